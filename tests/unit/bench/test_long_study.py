from __future__ import annotations

from typing import Any

import pytest

from turnwise.bench.long_study import results_at, tables
from turnwise.bench.specialists import table


def run_of(arm: str, seed: int, curve: list[tuple[int, float, float]]) -> dict[str, Any]:
    return {
        "arm": arm,
        "seed": seed,
        "steps": 4,
        "seconds": 1.0,
        "curve": curve,
        "rollout/prompt_tokens_max": [9, 9, 9],
    }


RUNS = [
    run_of("grpo", 1, [(0, 0.2, 0.2), (100, 0.4, 0.4)]),
    run_of(
        "ppo", 1, [(0, 0.2, 0.2), (50, 0.2, 0.2), (200, 0.8, 0.8)]
    ),  # its critic took 50 tokens before the first step
    run_of("grpo", 2, [(0, 0.1, 0.1), (120, 0.4, 0.4)]),
    run_of("ppo", 2, [(0, 0.1, 0.1), (150, 0.7, 0.7)]),
]


def test_runs_are_compared_at_the_tokens_that_all_have_reached() -> None:
    at = {(one.label, one.seed): one.success for one in results_at(RUNS, "methods", 100)}
    assert at == pytest.approx({("grpo", 1): 0.4, ("ppo", 1): 0.4, ("grpo", 2): 0.35, ("ppo", 2): 0.5})
    text = tables(RUNS, [], "methods")
    assert text.startswith("4 runs, compared at 100 sampled tokens.")
    assert "| ppo | 2 | 15.0% | 45.0%" in text
    assert "+7.5 [" in text  # the mean of 0 and 15 points, seed by seed


def test_tokens_of_a_critics_pre_training_count_as_a_flat_part_of_the_curve() -> None:
    flat, steep = results_at([RUNS[1], run_of("ppo", 3, [(0, 0.2, 0.2), (200, 0.8, 0.8)])], "methods", 200)
    assert flat.area < steep.area


def test_specialists_are_compared_with_the_joint_run_over_the_worlds_of_a_seed() -> None:
    rows = [
        {"policy": policy, "seed": seed, "world": world, "success": success}
        for policy, successes in {"mean": (0.5, 0.3), "joint": (0.4, 0.2)}.items()
        for seed in (1, 2)
        for world, success in zip(("doors", "guess"), successes, strict=True)
    ]
    rows.append({"policy": "doors", "seed": 1, "world": "doors", "success": 1.0})  # it did not play everywhere yet
    lines = table(rows).splitlines()
    assert lines[2].startswith("| mean | 50.0% | 30.0% | 40.0%")
    assert lines[2].endswith("| +10.0 [+10.0, +10.0] |")
    assert len(lines) == 4
