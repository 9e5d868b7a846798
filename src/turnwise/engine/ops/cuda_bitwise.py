"""Products and attention on CUDA in which a row's result depends on that row alone (`triton_bitwise.py`).

The module has the functions of `ProductOps` and of `AttentionOps`. Gradients need no fixed order; the usual kernels
compute them. Shapes and layouts are those of `torch_products.py` and `cuda_attention.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise.engine.ops import cuda_attention, for_device, torch_products, triton_bitwise
from turnwise.engine.ops.interface import AttentionRule
from turnwise.engine.ops.key_tiles import KeyTiles, decode_tiles, forest_tiles, prompt_tiles

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan, TreePlan

linear = triton_bitwise.linear
tree_backward = cuda_attention.tree_backward
multiply, empty_rows = torch_products.multiply, torch_products.empty_rows
multiply_with_low_rank, low_rank_gradients = torch_products.multiply_with_low_rank, torch_products.low_rank_gradients


def takes_low_rank_along(x_NI: Tensor) -> bool:  # noqa: ARG001 - adapters have a kernel of their own
    return False


def tree_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Output [1, N, H, D] and log-sum-exp [1, H, N] of a packed forest: each node over its whole path at once."""
    tiles = forest_tiles(plan, _queries_per_tile(query, key), for_device(query.device).transfer)
    query, key, value = (side[0].transpose(0, 1) for side in (query, key, value))
    out, sums = _attend(query, key, value, tiles, rule, with_sums=True)
    return out[None], sums[None]


def prefill(query: Tensor, key: Tensor, value: Tensor, plan: PagedPlan, layer: int, rule: AttentionRule) -> Tensor:  # noqa: ARG001
    """New prompt tokens attend to themselves causally and to their sequence's cached tokens, all from the cache."""
    tiles = prompt_tiles(plan, _queries_per_tile(query, key), for_device(query.device).transfer)
    keys, values = (side.flatten(0, 1) for side in plan.cache.layer(layer))
    out, _ = _attend(query[0].transpose(0, 1), keys, values, tiles, rule, with_sums=False)
    return out[None, plan.num_decode :]


def paged_decode(query: Tensor, layer: tuple[Tensor, Tensor], plan: PagedPlan, rule: AttentionRule) -> Tensor:
    """One query row [H, D] per sequence over its blocks."""
    keys, values = (side.flatten(0, 1) for side in layer)
    return _attend(query, keys, values, decode_tiles(plan), rule, with_sums=False)[0]


def can_capture_prefill(dtype: torch.dtype, head_size: int) -> bool:  # noqa: ARG001 - the host lays the tiles out
    return False


def _queries_per_tile(query: Tensor, key: Tensor) -> int:
    return triton_bitwise.queries_per_tile(query.shape[1], key.shape[1])


def _attend(
    query: Tensor, key: Tensor, value: Tensor, tiles: KeyTiles, rule: AttentionRule, *, with_sums: bool
) -> tuple[Tensor, Tensor]:
    query, key, value = (side if side.stride(1) == side.shape[2] else side.contiguous() for side in (query, key, value))
    return triton_bitwise.attend(query, key, value, tiles, rule.scale, with_sums=with_sums)
