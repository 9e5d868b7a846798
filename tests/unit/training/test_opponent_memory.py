"""What another base model takes beside the policy is in the memory plan, where it is on the same device."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from turnwise.engine.budget import GIB, machine_bytes
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import DeviceInfo
from turnwise.errors import ConfigError
from turnwise.models.facts import read_facts
from turnwise.rollout.limits import RolloutLimits
from turnwise.training.memory import Memory, estimate_memory
from turnwise.training.setup import read_config, set_up_new

LIMITS = RolloutLimits(max_turns=4, max_tokens_per_turn=16, max_trajectory_tokens=1024)


@pytest.fixture
def other(tiny_dir: Path, tmp_path: Path) -> Path:
    """Another base model."""
    return shutil.copytree(tiny_dir, tmp_path / "other")


def planned(opponent: object, *overrides: str) -> Memory:
    own = (f"env.options.opponent={opponent}", "model=tiny", "engine.device=cpu", "eval.tasks=0")
    memory = set_up_new(read_config("negotiate_tiny", [*own, *overrides])).make_plan().memory
    assert memory is not None
    return memory


def test_weights_and_cache_of_another_base_model_are_counted_once(other: Path) -> None:
    weights = 4 * read_facts(other).num_parameters
    found = planned(other, f"opponent.panel=[{other},{other}/]", "opponent.kv_cache_gib=0.5")
    assert found.opponents == weights + GIB // 2
    alone = planned("base", "opponent.panel=[base]")
    assert alone.opponents == 0
    assert found.num_fixed == alone.num_fixed + found.opponents
    assert "opponents" in found.line()
    assert "opponents" not in alone.line()


def test_an_opponent_on_another_device_takes_nothing_of_the_policys(other: Path) -> None:
    found = planned(other, f"opponent.panel=[{other}]", "opponent.device=cuda:1")
    assert found.opponents == 0


def test_a_run_whose_opponent_does_not_fit_beside_it_is_refused(other: Path) -> None:
    found = planned(other, f"opponent.panel=[{other}]")
    found.check_fits()
    with pytest.raises(ConfigError, match=r"opponents and what is trained.* use .*opponent\.device"):
        replace(found, opponents=2 * machine_bytes()).check_fits()
    with pytest.raises(ConfigError, match="opponents and what is trained"):
        planned(other, f"opponent.panel=[{other}]", f"opponent.kv_cache_gib={3 * machine_bytes() // GIB}")


def test_the_policys_cache_is_planned_with_what_the_opponent_leaves(tiny_dir: Path) -> None:
    card = DeviceInfo(kind="cuda", dtype="bfloat16", free_bytes=GIB // 4, total_bytes=GIB // 4)
    config = read_config("negotiate_tiny", ["model=tiny"])
    alone, beside = (
        estimate_memory(config, EngineConfig(), device, read_facts(tiny_dir), LIMITS, num_attempts=64)
        for device in (card, replace(card, reserved_bytes=GIB // 5))
    )
    assert beside.opponents == GIB // 5
    assert beside.kv_cache < alone.kv_cache
