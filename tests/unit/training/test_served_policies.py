"""A policy is played by the backend that its config names: eval, sample, pairs and Python's calls alike."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import cast

import pytest

import turnwise as tw
from turnwise.cli import main
from turnwise.errors import ConfigError
from turnwise.training.policy import find_policy

RECORDING = '''
"""Samples as local does, from files alone, and writes down what it was asked for."""

import json
from pathlib import Path

from turnwise.client.local import ServiceClient
from turnwise.backends import Publisher

LOG = Path(__file__).with_name("log.jsonl")


def note(**said):
    with LOG.open("a") as file:
        file.write(json.dumps(said) + "\\n")


class RecordingPublisher(Publisher):
    async def deliver(self, trainer, version):
        return await trainer.save_weights_and_get_sampling_client_async()

    async def deliver_files(self, adapter, version):
        note(adapter=None if adapter is None else sorted(path.name for path in adapter.iterdir()))
        note(own_directory=str(self.setup.run_directory), tokens=self.setup.rollout.max_trajectory_tokens)
        self.service = ServiceClient(engine=self.setup.engine)
        if adapter is None:
            return await self.service.create_sampling_client_async(base_model=str(self.setup.model_directory))
        return await self.service.create_sampling_client_async(model_path=str(adapter))

    async def close(self):
        note(closed=True)
        if hasattr(self, "service"):
            self.service.close()
'''

SMALL = ("model=tiny", "train.steps=1", "train.tasks_per_step=1", "rollout.group_size=2", "warmup.steps=0")


def _log(tmp_path: Path) -> dict[str, object]:
    """What the backend wrote down since the last call, by what it is."""
    file = tmp_path / "log.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    file.unlink(missing_ok=True)
    found: dict[str, object] = {}
    for line in lines:
        found |= line
    return found


@pytest.mark.model
@pytest.mark.usefixtures("tiny_dir")
def test_commands_and_python_calls_play_what_the_backend_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recording.py").write_text(RECORDING)
    backend = f"rollout.backend={tmp_path / 'recording.py'}:RecordingPublisher"
    run_dir = tmp_path / "run"
    quiet = ("engine.dtype=float32", "eval.tasks=4", "run.dialogues=0", f"run.dir={run_dir}")
    assert main(["train", "guess_number", *SMALL, *quiet]) == 0
    capsys.readouterr()

    assert main(["eval", str(run_dir), "--json"]) == 0
    local = json.loads(capsys.readouterr().out)
    assert _log(tmp_path) == {}, "the run's own backend is local"
    assert main(["eval", str(run_dir), "--json", backend]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == local, "the same weights, tasks and seeds"
    assert "sampler: " in told.err
    log = _log(tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(cast("list[str]", log["adapter"]))
    assert log["closed"]
    assert not str(log["own_directory"]).startswith(str(run_dir))
    assert not Path(str(log["own_directory"])).exists(), "nothing is left behind"

    monkeypatch.setattr("sys.stdin", io.StringIO("Guess a number.\n"))
    assert main(["sample", "tiny", backend, "--max-tokens", "4", "--seed", "1"]) == 0
    log = _log(tmp_path)
    assert (log["adapter"], log["closed"]) == (None, True), "a model without an adapter is served too"
    out = tmp_path / "pairs.parquet"
    pairs = ["pairs", str(run_dir), "--kind", "dpo", "--tasks", "12", "--samples", "12", "--out", str(out), backend]
    assert main(pairs) == 0
    assert _log(tmp_path)["closed"]

    result = tw.eval(run_dir, rollout={"backend": backend.partition("=")[2]})
    assert result.row.success == local["success"]
    assert _log(tmp_path)["closed"]
    policy = find_policy(str(run_dir), overrides=[backend])
    with policy, find_policy(str(run_dir)) as plain:
        assert policy.sample("Hi", max_tokens=6, seed=3) == plain.sample("Hi", max_tokens=6, seed=3)
    assert _log(tmp_path)["adapter"]


@pytest.mark.model
@pytest.mark.usefixtures("tiny_dir")
def test_a_backend_that_needs_a_trainer_says_so(tmp_path: Path) -> None:
    only = RECORDING.replace("async def deliver_files", "async def unused")
    (tmp_path / "only_trains.py").write_text(only)
    policy = find_policy("tiny", overrides=[f"rollout.backend={tmp_path / 'only_trains.py'}:RecordingPublisher"])
    with pytest.raises(ConfigError, match=r"samples for a trainer only.*expected rollout\.backend=local"):
        policy.sample("Hi")
    assert _log(tmp_path)["closed"]


def test_a_reply_ends_where_replies_end_in_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the turn or at `rollout.stop`; a reply that reaches neither is said to be cut."""
    with find_policy("tiny") as policy:
        free = policy.sample("hello", max_tokens=60, seed=3)
        end = policy.renderer.stop_ids[0]
        assert end in (policy.sampling_params(max_tokens=1, temperature=1.0, seed=None).stop_token_ids or ())
    word = free[10:13]
    with find_policy("tiny", overrides=[f"rollout.stop={json.dumps([word])}"]) as policy:
        ended = policy.sample("hello", max_tokens=60, seed=3)
    assert word in ended
    assert len(ended) < len(free)
    assert free.startswith(ended)
    for options, is_cut in (
        ([f"rollout.stop={json.dumps([word])}", "--max-tokens", "60"], False),
        (["--max-tokens", "4"], True),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert main(["sample", "tiny", *options, "--seed", "3", "--temperature", "1"]) == 0
        said = capsys.readouterr()
        assert (said.out == f"{ended}\n") is not is_cut
        assert ("the reply is cut after 4 tokens; --max-tokens allows more" in said.err) is is_cut
