from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.envs.tools import Toolbox, ToolError, format_tool_call, parse_tool_calls, tool
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.trajectory import Message, ToolCall


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


class Shop:
    def __init__(self) -> None:
        self.prices = {"tea": 3}

    @tool
    def price(self, item: str, currency: Literal["EUR", "USD"] = "EUR") -> str:
        """Say what an item costs.

        Args:
            item: Its name.
        """
        if not item:
            raise ToolError("which item?")
        return f"{self.prices[item]} {currency}"

    @tool(name="stock", timeout_s=10)
    async def count_stock(self) -> dict[str, int]:
        """Count everything."""
        return self.prices


def call(box: Toolbox, name: str, **arguments: Any) -> Message:
    return asyncio.run(box.call(ToolCall(name=name, arguments=arguments)))


def test_a_marked_function_is_still_a_function() -> None:
    assert add(2, 3) == 5


def test_functions_and_methods_answer_as_tool_messages() -> None:
    box = Toolbox(add, Shop())
    assert box.names == ("add", "stock", "price")
    assert call(box, "add", a=2) == Message(role="tool", name="add", content="3")
    assert call(box, "price", item="tea").content == "3 EUR"
    assert call(box, "stock").content == '{"tea": 3}'


def test_schemas_have_the_usual_form() -> None:
    (schema,) = Toolbox(add).schemas()
    assert schema["type"] == "function"
    assert schema["function"]["name"] == "add"
    assert schema["function"]["description"] == "Add two numbers."
    assert schema["function"]["parameters"]["required"] == ["a"]


def test_description_for_a_system_prompt() -> None:
    assert Toolbox(Shop()).describe().splitlines() == [
        "Tools:",
        "- stock(): Count everything.",
        "- price(item: string, currency: EUR|USD = 'EUR'): Say what an item costs.",
        "Call a tool like this:",
        '<tool_call>{"name": "NAME", "arguments": {"KEY": VALUE}}</tool_call>',
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("ad", {"a": 1}, "error: no tool 'ad'; did you mean 'add'?; the tools are add, stock, price"),
        ("add", {}, "error: add: argument 'a' is missing; expected a whole number"),
        ("add", {"a": "one"}, "error: add: a='one' does not fit; expected a whole number"),
        ("add", {"a": 1, "c": 2}, "error: add: unknown argument 'c'; expected a, b"),
        (
            "price",
            {"item": "tea", "currency": "GBP"},
            'error: price: currency=\'GBP\' does not fit; expected one of "EUR", "USD"',
        ),
        ("price", {"item": ""}, "error: which item?"),
        ("price", {"item": "cake"}, "error: KeyError: 'cake'"),
    ],
)
def test_what_the_policy_did_wrong_is_told_to_the_policy(name: str, arguments: dict[str, Any], error: str) -> None:
    message = call(Toolbox(add, Shop()), name, **arguments)
    assert (message.role, message.name, message.content) == ("tool", name, error)


def failing(error: BaseException) -> Toolbox:
    @tool
    def fetch() -> str:
        """Fetch."""
        raise error

    return Toolbox(fetch)


@pytest.mark.parametrize("error", [ValueError("bad date"), ZeroDivisionError("x / 0"), FileNotFoundError("a.txt")])
def test_errors_about_input_are_the_policys(error: Exception) -> None:
    assert call(failing(error), "fetch").content == f"error: {type(error).__name__}: {error}"


@pytest.mark.parametrize("error", [ConnectionError("refused"), MemoryError(), TypeError("bug"), TimeoutError("slow")])
def test_a_tool_that_breaks_fails_the_attempt_and_is_blamed(error: Exception) -> None:
    with pytest.raises(AttemptFailed) as failed:
        call(failing(error), "fetch")
    assert failed.value.party is Party.TOOL
    assert failed.value.detail.startswith(f"fetch: {error!r} at tests/unit/envs/test_tools.py:")


def test_blame_given_further_in_stays() -> None:
    with pytest.raises(AttemptFailed) as failed:
        call(failing(AttemptFailed(Party.SAMPLER, "judge is gone")), "fetch")
    assert failed.value.party is Party.SAMPLER


@pytest.mark.parametrize("is_async", [True, False])
def test_a_tool_that_takes_too_long_is_blamed(is_async: bool) -> None:
    @tool(name="slow", timeout_s=0.05)
    async def slow_async() -> str:
        """Sleep."""
        await asyncio.sleep(30)
        return "done"

    release = threading.Event()

    @tool(name="slow", timeout_s=0.05)
    def slow_plain() -> str:
        """Wait."""
        release.wait(60)
        return "done"

    with pytest.raises(AttemptFailed, match=r"tool: slow: no answer within 0\.05 s"):
        call(Toolbox(slow_async if is_async else slow_plain), "slow")
    release.set()


