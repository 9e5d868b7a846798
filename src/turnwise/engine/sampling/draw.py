"""Logits -> tokens and their logprobs.

A token's randomness is one uniform number, a hash of (request seed, sample, token index): the same request gives the
same tokens whatever else is in the batch, on every device. The reported logprob is of the whole vocabulary at the
sampling temperature (at 1 when greedy), before top-k, top-p and min-p cut the tail: the distribution the trainer
computes, so that the two agree.

Shape legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.attention.cuda import has_triton
from turnwise.engine.model.linear import cpu_kernels

BUCKET = 256
"""Vocabulary entries per partial sum of the inverse CDF."""


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Per row, [B] each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    is_cut: bool
    """Some row has top-k, top-p or min-p."""


def uniforms(
    seeds: Sequence[int] | np.ndarray, samples: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray
) -> np.ndarray:
    """[B] numbers in [0, 1): splitmix64 over (seed, sample, position), 24 bits each."""
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds, dtype=np.uint64))
        state = _mix(state ^ np.asarray(samples, dtype=np.uint64))
        state = _mix(state ^ np.asarray(positions, dtype=np.uint64))
    return ((state >> np.uint64(40)).astype(np.float64) / float(1 << 24)).astype(np.float32)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(logits_BV: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and logprobs [B] float32."""
    if not settings.is_cut and logits_BV.device.type == "cpu" and logits_BV.dtype is torch.float32:
        kernels = cpu_kernels()
        if kernels is not None:
            return kernels.sample_rows(logits_BV, settings.temperature, settings.uniform)
    if not settings.is_cut and logits_BV.device.type == "cuda":
        return draw_whole(logits_BV, settings.temperature, settings.uniform)
    return draw_torch(logits_BV, settings)


def draw_whole(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """`draw` on a GPU where no row cuts its tail."""
    if has_triton():
        from turnwise.engine.ops.triton_draw import draw_rows

        return draw_rows(logits_BV, temperature_B, uniform_B)
    off = torch.zeros_like(temperature_B)
    return draw_torch(logits_BV, DrawSettings(temperature_B, off, off + 1, off, uniform_B, is_cut=False))


def draw_torch(logits_BV: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
    is_greedy = settings.temperature == 0
    scaled = logits_BV.float() / torch.where(is_greedy, 1.0, settings.temperature)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    weights = cut_tail(logprobs.exp(), settings) if settings.is_cut else logprobs.exp()
    tokens = torch.where(is_greedy, scaled.argmax(dim=-1), inverse_cdf(weights, settings.uniform))
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def inverse_cdf(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The entry where the running sum of `weights` passes uniform * total; never an entry of weight 0."""
    rows, vocab = weights_BV.shape
    padded = torch.nn.functional.pad(weights_BV, (0, -vocab % BUCKET)).view(rows, -1, BUCKET)
    buckets = padded.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    goal = uniform_B.double()[:, None] * buckets[:, -1:]
    bucket = torch.searchsorted(buckets, goal, right=True).clamp_max(buckets.shape[1] - 1)
    before = torch.where(bucket > 0, buckets.gather(1, (bucket - 1).clamp_min(0)), 0.0)
    inside = padded[torch.arange(rows, device=padded.device), bucket[:, 0]].double()
    running = inside.cumsum(dim=-1)
    offset = torch.searchsorted(running, goal - before, right=True)
    last = (inside > 0).long().mul(torch.arange(BUCKET, device=inside.device)).amax(dim=-1, keepdim=True)
    return (bucket * BUCKET + torch.minimum(offset, last))[:, 0]


def cut_tail(probs_BV: Tensor, settings: DrawSettings) -> Tensor:
    """Zero what top-k, top-p and min-p leave out; at least the most likely token stays."""
    ordered, order = probs_BV.sort(dim=-1, descending=True)
    ranks = torch.arange(probs_BV.shape[1], device=probs_BV.device)[None]
    limit = torch.where(settings.top_k > 0, settings.top_k, probs_BV.shape[1])[:, None]
    before = ordered.cumsum(dim=-1) - ordered
    is_off = (settings.top_p >= 1)[:, None]
    keep = (ranks < limit) & (is_off | (before < settings.top_p[:, None]))
    keep &= ordered >= settings.min_p[:, None] * ordered[:, :1]
    keep[:, 0] = True
    return probs_BV * torch.zeros_like(keep).scatter_(1, order, keep)
