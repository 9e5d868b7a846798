"""Every shipped world can be branched, by its own fork or by replay; so la_grpo and refuel run on all of them."""

from __future__ import annotations

import pytest

from cases import plain_world_names
from turnwise.envs.registry import get_world
from turnwise.rollout.branch import check_can_branch
from turnwise.rollout.limits import RolloutLimits


@pytest.mark.parametrize("name", plain_world_names())
async def test_a_shipped_world_can_be_branched(name: str) -> None:
    assert await check_can_branch(get_world(name), RolloutLimits()) in ("fork", "replay")
