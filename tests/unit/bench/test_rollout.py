"""The rollout benchmark: what it counts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from turnwise.bench import rollout
from turnwise.bench.rollout import Conversation, MeasuredStep, StepTimes, draw_latencies, play_ideally, step_times
from turnwise.client.engines import POOL
from turnwise.errors import ConfigError


def _arguments(**given: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    rollout.add_options(parser)
    common = {"device": "cpu", "dtype": "auto", "rank": 4, "repeats": 1, "warmups": 0}
    return argparse.Namespace(**{**vars(parser.parse_args([])), **common, **given})


@pytest.fixture(scope="module")
def measured(tiny_dir: Path) -> dict[str, Any]:  # noqa: ARG001
    return rollout.run(_arguments())


def test_the_load_is_64_conversations_with_envs_of_0_to_200_ms(measured: dict[str, Any]) -> None:
    assert "64 conversations at once" in measured["load"]
    assert "0-200 ms" in measured["load"]


def test_the_sampler_works_on_while_most_envs_are_slow(measured: dict[str, Any]) -> None:
    """Envs of 100 ms a turn on average: one conversation after the other would leave the sampler idle nearly always."""
    assert measured["sampler_busy_share"] > 0.3, measured


def test_the_three_parts_of_the_time_are_all_of_it(measured: dict[str, Any]) -> None:
    for where in ("", "_at_0_ms"):
        parts = [measured[f"{name}_share{where}"] for name in ("sampler_busy", "waiting", "starved")]
        assert sum(parts) == pytest.approx(1.0)
        assert min(parts) >= 0


def test_without_latency_the_ideal_sampler_is_never_idle(measured: dict[str, Any]) -> None:
    assert measured["ideal_busy_share_at_0_ms"] == pytest.approx(1.0)
    assert measured["tokens_per_step"] < measured["tokens_per_step_at_0_ms"] <= 64


def test_plain_envs_are_measured_too_and_nothing_stays_behind(tiny_dir: Path) -> None:  # noqa: ARG001
    num_before = POOL.num_running
    few = rollout.run(_arguments(conversations=8, turns=2, reply=4, latency_ms=10.0, blocking=True))
    assert "plain envs in threads" in few["load"]
    assert 0 < few["sampler_busy_share"] < 1
    assert POOL.num_running == num_before, "the engine is closed"


def test_a_load_that_the_model_cannot_read_is_refused(tiny_dir: Path) -> None:  # noqa: ARG001
    with pytest.raises(ConfigError, match=r"--turns 40 x --reply 64 takes up to 3840 tokens and tiny reads 1024"):
        rollout.run(_arguments(turns=40))


def test_latencies_are_uniform_and_follow_from_the_seed() -> None:
    drawn = draw_latencies(3, 4000, 0.2)
    assert drawn == draw_latencies(3, 4000, 0.2) != draw_latencies(4, 4000, 0.2)
    assert 0 <= min(drawn) < 0.001
    assert 0.199 < max(drawn) <= 0.2
    assert sum(drawn) / len(drawn) == pytest.approx(0.1, abs=0.003)


def test_the_ideal_of_two_conversations_is_what_paper_and_pencil_give() -> None:
    """Steps of 1 s. One: env until 0, 2 tokens, env 5 s, 1 token, env 1 s. Other: env until 1, 3 tokens, env 0 s."""
    one = Conversation(0.0, [2, 1], [5.0, 1.0])
    other = Conversation(1.0, [3], [0.0])
    ideal = play_ideally([one, other], StepTimes(1.0, 0.0))
    # One samples in 0-2 and 7-8, the other in 1-4; 4-7 is idle, and the last answer comes at 9.
    assert ideal.busy_s == pytest.approx(5.0)
    assert ideal.wall_s == pytest.approx(9.0)


def test_a_step_of_more_rows_takes_longer_as_it_was_measured() -> None:
    steps = [MeasuredStep(0.002 + 0.0001 * rows, 0.0, rows) for rows in (1, 5, 20, 64, 64)]
    times = step_times(steps)
    assert times(10) == pytest.approx(0.003)
    assert step_times([MeasuredStep(0.004, 0.0, 64)] * 3)(1) == pytest.approx(0.004), (
        "one size tells nothing about others"
    )
