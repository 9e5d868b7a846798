"""Which experts a token uses, and with which weights; how a sampler's choice is recorded and replayed.

The sampler and the trainer compute the same logits up to rounding. Where two experts are almost equally good, rounding
decides, and a token that goes to another expert has another logprob altogether. So the sampler can write down its
choice (`RecordedRouting`), token by token and layer by layer beside the KV cache, and the trainer can use that choice
instead of its own (`ReplayedRouting`). The weights of the chosen experts are always the trainer's own.

Shape legend: N tokens, E experts, K experts of one token, L layers with experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise.models.experts import ExpertSpec

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan

UNKNOWN = -1
"""Stands for an expert where no choice was recorded."""


def choose_experts(logits_NE: Tensor, spec: ExpertSpec, correction_E: Tensor | None = None) -> Tensor:
    """The experts [N, K] of each token.

    Args:
        correction_E: what is added to scores for the choice alone, in families that balance experts that way.
    """
    wide = logits_NE.float()
    if spec.scoring == "chosen_softmax":
        return wide.topk(spec.num_chosen, dim=-1)[1]
    if spec.scoring == "softmax":
        return torch.softmax(wide, dim=-1).topk(spec.num_chosen, dim=-1)[1]
    assert spec.scoring == "sigmoid", "other routers run transformers' own code"
    ranks = wide.sigmoid() if correction_E is None else wide.sigmoid() + correction_E
    if spec.num_groups > 1:
        by_group = ranks.view(len(ranks), spec.num_groups, -1)
        best = by_group.topk(2, dim=-1)[0].sum(dim=-1).topk(spec.num_chosen_groups, dim=-1)[1]
        is_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, False)
        ranks = by_group.masked_fill(is_out[..., None], float("-inf")).flatten(1)
    return ranks.topk(spec.num_chosen, dim=-1)[1]


def score_experts(logits_NE: Tensor, choice_NK: Tensor, spec: ExpertSpec) -> Tensor:
    """The weights [N, K] float32 of the chosen experts; differentiable in the logits."""
    wide = logits_NE.float()
    if spec.scoring == "chosen_softmax":
        return torch.softmax(wide.gather(1, choice_NK), dim=-1)
    scores = torch.softmax(wide, dim=-1) if spec.scoring == "softmax" else wide.sigmoid()
    chosen = scores.gather(1, choice_NK)
    if spec.is_normalised:
        least = 1e-20 if spec.scoring == "sigmoid" else 0.0
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + least)
    return chosen if spec.scale == 1.0 else chosen * spec.scale


@dataclass(frozen=True, slots=True)
class RecordedRouting:
    """Writes every choice to the slots of the pass's tokens in the KV cache."""

    plan: PagedPlan

    def choose(self, layer: int, own_NK: Tensor, rows: Tensor | None) -> Tensor:
        choices = self.plan.cache.choices
        assert choices is not None, "made for a cache that keeps choices"
        slots = self.plan.slots if rows is None else self.plan.slots[rows]
        choices[layer].index_copy_(0, slots, own_NK.to(choices.dtype))
        return own_NK


class ReplayedRouting:
    """Uses the recorded choice of every token that has one, and counts how often the router's own was another."""

    def __init__(self, choices_LNK: Tensor) -> None:
        self.choices = choices_LNK
        """`UNKNOWN` where nothing was recorded."""
        self._flips: dict[int, Tensor] = {}
        self.num_choices = 0
        """Choices of all tokens that ran, recorded or not."""

    def choose(self, layer: int, own_NK: Tensor, rows: Tensor | None) -> Tensor:
        recorded = self.choices[layer] if rows is None else self.choices[layer][rows]
        recorded = recorded.to(own_NK.dtype)
        is_known = recorded[:, :1] != UNKNOWN
        is_kept = (recorded[:, :, None] == own_NK[:, None, :]).any(dim=-1)
        # A block that is run again for its backward pass counts once.
        self.num_choices += 0 if layer in self._flips else own_NK.numel()
        self._flips[layer] = torch.stack([((~is_kept) & is_known).sum(), is_known.sum() * own_NK.shape[1]])
        return torch.where(is_known, recorded, own_NK)

    def flips(self) -> Tensor:
        """[2]: choices that the router would have made otherwise, and all that were replayed."""
        return torch.stack(list(self._flips.values())).sum(dim=0)
