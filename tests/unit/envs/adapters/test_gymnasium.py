from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

gymnasium = pytest.importorskip("gymnasium")

from attempts import play  # noqa: E402 - after the check that the library is there
from turnwise.envs.adapters.gymnasium import clean_board, make_codec, observation_to_text  # noqa: E402
from turnwise.envs.registry import get_world  # noqa: E402
from turnwise.errors import ConfigError  # noqa: E402

STEADY = {"is_slippery": False}
TO_THE_GOAL = ("down", "down", "right", "right", "down", "right")


class Parrot(gymnasium.Env):
    """Text in, text out; truncates itself after two steps unless it hears `stop`."""

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(8, charset="abcdefghijklmnopqrstuvwxyz")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.steps = 0
        return f"hello {self.np_random.integers(1000)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return f"you said {action}", 0.5, action == "stop", self.steps >= 2, {"steps": self.steps, "text": "no"}


@pytest.fixture
def parrot() -> Iterator[str]:
    gymnasium.register("Parrot-v0", entry_point=Parrot)
    yield "gymnasium:Parrot-v0"
    del gymnasium.registry["Parrot-v0"]


async def test_a_path_to_the_goal_earns_the_reward_and_is_a_success() -> None:
    start, steps = await play(get_world("gymnasium:FrozenLake-v1", make=STEADY), TO_THE_GOAL)
    assert start[0].content.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1]
    assert steps[-1].terminated
    assert steps[-1].is_success is True
    assert steps[0].messages[0].content == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert steps[0].info == {"prob": 1.0}


async def test_a_hole_terminates_without_success() -> None:
    _, steps = await play(get_world("gymnasium:FrozenLake-v1", make=STEADY), ["right", "down"])
    assert steps[-1].terminated
    assert steps[-1].is_success is False


async def test_a_reply_that_names_no_action_or_two_moves_nothing() -> None:
    world = get_world("gymnasium:FrozenLake-v1", make=STEADY)
    _, steps = await play(world, ["hm", "left or right", "first left, no:\nGo DOWN!", "2"])
    assert [step.is_unparsable for step in steps] == [True, True, False, False]
    assert steps[0].messages[0].content == "Say one action in your last line: left, down, right, up."
    assert "[F]HFH" in steps[2].messages[0].content


async def test_the_turn_limit_truncates_and_is_no_end_of_the_task() -> None:
    world = get_world("gymnasium:FrozenLake-v1", make=STEADY, max_turns=2)
    for replies in (["left", "left"], ["hm", "hm"]):
        _, steps = await play(world, replies)
        assert (steps[-1].terminated, steps[-1].truncated, steps[-1].is_success) == (False, True, False)


async def test_truncation_by_the_env_stays_truncation(parrot: str) -> None:
    world = get_world(parrot)
    _, steps = await play(world, ["one", "two", "three"])
    assert [(step.terminated, step.truncated) for step in steps] == [(False, False), (False, True)]
    _, steps = await play(world, ["stop"])
    assert (steps[-1].terminated, steps[-1].truncated) == (True, False)


async def test_text_goes_through_as_it_is_where_the_space_holds_it(parrot: str) -> None:
    start, steps = await play(get_world(parrot), ["NOT LOWER", " abc "])
    assert start[0].content.startswith("You act in Parrot-v0. Say 1 to 8 characters.\n\nhello ")
    assert steps[0].is_unparsable
    assert steps[1].messages[0].content == "you said abc"
    assert steps[1].info == {"steps": 1.0}


async def test_equal_seeds_slip_alike() -> None:
    world = get_world("gymnasium:FrozenLake-v1")
    task = world.tasks("train", 1, 0)[0]
    first, again = await play(world, ["down"] * 6, task), await play(world, ["down"] * 6, task)
    assert first == again


async def test_known_envs_are_told_in_words() -> None:
    start, _ = await play(get_world("gymnasium:Blackjack-v1"), [])
    assert "stick, hit" in start[0].content
    assert "The dealer shows " in start[0].content
    start, _ = await play(get_world("gymnasium:Taxi-v4"), [])
    assert "Passenger in " in start[0].content
    start, _ = await play(get_world("gymnasium:CliffWalking-v1", view="observation"), [])
    assert start[0].content.endswith("\n\n36")


def test_actions_get_names_of_your_own() -> None:
    codec = make_codec(gymnasium.spaces.Discrete(3, start=1), ["low", "mid", "high"])
    assert [codec.read(text) for text in ("LOW", "2", "high", "0", "4", "", "low 1", "lowest")] == [
        *(1, 2, 3, None, None, None, 1, None)
    ]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"actions": ["left"]}, "are 1 names; the env has 4 actions"),
        ({"actions": ["a", "b", "c", "d e"]}, "'d e' is not a single word"),
        ({"make": {"no_such": 1}}, "gymnasium.make.'FrozenLake-v1'. failed"),
    ],
)
def test_options_that_do_not_fit_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        get_world("gymnasium:FrozenLake-v1", **options)


def test_what_cannot_be_played_in_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs Discrete or Text actions"):
        get_world("gymnasium:Pendulum-v1")
    with pytest.raises(ConfigError, match="no env 'FrozenLake'; did you mean 'FrozenLake-v1'"):
        get_world("gymnasium:FrozenLake")
    with pytest.raises(ConfigError, match='has no "ansi" render mode'):
        get_world("gymnasium:CartPole-v1", view="ansi")


def test_boards_and_observations_become_plain_text() -> None:
    assert clean_board("S\x1b[41mF\x1b[0mH\n") == "S[F]H"
    assert observation_to_text({"a": (1, 2), "b": "x"}) == "a: 1, 2\nb: x"
    space = gymnasium.spaces.Box(0, 1, (2,))
    assert observation_to_text(space.low) == "0, 0"


def test_the_adapter_of_the_same_name_does_not_hide_the_library() -> None:
    assert sys.modules["gymnasium"] is gymnasium


class Shown(gymnasium.Env):
    """Ends with the right action, which depends on the seed."""

    observation_space = gymnasium.spaces.Discrete(3)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.right = int(self.np_random.integers(3))
        return self.right, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return self.right, float(action == self.right), True, False, {}

    def demonstrate(self) -> int:
        return self.right


def test_an_env_that_demonstrates_has_demonstrations_in_the_names_of_its_actions() -> None:
    gymnasium.register("Shown-v0", entry_point=Shown)
    try:
        world = get_world("gymnasium:Shown-v0", actions=["low", "mid", "high"], rules="Say it.")
        played = world.demonstrations(8, 0)
        assert get_world("gymnasium:FrozenLake-v1").demonstrations(1, 0) == []
    finally:
        del gymnasium.registry["Shown-v0"]
    names = {"0": "low", "1": "mid", "2": "high"}
    assert all(names[asked.content.split()[-1]] == said.content for asked, said in played)
    assert len({said.content for _, said in played}) > 1


def test_a_module_that_registers_an_env_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import gymnasium\nfrom gymnasium.envs.toy_text import CliffWalkingEnv\n"
    text += 'gymnasium.register("Ledge-v0", CliffWalkingEnv, max_episode_steps=5)\n'
    (tmp_path / "ledge_module.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    world = get_world("gymnasium:ledge_module:Ledge-v0")
    try:
        assert world.max_turns == 5
    finally:
        del gymnasium.registry["Ledge-v0"]
        del sys.modules["ledge_module"]
