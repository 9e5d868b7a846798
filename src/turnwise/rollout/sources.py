"""The sources of a step's data. A method names one of these sources; `training.supply` reads it.

This module is below `methods`, which chooses a source, and below the code that plays it.
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
    """The distribution from which h is drawn."""
    p: float = 0.3
    """Parameter of the geometric distribution, which is truncated at the most turns of an attempt."""
    redraw: bool = True
    """If the attempt ends before turn h, draw h again among the turns it had; otherwise skip the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDialogues:
    """Written dialogues to imitate: those of the world, or the good attempts of a stored run."""

    path: str = ""
    """A run directory. Empty means the world's own demonstrations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPairs:
    """Stored pairs of a better and a worse attempt."""

    path: str
    """A Parquet file that `turnwise pairs` wrote."""
    only_branch_turn: bool = False
    """Whether the method trains only the turn at which the two attempts of a pair part."""


Source = PlayGroups | PlayBranches | ReadDialogues | ReadPairs
