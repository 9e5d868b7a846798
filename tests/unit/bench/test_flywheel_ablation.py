from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnwise.bench.flywheel_ablation import rl_tokens, success_at, table
from turnwise.runlog.writer import RunWriter


def result(arm: str, seed: int, success: list[float], sampled: list[int]) -> dict[str, Any]:
    return {"arm": arm, "seed": seed, "steps": 10, "success": success, "sampled": sampled}


RESULTS = [
    result("whole", 0, [0.1, 0.3, 0.5], [0, 100, 300]),
    result("whole", 1, [0.2, 0.4, 0.6], [0, 100, 200]),
    result("no routing", 0, [0.1, 0.2, 0.3, 0.4], [0, 50, 100, 150]),
    result("no routing", 1, [0.2, 0.2, 0.2, 0.2], [0, 50, 100, 200]),
]


def test_success_is_read_between_two_evaluations() -> None:
    assert success_at(RESULTS[0], 200) == pytest.approx(0.4)
    assert success_at(RESULTS[0], 0) == 0.5, "without a number of tokens it is the end that counts"


def test_every_token_of_an_rl_stage_counts_also_of_failed_tries_and_of_a_critic(tmp_path: Path) -> None:
    assert rl_tokens(tmp_path / "no stage") == 0
    writer = RunWriter.create(tmp_path / "rl", "", max_size_mb=1)
    writer.metrics(1, {"critic/sampled_tokens": 100.0})
    for step in (1, 2):
        writer.metrics(step, {"rollout/tokens_drawn": 30.0})
    writer.commit(2)
    writer.close()
    assert rl_tokens(tmp_path / "rl") == 160


def test_arms_are_compared_at_the_same_sampled_tokens() -> None:
    whole, routing = table(RESULTS, 100)[2:]
    assert whole.startswith("| whole | 2 | 15.0% | 35.0% |")
    assert routing.startswith("| no routing | 2 | 15.0% | 25.0% | -10.0% ±")
    assert "| no routing | 2 | 15.0% | 30.0% |" in table(RESULTS)[3]
