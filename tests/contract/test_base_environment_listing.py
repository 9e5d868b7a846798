"""The multi-turn guide's class and its three reward patterns run here with nothing but the import changed.

`listings/base_environment.py.txt` is the guide's class, `listings/reward_patterns.py.txt` its three versions of `step`.
The methods that the guide leaves to the reader are filled in below: the task is to say a word.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from turnwise.envs.adapters.base_environment import BaseEnvironment, BaseEnvironmentWorld
from turnwise.envs.base import EnvStep, assistant, user
from turnwise.envs.check import check_env

LISTINGS = Path(__file__).parent / "listings"
THEIRS = "from skyrl_train.environments.base_environment import BaseEnvironment"
OURS = "from turnwise.envs.adapters.base_environment import BaseEnvironment"

ROWS = [{"prompt": f"Say the word number {n}.", "ground_truth": {"word": f"word{n}"}} for n in range(40)]


def load_listing() -> type[BaseEnvironment]:
    text = (LISTINGS / "base_environment.py.txt").read_text(encoding="utf-8")
    ours = text.replace(THEIRS, OURS)
    assert [new for old, new in zip(text.splitlines(), ours.splitlines(), strict=True) if old != new] == [OURS]
    names: dict[str, Any] = {"__name__": "listing"}
    exec(compile(ours, "base_environment.py.txt", "exec"), names)  # noqa: S102 - the listing is ours to run
    return names["MyMultiTurnEnv"]


def load_patterns() -> dict[str, Any]:
    """`final`, `turn_level` and `progress`: the functions as printed."""
    text = (LISTINGS / "reward_patterns.py.txt").read_text(encoding="utf-8")
    patterns: list[Any] = []
    for source in re.split(r"^# .*$", text, flags=re.MULTILINE)[1:]:
        names: dict[str, Any] = {}
        exec(compile(source, "reward_patterns.py.txt", "exec"), names)  # noqa: S102 - the listing is ours to run
        patterns.append(names["step"])
    return dict(zip(("final", "turn_level", "progress"), patterns, strict=True))


def fill_in(**methods: Any) -> type[BaseEnvironment]:
    """The guide's class with its open methods written."""

    class Filled(load_listing()):
        def is_correct(self, response: str, ground_truth: dict[str, str]) -> bool:
            return ground_truth["word"] in response

        def get_feedback(self, response: str) -> str:
            return f"Not {response}. Try again."

        def is_well_formatted(self, response: str) -> bool:
            return response.startswith("word")

        def calculate_progress(self, response: str, ground_truth: dict[str, str]) -> float:
            word = ground_truth["word"]
            return sum(a == b for a, b in zip(response, word, strict=False)) / len(word)

    return type("Pattern", (Filled,), methods)


async def play(world: BaseEnvironmentWorld, replies: list[str]) -> list[EnvStep]:
    task = world.tasks("train", 1, seed=0)[0]
    env = world.make_env(task, seed=0)
    try:
        assert list(await env.start()) == [user(task.data["prompt"])]
        replies = [task.data["ground_truth"]["word"] if reply == "RIGHT" else reply for reply in replies]
        return [await env.step(assistant(reply)) for reply in replies]
    finally:
        await env.close()


async def test_listing_gives_feedback_until_the_answer_is_right() -> None:
    world = BaseEnvironmentWorld(fill_in(), ROWS)
    assert world.max_turns == 5
    wrong, right = await play(world, ["nothing", "RIGHT"])
    assert wrong.messages == [user("Not nothing. Try again.")]
    assert (wrong.reward, wrong.is_over, wrong.is_success) == (0.0, False, None)
    assert (right.reward, right.terminated, right.is_success, right.messages) == (1.0, True, True, [])


async def test_listing_ends_at_its_own_max_turns() -> None:
    steps = await play(BaseEnvironmentWorld(fill_in(), ROWS, max_turns=3), ["no"] * 3)
    assert [step.is_over for step in steps] == [False, False, True]
    assert (steps[-1].reward, steps[-1].is_success, steps[-1].messages) == (0.0, False, [])


async def test_final_reward_pattern() -> None:
    world = BaseEnvironmentWorld(fill_in(step=load_patterns()["final"]), ROWS, max_turns=3)
    assert [step.reward for step in await play(world, ["no", "RIGHT"])] == [0.0, 1.0]
    steps = await play(world, ["no"] * 3)
    assert [step.is_over for step in steps] == [False, False, True]
    assert steps[-1].messages == []  # its own end, not the adapter's: `current_turn` reached max_turns


async def test_turn_level_pattern() -> None:
    world = BaseEnvironmentWorld(fill_in(step=load_patterns()["turn_level"]), ROWS, max_turns=5)
    steps = await play(world, ["nonsense", "word?", "RIGHT"])
    assert [step.reward for step in steps] == [0.0, pytest.approx(0.2 / 5), 1.0]
    assert [step.is_over for step in steps] == [False, False, True]


async def test_turn_level_pattern_never_says_done_so_max_turns_does() -> None:
    world = BaseEnvironmentWorld(fill_in(step=load_patterns()["turn_level"]), ROWS, max_turns=2)
    steps = await play(world, ["word?", "word?"])
    assert [(step.reward, step.terminated) for step in steps] == [(0.1, False), (0.1, True)]
    assert steps[-1].is_success is False


@pytest.mark.parametrize("max_turns", [1, 2, 3])
async def test_progress_pattern_pays_a_tenth_and_on_its_last_turn_all_of_it(max_turns: int) -> None:
    world = BaseEnvironmentWorld(fill_in(step=load_patterns()["progress"]), ROWS, max_turns=max_turns)
    steps = await play(world, ["word"] * max_turns)
    word = world.tasks("train", 1, seed=0)[0].data["ground_truth"]["word"]
    progress = 4 / len(word)
    assert [step.reward for step in steps] == pytest.approx([progress * 0.1] * (max_turns - 1) + [progress])
    assert steps[-1].terminated


@pytest.mark.parametrize("pattern", ["listing", "final", "turn_level", "progress"])
def test_listing_and_patterns_keep_the_rules(pattern: str) -> None:
    methods = {} if pattern == "listing" else {"step": load_patterns()[pattern]}
    report = check_env(BaseEnvironmentWorld(fill_in(**methods), ROWS))
    assert report.is_ok, report
