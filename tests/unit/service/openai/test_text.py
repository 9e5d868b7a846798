"""Sampled ids to visible text: nothing shown that a later token takes back, and streamed = whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwise.service.openai.text import ReplyStream, TokenTexts, cut_at_stop

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_dir)


def decoder(tokenizer: Any) -> Any:
    return lambda ids: tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)


def characters(ids: Any) -> str:
    return "".join(chr(i) for i in ids)


def played(text: str, stops: tuple[str, ...] = (), *, has_tools: bool = False) -> tuple[list[str], Any]:
    """One character per token."""
    stream = ReplyStream(characters, stop_ids=(0,), stops=stops, has_tools=has_tools)
    shown = [stream.add(ord(character)) for character in text]
    rest, reply = stream.finish()
    return [*shown, rest], reply


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=30))
def test_the_texts_of_tokens_add_up_to_the_text(text: str, tokenizer: Any) -> None:
    ids = tokenizer(text)["input_ids"]
    decode = decoder(tokenizer)
    texts = TokenTexts(decode)
    assert "".join([*(texts.add(token) for token in ids), texts.finish()]) == decode(ids)


def test_half_a_character_waits_for_its_other_half(tokenizer: Any) -> None:
    ids = tokenizer("a😀b")["input_ids"]
    texts = TokenTexts(decoder(tokenizer))
    shown = [texts.add(token) for token in ids]
    assert len(ids) > 3, "the tokenizer spells the emoji in several tokens"
    assert "".join(shown) == "a😀b"
    assert not any("\ufffd" in one for one in shown)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abEND", max_size=20))
def test_a_stop_string_is_never_shown_not_even_its_beginning(text: str) -> None:
    shown, reply = played(text, ("END", "ba"))
    assert "".join(shown) == cut_at_stop(text, ("END", "ba")) == reply.content
    told = ""
    for one in shown:
        told += one
        assert reply.content.startswith(told)


def test_what_only_looked_like_a_stop_is_shown_in_the_end() -> None:
    shown, reply = played("so EN", ("END",))
    assert reply.content == "so EN"
    assert shown[-1] == "EN"


def test_a_tool_call_is_taken_out_of_the_text_and_read() -> None:
    shown, reply = played(f"Let me see. {CALL}", has_tools=True)
    assert "".join(shown).strip() == reply.content == "Let me see."
    (call,) = reply.calls
    assert (call.name, call.arguments) == ("add", {"a": 2})
    assert call.id.startswith("call_")


def test_a_call_that_cannot_be_read_stays_text() -> None:
    text = "<tool_call>{oops</tool_call>"
    shown, reply = played(text, has_tools=True)
    assert "".join(shown) == reply.content == text
    assert reply.calls == ()


def test_without_tools_a_call_is_text_like_any_other() -> None:
    shown, reply = played(CALL)
    assert "".join(shown) == reply.content == CALL


def test_the_end_of_turn_is_not_shown() -> None:
    _, reply = played("hi\x00")
    assert reply.content == "hi"


def test_tokens_count_as_told_with_their_text() -> None:
    stream = ReplyStream(characters, stop_ids=(0,), stops=("END",), has_tools=False)
    for character in "abEN":
        stream.add(ord(character))
    assert stream.num_told_tokens == 2
    stream.add(ord("D"))
    stream.finish()
    assert stream.num_told_tokens == 2, "the stop's own tokens are not part of the reply"
