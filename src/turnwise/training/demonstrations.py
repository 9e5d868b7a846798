"""The world's scripted dialogues as datums: what a warm-up and supervised training learn from.

A dialogue that is longer than the model's context cannot be learned. Such dialogues are left out and counted; if they
are more than half of all, the run stops before it spends anything, because the rest would show the short tasks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.credit.datums import dialogue_to_datums
from turnwise.doctor import Finding, Fix
from turnwise.envs.base import World
from turnwise.errors import ConfigError
from turnwise.renderers.base import Renderer
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.types import Datum

MIN_FITTING_SHARE = 0.5
_NUM_ASKED = 16
SHORTER = "let a prompt show the last turns only (docs/memory.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """The dialogues that fit; one dialogue may be several datums."""

    dialogues: Sequence[list[Datum]]
    left_out: Finding | None = None
    """A finding that says how many did not fit; None if all fit."""


def has_scripts(world: World) -> bool:
    """Whether the world has scripted dialogues. It may leave out a task that no script of it solves, so several tasks
    are asked for."""
    return any(world.demonstrations(count, 0) for count in (1, _NUM_ASKED))


def read_demonstrations(
    world: World, renderer: Renderer, count: int, seed: int, *, context_length: int
) -> Demonstrations:
    """Play `count` of the world's dialogues and render them.

    Raises:
        ConfigError: More than half of them are longer than the model's context.
    """
    dialogues: list[list[Datum]] = []
    for messages in world.demonstrations(count, seed):
        turns = [(turn.prompt_ids, turn.reply_ids) for turn in dialogue_to_turns(renderer, messages)]
        dialogues.append(dialogue_to_datums(turns))
    lengths = [max((datum.model_input.length for datum in datums), default=0) for datums in dialogues]
    fitting = [datums for datums, length in zip(dialogues, lengths, strict=True) if length <= context_length]
    if len(fitting) == len(dialogues):
        return Demonstrations(dialogues=dialogues)
    seen = (
        f"{len(dialogues) - len(fitting)} of {len(dialogues)} demonstrations of {world.name} are longer than the "
        f"model's context of {context_length} tokens; the longest has {max(lengths)}"
    )
    if len(fitting) < MIN_FITTING_SHARE * len(dialogues):
        raise ConfigError(
            f"{seen}. At least half must fit to be learned from: take a model with a longer context, shorter tasks "
            f"(env.options), or memory.window=8, to {SHORTER}; warmup.steps=0 trains without a warm-up"
        )
    left_out = Finding(
        name="demonstrations_left_out",
        seen=seen,
        why="the warm-up leaves them out, so it shows the shorter tasks alone",
        fixes=(Fix(option="memory.window=8", text=SHORTER), Fix(text="take a model with a longer context")),
        numbers={"left_out": len(dialogues) - len(fitting), "longest": max(lengths)},
    )
    return Demonstrations(dialogues=fitting, left_out=left_out)
