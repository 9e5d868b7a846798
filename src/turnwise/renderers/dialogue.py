"""Turns a written dialogue into the turns that a model would have had to play, for warm-ups and scripted samplers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.errors import DataError
from turnwise.renderers.base import Renderer
from turnwise.trajectory import Message


@dataclass(frozen=True, slots=True)
class DialogueTurn:
    """One reply of a written dialogue, in ids."""

    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    """The reply's ids, with the end of turn."""


def dialogue_to_turns(renderer: Renderer, messages: Sequence[Message]) -> list[DialogueTurn]:
    """Return each assistant message with its prompt, exactly as a rollout would have built it.

    Messages after the last reply are left out, because a model learns nothing from them.
    """
    turns: list[DialogueTurn] = []
    said: list[Message] = []  # messages since the last reply
    history: list[Message] = []
    for message in messages:
        if message.role != "assistant":
            said.append(message)
            continue
        if not said:
            raise DataError("two assistant messages in a row, or one at the very start; a reply answers something")
        if turns:
            before = history[:-1]
            ids = renderer.extend(turns[-1].prompt_ids, turns[-1].reply_ids, said, history=before).ids
        else:
            ids = renderer.start(said)
        turns.append(DialogueTurn(tuple(ids), tuple(renderer.encode_reply(message))))
        history += [*said, message]
        said = []
    if not turns:
        raise DataError("a dialogue without an assistant message; there is nothing to learn from it")
    return turns
