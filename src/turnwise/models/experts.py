"""What the routed experts of a model are, as data. Imports without torch.

A router scores all experts for every token, a few of them are chosen, and the MLP's output is the weighted sum of
theirs. Families differ in how scores follow from the router's logits; `ExpertSpec` says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Scoring = Literal["softmax", "chosen_softmax", "sigmoid", "own"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """The routed experts of one model."""

    num_experts: int
    num_chosen: int
    """Experts that each token uses."""
    inner_size: int
    """Width of one expert's hidden layer."""
    shared_size: int = 0
    """Width of the expert that every token uses beside the chosen ones; 0: there is none."""
    has_shared_gate: bool = False
    """Whether a sigmoid of x w' scales the shared expert."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an ordinary MLP in place of experts."""
    scoring: Scoring = "own"
    """How scores follow from logits: the softmax over all experts, over the chosen ones, or a sigmoid of each; `own`:
    only transformers' code knows, so the router cannot be trained or replayed."""
    is_normalised: bool = True
    """Whether the scores of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """What scores are multiplied with."""
    num_groups: int = 1
    """Experts are chosen from the best `num_chosen_groups` of this many groups."""
    num_chosen_groups: int = 1

    @property
    def is_routable(self) -> bool:
        """Whether our own code computes scores: then the router can be trained, and a choice can be replayed."""
        return self.scoring != "own"


COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of experts; one family may use two of the names."""
CHOSEN = ("top_k_experts", "num_experts_per_tok", "moe_k")
"""What configs call the number of experts that a token uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertReader:
    """How one family spells its experts in a config.json."""

    scoring: Scoring = "own"
    inner: str = "moe_intermediate_size"
    shared: str = ""
    """The key of the shared expert's width, or of the number of shared experts; empty: there is none."""
    has_shared_gate: bool = False
    normalises: bool = True
    """`norm_topk_prob` of a config that does not say."""
    has_dense_layers: bool = False
    """Whether some layers may have an ordinary MLP."""
    switch: str = ""
    """A setting without which a model has no experts; empty: their number says it."""

    def read(self, config: Mapping[str, Any]) -> ExpertSpec | None:
        """None for a model without routed experts."""
        num_experts = int(next((config[name] for name in COUNTS if config.get(name)), 0))
        if not num_experts or (self.switch and not config.get(self.switch)):
            return None
        inner = int(config.get(self.inner) or 0)
        shared = int(config.get(self.shared) or 0)
        return ExpertSpec(
            num_experts=num_experts,
            num_chosen=int(next((config[name] for name in CHOSEN if config.get(name)), 1)),
            inner_size=inner,
            shared_size=shared if self.shared.endswith("_size") else shared * inner,
            has_shared_gate=self.has_shared_gate,
            dense_layers=_dense_layers(config) if self.has_dense_layers else (),
            scoring=self.scoring,
            is_normalised=bool(config.get("norm_topk_prob", self.normalises)),
            scale=float(config.get("routed_scaling_factor") or 1.0) if self.scoring == "sigmoid" else 1.0,
            num_groups=int(config.get("n_group") or 1),
            num_chosen_groups=int(config.get("topk_group") or 1),
        )


def _dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without experts: those that are named, those between steps, and those outside the bounds."""
    step = int(config.get("decoder_sparse_step") or config.get("moe_layer_interval") or 1)
    count = int(config.get("num_hidden_layers") or 0)
    first = int(config.get("first_k_dense_replace") or config.get("moe_layer_start_index") or 0)
    end = config.get("moe_layer_end_index")
    last = count - 1 if end in (None, -1) else int(end)
    named = set(config.get("mlp_only_layers") or ())
    return tuple(i for i in range(count) if i in named or (i + 1) % step or not first <= i <= last)
