"""The remote client against a real `turnwise serve` process, and `turnwise train` with `base_url=`.

The SDK's threads and sockets live in processes of their own: they outlast a test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from command_line import SECONDS, start_cli
from local_server import serving
from service_process import ROOT, ServerProcess, check_names, run_checks, sdk_python
from turnwise.cli import main
from turnwise.rollout.certify import Certificate
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runtime.exit_codes import ExitCode

CHECKS = Path(__file__).parent / "sdk" / "remote_checks.py"
MINT_CHECKS = Path(__file__).parent / "sdk" / "remote_mint_checks.py"
SMALL = [
    "train.tasks_per_step=2",
    "rollout.group_size=4",
    "eval.tasks=2",
    "warmup.steps=20",
    "warmup.learning_rate=0.01",
    "env.options.high=3",
    "run.dialogues=0",
]


@pytest.fixture(scope="module")
def server(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    assert tiny_dir.is_dir()
    with ServerProcess(tmp_path_factory.mktemp("service")) as process:
        yield process
        assert "ERROR" not in "".join(process.log), process.log


@pytest.fixture(scope="module")
def outcomes(server: ServerProcess, turnwise_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    more = {"TURNWISE_HOME": str(turnwise_home), "SCRATCH": str(tmp_path_factory.mktemp("scratch"))}
    return run_checks(Path(sys.executable), CHECKS, server.url, more)


@pytest.mark.parametrize("name", check_names(CHECKS))
def test_the_remote_client_finds_that(name: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[name] is None, outcomes[name]


@pytest.fixture(scope="module")
def mint_outcomes(server: ServerProcess, turnwise_home: Path) -> dict[str, Any]:
    python = sdk_python("mindlab-toolkit", "0.2.0")
    more = {"TURNWISE_HOME": str(turnwise_home), "MINT_API_KEY": "sk-any", "PYTHONPATH": str(ROOT / "src")}
    return run_checks(python, MINT_CHECKS, server.url, more)


@pytest.mark.parametrize("name", check_names(MINT_CHECKS))
def test_with_mints_sdk_the_remote_client_finds_that(name: str, mint_outcomes: dict[str, Any]) -> None:
    assert mint_outcomes[name] is None, mint_outcomes[name]


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    with start_cli(*arguments, stderr=subprocess.PIPE) as process:
        said, complaints = process.communicate(timeout=SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, said, complaints)


def losses(directory: Path) -> dict[int, float]:
    with RunReader(directory) as run:
        return dict(run.metric("train/loss"))


@pytest.mark.slow
def test_turnwise_train_runs_against_a_service_and_goes_on_with_it(server: ServerProcess, tmp_path: Path) -> None:
    run_dir = tmp_path / "remote"
    options = ["train", "guess_number", "model=tiny", *SMALL, "train.save_every=1", "train.keep_checkpoints=1"]
    options.append("eval.keep_best=false")
    done = run_cli(*options, f"model.base_url={server.url}", "train.steps=2", f"run.dir={run_dir}")
    assert done.returncode == 0, done.stderr
    assert f"that of the service at {server.url}" in done.stdout
    again = run_cli("train", "--resume", str(run_dir), "train.steps=4")
    assert again.returncode == 0, again.stderr
    assert "resume       after 2 steps" in again.stdout
    with RunReader(run_dir) as run:
        assert [row.step for row in run.checkpoints()] == [4]
        certificates = [Certificate.from_json(row.content) for row in run.certificates()]
    assert certificates
    assert all(certificate.is_exact and certificate.max_gap < 1e-3 for certificate in certificates)
    measured = run_cli("eval", str(run_dir), "--json")
    assert measured.returncode == 0, measured.stderr


@pytest.mark.slow
def test_a_remote_run_does_what_a_local_one_does(server: ServerProcess, tmp_path: Path) -> None:
    """Same seeds, same tasks, same samples, same losses: the service is the same engine behind a wire."""
    options = ["train", "guess_number", "model=tiny", *SMALL, "train.steps=3", "eval.tasks=0"]
    for name, more in (("remote", [f"base_url={server.url}"]), ("local", [])):
        done = run_cli(*options, *more, f"run.dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
    remote, local = losses(tmp_path / "remote"), losses(tmp_path / "local")
    assert local, "nothing was learned from; the comparison would be empty"
    assert remote.keys() == local.keys()
    for step, value in local.items():
        assert remote[step] == pytest.approx(value, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["engine.device=cpu"], "engine.device is not read with model.base_url"),
        (["rollout.stop=x"], "rollout.stop"),
        (["base_url=localhost:1"], "expected http://"),
    ],
)
def test_what_a_service_would_not_read_is_refused_before_anything_is_spent(options: list[str], word: str) -> None:
    done = run_cli("train", "guess_number", "model=tiny", "base_url=http://127.0.0.1:1", *options, "--plan")
    assert done.returncode == 2
    assert word in done.stderr


def test_ppo_is_refused_at_a_service_without_critics_before_anything_but_its_name_is_asked(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny_dir.is_dir()
    asked: list[str] = []
    app = FastAPI()

    @app.middleware("http")
    async def note(request: Request, _: Any) -> JSONResponse:
        asked.append(request.url.path)
        return JSONResponse({"detail": "Not Found"}, status_code=404)

    with serving(app) as url:
        code = main(
            ["train", "guess_number", "model=tiny", "method=ppo", f"base_url={url}", f"run.dir={tmp_path / 'x'}"]
        )
    assert code == 2
    assert "has no critics" in capsys.readouterr().err
    assert set(asked) == {"/healthz"}


def test_a_key_that_the_service_does_not_know_is_told_with_what_to_set(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiny_dir.is_dir()
    app = FastAPI()

    @app.middleware("http")
    async def refuse(request: Request, _: Any) -> JSONResponse:
        if request.url.path == "/healthz":
            return JSONResponse({"status": "ok", "service": "turnwise"})
        return JSONResponse({"detail": "unknown key"}, status_code=401)

    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    with serving(app) as url:
        done = run_cli("train", "guess_number", "model=tiny", *SMALL, f"base_url={url}", f"run.dir={tmp_path / 'x'}")
    assert done.returncode == 2, done.stderr
    assert "set TINKER_API_KEY" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_where_nobody_is_fails_at_once_with_one_line(tmp_path: Path) -> None:
    done = run_cli("train", "guess_number", "model=tiny", "base_url=http://127.0.0.1:9", f"run.dir={tmp_path / 'x'}")
    assert done.returncode == 2
    assert done.stderr.strip().startswith("turnwise: no service answers at http://127.0.0.1:9")


@pytest.mark.slow
def test_a_service_that_stops_answering_is_named_and_the_run_can_be_resumed(
    server: ServerProcess, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    limits = ["train.call_deadline_s=6", "rollout.sample_deadline_s=6", "rollout.max_retries=0"]
    options = [*SMALL, *limits, "warmup.steps=0", "eval.tasks=0", "train.save_every=1", "train.max_empty_steps=50"]
    train = ["train", "guess_number", "model=tiny", *options, f"base_url={server.url}", "train.steps=1000"]
    process = start_cli(*train, f"run.dir={run_dir}")
    try:
        ends_s = time.monotonic() + 90
        while not has_checkpoint(run_dir):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < ends_s
            time.sleep(0.05)
        os.kill(server.pid, signal.SIGSTOP)
        out, _ = process.communicate(timeout=120)
    finally:
        os.kill(server.pid, signal.SIGCONT)
        process.kill()
        process.wait()
    assert process.returncode == ExitCode.STALLED, out
    assert "gave no answer within 6 s" in out
    with RunReader(run_dir) as run:
        done = run.checkpoints()[-1].step
    again = run_cli("train", "--resume", str(run_dir), f"train.steps={done + 1}", "train.call_deadline_s=60")
    assert again.returncode == 0, again.stdout + again.stderr


def has_checkpoint(directory: Path) -> bool:
    if not is_run(directory):
        return False
    with RunReader(directory) as run:
        return bool(run.checkpoints())
