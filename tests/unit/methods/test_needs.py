"""What does not go together with a method is refused, with the reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from turnwise.config.config import Config

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rollout": {"same_start": False}, "method": {"name": "la_grpo"}}, "a dialogue has one world"),
    ({"rollout": {"same_start": False}, "method": {"name": "refuel"}}, "a dialogue has one world"),
    ({"rollout": {"same_start": False}, "method": {"name": "dpo"}}, "it would prefer the luckier one"),
    ({"rollout": {"same_start": False}, "method": {"name": "sft"}}, "reads stored data"),
    ({"rollout": {"group_size": 5}, "method": {"name": "refuel"}}, "expected an even number"),
    ({"reward": {"potential": True}, "method": {"name": "mt_grpo"}}, "r - phi(s_last)"),
    ({"reward": {"potential": True}, "method": {"name": "rft"}}, "potentials lower them by phi(s_0)"),
    ({"reward": {"potential": True}, "method": {"advantage": "max_rl"}}, "divides by the mean return"),
]
ACCEPTED: list[dict[str, Any]] = [
    {"rollout": {"same_start": False}, "method": {"name": "grpo"}},
    {"rollout": {"group_size": 6}, "method": {"name": "refuel"}},
    {"rollout": {"group_size": 5}, "method": {"name": "refuel"}, "data": {"pairs": "p.parquet"}},
    {"reward": {"potential": True}, "method": {"name": "gigpo"}},
]


def test_what_a_method_cannot_use_is_refused_with_the_reason() -> None:
    for sections, reason in REFUSED:
        with pytest.raises(ValidationError, match=re.escape(reason)):
            Config.model_validate(sections)
    for sections in ACCEPTED:
        Config.model_validate(sections)
    assert Config().rollout.same_start, "by default, whatever the method"
