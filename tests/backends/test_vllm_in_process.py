"""vLLM's engine in the process of a run: what a server does, without one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from turnwise.backends.vllm_in_process import MARK
from turnwise.cli import main
from vllm_server import make_model

pytestmark = pytest.mark.timeout(900)  # the first one installs vLLM, and an engine takes a while to start

ROOT = Path(__file__).parents[2]
ECHO = f"{ROOT / 'tests' / 'e2e' / 'echo_world.py'}:EchoWorld"


def engine_processes(directory: Path) -> list[int]:
    """Processes of the engines that write their logs below this directory."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            said = file.read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [int(file.parts[2])] if f"{MARK}=" in said and str(directory) in said else []
    return found


def test_an_engine_in_the_process_does_what_a_server_does_and_dies_with_a_process_that_is_killed(
    model: Path, tiny_dir: Path, server_python: Path, tmp_path: Path
) -> None:
    tied = make_model(tiny_dir, tmp_path / "tied", is_tied=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("in_process_claims.py")
    command = [str(server_python), str(script), str(model), str(tied), str(tmp_path), ECHO]
    claims: list[str] = []
    with (tmp_path / "output").open("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                claims += [line.removeprefix("CLAIM ").strip()] if line.startswith("CLAIM ") else []
                if line.startswith("READY"):
                    break
            assert claims == ["run", "merged", "adapters", "weights"], (tmp_path / "output").read_text()[-4000:]
            assert engine_processes(tmp_path), "the engine runs"
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    until_s = time.monotonic() + 60
    while engine_processes(tmp_path) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not engine_processes(tmp_path), "nothing outlives the process"


def test_without_vllm_here_the_error_says_what_to_do_and_options_of_servers_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", ECHO, f"model={model}", f"run.dir={tmp_path / 'run'}", "rollout.backend=vllm_in_process"]
    assert main(command) != 0
    said = capsys.readouterr().err
    assert "cannot import vllm; install it where turnwise is" in said
    assert "rollout.backend=vllm with rollout.server_python" in said
    assert main([*command, "rollout.url=http://127.0.0.1:1"]) != 0
    assert "rollout.url is not read with rollout.backend=vllm_in_process" in capsys.readouterr().err
    assert not (tmp_path / "run").exists(), "nothing was begun"
