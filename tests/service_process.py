"""A real `turnwise serve` process for tests, and virtual environments with the real SDKs to talk to it."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from command_line import start_cli
from environments import ROOT, Environment, make_environment, run_in

START_S = 240.0
CHECKS_S = 500.0


class ServerProcess:
    """`turnwise serve` on a free port; `restart` keeps the port and the data."""

    def __init__(self, data_dir: Path, *options: str, model: str = "tiny") -> None:
        self.data_dir = data_dir
        self._options = options
        self._model = model
        self._process: subprocess.Popen[str] | None = None
        self.port = 0
        self.log: list[str] = []
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = ["serve", "--model", self._model, "--port", str(self.port)]
        self._process = start_cli(
            *command, "--data-dir", str(self.data_dir), *self._options, stdout=None, stderr=subprocess.PIPE
        )
        is_up = threading.Event()
        process = self._process

        def read() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                self.log.append(line)
                found = re.search(r"at http://127\.0\.0\.1:(\d+) ", line)
                if found:
                    self.port = int(found[1])
                    is_up.set()
            process.stderr.close()
            is_up.set()  # it ended

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        assert is_up.wait(START_S), "the server did not start in time"
        assert self.port, "".join(self.log)

    def kill(self) -> None:
        """As `kill -9`: nothing is told, nothing is written."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """As Ctrl-C; returns the exit code."""
        return self._end(signal.SIGINT)

    def _end(self, how: signal.Signals) -> int:
        process = self._process
        if process is None:
            return 0
        process.send_signal(how)
        try:
            return process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            self._process = None
            self._reader.join(10)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.stop()


def sdk_python(package: str, version: str, needs: tuple[str, ...] | None = None) -> Path:
    """The interpreter of a virtual environment with that SDK.

    The SDKs need torch for custom losses only; the environment ends its search path with ours, which has it. With
    `needs` the package is installed without what it asks for (torch, again), and those are installed instead.
    """

    def fill(environment: Environment) -> None:
        if needs is None:
            # The SDKs ask for different releases of tinker, so the one that our own client was tested with stays out.
            environment.install("-c", str(environment.write_constraints("tinker")), f"{package}=={version}")
        else:
            environment.install(*needs)
            environment.install("--no-deps", f"{package}=={version}")
        environment.end_with_ours()

    return make_environment(f"{package}-{version}", fill)


def check_names(checks: Path) -> list[str]:
    """The checks of a file, without importing it: its public functions."""
    tree = ast.parse(checks.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def run_checks(python: Path, checks: Path, url: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run a file of checks in an SDK's environment: {check: None, or what went wrong}."""
    runner = ROOT / "tests" / "contract" / "sdk" / "runner.py"
    env = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TINKER_BASE_URL": url,
        "MINT_BASE_URL": url,
        **environment,
    }
    return json.loads(run_in(python, str(runner), str(checks), env=env, timeout_s=CHECKS_S).splitlines()[-1])
