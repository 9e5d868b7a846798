"""The agreement benchmark: the sampler's distribution is the trainer's, and the benchmark would see it if not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from turnwise.bench import agreement, report
from turnwise.errors import ConfigError


def _arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    report.add_common_options(parser)
    agreement.add_options(parser)
    return parser.parse_args(["--model=tiny", "--device=cpu", *given])


@pytest.fixture(scope="module")
def measured(tiny_dir: Path) -> dict[str, Any]:  # noqa: ARG001
    return agreement.run(_arguments("--batches", "1", "4", "--new-tokens=6", "--dialogues=3", "--turns=3"))


def test_in_float32_no_logprob_differs_by_more_than_rounding(measured: dict[str, Any]) -> None:
    cases = [case for case in measured.values() if isinstance(case, dict)]
    assert len(cases) == 8
    for case in cases:
        assert case["max_gap"] < 1e-4
        assert case["k2"] <= case["max_gap"] ** 2
    assert measured["max_k2"] == max(case["k2"] for case in cases)


def test_the_adapter_is_large_enough_to_be_missed(measured: dict[str, Any]) -> None:
    assert measured["adapter_k2"] > 1e6 * measured["max_k2"]


def test_every_sampled_token_is_compared(measured: dict[str, Any]) -> None:
    for merge in ("merged", "unmerged"):
        counts = {name: measured[f"{merge}_{name}"]["tokens"] for name in ("batch_1", "batch_4", "dialogues", "turn_3")}
        assert counts == {"batch_1": 6, "batch_4": 24, "dialogues": 54, "turn_3": 18}


def test_in_bitwise_mode_every_logprob_is_the_same_number(measured: dict[str, Any]) -> None:
    given = ("--batches", "1", "4", "--new-tokens=6", "--dialogues=3", "--turns=3", "--engine=bitwise=true")
    exact = agreement.run(_arguments(*given))
    cases = {name: case for name, case in exact.items() if isinstance(case, dict)}
    assert set(cases) == {name for name in measured if name.startswith("unmerged_")}
    for case in cases.values():
        assert (case["equal_bits"], case["max_gap"], case["k2"]) == (1.0, 0.0, 0.0)
    assert exact["adapter_k2"] > 0
    assert measured["unmerged_dialogues"]["equal_bits"] < 1


def test_an_unknown_option_of_the_engine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no option engine\.bits"):
        agreement.run(_arguments("--engine=bits=true"))


def test_without_an_adapter_there_is_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match="--rank 0 leaves no adapter"):
        agreement.run(_arguments("--rank=0"))
