"""What a benchmark prints."""

from __future__ import annotations

import argparse
import time

import pytest
import torch

from turnwise.bench.report import Timing, show, timed


def test_a_result_without_model_or_machine_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    show({"bench": "env-workers", "load": "8 envs", "speedup": 5.91}, as_json=False)
    printed = " ".join(capsys.readouterr().out.split())  # a title may be broken in two
    assert "env-workers on" in printed
    assert "CPU" in printed
    assert "5.91" in printed


def test_model_and_machine_are_in_the_title_only(capsys: pytest.CaptureFixture[str]) -> None:
    show({"bench": "sample", "model": "tiny", "machine": "a card", "tokens_per_s": 12.0}, as_json=False)
    printed = " ".join(capsys.readouterr().out.split())  # a title may be broken in two
    assert "sample: tiny on a card" in printed
    assert printed.count("tiny") == 1


def test_a_cpus_rate_has_cpu_seconds_beside_seconds() -> None:
    """Beside other programs seconds say little; a sleeping process takes no CPU."""
    timing = timed(lambda: time.sleep(0.2), argparse.Namespace(warmups=0, repeats=1), torch.device("cpu"))
    assert timing.median >= 0.2
    assert timing.cpu_seconds[0] < 0.1
    rates = Timing([2.0, 3.0, 4.0], [0.5, 1.0, 1.5]).rates(6, torch.device("cpu"))
    assert rates == {"tokens_per_s": 2.0, "tokens_per_cpu_s": 6.0}


def test_a_gpus_rate_has_no_cpu_seconds() -> None:
    assert Timing([2.0], [0.5]).rates(6, torch.device("meta")) == {"tokens_per_s": 3.0}
