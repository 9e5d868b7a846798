"""Every adapter keeps the rules that `check_env` plays through, with envs of the libraries themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from openenv_servers import ECHO, openenv_server
from turnwise.envs.check import check_env
from turnwise.envs.registry import get_world

NAMES = {
    "gymnasium:FrozenLake-v1": "gymnasium",
    "gymnasium:Taxi-v4": "gymnasium",
    "gymnasium:CliffWalking-v1": "gymnasium",
    "gymnasium:Blackjack-v1": "gymnasium",
    "gymnasium:CartPole-v1": "gymnasium",
    "reasoning_gym:chain_sum": "reasoning_gym",
    "reasoning_gym:leg_counting": "reasoning_gym",
    "skyrl_gym:gsm8k": "skyrl_gym",
    "skyrl_gym:gsm8k_multi_turn": "skyrl_gym",
    "textarena:GuessTheNumber-v0": "textarena",
    "textarena:KuhnPoker-v0": "textarena",
    "textarena:Nim-v0": "textarena",
    "textarena:ThreePlayerTicTacToe-v0": "textarena",
    "textarena:TicTacToe-v0": "textarena",
}


@pytest.mark.parametrize("name", NAMES)
def test_an_env_of_another_library_keeps_the_rules(name: str) -> None:
    pytest.importorskip(NAMES[name])
    report = check_env(get_world(name), num_tasks=2, deadline_s=120)
    assert report.is_ok, report


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("websockets")
    pytest.importorskip("openenv", reason="in the extra adapters, too large for dev")
    with openenv_server(ECHO, tmp_path) as address:
        get_world(f"openenv:{address}", timeout_s=120.0)  # comes back when the server is up
        yield f"openenv:{address}"


def test_the_env_that_openenv_itself_makes_keeps_the_rules(echo: str) -> None:
    report = check_env(get_world(echo), num_tasks=2, deadline_s=120)
    assert report.is_ok, report


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word list of our own where nltk looks for one."""
    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    for file in ("en", "en-basic"):
        (folder / file).write_text("apple\nbread\nchair\ndance\neagle\nflame\ngrape\nhouse\n", encoding="utf-8")
    pytest.importorskip("nltk").data.path.insert(0, str(tmp_path))
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))


@pytest.mark.usefixtures("words")
def test_a_taskset_that_comes_with_verifiers_keeps_the_rules() -> None:
    pytest.importorskip("verifiers", reason="in the extra adapters, too large for dev")
    world = get_world("verifiers:textarena", taskset={"game": "Hangman-v0"}, num_tasks=20, max_turns=16)
    report = check_env(world, num_tasks=2, deadline_s=120)
    assert report.is_ok, report
