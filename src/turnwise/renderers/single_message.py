r"""All turns of an attempt in one assistant message (`use_conversation_multi_turn: false`).

    <|im_start|>user\nFind the year.<|im_end|>\n<|im_start|>assistant\n
    <search>who</search><|im_end|>                                       sampled
    \nIt was Ann in 1900.\n                                              observation, raw text
    The year is 1900.<|im_end|>                                          sampled

Only the first prompt is written in the chat format. What the env says later is encoded as plain text, each message on
lines of its own, whatever its role, and put straight after the sampled ids; no header opens a new message.

If the model sampled an end-of-turn id, the id stays in the prompt: it was sampled and trained, and without it the
prompt would not extend the last one. If the model did not sample it (it stopped at a stop string, or was cut), it is
not added, so nothing closes the message. This is append-only and exact for every reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turnwise.errors import DataError
from turnwise.renderers.base import Extension, Renderer
from turnwise.trajectory import Message


class TextRenderer(Renderer, Protocol):
    """A renderer that can also encode bare text."""

    def encode_text(self, text: str) -> list[int]: ...


class SingleMessage:
    """Starts like another renderer, then continues inside the reply that it opened."""

    def __init__(self, inner: TextRenderer) -> None:
        self._inner = inner

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._inner.stop_ids

    def start(self, messages: Sequence[Message]) -> list[int]:
        return self._inner.start(messages)

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        observation: Sequence[Message],
        *,
        history: Sequence[Message] = (),  # noqa: ARG002 - nothing is rendered again
    ) -> Extension:
        if not observation:
            raise DataError("nothing was said after the reply; the next reply needs something to go on")
        text = "\n" + "\n".join(message.content for message in observation) + "\n"
        return Extension([*prompt_ids, *sampled_ids, *self._inner.encode_text(text)], is_append_only=True)

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        return self._inner.parse(sampled_ids)

    def encode_reply(self, reply: Message) -> list[int]:
        return self._inner.encode_reply(reply)
