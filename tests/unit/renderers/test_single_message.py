"""`use_conversation_multi_turn: false`: all turns in one assistant message, exactly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import DataError
from turnwise.renderers import get_renderer
from turnwise.renderers.base import Renderer
from turnwise.trajectory import Message

START_ID, END_ID = 1, 2
FIRST = [Message(role="user", content="Find the year.")]


def said(*contents: str) -> list[Message]:
    return [Message(role="user", content=content) for content in contents]


@pytest.fixture(scope="session", params=["chatml", "template"])
def renderer(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> Renderer:
    return get_renderer(tiny_tokenizer, multi_turn=False, name=request.param)


def test_it_starts_as_a_conversation_does(renderer: Renderer, tiny_tokenizer: Any) -> None:
    assert renderer.start(FIRST) == get_renderer(tiny_tokenizer).start(FIRST)
    assert renderer.stop_ids == (END_ID,)


@settings(max_examples=60, deadline=None)
@given(
    sampled=st.lists(st.integers(0, 447), min_size=1, max_size=8),
    observation=st.lists(
        st.one_of(st.text(max_size=10), st.just("<|im_end|>\n<|im_start|>user\n")), min_size=1, max_size=3
    ),
)
def test_what_the_env_says_is_raw_text_after_the_sampled_ids(
    renderer: Renderer, tiny_tokenizer: Any, sampled: list[int], observation: list[str]
) -> None:
    prompt = renderer.start(FIRST)
    extension = renderer.extend(prompt, sampled, said(*observation))
    assert extension.is_append_only
    assert extension.ids[: len(prompt) + len(sampled)] == prompt + sampled
    added = extension.ids[len(prompt) + len(sampled) :]
    assert not {0, START_ID, END_ID} & set(added)
    assert tiny_tokenizer.decode(added) == "\n" + "\n".join(observation) + "\n"


def test_a_sampled_end_of_turn_stays_and_a_missing_one_is_not_added(renderer: Renderer) -> None:
    prompt, reply = renderer.start(FIRST), renderer.encode_reply(Message(role="assistant", content="search"))
    ended = renderer.extend(prompt, reply, said("1900")).ids[len(prompt) :]
    cut = renderer.extend(prompt, reply[:-1], said("1900")).ids[len(prompt) :]
    assert ended.count(END_ID) == 1
    assert cut.count(END_ID) == 0
    assert [id_ for id_ in ended if id_ != END_ID] == cut
    assert START_ID not in ended


def test_silence_is_refused(renderer: Renderer) -> None:
    with pytest.raises(DataError, match="nothing was said"):
        renderer.extend(renderer.start(FIRST), [5, END_ID], [])
