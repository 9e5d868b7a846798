"""Any renderer, for dialogues that may start over: a world says so by a mark on the first message of the new beginning.

The next prompt is then those messages alone, rendered anew (`is_append_only=False`), and training starts another datum
there. An agent that rewrites its history, or that holds several conversations, plays in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnwise.renderers.base import Extension, Renderer
from turnwise.trajectory import RESTART, Message


class RestartRenderer:
    """Renders what was said since the last new beginning. It has no state: `history` says everything."""

    def __init__(self, inner: Renderer) -> None:
        self._inner = inner

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._inner.stop_ids

    def start(self, messages: Sequence[Message]) -> list[int]:
        return self._inner.start(_since_restart(messages))

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        observation: Sequence[Message],
        *,
        history: Sequence[Message] = (),
    ) -> Extension:
        if any(message.name == RESTART for message in observation):
            return Extension(self._inner.start(_since_restart(observation)), is_append_only=False)
        return self._inner.extend(prompt_ids, sampled_ids, observation, history=_since_restart(history))

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        return self._inner.parse(sampled_ids)

    def encode_reply(self, reply: Message) -> list[int]:
        return self._inner.encode_reply(reply)


def _since_restart(messages: Sequence[Message]) -> list[Message]:
    """The messages from the last mark on, without the mark, which is ours and no chat format's."""
    last = max((index for index, message in enumerate(messages) if message.name == RESTART), default=0)
    kept = list(messages[last:])
    if kept and kept[0].name == RESTART:
        kept[0] = replace(kept[0], name=None)
    return kept
