"""Whole runs that sample on a real vLLM server: they train, certify, survive faults, and say what is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import turnwise as tw
from skyrl_guide import BASIC_MULTI_TURN
from turnwise.cli import main
from turnwise.config.files import config_from_yaml
from turnwise.runlog.reader import RunReader
from turnwise.training.policy import find_policy
from vllm_server import RANK, Served, check_whole, make_model, num_steps_done, pids_of

pytestmark = pytest.mark.timeout(900)  # the first one installs vLLM, and a server takes a minute to start

SMALL = (
    "train.steps=3",
    "train.tasks_per_step=2",
    "rollout.group_size=6",
    "rollout.max_turns=3",
    "warmup.steps=2",
    "eval.tasks=0",
    "run.dialogues=0",
    "engine.dtype=float32",
    f"model.rank={RANK}",
    "train.max_empty_steps=1000",
)
DISK_BYTES, LEFT_BYTES = 64 * 2**20, 64 * 2**10
"""Of a small disk, and what is left on it when it is full: an adapter is larger, what a step writes down is not."""
DEADLINE_S = 10
"""What a server gets for a reply of a few tokens, where it hangs."""
ECHO = f"{Path(__file__).parents[1] / 'e2e' / 'echo_world.py'}:EchoWorld"


def train(model: Path, directory: Path, *options: str) -> int:
    return main(["train", ECHO, f"model={model}", *SMALL, "rollout.backend=vllm", f"run.dir={directory}", *options])


def test_the_guides_yaml_trains_on_a_server_that_is_there(vllm: Served, tmp_path: Path) -> None:
    file = tmp_path / "multi_turn.yaml"
    assert "backend: sglang\n" in BASIC_MULTI_TURN
    file.write_text(BASIC_MULTI_TURN.replace("backend: sglang\n", "backend: vllm\n"), encoding="utf-8")
    directory = tmp_path / "run"
    small = [one for one in SMALL if not one.startswith(("rollout.max_turns", "train.steps", "rollout.group_size"))]
    alias = (f"model={vllm.model}", f"generator.url={vllm.url}", "train.steps=2", "rollout.group_size=4")
    before = loaded_adapters(vllm)
    assert main(["train", str(file), f"env={ECHO}", *alias, *small, f"run.dir={directory}"]) == 0
    check_whole(directory, 2)
    with RunReader(directory) as run:
        rollout = config_from_yaml(run.config_yaml, str(directory)).rollout
    assert (rollout.backend, rollout.max_turns, rollout.max_tokens_per_turn) == ("vllm", 5, 1024), "as it says"
    assert not list((directory / "served").glob("*")), "what nobody uses any more is deleted"
    assert loaded_adapters(vllm) == before, "and unloaded"


def loaded_adapters(served: Served) -> set[str]:
    """What the server itself says that it holds beside its model."""
    with urllib.request.urlopen(f"{served.url}/v1/models") as answer:
        return {model["id"] for model in json.load(answer)["data"] if model["parent"] is not None}


def test_a_run_plays_ahead_and_every_turn_is_of_the_version_that_it_says(vllm: Served, tmp_path: Path) -> None:
    options = (f"rollout.url={vllm.url}", "train.max_staleness=2", "train.steps=4", "rollout.temperature=0.7")
    for kv in ("recompute", "keep"):
        directory = tmp_path / kv
        assert train(vllm.model, directory, *options, f"rollout.kv_across_updates={kv}") == 0
        with RunReader(directory) as run:
            assert run.certificates()
            assert all(row.is_exact for row in run.certificates())
            attempts = [run.attempt(row.id).trajectory for row in run.attempts(phase="train")]
        versions = [[turn.policy_version for turn in one.turns] for one in attempts]
        assert all(one == sorted(one) for one in versions)
        assert any(one[-1] > 0 for one in versions)
        if kv == "keep":
            assert all(len(set(one)) == 1 for one in versions)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system that holds little."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this process may not mount a file system: {error}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    """Take all room of a file system but a little, in small parts: a run writes there meanwhile."""
    with (place / "filler").open("wb", buffering=0) as file:
        while (num_bytes := os.statvfs(place).f_bavail * os.statvfs(place).f_frsize - LEFT_BYTES) > 0:
            file.write(bytes(min(num_bytes, 2**20)))


def test_a_run_whose_disk_is_full_ends_with_that_and_goes_on_when_there_is_room(
    vllm: Served, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = small_disk / "run"

    def fill_after_a_step() -> None:
        while time.monotonic() < end_s:
            time.sleep(0.02)
            if (directory / "run.db").exists() and num_steps_done(directory) >= 1:
                fill(small_disk)
                return

    end_s = time.monotonic() + 600
    filler = threading.Thread(target=fill_after_a_step)
    filler.start()
    options = (f"rollout.url={vllm.url}", "train.save_every=1", "train.steps=6")
    assert train(vllm.model, directory, *options) != 0
    filler.join()
    said = capsys.readouterr().err
    assert re.search(r"adapter of version [2-5] could not be written.*No space left on device", said)
    assert "Traceback" not in said
    (small_disk / "filler").unlink()
    assert main(["train", "--resume", str(directory)]) == 0
    check_whole(directory, 6)


def test_another_model_behind_the_address_is_refused_before_anything_is_trained(
    vllm: Served, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_model(tiny_dir, tmp_path / "other", is_tied=True)
    assert train(other, tmp_path / "run", f"rollout.url={vllm.url}") != 0
    assert "does not serve the run's model" in capsys.readouterr().err
    with RunReader(tmp_path / "run") as run:
        assert not run.metric("train/grad_norm")


def test_a_compared_run_is_measured_and_talks_on_a_server_and_so_does_its_export(
    vllm: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, adapter = tmp_path / "compared", tmp_path / "adapter"
    spelled = ("generator.backend=vllm", f"generator.url={vllm.url}")
    grid = ("methods=grpo", f"env={ECHO}", "seeds=1", f"model={vllm.model}", *SMALL)
    assert main(["compare", *grid, "train.learning_rate=0.03", "eval.tasks=2", *spelled, f"--out={out}"]) == 0
    (result,) = json.loads((out / "compare.json").read_text())["results"]
    assert (result["label"], result["steps"]) == ("grpo", 3)
    (directory,) = [file.parent for file in out.glob("*/*/run.db")]
    assert main(["export", str(directory), "--peft", str(adapter)]) == 0
    capsys.readouterr()
    assert main(["eval", str(directory), "eval.tasks=6", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["num_attempts"] == 6
    assert f"sampler: vLLM at {vllm.url}" in told.err
    served = ("rollout.backend=vllm", f"rollout.url={vllm.url}")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello.\nAnd more.\n"))
    assert main(["sample", str(directory), *served, "--max-tokens", "4"]) == 0
    prompt = tw.types.ModelInput.from_ints(range(40, 90))
    here = ["rollout.backend=local"]
    with find_policy(str(directory), overrides=here) as policy, find_policy(str(vllm.model)) as base:
        ours = policy.sampler.compute_logprobs(prompt).result()[1:]
        untrained = base.sampler.compute_logprobs(prompt).result()[1:]
    for target in (directory, adapter):
        with find_policy(str(target), overrides=["engine.dtype=float32", *served]) as policy:
            theirs = policy.sampler.compute_logprobs(prompt).result()[1:]
        assert theirs == pytest.approx(ours, abs=1e-3)
        assert theirs != pytest.approx(untrained, abs=1e-2), "the adapter is there"


def test_the_bench_measures_a_server_that_runs_beside_our_engine_and_leaves_it_as_it_was(
    vllm: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    before = loaded_adapters(vllm)
    sizes = ("--prompts=4", "--prompt-tokens=16", "--new-tokens=8", "--dialogues=0", "--repeats=1", f"--rank={RANK}")
    server = ("--backend=vllm", f"--server-url={vllm.url}", "--weights=adapter")
    assert main(["bench", "sample", f"--model={vllm.model}", "--dtype=float32", *sizes, *server, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for side in ("local", "vllm"):
        assert found[f"{side}_drift_tokens"] == 8 * 8
        assert found[f"{side}_drift_abs_max"] < 1e-3, "both sample from the trainer's adapter"
        assert 0 < found[f"{side}_publish_ms"] < found[f"{side}_publish_to_token_ms"]
        assert found[f"{side}_tokens_per_s"] > 0
    assert loaded_adapters(vllm) == before


@contextmanager
def a_server_that_never_answers() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    held.append(listener.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for one in held:
            one.close()


def test_a_server_that_accepts_and_never_answers_is_named_alone_and_left_out_beside_one_that_does(
    vllm: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_server_that_never_answers() as silent:
        short = ("rollout.server_wait_s=3", "rollout.server_deadline_s=20")
        assert train(vllm.model, tmp_path / "alone", f"rollout.url={silent}", *short) != 0
        assert silent in capsys.readouterr().err
        both = f"rollout.url={silent},{vllm.url}"
        assert train(vllm.model, tmp_path / "both", both, "rollout.server_wait_s=3") == 0
    check_whole(tmp_path / "both", 3)


def num_drawing(served: Served) -> int:
    """Replies under way, by the server's own words."""
    with urllib.request.urlopen(f"{served.url}/metrics") as page:
        found = re.findall(r"^vllm:num_requests_running\{.*\} ([0-9.e+]+)$", page.read().decode(), re.MULTILINE)
    return int(sum(map(float, found)))


