"""Gradients of the base's own weights, for trainables of all weights: products, norms, head norms.

Every function adds to a float32 tensor. The products in front of them run in the activations' dtype.

Shape legend: N packed tokens, I inputs, O outputs of a group, H hidden size, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.engine.model.lora import LinearGroup
from turnwise.engine.model.lora_products import NormedInput
from turnwise.engine.ops import for_device
from turnwise.engine.ops.interface import Heads, Rotation


def add_product_gradient(grads: LinearGroup, dy_NO: Tensor, x_NI: Tensor | NormedInput) -> None:
    """dW += dy' x and db += sum of dy, of a group of linears."""
    x = x_NI if isinstance(x_NI, Tensor) else x_NI.formed()
    for_device(dy_NO.device).products.multiply(dy_NO.t(), x, out=grads.weight, is_added=True)
    if grads.bias is not None:
        grads.bias.add_(dy_NO.sum(dim=0, dtype=grads.bias.dtype))


def add_norm_gradient(grad_H: Tensor, dx_NH: Tensor, h_NH: Tensor, rstd_N: Tensor) -> None:
    """Add the gradient of the weight in x = h * rstd * weight."""
    grad_H.add_((dx_NH.float() * h_NH.float()).mul_(rstd_N[:, None]).sum(dim=0))


def add_head_norm_gradients(grads: Heads, dq: Tensor, dk: Tensor, qkv: Tensor, rotation: Rotation) -> None:
    """Add the gradients of the norms on query and key heads, which some models have before the rotation.

    `qkv` is the input of these norms.
    """
    cos, sin = rotation.of_tokens()
    query, key, _ = grads.split(qkv)
    for grad_D, turned, raw in ((grads.query_norm, dq, query), (grads.key_norm, dk, key)):
        assert grad_D is not None, "both head norms or none"
        first, second = turned.float().chunk(2, dim=-1)
        back = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
        wide = raw.float()
        rstd = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + grads.eps)
        grad_D.add_((back * wide).mul_(rstd).sum(dim=(0, 1)))
