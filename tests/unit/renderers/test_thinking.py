"""A format that forgets thinking: prompts are rendered anew, and the trajectory splits."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.errors import ConfigError, DataError
from turnwise.renderers import get_renderer
from turnwise.trajectory import Message


def user(content: str) -> Message:
    return Message(role="user", content=content)


def assistant(content: str) -> Message:
    return Message(role="assistant", content=content)


START = [user("Guess.")]
THOUGHT = "<think>\nhalf of 16\n</think>\n\n8"


def test_a_reply_with_thinking_is_rendered_anew_without_it(tiny_tokenizer: Any) -> None:
    renderer = get_renderer(tiny_tokenizer, strip_thinking=True)
    prompt = renderer.start(START)
    extension = renderer.extend(prompt, renderer.encode_reply(assistant(THOUGHT)), [user("Higher.")], history=START)
    assert not extension.is_append_only
    assert extension.ids == get_renderer(tiny_tokenizer).start([*START, assistant("8"), user("Higher.")])


def test_a_reply_without_thinking_is_appended_to(tiny_tokenizer: Any) -> None:
    renderer = get_renderer(tiny_tokenizer, strip_thinking=True)
    prompt, sampled = renderer.start(START), renderer.encode_reply(assistant("8"))
    extension = renderer.extend(prompt, sampled, [user("Higher.")])
    assert extension.is_append_only
    assert extension.ids[: len(prompt) + len(sampled)] == prompt + sampled


def test_rendering_anew_needs_the_history(tiny_tokenizer: Any) -> None:
    renderer = get_renderer(tiny_tokenizer, strip_thinking=True)
    with pytest.raises(DataError, match="history"):
        renderer.extend(renderer.start(START), renderer.encode_reply(assistant(THOUGHT)), [user("Higher.")])


def test_options_that_nobody_would_read_are_refused(tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="strip_thinking"):
        get_renderer(tiny_tokenizer, strip_thinking=True, multi_turn=False)
    with pytest.raises(ConfigError, match="strip_thinking"):
        get_renderer(tiny_tokenizer, strip_thinking=True, name="template")
    with pytest.raises(ConfigError, match="did you mean 'chatml'"):
        get_renderer(tiny_tokenizer, name="chat_ml")
