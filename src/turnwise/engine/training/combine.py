"""Several trained models of one base as one: exact sums of adapters; sums, SLERP and TIES of full weights.

A weighted sum of low-rank products is again one: with A of all parts one below the other, and B side by side,
B A = sum of w_i B_i A_i. Its rank is the sum of the ranks. Nothing is approximated: float32 rounding of B is all that
differs. Full weights are combined tensor by tensor, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from turnwise.engine.model.load import without_progress_bars
from turnwise.engine.model.lora import LORA_ALPHA, LoraWeights, num_parameters, split_pairs
from turnwise.engine.model.pretrained import load_pretrained
from turnwise.engine.training.adapter_files import is_critic, load_tensors, read_pairs, write_adapter
from turnwise.engine.training.full_files import WEIGHTS_FILE, trained_names, weights_dtype, write_weights
from turnwise.engine.training.peft_names import SavedPair
from turnwise.errors import CheckpointError
from turnwise.models.linears import Shape, linear_kind
from turnwise.types import LoraConfig

Weighted = Sequence[tuple[Path, float]]
"""Directories of checkpoints, and how much each counts."""
FullMethod = Literal["sum", "slerp", "ties"]
PARALLEL = 1e-6
"""Below this sine, two directions are one, and SLERP is the straight line."""


def sum_adapters(parts: Weighted, out: Path, base_model: str) -> LoraConfig:
    """Write the weighted sum of adapters as an adapter; returns its shape."""
    read = [_read_part(directory) for directory, _ in parts]
    _check_same_names({str(directory): own for (directory, _), own in zip(parts, read, strict=True)}, "adapts")
    columns = {name: [(own[name], weight) for own, (_, weight) in zip(read, parts, strict=True)] for name in read[0]}
    for name, pairs in columns.items():
        sizes = {(pair.a.shape[-1], pair.b.shape[-2], pair.a.shape[:-2]) for pair, _ in pairs}
        if len(sizes) > 1:
            raise CheckpointError(f"{name} has other sizes in {parts[0][0]} than in another part; one base?")
    lora = _summed_shape(columns)
    shapes = {name: _shape(pairs[0][0]) for name, pairs in columns.items()}
    flat = torch.zeros(num_parameters(shapes, lora))
    for name, (a, b) in split_pairs(flat, shapes, lora).items():
        new_scale, start = LORA_ALPHA / shapes[name].rank(lora), 0
        for pair, weight in columns[name]:  # what is left of a smaller rank stays 0, and adds nothing
            rank = pair.a.shape[-2]
            a[..., start : start + rank, :] = pair.a
            b[..., start : start + rank] = (pair.b.double() * (weight * pair.scale / new_scale)).float()
            start += rank
    write_adapter(LoraWeights(lora, shapes, flat), out, base_model)
    return lora


def _read_part(directory: Path) -> dict[str, SavedPair]:
    if is_critic(directory):
        raise CheckpointError(f"{directory} is a critic; expected the adapter of a policy")
    return read_pairs(directory)


def _summed_shape(columns: Mapping[str, Sequence[tuple[SavedPair, float]]]) -> LoraConfig:
    """The smallest shape that holds all parts: the largest sum of ranks, apart for experts."""
    kinds = {linear_kind(name) for name in columns}

    def most(*, of_experts: bool) -> int:
        own = [pairs for pairs in columns.values() if (pairs[0][0].a.dim() == 3) is of_experts]
        return max((sum(pair.a.shape[-2] for pair, _ in pairs) for pairs in own), default=0)

    expert_rank = most(of_experts=True)
    return LoraConfig(
        rank=most(of_experts=False) or expert_rank,
        train_attn="attn" in kinds,
        train_mlp="mlp" in kinds,
        train_unembed="unembed" in kinds,
        train_router="router" in kinds,
        expert_rank=expert_rank,
    )


def _shape(pair: SavedPair) -> Shape:
    """The shape says the rank of experts, so the number of chosen ones does not matter."""
    return Shape(pair.b.shape[-2], pair.a.shape[-1], pair.a.shape[0] if pair.a.dim() == 3 else 0, 1)


def _check_same_names(names_by_part: Mapping[str, Iterable[str]], verb: str) -> None:
    """Every part must have what the first one has, and nothing else."""
    (first, expected), *others = ((part, set(names)) for part, names in names_by_part.items())
    for part, names in others:
        for has, has_not, missing in ((first, part, expected - names), (part, first, names - expected)):
            if missing:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise CheckpointError(
                    f"{has} {verb} {min(missing)}{more}, and {has_not} does not; expected parts of the same modules"
                )


@torch.no_grad()
@without_progress_bars()
def combine_full(parts: Weighted, base: Path, out: Path, method: FullMethod, density: float) -> None:
    """Write full weights as a Hugging Face directory, in the dtype that the first part was sampled in.

    Args:
        density: The share of each tensor's changes that TIES keeps.
    """
    model = load_pretrained(base, torch.float32)
    is_trained = trained_names(base)
    start = {name: parameter.detach() for name, parameter in model.named_parameters() if is_trained(name)}
    saved = [load_tensors(directory / WEIGHTS_FILE) for directory, _ in parts]
    loaded = [{name: own for name, own in one.items() if is_trained(name)} for one in saved]
    names = {str(directory): own for (directory, _), own in zip(parts, loaded, strict=True)}
    _check_same_names({str(base): start, **names}, "has")
    combine: Callable[[Tensor, Sequence[Tensor], Sequence[float]], Tensor] = {
        "sum": sum_tensors,
        "slerp": _slerp_between,
        "ties": partial(ties_tensors, density=density),
    }[method]
    dtype, weights = weights_dtype(parts[0][0]), [weight for _, weight in parts]
    combined = {
        name: combine(tensor, [own[name].float() for own in loaded], weights).to(dtype)
        for name, tensor in start.items()
    }
    write_weights(out, combined, parts[0][0])


def sum_tensors(base: Tensor, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """base + sum of w_i (tensor_i - base)."""
    return base + sum(((one - base) * weight for one, weight in zip(tensors, weights, strict=True)), start=base * 0)


def _slerp_between(_base: Tensor, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return slerp_tensors(*tensors, share=weights[1] / sum(weights))


def slerp_tensors(first: Tensor, second: Tensor, share: float) -> Tensor:
    """The point of the great circle from `first` (share 0) to `second` (share 1); the norm goes along too."""
    one, two = first.flatten().double(), second.flatten().double()
    norms = one.norm() * two.norm()
    cosine = (one @ two / norms).clamp(-1, 1) if norms > 0 else torch.ones((), dtype=torch.double)
    angle = torch.arccos(cosine)
    if angle.sin() < PARALLEL:
        return torch.lerp(first, second, share)
    mixed = (((1 - share) * angle).sin() * one + (share * angle).sin() * two) / angle.sin()
    return mixed.to(first.dtype).view_as(first)


def ties_tensors(base: Tensor, tensors: Sequence[Tensor], weights: Sequence[float], *, density: float) -> Tensor:
    """TIES (arXiv:2306.01708, algorithm 1, with lambda = 1): trim each change to its largest values, elect the sign of
    the larger weighted sum, and take the weighted mean of the changes that have it."""
    changes = torch.stack([_trim(one - base, density) for one in tensors])
    shares = torch.tensor(weights, dtype=base.dtype).view(-1, *[1] * base.dim())
    elected = (changes * shares).sum(0).sign()
    counts = (changes.sign() == elected) & (changes != 0)
    total = (shares * counts).sum(0)
    mean = (changes * shares * counts).sum(0) / torch.where(total > 0, total, torch.ones_like(total))
    return base + mean


def _trim(change: Tensor, density: float) -> Tensor:
    """The largest values by magnitude; the rest is 0."""
    keep = max(1, round(density * change.numel()))
    kept = torch.zeros_like(change).flatten()
    largest = change.flatten().abs().topk(keep).indices
    kept[largest] = change.flatten()[largest]
    return kept.view_as(change)
