"""What the leading process tells the other learners, and what they answer; both travel pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.engine.config import EngineConfig
from turnwise.engine.training.objective import LossSettings, PassDatum
from turnwise.losses.outside import LossFunction
from turnwise.types import AdamParams, LoraConfig

FloatColumn = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSetup:
    """What a learner process starts with."""

    model_dir: Path
    engine: EngineConfig
    name: str
    rank: int
    size: int
    store_host: str
    store_port: int
    backend: Literal["nccl", "gloo"]
    deadline_s: float
    is_sharded: bool = False
    """Whether each learner holds a part of the weights."""
    samples: bool = False
    """Whether this learner samples too."""


@dataclass(frozen=True, slots=True)
class MeetCall:
    """Join the other learners. All of them have loaded their models."""


@dataclass(frozen=True, slots=True)
class CreateCall:
    """Make a trainable under this number; its values come from rank 0."""

    number: int
    kind: Literal["adapter", "critic", "full"]
    lora: LoraConfig | None = None


@dataclass(frozen=True, slots=True)
class TakeStateCall:
    """Take over weights and optimizer state from rank 0."""

    number: int


@dataclass(frozen=True, slots=True)
class DropCall:
    number: int


@dataclass(frozen=True, slots=True)
class RunCall:
    """Run a share of a batch, with or without a gradient."""

    number: int
    datums: Sequence[PassDatum]
    """Rank 0 has checked them."""
    loss_fn: str | LossFunction
    settings: LossSettings
    is_learning: bool


@dataclass(frozen=True, slots=True)
class StepCall:
    """Sum the gradients of all ranks, and take an optimizer step."""

    number: int
    params: AdamParams


@dataclass(frozen=True, slots=True)
class ServeCall:
    """Take part in the exchange of weights while rank 0 works alone."""


@dataclass(frozen=True, slots=True)
class KeepVersionCall:
    """Keep a copy of the weights in training under a number."""

    number: int
    source: int


@dataclass(frozen=True, slots=True)
class DropVersionsCall:
    """Forget copies that `KeepVersionCall` made."""

    sources: Sequence[int]


@dataclass(frozen=True, slots=True)
class ShardFilesCall:
    """Write or read this learner's parts of a sharded checkpoint, together with the others."""

    number: int
    directory: Path
    round: int
    """Counts such calls: the learners meet anew each time."""
    is_saved: bool
    with_optimizer: bool


@dataclass(frozen=True, slots=True)
class RunReply:
    """The numbers of a share, [T] of its datums laid end to end."""

    outputs: FloatColumn
    is_known: NDArray[np.bool_]
    entropies: FloatColumn | None
    references: FloatColumn | None
    """Logprobs of the reference, where the loss needed them."""


LearnerCall = (
    MeetCall
    | CreateCall
    | TakeStateCall
    | DropCall
    | RunCall
    | StepCall
    | ServeCall
    | KeepVersionCall
    | DropVersionsCall
    | ShardFilesCall
)
