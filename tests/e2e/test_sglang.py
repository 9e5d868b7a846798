"""Whole runs that sample on SGLang servers: as the guide writes it, and while servers die, hang and come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import turnwise as tw
from sglang_stub import SglangStub, sglang_stubs
from skyrl_guide import BASIC_MULTI_TURN
from turnwise.cli import main
from turnwise.runlog.reader import RunReader
from turnwise.trajectory import EndReason

pytestmark = pytest.mark.model

WORLD = """
from turnwise.envs.base import EnvStep, user


class Talk:
    max_turns, max_tokens = 3, 8

    def __init__(self, seed: int):
        self.turn = 0

    def start(self):
        return [user("Say something long enough to fill a block of the cache, then say it again, only shorter.")]

    def step(self, reply):
        self.turn += 1
        over = self.turn == 3
        return EnvStep(reward=float(len(reply.content) % 7), terminated=over, messages=() if over else [user("More.")])

    def close(self):
        pass
"""
HANG_S = 200.0
"""Only a hang takes so long."""
SMALL = ("model=tiny", "train.tasks_per_step=1", "warmup.steps=0", "eval.tasks=0", "run.dialogues=0")


@pytest.fixture
def stubs(tmp_path: Path, tiny_dir: Path) -> Iterator[list[SglangStub]]:
    assert tiny_dir.is_dir()
    with sglang_stubs(3, tmp_path / "stubs") as servers:
        yield servers


def files(tmp_path: Path, stubs: list[SglangStub]) -> tuple[str, list[str]]:
    """The guide's YAML, and the options that let it run here."""
    (tmp_path / "guide.yaml").write_text(BASIC_MULTI_TURN)
    (tmp_path / "talk.py").write_text(WORLD)
    where = (f"generator.url={','.join(stub.url for stub in stubs)}", f"run.dir={tmp_path / 'run'}")
    return str(tmp_path / "guide.yaml"), [f"env={tmp_path / 'talk.py'}:Talk", "engine.dtype=float32", *SMALL, *where]


def train(tmp_path: Path, stubs: list[SglangStub], *options: str) -> int:
    guide, needed = files(tmp_path, stubs)
    return main(["train", guide, *needed, *options])


def metric(run: Path, name: str) -> list[float]:
    with RunReader(run) as reader:
        return [value for _, value in reader.metric(name)]