def test_a_server_whose_engine_hangs_says_that_it_is_well_and_is_left_out_until_it_draws_again(
    vllm: Served, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    engines = [pid for pid in pids_of(vllm.log.parent) if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
    said: list[int] = []

    def hang() -> None:
        """Stop the engine when the second step samples, until the fleet has given up on it."""
        while time.monotonic() < end_s and not (directory / "run.db").exists():
            time.sleep(0.05)
        while time.monotonic() < end_s and not (num_steps_done(directory) and num_drawing(vllm)):
            time.sleep(0.02)
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(DEADLINE_S + 2)
            with urllib.request.urlopen(f"{vllm.url}/health", timeout=30) as answer:
                said.append(answer.status)
        finally:
            for pid in engines:
                os.kill(pid, signal.SIGCONT)

    end_s = time.monotonic() + 600
    hanging = threading.Thread(target=hang)
    hanging.start()
    patient = (
        f"rollout.server_deadline_s={DEADLINE_S}",
        "rollout.server_wait_s=300",
        "rollout.max_tokens_per_turn=150",
    )
    assert train(vllm.model, directory, f"rollout.url={vllm.url}", "train.steps=4", *patient) == 0
    hanging.join()
    assert engines
    assert said == [200], "only a token tells"
    check_whole(directory, 4)
    with RunReader(directory) as run:
        assert sum(value for _, value in run.metric("fleet/servers_lost")) >= 1
        assert sum(value for _, value in run.metric("fleet/servers_returned")) >= 1


def test_what_cannot_be_started_is_refused_by_name_and_a_plan_starts_nothing(
    vllm: Served, model: Path, server_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, directory = f"rollout.server_python={server_python}", tmp_path / "run"
    for options, words in {
        (f"rollout.server_python={sys.executable}",): "cannot import vllm; install it there, or name a Python",
        ("rollout.server_python=/no/such/python",): "is no program",
        (python, "rollout.server_args=--max-logprob 5"): "--max-logprob, which vllm does not take; did you mean",
        (python, "rollout.server_args=--port=1"): "has --port, which the run sets itself",
    }.items():
        assert train(model, directory, *options) != 0
        assert words in capsys.readouterr().err
        assert not directory.exists(), "nothing was begun"
    for where, words in {
        python: "vLLM on a CPU cannot sleep",
        f"rollout.url={vllm.url}": "cannot sleep; start it",
    }.items():
        assert train(model, tmp_path / words, where, "rollout.placement=colocated") != 0
        assert words in capsys.readouterr().err
    assert train(model, directory, python, "rollout.max_num_seqs=7", "--plan") == 0
    assert "vLLM, a server that the run starts" in (said := capsys.readouterr().out)
    assert "--max-num-seqs 7" in said
    assert not directory.exists()
