"""Snapshots of what is trained (weights, optimizer and the gradient collected so far), and sums of adapters.

A snapshot is an adapter directory with `gradient.safetensors` beside it when there is a gradient, so that training
goes on from it at any point, not only between optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from turnwise.engine.model.lora import LoraWeights, num_parameters, split_pairs
from turnwise.engine.training import adapter_files
from turnwise.errors import CheckpointError
from turnwise.models.linears import Shape
from turnwise.types import LoraConfig

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine
    from turnwise.engine.training.trainable import Trainable

GRADIENT_FILE = "gradient.safetensors"
MAX_SUMMED_RANK = 1024


def write_snapshot(engine: Engine, adapter: Trainable, directory: Path) -> None:
    """Fill `directory` with everything that further training needs; the caller syncs it and moves it into place."""
    engine.save_adapter(adapter, directory, with_optimizer=True)
    if bool(adapter.grad.any()):
        adapter_files.save_tensors({"grad": adapter.grad.cpu()}, directory / GRADIENT_FILE)


def read_snapshot(engine: Engine, lora: LoraConfig, directory: Path) -> Trainable:
    """Restore an adapter exactly as `write_snapshot` saved it."""
    adapter = engine.create_saved(directory, lora)
    engine.load_adapter(adapter, directory, with_optimizer=True)
    gradient = directory / GRADIENT_FILE
    if gradient.exists():
        adapter.grad.copy_(load_file(gradient)["grad"])
        adapter.has_gradient = True
    return adapter


def write_sum(
    engine: Engine, directories: Sequence[Path], coefficients: Sequence[float], directory: Path
) -> LoraConfig:
    """Write an adapter whose change of every weight is the weighted sum of the others' changes; returns its shape.

    The sum is exact: A matrices are stacked, and each B is multiplied by its coefficient and scale, so ranks add up.
    """
    loras = [adapter_files.read_lora_config(source) for source in directories]
    rank = sum(lora.rank for lora in loras)
    if rank > MAX_SUMMED_RANK:
        raise CheckpointError(f"the ranks add up to {rank}; expected at most {MAX_SUMMED_RANK}")
    own = [engine.load_policy(source) for source in directories]
    shapes: dict[str, Shape] = {}
    for policy in own:
        shapes.update(policy.shapes)
    summed = LoraConfig(
        rank=rank,
        train_unembed=any(lora.train_unembed for lora in loras),
        train_mlp=any(lora.train_mlp for lora in loras),
        train_attn=any(lora.train_attn for lora in loras),
        train_router=any(lora.train_router for lora in loras),
        expert_rank=sum(max((s.rank(p.lora) for s in p.shapes.values() if s.experts), default=0) for p in own),
    )
    weights = LoraWeights(summed, shapes, torch.zeros(num_parameters(shapes, summed)))
    _fill_sum(weights, own, coefficients)
    adapter_files.write_adapter(weights, directory, str(engine.model_dir))
    return summed


def _fill_sum(total: LoraWeights, sources: Sequence[LoraWeights], coefficients: Sequence[float]) -> None:
    first: dict[str, int] = {}
    for source, coefficient in zip(sources, coefficients, strict=True):
        for name, (a, b) in split_pairs(source.flat, source.shapes, source.lora).items():
            rows = slice(first.get(name, 0), first.get(name, 0) + a.shape[-2])
            scales = (source.expert_scale, total.expert_scale) if a.dim() == 3 else (source.scale, total.scale)
            total.pairs[name][0][..., rows, :] = a.cpu()
            total.pairs[name][1][..., rows] = b.cpu() * (coefficient * scales[0] / scales[1])
            first[name] = rows.stop
