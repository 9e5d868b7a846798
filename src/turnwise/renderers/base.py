"""The interface between conversations and token ids.

    prompt_ids = renderer.start(messages)
    reply = renderer.parse(sampled_ids)
    prompt_ids = renderer.extend(prompt_ids, sampled_ids, observation, history=messages).ids

The next prompt is the last prompt, then the sampled ids unchanged, then the tokens that the format puts before the next
reply. No sampled id is ever decoded and encoded again. A format whose template rewrites earlier messages cannot do
that: it renders the whole prompt again and sets `is_append_only=False`; the trajectory then becomes several datums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from turnwise.trajectory import Message


@dataclass(frozen=True, slots=True)
class Extension:
    """The prompt of the next turn."""

    ids: list[int]
    is_append_only: bool
    """Whether `ids` starts with the last prompt and the sampled ids."""


class Renderer(Protocol):
    """One chat format of one tokenizer."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a reply. The first one is the format's own end of turn."""
        ...

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Render the first prompt: these messages and the start of the model's reply."""
        ...

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        observation: Sequence[Message],
        *,
        history: Sequence[Message] = (),
    ) -> Extension:
        """Render the next prompt, after a reply was sampled and the env answered.

        Every renderer repeats this signature: a type checker compares it with the protocol.

        Args:
            history: Every message in `prompt_ids`, oldest first. Only formats that may have to render the whole
                prompt again read it.
        """
        ...

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        """Turn a reply into a message. A stop id at its end is left out; all other ids become text."""
        ...

    def encode_reply(self, reply: Message) -> list[int]:
        """The ids that the model would have to sample to say this, with the end of turn."""
        ...
