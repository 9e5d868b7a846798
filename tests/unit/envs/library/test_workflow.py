from __future__ import annotations

from typing import Any

import pytest

from cases import for_each
from turnwise.envs.base import EnvStep, Task, assistant, system, user
from turnwise.envs.library.workflow import LEVELS, Workflow, WorkflowEnv
from turnwise.errors import ConfigError
from turnwise.runtime.blocking import run_to_end

FORM: dict[str, Any] = {
    "words": ["blue", "green", "red", "red", "white", "black"],
    "seals": ["red", "black"],
    "columns": 2,
}
"""Two sections of three cells; the last cell of each asks for its seal."""
RIGHT = ("blue", "green", "red", "red", "white", "black")


def make_env(**options: Any) -> WorkflowEnv:
    world = Workflow(**{"rows": 3, "columns": 2, "sections": 2, **options})
    return world.make_env(Task(id="t", data=FORM), seed=0)


def play(env: WorkflowEnv, *replies: str) -> list[EnvStep]:
    async def steps() -> list[EnvStep]:
        return [await env.step(assistant(reply)) for reply in replies]

    return run_to_end(steps())


def said(steps: list[EnvStep]) -> list[str]:
    return [message.content for step in steps for message in step.messages]


def test_a_section_tells_its_seal_once_and_asks_for_it_at_its_end() -> None:
    env = make_env()
    assert run_to_end(env.start()) == [
        system("Fill in the form. Answer with one word."),
        user("The seal is red. Row 1, A: write blue."),
    ]
    assert said(play(env, *RIGHT)) == [
        "Row 1, B: write green.",
        "Row 2, A: write the seal.",
        "The seal is now black. Row 2, B: write red.",
        "Row 3, A: write white.",
        "Row 3, B: write the seal.",
    ]


def test_ordinary_cells_pay_one_half_together_and_so_do_seals() -> None:
    steps = play(make_env(), *RIGHT)
    assert [step.reward_parts["outcome"] for step in steps] == [0.125, 0.125, 0.25, 0.125, 0.125, 0.25]
    assert (steps[-1].terminated, steps[-1].is_success) == (True, True)
    assert steps[-1].info == {"cells_right": 1.0, "seals_right": 1.0}


def test_a_wrong_word_costs_its_share_and_the_form_goes_on() -> None:
    steps = play(make_env(), "red", *RIGHT[1:])
    assert said(steps)[0] == "Wrong. Row 1, B: write green."
    assert sum(step.reward_parts["outcome"] for step in steps) == pytest.approx(0.875)
    assert steps[-1].is_success is False, "three cells of four are less than min_right=0.9"
    assert play(make_env(min_right=0.75), "red", *RIGHT[1:])[-1].is_success


def test_a_success_needs_every_seal() -> None:
    steps = play(make_env(min_right=0.0), *RIGHT[:2], "blue", *RIGHT[3:])
    assert (steps[-1].is_success, steps[-1].info["seals_right"]) == (False, 0.5)


@for_each(("reply", "is_unparsable"), [("", True), ("blue or green", True), ("BLUE!", False), ("write yellow", False)])
def test_a_reply_is_read_where_it_holds_exactly_one_word_of_the_form(reply: str, is_unparsable: bool) -> None:
    (step,) = play(make_env(), reply)
    assert step.is_unparsable is is_unparsable


@for_each("level", range(len(LEVELS)))
def test_the_script_fills_in_every_level_without_a_mistake(level: int) -> None:
    world = Workflow(level=level)
    (dialogue,) = world.demonstrations(1, seed=level)
    replies = [message.content for message in dialogue if message.role == "assistant"]
    rows, columns, _ = LEVELS[level]
    assert len(replies) == world.max_turns == rows * columns
    (task,) = world.tasks("train", 1, seed=level)
    last = play(world.make_env(task, seed=0), *replies)[-1]
    assert (last.is_success, last.info) == (True, {"cells_right": 1.0, "seals_right": 1.0})


def test_a_fork_goes_its_own_way() -> None:
    env = make_env()
    play(env, "blue")
    twin = env.fork()
    play(twin, "green", "red")
    assert (env.potential(), twin.potential()) == (1 / 6, 3 / 6)
    assert said(play(env, "green")) == ["Row 2, A: write the seal."]


def test_a_summary_says_the_latest_seal() -> None:
    env = make_env()
    dialogue = [*run_to_end(env.start())]
    for reply in RIGHT[:4]:
        dialogue += [assistant(reply), *play(env, reply)[0].messages]
    assert Workflow().summary(dialogue, 12) == "The seal is black."


@for_each("options", [{"level": 11}, {"columns": 9}, {"rows": -1}, {"min_right": 1.5}, {"demonstration_skill": 2.0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Workflow(**options)


def test_a_section_has_two_cells_or_more() -> None:
    with pytest.raises(ConfigError, match="3 cells for 2 sections"):
        Workflow(rows=1, columns=3, sections=2)
