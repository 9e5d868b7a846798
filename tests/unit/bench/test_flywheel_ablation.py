from __future__ import annotations

from typing import Any

import pytest

from turnwise.bench.flywheel_ablation import success_at, table


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


def test_arms_are_compared_at_the_same_sampled_tokens() -> None:
    whole, routing = table(RESULTS, 100)[2:]
    assert whole.startswith("| whole | 2 | 15.0% | 35.0% |")
    assert routing.startswith("| no routing | 2 | 15.0% | 25.0% | -10.0% ±")
    assert "| no routing | 2 | 15.0% | 30.0% |" in table(RESULTS)[3]
