"""Any renderer, for dialogues of which a prompt shows a part (`memory.dialogue.visible`).

A prompt that still holds everything before it is extended as the inner renderer does it, so the turns share a datum. A
prompt that does not is rendered anew (`is_append_only=False`), and `credit.datums` starts another datum there: what is
trained is always what was sampled, after exactly the ids that the sampler was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnwise.errors import DataError
from turnwise.memory.config import MemoryConfig
from turnwise.memory.dialogue import is_request, visible
from turnwise.renderers.base import Extension, Renderer
from turnwise.trajectory import Message


class MemoryRenderer:
    """Renders what the memory leaves of a dialogue. It has no state: `history` says everything."""

    def __init__(self, inner: Renderer, memory: MemoryConfig) -> None:
        self._inner = inner
        self._memory = memory

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._inner.stop_ids

    def start(self, messages: Sequence[Message]) -> list[int]:
        return self._inner.start(_shown(visible(messages, self._memory)))

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        observation: Sequence[Message],
        *,
        history: Sequence[Message] = (),
    ) -> Extension:
        if not history:
            raise DataError("memory needs the whole dialogue to choose what a prompt shows; pass it as history")
        before = visible(history, self._memory)
        reply = self._inner.parse(sampled_ids)
        after = visible([*history, reply, *observation], self._memory)
        if after == (*before, reply, *observation):
            return self._inner.extend(prompt_ids, sampled_ids, _shown(observation), history=_shown(before))
        return Extension(self._inner.start(_shown(after)), is_append_only=False)

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        return self._inner.parse(sampled_ids)

    def encode_reply(self, reply: Message) -> list[int]:
        return self._inner.encode_reply(reply)


def _shown(messages: Sequence[Message]) -> list[Message]:
    """The messages without our own mark on requests for a summary, which no chat format knows."""
    return [replace(message, name=None) if is_request(message) else message for message in messages]
