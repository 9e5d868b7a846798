"""The benchmark of learners: what it compares, and that it reads its options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from turnwise.bench import learners, report
from turnwise.errors import ConfigError


def _arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.set_defaults(bench="learners")
    report.add_common_options(parser)
    learners.add_options(parser)
    return parser.parse_args(["--model=tiny", "--device=cpu", "--sequences=2", "--tokens=16", *given])


def test_learners_are_compared_with_one_process_and_with_processes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[int]] = []

    def run_at_once(args: argparse.Namespace, counts: list[int]) -> list[dict[str, Any]]:  # noqa: ARG001
        started.append(counts)
        rate = {(1,): 100.0, (2,): 170.0 + len(started), (1, 1): 95.0}[tuple(counts)]
        return [{"machine": "a CPU", "tokens_per_s": rate, "cpu_s": 1.0 / sum(counts)} for _ in counts]

    monkeypatch.setattr(learners, "run_at_once", run_at_once)
    found = learners.run(_arguments("--rounds=2"))
    assert started == 2 * [[1], [2], [1, 1]], "the sides take turns"
    assert found["speedup"] == pytest.approx((172 + 175) / 200)
    assert (found["lowest_speedup"], found["highest_speedup"]) == (1.72, 1.75)
    assert found["possible_speedup"] == 1.9
    assert found["speedup_by_cpu_time"] == 2.0


def test_a_side_trains_with_the_options_of_the_engine(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    made: list[Any] = []
    engine = learners.Engine
    monkeypatch.setattr(learners, "Engine", lambda *given, **named: (made.append(given[1]), engine(*given, **named))[1])
    args = _arguments("--side=ours", "--learners=1", "--repeats=1", "--engine=micro_batch_tokens=16,self_test=false")
    assert learners.run(args)["tokens_per_s"] > 0
    assert (made[0].micro_batch_tokens, made[0].self_test) == (16, False)
    with pytest.raises(ConfigError, match=r"no option engine\.nothing"):
        learners.run(_arguments("--side=ours", "--engine=nothing=1"))
