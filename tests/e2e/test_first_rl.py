"""The first recipe through its real command line: it runs, and it learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "src" / "turnwise" / "recipes" / "first_rl.py"


def run_recipe(home: Path, *options: str) -> str:
    # One thread: two that wait for each other on a busy machine are far slower than one, for a model this small.
    environment = {**os.environ, "TURNWISE_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "turnwise.recipes.first_rl", *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def success_rates(output: str) -> tuple[float, float]:
    found = re.search(r"before: (\S+)\n(?:.*\n)*.*after:\s+(\S+)", output)
    assert found, output
    return float(found[1]), float(found[2])


@pytest.mark.usefixtures("tiny_dir")  # makes the model once for all
def test_a_few_steps_show_the_way_from_prompt_to_gradient(turnwise_home: Path) -> None:
    output = run_recipe(turnwise_home, "--steps", "2", "--seed", "5")
    assert output.startswith("prompt    'Q: Please name one digit that is above 3.\\nA: '\nids       [")
    assert re.search(r"^step   2  reward \d\.\d\d$", output, re.MULTILINE)
    before, _ = success_rates(output)
    assert before < 0.1


@pytest.mark.usefixtures("tiny_dir")
def test_the_recipe_learns_its_task_from_random_weights(turnwise_home: Path) -> None:
    before, after = success_rates(run_recipe(turnwise_home, "--seed", "0"))
    assert after > before + 0.3
    assert after > 0.9


def test_the_recipe_fits_on_three_screens_and_uses_clients_only() -> None:
    text = RECIPE.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    imported = re.findall(r"^(?:import|from) (\S+)(?: import (.*))?$", text, re.MULTILINE)
    assert [(module, names) for module, names in imported if module.startswith("turnwise")] == [
        ("turnwise", ""),
        ("turnwise", "types"),
    ]
