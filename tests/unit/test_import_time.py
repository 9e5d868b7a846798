"""`import turnwise` is quick and light; the heavy parts come when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import turnwise


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("module", ["turnwise", "turnwise.types", "turnwise.models.store", "turnwise.cli"])
def test_importing_loads_no_torch_and_no_transformers(module: str) -> None:
    assert _run(f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))") == "[]"


def test_making_tiny_loads_no_torch() -> None:
    assert _run("import sys, turnwise.models.tiny as t; t.build_weights(); print('torch' in sys.modules)") == "False"


def test_importing_takes_less_than_0_3_seconds() -> None:
    # Of the processor, Python's own start included: what else the machine does is not ours.
    durations = [float(_run("import time, turnwise; print(time.process_time())")) for _ in range(6)]
    assert min(durations) < 0.3


def test_types_is_there_after_a_plain_import() -> None:
    assert _run("import turnwise as mint; print(mint.types.AdamParams.__name__)") == "AdamParams"


@pytest.mark.parametrize("name", turnwise.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(turnwise, name) is not None
    assert name in dir(turnwise)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = turnwise.nothing  # type: ignore[attr-defined]
