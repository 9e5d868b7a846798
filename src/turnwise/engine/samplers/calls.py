"""What a run asks of a sampler in another process; calls and answers travel pickled, each with a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from turnwise.engine.config import EngineConfig
from turnwise.types import SampleRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSetup:
    """What a sampler process starts with."""

    model_dir: Path
    engine: EngineConfig
    name: str


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """Sample from the weights of this name; None: from the base model."""

    request: SampleRequest
    weights: str | None


@dataclass(frozen=True, slots=True)
class LoadCall:
    """Keep published weights under a name."""

    name: str
    directory: Path
    files: Mapping[str, bytes] | None = None
    """The files of the directory, for a sampler that may not see it."""


@dataclass(frozen=True, slots=True)
class UnloadCall:
    """Forget weights; requests under way keep theirs."""

    name: str


@dataclass(frozen=True, slots=True)
class FactsCall:
    """Say which model this is; the thread that samples answers."""


@dataclass(frozen=True, slots=True)
class CancelCall:
    """End the call with this number; its answer is not needed any more."""

    number: int


SamplerCall = GenerateCall | LoadCall | UnloadCall | FactsCall


@dataclass(frozen=True, slots=True)
class SamplerFacts:
    """The answer to `FactsCall`."""

    vocabulary: int
    context_length: int
