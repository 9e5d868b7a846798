"""Where the data of a step comes from. A method names one of these; `train.sources` is the one place that reads it.

They stand below both `methods`, which choose one, and `rollout`, which plays one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayGroups:
    """Several attempts at each task, each from the start (`RolloutConfig.same_start`: in the same world)."""


PLAY_GROUPS = PlayGroups()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayBranches:
    """One attempt at each task up to turn h, then several continuations of it, each to the end."""

    continuations: int
    turn: Literal["uniform", "geometric"] = "uniform"
    """How h is drawn."""
    p: float = 0.3
    """Of the geometric distribution, truncated at the most turns of an attempt."""
    redraw: bool = True
    """Where the attempt ended before turn h, draw h again among the turns it had; else the task is passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDialogues:
    """Written dialogues to imitate: those of the world, or the good attempts of a stored run."""

    path: str = ""
    """A run directory; empty: the world's own demonstrations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPairs:
    """Stored pairs of a better and a worse attempt."""

    path: str
    """A Parquet file of `turnwise pairs`."""
    only_branch_turn: bool = False
    """The method trains the turn at which a pair parts, and no other."""


Source = PlayGroups | PlayBranches | ReadDialogues | ReadPairs
