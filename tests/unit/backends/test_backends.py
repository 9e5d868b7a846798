"""Backends: found by name or as `module:Class`, and one new file is all that a new one takes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import turnwise.backends
from turnwise.backends import BackendSetup, backend_names, find_publisher, make_publisher
from turnwise.backends.local import LocalPublisher
from turnwise.cli import main
from turnwise.client.fake import RecordingTrainer, ScriptedSampler
from turnwise.config.files import load_config
from turnwise.errors import ConfigError
from turnwise.rollout.server_options import OTHER_SAMPLERS
from turnwise.runlog.reader import RunReader
from turnwise.runtime import tolerances

COUNTING = '''
"""A backend in one file: it samples as the local one does, and writes down what it was asked for."""

import json
from pathlib import Path

from turnwise.backends import Publisher

LOG = Path(__file__).with_name("log.json")


class CountingPublisher(Publisher):
    def __init__(self, setup):
        super().__init__(setup)
        self.versions = []

    async def deliver(self, trainer, version):
        self.versions.append(version)
        return await trainer.save_weights_and_get_sampling_client_async()

    async def close(self):
        setup = self.setup
        told = [setup.rollout.group_size, setup.rollout.max_turns, setup.engine.dtype]
        told += [str(setup.run_directory), (setup.model_directory / "config.json").is_file()]
        LOG.write_text(json.dumps({"versions": self.versions, "told": told}))
'''


WORLD = """
from turnwise.envs.base import EnvStep, user

class AnyLuck:
    max_turns, max_tokens = 1, 4

    def __init__(self, seed: int):
        pass

    def start(self):
        return [user("Say something.")]

    def step(self, reply):
        return EnvStep(reward=float(len(reply.content) % 7), terminated=True)

    def close(self):
        pass
"""


@pytest.mark.model
@pytest.mark.usefixtures("tiny_dir")
def test_a_backend_from_outside_the_package_trains_a_run_and_is_closed_with_it(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    (tmp_path / "luck.py").write_text(WORLD)
    small = ("model=tiny", "train.steps=3", "train.tasks_per_step=1", "rollout.group_size=8", "warmup.steps=0")
    quiet = ("engine.dtype=float32", "eval.tasks=0", "run.dialogues=0", f"run.dir={tmp_path / 'run'}")
    backend = f"rollout.backend={tmp_path / 'counting.py'}:CountingPublisher"
    assert main(["train", f"env={tmp_path / 'luck.py'}:AnyLuck", *small, *quiet, backend]) == 0
    log = json.loads((tmp_path / "log.json").read_text())
    assert log["versions"] == [0, 1, 2, 3]
    assert log["told"] == [8, 1, "float32", str(tmp_path / "run"), True], "the world's limit of turns is filled in"
    with RunReader(tmp_path / "run") as run:
        attempts = [run.attempt(row.id) for row in run.attempts(phase="train")]
    drawn = [(one.row.step, turn.policy_version) for one in attempts for turn in one.trajectory.turns]
    assert set(drawn) == {(1, 0), (2, 1), (3, 2)}


def test_a_file_in_the_folder_of_backends_is_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counting_here.py").write_text(COUNTING)
    monkeypatch.setattr(turnwise.backends, "__path__", [*turnwise.backends.__path__, str(tmp_path)])
    assert backend_names() == ["counting_here", "local", "sglang", "vllm", "vllm_in_process"]
    config = load_config("guess_number", ["rollout.backend=counting_here"])
    setup = BackendSetup(
        rollout=config.rollout, model_directory=tmp_path, run_directory=tmp_path, engine=config.engine_in_use
    )
    publisher = make_publisher(setup)
    sampler = asyncio.run(publisher.publish(RecordingTrainer(ScriptedSampler([])), 5))
    assert (type(publisher).__name__, sampler.version) == ("CountingPublisher", 5)


def test_what_a_run_knows_of_other_samplers_is_what_their_publishers_say() -> None:
    assert set(OTHER_SAMPLERS) < set(backend_names())
    for name, facts in OTHER_SAMPLERS.items():
        assert find_publisher(name).takes_full_weights == facts.takes_whole, name


def test_what_is_no_backend_is_refused_with_what_to_do() -> None:
    assert find_publisher("local") is LocalPublisher
    with pytest.raises(ConfigError, match="no backend; did you mean 'local'"):
        find_publisher("locl")
    with pytest.raises(ConfigError, match="expected a class that inherits from"):
        find_publisher("json:dumps")


def test_a_plan_says_how_an_engine_in_this_process_is_sized() -> None:
    options = ["rollout.backend=vllm_in_process", "rollout.max_num_seqs=7", "rollout.server_args=--seed 3"]
    said = find_publisher("vllm_in_process").describe(load_config("guess_number", options).rollout)
    assert said == "vLLM in this process --max-num-seqs 7 --seed 3"


def test_the_certificate_allows_for_a_server_that_rounds_more_than_the_trainer(tmp_path: Path) -> None:
    for arguments, dtype in (((), None), (("--dtype", "bfloat16"), "bfloat16"), (("--dtype=half",), "half")):
        config = load_config("guess_number", ["rollout.backend=vllm"])
        rollout = config.rollout.model_copy(update={"server_args": arguments})
        setup = BackendSetup(
            rollout=rollout, model_directory=tmp_path, run_directory=tmp_path, engine=config.engine_in_use
        )
        assert find_publisher("vllm")(setup).dtype == dtype
    assert (tolerances.k2("float32"), tolerances.k2("half")) == (1e-4, 1e-2)
