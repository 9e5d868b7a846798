"""What a benchmark prints."""

from __future__ import annotations

import pytest

from turnwise.bench.report import show


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
