"""What one decoder block computes, as data. Imports without torch.

A family of models (`families.py`) reads a `BlockSpec` from a config. The fused body (`engine/model/body.py`) runs every
model whose block has parts that the fused kernels support, whatever its class is called; other models run transformers'
own modelling code.

    h, x = norm(h + what the block before added)
    q, k, v = rotate(head norms(x Wqkv'))
    h, x = norm(h + attention(q, k, v) Wo')
    added = activation(x Wgate') * (x Wup') Wdown'             mlp = "gated"

Where a model has routed experts (`experts.py`), the last line is the sum over a token's experts, which are gated too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNames:
    """Dotted names of a block's modules inside a decoder layer, and of those around the layers inside the body."""

    input_norm: str = "input_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    inner_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    embedding: str = "embed_tokens"
    layers: str = "layers"
    last_norm: str = "norm"
    rotation: str = "rotary_emb"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRule:
    """What becomes of the head's product: cap(scale x), with cap(x) = softcap tanh(x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None


PLAIN_LOGITS = LogitRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """The kind of each part of a decoder block; all blocks of a model are alike.

    A linear's bias is not part of it: the model's own module says whether there is one. Windows are not either: they
    differ from layer to layer (`families.layer_windows`).
    """

    norm: Literal["rms", "layer"] = "rms"
    norm_place: Literal["before", "after"] = "before"
    """Whether a norm stands before attention and MLP, or after them."""
    norm_eps: float = 1e-6
    head_norm: Literal["none", "rms"] = "none"
    """Norm of each query and key head, before the rotation."""
    rotation: Literal["halves", "neighbours", "none"] = "halves"
    """Which coordinates of a head turn together: x_i with x_(i + D/2), x_2i with x_(2i + 1), or none."""
    angles: str = "default"
    """The `rope_type` of the config: how angles follow from positions."""
    mlp: Literal["gated", "plain"] = "gated"
    activation: str = "silu"
    """The config's name of the MLP's activation."""
    names: PartNames = PartNames()
