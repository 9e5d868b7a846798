"""One step of training on an env of every library, through the command line, with `tiny`.

`rft` keeps every attempt here, so that a model which knows nothing still has something to learn from: the step is a
real one, with a gradient. What is not in the extra `dev` is skipped where it is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import ONE_STEP
from openenv_servers import ECHO, openenv_server
from turnwise.cli import main
from turnwise.envs.registry import get_world
from turnwise.runlog.reader import RunReader

SMALL = (*ONE_STEP, "rollout.max_turns=2", "env.options.max_tokens=6")
BESIDE = "run by tests/contract/test_adapters_packages.py"
SUMS = """\
import verifiers.v1 as vf

class SumTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply) / 100

class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in range(20):
            yield SumTask(vf.TaskData(prompt=f"{n} + 1 ="), self.config.task)
"""


def _train(name: str, directory: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Train for a step; what was printed."""
    assert main(["train", f"env={name}", *SMALL, *options, f"run.dir={directory}"]) == 0
    with RunReader(directory) as run:
        attempts = run.attempts(phase="train")
        assert len(attempts) == 4
        assert [row.is_exact for row in run.certificates()] == [True]
        ((_, grad_norm),) = run.metric("train/grad_norm")
        assert grad_norm > 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("tiny_dir")
@pytest.mark.parametrize(
    ("package", "name", "said"),
    [
        ("gymnasium", "gymnasium:FrozenLake-v1", "You act in FrozenLake-v1."),
        ("reasoning_gym", "reasoning_gym:chain_sum", "arithmetic problem"),
        ("skyrl_gym", "skyrl_gym:gsm8k", "The last line is"),
        ("skyrl_gym", "skyrl_gym:gsm8k_multi_turn", "The last line is"),
        ("textarena", "textarena:TicTacToe-v0", "Tic Tac Toe"),
    ],
)
def test_an_env_of_another_library_is_trained_for_a_step(
    package: str, name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(package, reason=BESIDE)
    assert said in _train(name, tmp_path / "run", capsys)


@pytest.mark.usefixtures("tiny_dir")
def test_a_verifiers_taskset_is_trained_for_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("verifiers", reason=BESIDE)
    (tmp_path / "sums.py").write_text(SUMS, encoding="utf-8")
    assert " + 1 =" in _train(f"verifiers:{tmp_path}/sums.py:SumTaskset", tmp_path / "run", capsys)


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("websockets")
    pytest.importorskip("openenv", reason=BESIDE)
    with openenv_server(ECHO, tmp_path) as address:
        get_world(f"openenv:{address}", timeout_s=120.0)  # comes back when the server is up
        yield f"openenv:{address}"


@pytest.mark.usefixtures("tiny_dir")
def test_an_openenv_server_is_trained_on_for_a_step(
    echo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "echoed_message" in _train(echo, tmp_path / "run", capsys)


def test_a_library_that_is_missing_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)  # what makes Python say that there is no such module
    assert main(["train", "env=gymnasium:FrozenLake-v1", "model=tiny", "--plan"]) == 2
    assert "install it with: pip install 'turnwise[gymnasium]'" in capsys.readouterr().err
