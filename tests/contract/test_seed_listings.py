"""MinT's published recipes run here with nothing but their import changed.

`listings/*.py.txt` are the listings of MinT's documentation: "Multi-Turn RL" as printed, and the loop of "RL Overview"
with its sampling and datum fragments in the place it leaves open (`num_steps` and a stand-in verifier are ours). A
tiny model answers to the name that they ask for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LISTINGS = Path(__file__).parent / "listings"


def run_listing(name: str, home: Path) -> subprocess.CompletedProcess[str]:
    text = (LISTINGS / f"{name}.py.txt").read_text(encoding="utf-8")
    ours = re.sub(r"^import mint$", "import turnwise as mint", text, flags=re.MULTILINE)
    ours = re.sub(r"^from mint import types$", "from turnwise import types", ours, flags=re.MULTILINE)
    changed = [new for old, new in zip(text.splitlines(), ours.splitlines(), strict=True) if old != new]
    assert changed == ["import turnwise as mint", "from turnwise import types"]
    environment = {**os.environ, "TURNWISE_ALIASES": "Qwen/Qwen3-0.6B=tiny", "TURNWISE_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", ours], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.usefixtures("tiny_dir")  # makes the model once for all
def test_multi_turn_rl_recipe_runs(turnwise_home: Path) -> None:
    done = run_listing("multi_turn_rl", turnwise_home)
    assert done.returncode == 0, done.stderr
    assert "Multi-turn RL model saved" in done.stdout
    losses = [float(loss) for loss in re.findall(r"avg loss=(\S+)", done.stdout)]
    assert len(losses) == 2
    assert all(loss == loss for loss in losses)  # not nan
    (saved,) = turnwise_home.glob("checkpoints/*/sampler_weights/multi-turn-rl-v1")
    assert (saved / "adapter_model.safetensors").is_file()


@pytest.mark.usefixtures("tiny_dir")
def test_rl_overview_loop_runs(turnwise_home: Path) -> None:
    done = run_listing("rl_overview", turnwise_home)
    assert done.returncode == 0, done.stderr
    saved = sorted(turnwise_home.glob("checkpoints/*/sampler_weights/rl-step-*"))
    assert [place.name for place in saved] == ["rl-step-0", "rl-step-1"]
    info = json.loads((saved[0] / "checkpoint.json").read_text(encoding="utf-8"))
    assert (info["base_model"], info["stored_model"]) == ("Qwen/Qwen3-0.6B", "tiny")
