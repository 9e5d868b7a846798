"""The public names of `turnwise`: frozen, and each with a docstring whose example runs."""

from __future__ import annotations

import doctest
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

import turnwise

PUBLIC_NAMES = [
    "Config",
    "Env",
    "EnvStep",
    "Message",
    "Method",
    "Observer",
    "RLAdapter",
    "RLConfig",
    "Run",
    "SamplingClient",
    "ServiceClient",
    "Task",
    "TrainingClient",
    "Trajectory",
    "World",
    "assistant",
    "eval",
    "flywheel",
    "run_grpo",
    "start",
    "system",
    "tool",
    "train",
    "types",
    "user",
]


def test_the_public_names_are_these() -> None:
    assert sorted(turnwise.__all__) == sorted(PUBLIC_NAMES), "a name that is added or taken away is a decision"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.usefixtures("tiny_dir")
def test_every_public_name_has_an_example_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # runs of the examples go here
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(verbose=False)
    said: list[str] = []
    for name in PUBLIC_NAMES:
        value: Any = getattr(turnwise, name)
        module = value if inspect.ismodule(value) else sys.modules[value.__module__]
        (found,) = finder.find(value, name=f"turnwise.{name}", globs=dict(vars(module))) or [None]
        assert found is not None, f"turnwise.{name} has no docstring"
        assert found.examples, f"turnwise.{name} has no example in its docstring"
        runner.run(found, out=said.append)
    assert not runner.summarize(verbose=False).failed, "".join(said)
