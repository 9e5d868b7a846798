from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.envs.base import EnvStep, Task, assistant, system, user
from turnwise.envs.library.calculator import Calculator, CalculatorEnv, evaluate
from turnwise.envs.tools import ToolError, format_tool_call
from turnwise.errors import ConfigError
from turnwise.trajectory import Message


def make_env(world: Calculator | None = None) -> CalculatorEnv:
    return (world or Calculator()).make_env(Task(id="t", data={"expression": "12 * 34"}), seed=0)


async def play(env: CalculatorEnv, *replies: str) -> list[EnvStep]:
    await env.start()
    return [await env.step(assistant(reply)) for reply in replies]


def tool_message(content: str) -> Message:
    return Message(role="tool", name="calc", content=content)


async def test_the_dialogue_of_the_docstring() -> None:
    env = make_env()
    assert await env.start() == [
        system("Use the calculator. Write calc(2*3) and wait. Then write Answer: 6"),
        user("What is 12 * 34?"),
    ]
    call = await env.step(assistant("calc(12*34)"))
    assert call.messages == [tool_message("408")]
    assert call.reward == {"format": 0.1}
    answer = await env.step(assistant("Answer: 408"))
    assert (answer.reward, answer.terminated, answer.is_success) == ({"outcome": 1.0}, True, True)


async def test_the_tool_call_protocol() -> None:
    env = make_env(Calculator(protocol="tool_call"))
    start = await env.start()
    assert "- calc(expression: string): Work out an expression" in start[0].content
    call = await env.step(assistant(format_tool_call("calc", expression="12*34")))
    assert call.messages == [tool_message("408")]
    assert (await env.step(assistant("Answer: 408"))).is_success


async def test_a_wrong_answer_costs_half_a_point() -> None:
    (step,) = await play(make_env(), "Answer: 400")
    assert step.labels == {"answer": "400"}, "so that samples can vote"
    assert (step.reward, step.terminated, step.is_success) == ({"outcome": -0.5}, True, False)


async def test_a_right_answer_without_the_tool_is_worth_nothing() -> None:
    (step,) = await play(make_env(), "Answer: 408")
    assert (step.reward, step.terminated, step.is_success) == ({"outcome": 0.0}, True, False)


async def test_a_call_that_failed_does_not_count_as_using_the_tool() -> None:
    steps = await play(make_env(), "calc(12/34)", "Answer: 408")
    assert steps[0].messages == [tool_message("error: only whole numbers, + - * and brackets")]
    assert [step.reward for step in steps] == [{"format": 0.0}, {"outcome": 0.0}]


async def test_the_format_reward_is_paid_once() -> None:
    steps = await play(make_env(), "calc(1+1)", "calc(12*34)")
    assert [step.reward for step in steps] == [{"format": 0.1}, {"format": 0.0}]


async def test_three_turns_without_an_answer_end_it() -> None:
    steps = await play(make_env(), "hm", "calc(12*34)", "hm")
    assert [step.is_over for step in steps] == [False, False, True]
    assert [step.is_unparsable for step in steps] == [True, False, True]
    assert steps[-1].is_success is False


async def test_a_result_cannot_be_made_up_in_the_same_breath() -> None:
    (step,) = await play(make_env(), "calc(12*34) = 408\nAnswer: 408")
    assert step.messages == [tool_message("408")]
    assert not step.is_over


@pytest.mark.parametrize("text", ["Answer: 407 Answer: 408", "Answer:", "408", "Answer: many", "Answer: 4" + "0" * 30])
async def test_replies_with_no_call_and_no_single_answer_are_unparsable(text: str) -> None:
    (step,) = await play(make_env(), text)
    assert step.is_unparsable
    assert not step.is_over


@pytest.mark.parametrize("text", ["answer:  408", "So the ANSWER: 408.", "Answer: 408\nAnswer: 408"])
async def test_answers_are_read_in_any_case(text: str) -> None:
    steps = await play(make_env(), "calc(12*34)", text)
    assert steps[-1].is_success