@pytest.mark.parametrize("result", [{1, 2}, object(), float("nan")])
def test_a_result_that_is_neither_text_nor_json_is_the_tools_fault(result: Any) -> None:
    @tool
    def strange() -> Any:
        """Give something strange."""
        return result

    with pytest.raises(AttemptFailed, match="neither text nor JSON"):
        call(Toolbox(strange), "strange")


async def test_calls_run_in_order() -> None:
    seen: list[int] = []

    @tool
    def note(n: int) -> str:
        """Note a number."""
        seen.append(n)
        return "ok"

    await Toolbox(note).call_all([ToolCall(name="note", arguments={"n": n}) for n in (2, 1, 3)])
    assert seen == [2, 1, 3]


def test_unmarked_and_doubled_tools_are_refused() -> None:
    with pytest.raises(ConfigError, match="no @tool found"):
        Toolbox(len)
    with pytest.raises(ConfigError, match="two tools named 'add'"):
        Toolbox(add, add)


def test_a_tool_whose_types_json_does_not_have_is_refused_when_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"@tool on .*pack: .* has no JSON schema"):

        @tool
        def pack(data: bytes) -> int:
            return len(data)


def test_a_call_is_read_and_the_rest_is_content() -> None:
    text = f"Let me see. {format_tool_call('add', a=1, b=2)} Wait."
    content, calls, problem = parse_tool_calls(text)
    assert content == "Let me see.  Wait."
    assert calls == (ToolCall(name="add", arguments={"a": 1, "b": 2}),)
    assert problem is None


def test_several_calls_are_read_in_order() -> None:
    parsed = parse_tool_calls(format_tool_call("add", a=1) + "\n" + format_tool_call("price", item="tea"))
    assert [one.name for one in parsed.calls] == ["add", "price"]


def test_text_without_a_call_is_content() -> None:
    assert parse_tool_calls("Just words. </tool_call>") == ("Just words. </tool_call>", (), None)


def test_arguments_may_be_missing_or_written_as_text() -> None:
    assert parse_tool_calls('<tool_call>{"name": "now"}</tool_call>').calls[0].arguments == {}
    text = json.dumps({"name": "add", "arguments": json.dumps({"a": 1})})
    assert parse_tool_calls(f"<tool_call>\n{text}\n</tool_call>").calls[0].arguments == {"a": 1}


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("{bad", "the tool call is not JSON"),
        ("[1]", "the tool call is not a JSON object"),
        ('{"arguments": {}}', 'the tool call has no "name"'),
        ('{"name": 3}', 'the tool call has no "name"'),
        ('{"name": "add", "arguments": [1]}', '"arguments" of add is not an object'),
        ('{"name": "add", "arguments": "x"}', '"arguments" of add is not an object'),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not a JSON number"),
        ("[" * 100_000, "not JSON"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_problem_and_no_call(block: str, problem: str) -> None:
    good = format_tool_call("add", a=1)
    parsed = parse_tool_calls(f"{good}<tool_call>{block}</tool_call>")
    assert parsed.calls == ()
    assert parsed.problem is not None
    assert problem in parsed.problem


def test_an_open_tag_is_a_problem() -> None:
    parsed = parse_tool_calls('Hm <tool_call>{"name": "add"}')
    assert parsed == ('Hm <tool_call>{"name": "add"}', (), "a <tool_call> without its </tool_call>")


def test_thousands_of_open_tags_are_read_quickly() -> None:
    began = time.monotonic()
    assert parse_tool_calls("<tool_call>" * 50_000).problem is not None
    assert time.monotonic() - began < 10


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    content, calls, problem = parse_tool_calls(text)
    assert isinstance(content, str)
    assert calls == () or problem is None


@given(st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.booleans(), st.none()), max_size=4))
def test_what_is_written_is_read_back(arguments: dict[str, Any]) -> None:
    if any("tool_call>" in f"{key}{value}" for key, value in arguments.items()):
        return
    arguments.pop("name", None)
    assert parse_tool_calls(format_tool_call("f", **arguments)).calls == (ToolCall(name="f", arguments=arguments),)


def test_the_toolbox_reads_text_first_and_then_what_came_with_the_message() -> None:
    box = Toolbox(add)
    given_call = ToolCall(name="add", arguments={"a": 9})
    written = Message(role="assistant", content=format_tool_call("add", a=1), tool_calls=(given_call,))
    assert box.read(written).calls[0].arguments == {"a": 1}
    bare = Message(role="assistant", content="", tool_calls=(given_call,))
    assert box.read(bare).calls == (given_call,)
