"""The benchmark of whole GRPO steps: what it counts, and that it compares equal work only."""

from __future__ import annotations

import argparse
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from turnwise.bench import report, step
from turnwise.errors import ConfigError

FAKE_TRL = """#!{python}
import json, pathlib, sys
load = json.loads(pathlib.Path(sys.argv[2]).read_text())
dialogues = len(load["prompts"]) * load["group_size"]
sampled = dialogues * load["turns"] * load["new_tokens"]
trained = sampled + dialogues * (load["prompt_tokens"] + (load["turns"] - 1) * load["num_observed"])
result = {{"version": "0", "cpu_s": 9.0, "wall_s": 9.0, "sampled_tokens": sampled, "trained_tokens": trained}}
pathlib.Path(sys.argv[3]).write_text(json.dumps(result | {{"load": load}}))
"""


def _arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    report.add_common_options(parser)
    step.add_options(parser)
    small = ["--prompts=2", "--group-size=2", "--prompt-tokens=8", "--turns=3", "--new-tokens=4", "--observed=5"]
    return parser.parse_args(["--model=tiny", "--device=cpu", "--repeats=1", "--micro-batch=4", *small, *given])


@pytest.fixture(scope="module")
def sides(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:  # noqa: ARG001
    fake = tmp_path_factory.mktemp("trl") / "python"
    fake.write_text(FAKE_TRL.format(python=sys.executable), encoding="utf-8")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    given = (f"--trl-python={fake}",)
    return {side: [step.run(_arguments(f"--side={side}", *given))] for side in ("peer", "ours")}


def test_both_sides_sample_and_train_the_same_tokens(sides: dict[str, list[dict[str, Any]]]) -> None:
    result = step.compare(_arguments(), sides)
    assert result["sampled_tokens"] == 4 * 3 * 4
    assert result["trained_tokens"] == 4 * (8 + 3 * 4 + 2 * 5)
    assert result["ratio_cpu"] == pytest.approx(9.0 / result["cpu_s"])


def test_trl_gets_our_prompts_and_adapts_the_same_linears(sides: dict[str, list[dict[str, Any]]]) -> None:
    load = sides["peer"][0]["load"]
    assert (len(load["prompts"]), len(load["prompts"][0]), load["rank"]) == (2, 8, 16)
    assert load["dtype"] == sides["ours"][0]["dtype"] == "float32"
    assert "lm_head" not in load["targets"]
    assert {"q_proj", "o_proj", "gate_proj", "down_proj"} <= set(load["targets"])


def test_unequal_work_is_not_compared(sides: dict[str, list[dict[str, Any]]]) -> None:
    less = [{**sides["peer"][0], "sampled_tokens": 1}]
    with pytest.raises(ConfigError, match="unequal work: sampled_tokens 48 here and 1 in TRL"):
        step.compare(_arguments(), {**sides, "peer": less})


def test_a_python_without_trl_is_said(tmp_path: Path, tiny_dir: Path) -> None:  # noqa: ARG001
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no module named trl >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(ConfigError, match=r"could not run TRL(.|\n)*no module named trl"):
        step.run(_arguments("--side=peer", f"--trl-python={broken}"))


def test_loads_that_trl_cannot_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match="a multiple of TRL's passes"):
        step.run(_arguments("--micro-batch=3"))
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        step.run(_arguments("--rank=0"))


def test_the_script_of_trl_imports_nothing_of_ours() -> None:
    lines = step.SCRIPT.read_text(encoding="utf-8").splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert imports
    assert [line for line in imports if "turnwise" in line] == []
