"""The small steps between a decoder layer's matrix products, in plain torch: norm, rotation, gate.

`cpu_layers.py` and `triton_layers.py` have the same functions as fused kernels. Sums and products run in float32,
results are stored in the activations' dtype.

Shape legend: N packed tokens, H hidden size, Q query heads, K key (and value) heads, D head size, I inner size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.engine.ops.interface import CacheSlots, Heads, Rotation


def add_norm(
    h: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    room: Tensor | None = None,  # noqa: ARG001 - torch makes tensors of its own
) -> tuple[Tensor, Tensor, Tensor]:
    """h + delta, its RMS norm times `weight`, and 1 / rms [N]."""
    if delta is not None:
        h = h + delta
    wide = h.float()
    rstd = torch.rsqrt(wide.square().mean(dim=-1) + eps)
    return h, (wide * rstd[:, None] * weight.float()).to(h.dtype), rstd


def norm_backward(dx: Tensor, h: Tensor, rstd: Tensor, weight: Tensor, dh: Tensor | None) -> Tensor:
    """Gradient of `add_norm` with respect to its sum, added to `dh` (the gradient of the residual path)."""
    scaled = dx.float() * weight.float()
    wide = h.float()
    mean = (scaled * wide).mean(dim=-1, keepdim=True)
    grad = rstd[:, None] * (scaled - wide * (rstd.square()[:, None] * mean))
    return grad.to(h.dtype) if dh is None else dh.add_(grad)


def rotate(qkv: Tensor, heads: Heads, rotation: Rotation, cache: CacheSlots | None) -> tuple[Tensor, Tensor, Tensor]:
    """Head norms and rotary position: query [N, Q, D], key and value [N, K, D]."""
    cos, sin = rotation.of_tokens()
    query, key, value = heads.split(qkv)
    query = _turn(_head_norm(query, heads.query_norm, heads.eps), cos, sin).to(qkv.dtype)
    key = _turn(_head_norm(key, heads.key_norm, heads.eps), cos, sin).to(qkv.dtype)
    if cache is not None:
        cache.keys.index_copy_(0, cache.slots, key)
        cache.values.index_copy_(0, cache.slots, value)
    return query, key, value


def rotate_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor | None, heads: Heads, rotation: Rotation
) -> Tensor:
    """Gradient of the joined projection [N, (Q + 2 K) D]; `qkv` is needed where heads are normed."""
    cos, sin = rotation.of_tokens()
    dquery, dkey, dvalue = grads
    parts = [_turn(dquery.float(), cos, -sin), _turn(dkey.float(), cos, -sin), dvalue]
    if qkv is not None:
        query, key, _ = heads.split(qkv)
        for i, (raw, weight) in enumerate(((query, heads.query_norm), (key, heads.key_norm))):
            assert weight is not None, "both head norms or none"
            wide = raw.float()
            rstd = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + heads.eps)
            scaled = parts[i] * weight.float()
            parts[i] = rstd * (scaled - wide * (rstd.square() * (scaled * wide).mean(dim=-1, keepdim=True)))
    return torch.cat([part.to(dvalue.dtype) for part in parts], dim=1).flatten(1)


def swiglu(gate_up: Tensor, *, room: Tensor | None = None) -> Tensor:  # noqa: ARG001
    """silu(gate) * up, from [N, 2 I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def swiglu_backward(dact: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `gate_up`, and the activation once more; both inputs may be overwritten."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    wide = dact.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    act = (silu * up).to(gate_up.dtype)
    dgate = wide * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat([dgate, wide * silu], dim=-1).to(gate_up.dtype), act


def _head_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    if weight is None:
        return wide
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (x_i, x_{i + D/2}), turned by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
