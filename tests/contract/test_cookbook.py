"""Recipes of tinker_cookbook 0.5.8, unmodified, run against a real `turnwise serve` with a local model directory."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service_process import ServerProcess, sdk_python

NEEDS = (
    "tinker==0.36.0",
    "transformers<=5.5.4,>=4.57.6",
    *("aiohttp", "blobfile", "chz", "cloudpickle", "datasets", "math-verify", "numpy", "pillow", "pylatexenc"),
    *("pyrage", "safetensors", "sympy", "termcolor", "tiktoken", "tml-renderers"),
)
RECIPE_S = 500.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first run installs the cookbook


@pytest.fixture(scope="module")
def server(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("service"), model=str(tiny_dir)) as server:
        yield server


def run_recipe(name: str, server: ServerProcess, tiny_dir: Path, log_path: Path, **settings: Any) -> list[Any]:
    """The rows of the recipe's own metrics file."""
    python = sdk_python("tinker_cookbook", "0.5.8", NEEDS)
    settings = {
        "model_name": tiny_dir,
        "renderer_name": "role_colon",
        "log_path": log_path,
        "behavior_if_log_dir_exists": "delete",
        "base_url": server.url,
        **settings,
    }
    done = subprocess.run(
        [str(python), "-m", f"tinker_cookbook.recipes.{name}", *(f"{key}={value}" for key, value in settings.items())],
        env={**os.environ, "TINKER_API_KEY": "tml-cookbook", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RECIPE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


def test_supervised_chat_learns(server: ServerProcess, tiny_dir: Path, tmp_path: Path) -> None:
    conversations = tmp_path / "chat.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "it is so"}]}
        for i in range(48)
    ]
    conversations.write_text("\n".join(json.dumps(row) for row in rows))
    metrics = run_recipe(
        "chat_sl.train",
        server,
        tiny_dir,
        tmp_path / "log",
        dataset=conversations,
        batch_size=8,
        max_length=200,
        learning_rate=0.01,
        lr_schedule="constant",
        save_every=2,
    )
    losses = [row["train_mean_nll"] for row in metrics if "train_mean_nll" in row]
    assert losses[-1] < 0.7 * losses[0], losses


def test_arithmetic_rl_samples_what_it_trains(server: ServerProcess, tiny_dir: Path, tmp_path: Path) -> None:
    metrics = run_recipe(
        "math_rl.train",
        server,
        tiny_dir,
        tmp_path / "log",
        group_size=4,
        groups_per_batch=4,
        max_tokens=5,
        learning_rate=1e-3,
        max_steps=3,
        eval_every=2,
        save_every=2,
    )
    steps = [row for row in metrics if "optim/kl_sample_train_v1" in row]
    assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-3 for row in steps), "sampler and trainer agree"
    assert len(metrics) >= 3