async def test_a_broken_tool_call_is_told_what_is_wrong() -> None:
    (step,) = await play(make_env(Calculator(protocol="tool_call")), "<tool_call>{calc}</tool_call>")
    assert step.is_unparsable
    assert "the tool call is not JSON" in step.messages[0].content


async def test_state_is_the_result_and_the_turn() -> None:
    env = make_env()
    assert env.state_key() == "result None turn 0"
    await play(env, "calc(12*34)")
    assert env.state_key() == "result 408 turn 1"


@pytest.mark.parametrize(
    ("expression", "value"), [("12*34", 408), ("1+2*3", 7), ("(1+2)*3", 9), ("-5-6", -11), (" 2 - -3 ", 5), ("0", 0)]
)
def test_expressions_are_worked_out(expression: str, value: int) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1/2",
        "2**9",
        "2//1",
        "1+",
        "()",
        "(1",
        "a",
        "__import__('os')",
        "1;2",
        "007",
        "1.5",
        "1,2",
        "12(3)",
        "9" * 65,
        "(" * 32 + ")" * 32,
        "1\n",
        "+1",
        "٣+1",
        "1or 2",
    ],
)
def test_everything_else_is_refused(expression: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ToolError):
            evaluate(expression)


@given(st.integers(0, 999), st.sampled_from("+-*"), st.integers(0, 999))
def test_it_agrees_with_python(left: int, sign: str, right: int) -> None:
    expected = {"+": left + right, "-": left - right, "*": left * right}[sign]
    assert evaluate(f"{left}{sign}{right}") == expected


def test_operands_have_up_to_three_digits_and_all_signs_occur() -> None:
    tasks = [*Calculator().tasks("train", 500, 0), *Calculator().tasks("test", 500, 0)]
    parts = [task.data["expression"].split() for task in tasks]
    assert {sign for _, sign, _ in parts} == set("+-*")
    assert {len(number) for left, _, right in parts for number in (left, right)} == {1, 2, 3}
    assert len({task.id for task in tasks}) == 1000


@pytest.mark.parametrize("protocol", ["line", "tool_call"])
def test_demonstrations_call_and_then_answer(protocol: Any) -> None:
    for dialogue in Calculator(protocol=protocol).demonstrations(20, 0):
        assert [message.role for message in dialogue] == ["system", "user", "assistant", "tool", "assistant"]
        assert dialogue[-1].content == f"Answer: {dialogue[-2].content}"


@pytest.mark.parametrize("options", [{"max_digits": 0}, {"operators": "+/"}, {"operators": ""}, {"max_turns": 1}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Calculator(**options)


async def test_a_demonstration_without_skill_calls_with_any_problem_and_says_what_it_is_told() -> None:
    for skill, least, most in ((0.0, 0.0, 0.1), (0.5, 0.35, 0.65), (1.0, 1.0, 1.0)):
        world = Calculator(max_digits=2, demonstration_skill=skill)
        dialogues, tasks = world.demonstrations(100, 0), world.tasks("train", 100, 0)
        is_right = [
            f"calc({task.data['expression'].replace(' ', '')})" in [message.content for message in dialogue]
            for task, dialogue in zip(tasks, dialogues, strict=True)
        ]
        assert least <= sum(is_right) / 100 <= most
        assert all(dialogue[-1].content == f"Answer: {dialogue[-2].content}" for dialogue in dialogues)
    with pytest.raises(ConfigError, match="demonstration_skill=2; expected 0 to 1"):
        Calculator(demonstration_skill=2)


async def test_a_wrong_answer_costs_what_the_world_says() -> None:
    for penalty in (0.0, 0.5, 2.0):
        world = Calculator(wrong_penalty=penalty)
        (task,) = world.tasks("train", 1, 0)
        step = await world.make_env(task, 0).step(assistant("Answer: 123456789"))
        assert step.reward_parts["outcome"] == -penalty
        assert (step.terminated, step.is_success) == (True, False)
