"""`cluster.samplers`: engines that sample beside the one that leads the run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import turnwise as tw
from processes import processes_below
from turnwise.client.checkpoints import CheckpointStore
from turnwise.runlog.reader import RunReader

ECHO = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SLOW = "turnwise.bench.slow_world:SlowWorld"
QUICK = ("train.tasks_per_step=2", "rollout.group_size=4", "train.learning_rate=1e-3", "eval.tasks=0", "model=tiny")
SMALL = (*QUICK, "train.save_every=1", "train.max_empty_steps=1000", "run.dialogues=0")
EXACT = (*SMALL, "rollout.deterministic=true", "train.steps=4")
SEPARATE = ("cluster.placement=separate", "cluster.samplers=2")
HANG_S = 120.0
"""Only a hang takes so long."""


def _weights(directory: Path) -> np.ndarray:
    with RunReader(directory) as run:
        place = CheckpointStore(directory).directory(run.checkpoints()[-1].path)
    file = next(place / name for name in ("adapter_model.safetensors", "model.safetensors") if (place / name).is_file())
    tensors = load_file(file)
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


Drawn = dict[tuple[int, str, int, int], tuple[tuple[int, ...], tuple[float, ...], int]]


def _drawn(directory: Path) -> Drawn:
    """Tokens, logprobs and version of every turn, by step, task, attempt and turn."""
    with RunReader(directory) as run:
        return {
            (row.step, row.task_id, row.attempt, index): (turn.sampled_ids, turn.sampler_logprobs, turn.policy_version)
            for row in run.attempts(phase="train")
            if row.outcome != "failed"
            for index, turn in enumerate(run.attempt(row.id).trajectory.turns)
        }


def _sum(directory: Path, metric: str) -> float:
    with RunReader(directory) as run:
        return sum(value for _, value in run.metric(metric))


def _train(directory: Path, *options: str, world: str = ECHO, observer: tw.Observer | None = None) -> tw.Run:
    return tw.train(world, directory=directory, overrides=options, observer=observer or tw.Observer())


class Killer(tw.Observer):
    """Sends a signal to one process of the run in the middle of the second step, and the next ones a step later each.

    A process that was started again is a new one, so every signal hits another process.
    """

    def __init__(self, module: str, *signals: signal.Signals) -> None:
        self._module, self._signals = module, list(signals)
        self._is_sent = threading.Event()

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        if step > 1:
            assert self._is_sent.wait(HANG_S)
        if self._signals:
            self._is_sent.clear()
            threading.Timer(0.02, self._send, [self._signals.pop(0)]).start()

    def _send(self, sent: signal.Signals) -> None:
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_below(os.getpid())}
        os.kill(min(pid for pid, command in commands.items() if self._module.encode() in command), sent)
        self._is_sent.set()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:  # noqa: ARG001
    """A run of one process, to compare with."""
    directory = tmp_path_factory.mktemp("alone") / "run"
    _train(directory, *EXACT)
    return directory


def test_samplers_draw_what_one_process_draws_also_when_one_dies_and_another_hangs(alone: Path, tmp_path: Path) -> None:
    killer = Killer("turnwise.engine.samplers.process", signal.SIGKILL, signal.SIGSTOP)
    _train(tmp_path / "run", *EXACT, *SEPARATE, "cluster.deadline_s=5", observer=killer)
    assert _drawn(tmp_path / "run") == _drawn(alone)
    assert np.array_equal(_weights(tmp_path / "run"), _weights(alone))
    assert _sum(tmp_path / "run", "fleet/servers_lost") >= 2
    assert _sum(tmp_path / "run", "fleet/sticky_share") > 0


def test_learners_that_sample_draw_what_one_process_draws_also_when_one_is_killed(alone: Path, tmp_path: Path) -> None:
    killer = Killer("turnwise.engine.learners.process", signal.SIGKILL)
    _train(tmp_path / "run", *EXACT, "cluster.learners=2", "cluster.samplers=2", observer=killer)
    drawn, expected = _drawn(tmp_path / "run"), _drawn(alone)
    assert {place: (ids, version) for place, (ids, _, version) in drawn.items()} == {
        place: (ids, version) for place, (ids, _, version) in expected.items()
    }
    for place, (_, logprobs, _) in drawn.items():
        assert logprobs == pytest.approx(expected[place][1], abs=1e-5)
    weights = _weights(alone)
    assert np.linalg.norm(_weights(tmp_path / "run") - weights) < 1e-5 * np.linalg.norm(weights)
    assert _sum(tmp_path / "run", "fleet/servers_lost") >= 1


@pytest.mark.usefixtures("tiny_dir")
def test_all_weights_reach_samplers_of_their_own_bit_for_bit(tmp_path: Path) -> None:
    full = (*SMALL, "rollout.deterministic=true", "train.steps=2", "model.train=full")
    for name, options in (("one", ()), ("two", ("cluster.placement=separate",))):
        _train(tmp_path / name, *full, *options)
    assert _drawn(tmp_path / "two") == _drawn(tmp_path / "one")
    assert np.array_equal(_weights(tmp_path / "two"), _weights(tmp_path / "one"))


@pytest.mark.usefixtures("tiny_dir")
def test_each_turn_carries_the_version_that_drew_it_when_updates_come_in_between(tmp_path: Path) -> None:
    slow = ("env.options.median_s=0.05", "env.options.p99_s=1", "train.max_staleness=2", "train.steps=6")
    _train(
        tmp_path,
        *SMALL,
        "cluster.placement=separate",
        *slow,
        "train.learning_rate=1e-2",
        "train.keep_checkpoints=9",
        world=SLOW,
    )
    with RunReader(tmp_path) as run, tw.ServiceClient(data_dir=tmp_path) as service:
        clients = {row.step: service.create_sampling_client(row.path) for row in run.checkpoints()}
        attempts = [run.attempt(row.id).trajectory.turns for row in run.attempts(phase="train")]
        assert any(len({turn.policy_version for turn in turns}) > 1 for turns in attempts), "an update came in between"
        checked = [turn for turns in attempts for turn in turns if turn.policy_version in clients]
        assert len({turn.policy_version for turn in checked}) > 2
        for turn in checked:
            ids = tw.types.ModelInput.from_ints([*turn.prompt_ids, *turn.sampled_ids])
            scored = clients[turn.policy_version].compute_logprobs(ids).result()[len(turn.prompt_ids) :]
            assert turn.sampler_logprobs == pytest.approx(scored, abs=1e-4)
