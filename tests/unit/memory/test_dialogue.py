from __future__ import annotations

from typing import Any

import pytest

from turnwise.envs.base import assistant, system, user
from turnwise.errors import ConfigError
from turnwise.memory.config import MemoryConfig
from turnwise.memory.dialogue import request, visible
from turnwise.memory.world import with_summaries
from turnwise.trajectory import Message

START = [system("Play."), user("o0")]


def turns(first: int, last: int) -> list[Message]:
    return [m for n in range(first, last + 1) for m in (assistant(f"r{n}"), user(f"o{n}"))]


def texts(messages: tuple[Message, ...]) -> list[str]:
    return [message.content for message in messages]


def test_without_memory_everything_is_visible() -> None:
    dialogue = [*START, *turns(1, 9)]
    assert visible(dialogue, MemoryConfig(notes=True)) == tuple(dialogue)


def test_a_window_slides_and_shows_what_its_first_reply_answered() -> None:
    memory = MemoryConfig(window=2)
    assert visible([*START, *turns(1, 2)], memory) == (*START, *turns(1, 2))
    assert texts(visible([*START, *turns(1, 3)], memory)) == ["Play.", "o0\no1", "r2", "o2", "r3", "o3"]


def test_a_summary_replaces_all_turns_before_it_and_older_summaries() -> None:
    memory, ask = MemoryConfig(window=2, summary_tokens=5), request(5)
    asked = [*START, *turns(1, 2), ask]
    assert visible(asked, memory) == tuple(asked)
    once = [*asked, assistant("first"), user("o2")]
    assert texts(visible(once, memory)) == ["Play.", "o0\nMemory: first\no2"]
    twice = [*once, *turns(3, 4), ask, assistant("second"), user("o4"), *turns(5, 5)]
    assert texts(visible(twice, memory)) == ["Play.", "o0\nMemory: second\no4", "r5", "o5"]


def test_turns_can_stay_in_full_after_a_summary() -> None:
    memory, ask = MemoryConfig(window=3, summary_tokens=5, keep=2), request(5)
    once = [*START, *turns(1, 3), ask, assistant("sum"), user("o3")]
    assert texts(visible(once, memory)) == ["Play.", "o0\nMemory: sum\no1", "r2", "o2", "r3", "o3"]
    twice = [*once, *turns(4, 4), ask, assistant("sum2"), user("o4")]
    assert texts(visible(twice, memory)) == ["Play.", "o0\nMemory: sum2\no2", "r3", "o3", "r4", "o4"]


def test_a_tool_answer_is_not_joined_to_text_if_it_holds_more_than_text() -> None:
    memory = MemoryConfig(window=1)
    plain = [*START, assistant("r1"), Message(role="tool", content="t1", name="look"), *turns(2, 2)]
    assert texts(visible(plain, memory)) == ["Play.", "o0\nt1", "r2", "o2"]


def test_a_scripted_dialogue_gets_a_summary_where_the_policy_would_be_asked() -> None:
    memory = MemoryConfig(window=2, summary_tokens=5)
    found = with_summaries([*START, *turns(1, 4)[:-1]], memory, lambda said, most: f"{len(said)} {most}")
    ask = request(5)
    assert found == [*START, *turns(1, 2), ask, assistant("6 5"), user("o2"), *turns(3, 4)[:-1]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"summary_tokens": 8}, "summary_tokens=8 is not read without a window"),
        ({"window": 4, "keep": 1}, "keep=1 is not read without summaries"),
        ({"window": 2, "summary_tokens": 8, "keep": 2}, "nothing would leave a full window"),
    ],
)
def test_options_that_nobody_would_read_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MemoryConfig(**options)
