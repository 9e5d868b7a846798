"""Merge what several runs trained on one base model: `turnwise merge RUN=0.5 RUN=0.5 --out DIR`.

Adapters are summed exactly; the result is a checkpoint in PEFT's format, which loads wherever an adapter does. Full
weights become a Hugging Face model. Both have `merge.json` beside them, which says what was merged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from turnwise.client.checkpoints import INFO_FILE, CheckpointInfo, checksums_of, verify, write_directory
from turnwise.config.config import Config
from turnwise.errors import CheckpointError, ConfigError
from turnwise.models.directories import ADAPTER_CONFIG
from turnwise.training.policy import WHOLE_FILE, find_policy
from turnwise.training.setup import Report, find_model, report_nothing
from turnwise.types import LoraConfig

MERGE_FILE = "merge.json"
MergeMethod = Literal["sum", "slerp", "ties"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """How to merge."""

    method: MergeMethod = "sum"
    density: float = 0.2
    """The share of each tensor's changes that TIES keeps."""

    def check(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(f"density is {self.density:g}; expected more than 0, and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePart:
    """One of the trained models that are merged."""

    target: str
    """The name that the user gave."""
    directory: Path
    step: int
    """The step of its run; 0 if it is no run."""
    base: Path
    """The directory of its base model."""
    is_full: bool
    config: Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What was written."""

    directory: Path
    rank: int | None
    """The rank of the adapter; None for full weights."""


def split_weight(word: str) -> tuple[str, float | None]:
    """`RUN=0.5` as (RUN, 0.5); None where no weight is named."""
    target, equals, text = word.rpartition("=")
    if not equals:
        return word, None
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ConfigError(f"{word} does not end with a weight; expected RUN=WEIGHT, such as runs/a=0.5")
    return target, weight


def find_parts(targets: Sequence[str], step: str | None = None, report: Report = report_nothing) -> list[MergePart]:
    """Find the checkpoints of all targets; parts that do not belong together are refused."""
    if len(targets) < 2:
        raise ConfigError(f"{len(targets)} to merge; expected two or more runs, checkpoints or adapters")
    parts = [_find_part(target, step, report) for target in targets]
    for part in parts[1:]:
        if part.base != parts[0].base:
            raise ConfigError(
                f"{parts[0].target} belongs to the base model {parts[0].base}, and {part.target} to {part.base}; "
                "expected parts of one base model"
            )
        if part.is_full != parts[0].is_full:
            full, adapter = (part, parts[0]) if part.is_full else (parts[0], part)
            raise ConfigError(
                f"{full.target} holds all weights, and {adapter.target} is an adapter; expected parts of one kind"
            )
    return parts


def _find_part(target: str, step: str | None, report: Report) -> MergePart:
    policy = find_policy(target, step=step, report=report)
    directory = policy.files
    if directory is None:
        raise ConfigError(
            f"{target} is a model as it is, so there is no base to compare it with; expected a run, a checkpoint or a "
            "PEFT adapter"
        )
    if not any((directory / name).is_file() for name in (ADAPTER_CONFIG, WHOLE_FILE)):
        raise CheckpointError(f"{target}: {directory} is not on this machine; expected a checkpoint with files here")
    if (directory / INFO_FILE).is_file():
        verify(directory)
    if policy.why:
        report(f"{target}: {policy.why}")
    return MergePart(
        target=target,
        directory=directory.resolve(),
        step=policy.step,
        base=find_model(policy.config, report).resolve(),
        is_full=not (directory / ADAPTER_CONFIG).is_file(),
        config=policy.config,
    )


def merge(parts: Sequence[MergePart], weights: Sequence[float], out: Path, options: MergeOptions) -> Merged:
    """Write the merged model to a new directory, complete or not at all."""
    options.check()
    _check_method(parts, weights, options)
    if out.exists():
        raise ConfigError(f"{out} exists; name a new directory")
    weighted = [(part.directory, weight) for part, weight in zip(parts, weights, strict=True)]
    base = parts[0].base
    shape: LoraConfig | None = None

    def fill(staged: Path) -> None:
        nonlocal shape
        from turnwise.engine.training.combine import combine_full, sum_adapters  # torch

        if parts[0].is_full:
            combine_full(weighted, base, staged, options.method, options.density)
        else:
            shape = sum_adapters(weighted, staged, str(base))
        (staged / MERGE_FILE).write_text(_record(parts, weights, options), encoding="utf-8")

    def seal(staged: Path) -> None:
        if shape is not None:
            info = _info(parts[0].config, base, shape)
            text = replace(info, checksums=checksums_of(staged)).to_json()
            (staged / INFO_FILE).write_text(text, encoding="utf-8")

    write_directory(out, fill, seal)
    return Merged(directory=out, rank=None if shape is None else shape.rank)


def _check_method(parts: Sequence[MergePart], weights: Sequence[float], options: MergeOptions) -> None:
    if options.method == "sum":
        return
    if not parts[0].is_full:
        raise ConfigError(
            f"--method {options.method} is for full weights (model.train=full): its result is not low-rank; for "
            "adapters use --method sum"
        )
    if min(weights) < 0 or not sum(weights):
        raise ConfigError(f"weights {', '.join(f'{w:g}' for w in weights)}; {options.method} expects none below 0")
    if options.method == "slerp" and len(parts) != 2:
        raise ConfigError(f"{len(parts)} parts; slerp goes from one to another, so it expects two")


def _record(parts: Sequence[MergePart], weights: Sequence[float], options: MergeOptions) -> str:
    rows = [
        {"target": part.target, "directory": str(part.directory), "step": part.step, "weight": weight}
        for part, weight in zip(parts, weights, strict=True)
    ]
    read = asdict(options) if options.method == "ties" else {"method": options.method}
    return json.dumps({**read, "base": str(parts[0].base), "parts": rows}, indent=2) + "\n"


def _info(config: Config, base: Path, shape: LoraConfig) -> CheckpointInfo:
    return CheckpointInfo(
        base_model=config.model.name,
        stored_model=config.model.alias or config.model.name,
        model_directory=str(base),
        lora=shape,
        has_optimizer=False,
        created_at=datetime.now(UTC).isoformat(),
    )