def test_the_guides_yaml_trains_on_sglang_servers_with_a_whole_certificate(
    tmp_path: Path, stubs: list[SglangStub], capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("generator.sampling_params.max_generate_length=12", "rollout.group_size=6", "train.steps=3")
    assert train(tmp_path, stubs, *short) == 0
    run = tmp_path / "run"
    assert metric(run, "fleet/servers_ready") == [3, 3, 3]
    assert metric(run, "fleet/retries") == [0, 0, 0]
    num_checks = sum(stub.num_probes + 1 for stub in stubs)  # one more: its model is compared with the trainer's
    assert sum(metric(run, "fleet/requests")) == sum(stub.num_answered for stub in stubs) - num_checks
    assert min(metric(run, "fleet/sticky_share")) > 0.5, "two turns of three follow another one"
    assert min(metric(run, "fleet/cached_prompt_share")) > 0.5, "a server reads a conversation once"
    names = {body["lora_path"] for stub in stubs for body in stub.bodies if "lora_path" in body}
    assert {name.split("-")[2] for name in names} == {"v0", "v1", "v2"}, "every step was drawn with its own weights"
    assert not any(stub.adapters for stub in stubs)
    with RunReader(run) as reader:
        assert [(row.step, row.is_exact) for row in reader.certificates()] == [(1, True), (3, True)]
    capsys.readouterr()
    assert main(["certify", str(run)]) == 0
    assert "EXACT" in capsys.readouterr().out


def test_a_run_goes_on_while_servers_die_hang_and_come_back(tmp_path: Path, stubs: list[SglangStub]) -> None:
    killed, hung, steady = stubs
    for stub in stubs:
        stub.draw_s = 0.02
    guide, needed = files(tmp_path, stubs)
    patient = ["rollout.server_deadline_s=1", f"rollout.server_wait_s={HANG_S}", "rollout.max_retries=0"]
    needed += ["rollout.group_size=8", "train.steps=10000", "rollout.max_tokens_per_turn=8", *patient]
    running = tw.start(guide, overrides=needed, observer=tw.Observer())
    run = tmp_path / "run"
    wait_until(lambda: killed.num_answered > 8)
    killed.kill()
    hung.fault = "hang"
    wait_until(lambda: steady.num_answered > 30)
    hung.fault = ""
    killed.start()
    wait_until(lambda: sum(metric(run, "fleet/servers_returned")) >= 2)
    wait_until(lambda: metric(run, "fleet/servers_ready")[-1] == 3)
    before = killed.num_answered, hung.num_answered
    wait_until(lambda: killed.num_answered > before[0] + 12 and hung.num_answered > before[1] + 12)
    running.stop()
    assert running.wait().state == "stopped"
    assert sum(metric(run, "fleet/retries")) > 0
    assert sum(metric(run, "fleet/servers_lost")) >= 2
    assert set(metric(run, "rollout/attempts_kept")) == {8}, "no attempt was lost, and none counted twice"
    assert sum(metric(run, "rollout/retries")) == 0
    assert main(["certify", str(run)]) == 0


def test_a_run_whose_servers_are_all_gone_stops_with_their_names_and_goes_on_when_they_are_back(
    tmp_path: Path, stubs: list[SglangStub], capsys: pytest.CaptureFixture[str]
) -> None:
    def kill_all() -> None:
        wait_until(lambda: sum(stub.num_answered for stub in stubs) > 40)
        for stub in stubs:
            stub.kill()

    threading.Thread(target=kill_all, daemon=True).start()
    quick = ("rollout.server_wait_s=0.5", "rollout.max_retries=0", "train.max_empty_steps=1")
    small = ("rollout.group_size=8", "train.steps=6", "rollout.max_tokens_per_turn=8", "train.save_every=1")
    assert train(tmp_path, stubs, *small, *quick) != 0
    said = capsys.readouterr()
    assert stubs[0].url in said.out + said.err
    for stub in stubs:
        stub.start()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    with RunReader(tmp_path / "run") as run:
        assert [step for step, _ in run.metric("rollout/attempts_kept")] == [1, 2, 3, 4, 5, 6]
    assert not any(stub.adapters for stub in stubs)


def test_servers_on_the_trainers_device_give_their_memory_back_while_it_learns(
    tmp_path: Path, stubs: list[SglangStub], capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("rollout.group_size=6", "rollout.max_tokens_per_turn=8", "rollout.placement=colocated")
    assert train(tmp_path, stubs, *small, "train.steps=1", "train.max_staleness=1") != 0
    assert "the sampler sleeps while the trainer learns" in capsys.readouterr().err
    stubs[1].has_memory_saver = False
    assert train(tmp_path, stubs, *small, f"run.dir={tmp_path / 'refused'}") != 0
    assert f"the server at {stubs[1].url} cannot give its memory back" in capsys.readouterr().err
    stubs[1].has_memory_saver = True

    def kill_one_that_sleeps() -> None:
        wait_until(lambda: stubs[0].is_asleep)
        stubs[0].kill()

    threading.Thread(target=kill_one_that_sleeps, daemon=True).start()
    quick = ("rollout.server_wait_s=30", "train.save_every=1")
    assert train(tmp_path, stubs, *small, *quick, "train.steps=3") == 0
    killed, *others = [len(stub.sleeps) for stub in stubs]
    assert others == [3, 3], "before each step learns"
    assert 1 <= killed <= 3, "it was killed in one of its sleeps"
    assert not any(stub.is_asleep for stub in stubs[1:]), "the run ends with servers that are awake"
    with RunReader(tmp_path / "run") as run:
        assert [(row.step, row.is_exact) for row in run.certificates()] == [(1, True), (3, True)]
    stubs[0].start()
    for stub in stubs:
        stub.never_wakes = True
    never = ("train.steps=2", "rollout.server_deadline_s=2", "rollout.server_wait_s=2", f"run.dir={tmp_path / 'never'}")
    assert train(tmp_path, stubs, *small, *never) != 0
    assert "did not wake up" in "".join(capsys.readouterr())


def test_a_version_is_published_once_also_when_it_was_evaluated(tmp_path: Path, stubs: list[SglangStub]) -> None:
    short = ("rollout.group_size=6", "rollout.max_tokens_per_turn=8", "train.steps=2", "eval.tasks=2", "eval.every=1")
    assert train(tmp_path, stubs[:1], *short) == 0
    names = {body["lora_path"] for body in stubs[0].bodies if "lora_path" in body}
    assert sorted(name.split("-")[2] for name in names) == ["v0", "v1", "v2"]


WEIGHTS = ("model.train=full", "rollout.publish=weights", "train.learning_rate=1e-3", "rollout.group_size=6")


def test_all_weights_reach_every_server_and_one_that_dies_and_comes_back(
    tmp_path: Path, stubs: list[SglangStub]
) -> None:
    killed, steady = servers = stubs[:2]
    run = tmp_path / "run"

    def kill_one() -> None:
        wait_until(lambda: (run / "run.db").exists() and bool(metric(run, "fleet/servers_ready")))
        killed.kill()
        wait_until(lambda: metric(run, "fleet/servers_ready")[-1] == 1)
        killed.start()

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    guide, needed = files(tmp_path, servers)
    needed += [*WEIGHTS, "train.steps=10000", "rollout.max_tokens_per_turn=8"]
    running = tw.start(guide, overrides=needed, observer=tw.Observer())
    wait_until(lambda: sum(metric(run, "fleet/servers_returned")) >= 1)
    wait_until(lambda: metric(run, "fleet/servers_ready")[-1] == 2)
    before = killed.num_answered
    wait_until(lambda: killed.num_answered > before + 12)
    running.stop()
    assert running.wait().state == "stopped"
    killer.join()
    assert not killed.adapters
    assert not steady.adapters
    with RunReader(run) as reader:
        assert reader.certificates()
        assert all(row.is_exact for row in reader.certificates()), "every reply is of the weights that it names"
        attempts = [reader.attempt(row.id) for row in reader.attempts(phase="train")]
    drawn = {(one.row.step, version) for one in attempts for turn in one.trajectory.turns for version in turn.versions}
    assert {step - version for step, version in drawn} == {1}, "a step learns from the version before it"


def test_whole_weights_are_replaced_under_replies_and_every_token_keeps_its_version(
    tmp_path: Path, stubs: list[SglangStub]
) -> None:
    for stub in stubs[:1]:
        stub.chunk = 2
    ahead = ("train.max_staleness=2", "train.steps=4", "rollout.max_tokens_per_turn=40")
    for choice in ("recompute", "end"):
        run = tmp_path / choice
        options = (*WEIGHTS, *ahead, f"rollout.kv_across_updates={choice}", f"run.dir={run}")
        assert train(tmp_path, stubs[:1], *options) == 0
        with RunReader(run) as reader:
            assert reader.certificates()
            assert all(row.is_exact for row in reader.certificates())
            attempts = [reader.attempt(row.id).trajectory for row in reader.attempts(phase="train")]
        mixed = [turn for one in attempts for turn in one.turns if len(set(turn.versions)) > 1]
        if choice == "end":
            assert not mixed, "replies are finished by the weights that began them"
            assert any(one.end_reason is EndReason.UPDATED for one in attempts)
        else:
            assert mixed, "an update fell into a reply"
            assert all(list(turn.versions) == sorted(turn.versions) for turn in mixed)


def wait_until(is_so: object) -> None:
    assert callable(is_so)
    give_up_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < give_up_s, "it did not come"
        time.sleep(0.05)
