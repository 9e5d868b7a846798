"""Logits -> tokens and their logprobs, in plain torch.

Shape legend: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.engine.ops.interface import DrawSettings, TailCut

BUCKET = 256
"""Vocabulary entries per partial sum of the inverse CDF."""


def draw(logits_BV: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and logprobs [B] float32."""
    is_greedy = settings.temperature == 0
    scaled = logits_BV.float() / torch.where(is_greedy, 1.0, settings.temperature)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    weights = logprobs.exp() if settings.cut is None else cut_tail(logprobs.exp(), settings.cut)
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


def cut_tail(probs_BV: Tensor, cut: TailCut) -> Tensor:
    """Zero what top-k, top-p and min-p leave out; at least the most likely token stays."""
    ordered, order = probs_BV.sort(dim=-1, descending=True)
    ranks = torch.arange(probs_BV.shape[1], device=probs_BV.device)[None]
    limit = torch.where(cut.top_k > 0, cut.top_k, probs_BV.shape[1])[:, None]
    before = ordered.cumsum(dim=-1) - ordered
    is_off = (cut.top_p >= 1)[:, None]
    keep = (ranks < limit) & (is_off | (before < cut.top_p[:, None]))
    keep &= ordered >= cut.min_p[:, None] * ordered[:, :1]
    keep[:, 0] = True
    return probs_BV * torch.zeros_like(keep).scatter_(1, order, keep)
