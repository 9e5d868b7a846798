"""The seam between conversations and token ids.

    prompt_ids = renderer.start(messages)
    reply = renderer.parse(sampled_ids)
    prompt_ids = renderer.extend(prompt_ids, sampled_ids, observation, history=messages).ids

The next prompt is the last prompt, then the sampled ids as they are, then what the format puts between them and the
next reply: no sampled id is ever decoded and encoded again. A format that cannot do that (its template rewrites what
was said before) renders the prompt anew and says so with `is_append_only=False`; the trajectory then splits into
several datums.
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
    """True: `ids` starts with the last prompt and the sampled ids."""


class Renderer(Protocol):
    """One chat format of one tokenizer."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a reply; the first is the format's own end of turn."""
        ...

    def start(self, messages: Sequence[Message]) -> list[int]:
        """The first prompt: these messages and the opening of the model's reply."""
        ...

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        observation: Sequence[Message],
        *,
        history: Sequence[Message] = (),
    ) -> Extension:
        """The prompt after a reply was sampled and the env answered.

        Every renderer repeats this signature: a type checker compares it with the protocol.

        Args:
            history: every message that `prompt_ids` stands for, oldest first. Only formats that may have to render
                the prompt anew read it.
        """
        ...

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        """The reply as a message; a stop id at its end is left out, anything else in it becomes text."""
        ...

    def encode_reply(self, reply: Message) -> list[int]:
        """The ids, end of turn included, that the model would have to sample to say this."""
        ...
