"""The plan counts what each method plays."""

from __future__ import annotations

import pytest

from turnwise.config.files import load_config
from turnwise.training.plan import attempts_per_task


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (["method=grpo"], 6),
        (["method=la_grpo"], 6),
        (["method=refuel"], 6),
        (["method=dpo"], 6),
        (["method=dpo", "data.pairs=p.parquet"], 0),
        (["method=sft"], 0),
    ],
)
def test_attempts_per_task_are_those_that_are_played(overrides: list[str], count: int) -> None:
    config = load_config("guess_number", ["rollout.group_size=6", *overrides])
    assert attempts_per_task(config) == count
