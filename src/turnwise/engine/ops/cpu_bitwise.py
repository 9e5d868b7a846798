"""Products and attention on a CPU in which a row's result depends on that row alone, to the last bit.

The usual kernels choose by the number of rows in which order they sum, and attend to a prefix by parts that they merge.
Here every product sums along its depth from the first number to the last, and every query meets the keys of its whole
sequence from position 0 on, in blocks of one size. So decoding, reading a prompt and a pass of the trainer give the
same bits. Gradients need no such order; the usual kernels compute them.

The module has the functions of `ProductOps` and of `AttentionOps`. Shapes and layouts are those of `cpu_products.py`
and `cpu_attention.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise.engine.ops import cpu, cpu_attention, cpu_products
from turnwise.engine.ops.cpu_attention import attend, equal_rows, rows_over_keys
from turnwise.engine.ops.interface import AttentionRule, Saved

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan, TreePlan

can_capture_prefill, tree_backward = cpu_attention.can_capture_prefill, cpu_attention.tree_backward
empty_rows, low_rank_gradients = cpu_products.empty_rows, cpu_products.low_rank_gradients
multiply_with_low_rank = cpu_products.multiply_with_low_rank

BLOCK_ROWS, DOT_ROWS = 128, 4
"""BLOCK_COLS and DOT_COLS of cpu_linear.c: rows that are taken at once, and up to how many it sums in another order."""


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W' + b."""
    rows = len(x_NI)
    rest = rows % BLOCK_ROWS
    if 0 < rest <= DOT_ROWS:
        x_NI = torch.nn.functional.pad(x_NI, (0, 0, 0, DOT_ROWS + 1 - rest))
    kernels = cpu.load()
    assert kernels is not None, "chosen only where the kernels are built"
    bias = None if bias_O is None else bias_O.float()
    return kernels.linear_small(weight_OI, x_NI.contiguous(), bias=bias)[:rows]


def multiply(
    a_MK: Tensor, b_KN: Tensor, *, out: Tensor | None = None, alpha: float = 1.0, is_added: bool = False
) -> Tensor:
    """alpha a b, written to `out` or added to it where given."""
    if alpha != 1:  # the kernel rounds once or twice where it scales a sum that it adds, depending on the row's place
        a_MK = a_MK * alpha
    out = a_MK.new_empty(len(a_MK), b_KN.shape[1]) if out is None else out
    return cpu_products.product(a_MK, b_KN, out, is_added=is_added)


def takes_low_rank_along(x_NI: Tensor) -> bool:  # noqa: ARG001 - the rank would be cut at other places
    return False


def tree_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Output [1, N, H, D] and log-sum-exp [1, H, N] of a packed forest: each node over its whole path at once."""
    _, num_heads, num_tokens, head_size = query.shape
    out = query.new_empty(1, num_tokens, num_heads, head_size)
    logsumexp = query.new_empty(1, num_heads, num_tokens)
    sides = Saved(query, key, value, out.transpose(1, 2), logsumexp)
    paths = plan.path_runs()
    if paths is None:
        for run in plan.equal_runs():
            attend(Saved(*(equal_rows(side, run) for side in sides)), rule, is_causal=True)
    else:
        for path in paths:
            attend(rows_over_keys(sides, path.rows, path.keys), rule, is_causal=True)
    return out, logsumexp


def prefill(query: Tensor, key: Tensor, value: Tensor, plan: PagedPlan, layer: int, rule: AttentionRule) -> Tensor:
    """New prompt tokens attend to themselves causally and to their sequence's cached tokens."""
    _, num_heads, num_tokens, head_size = query.shape
    out = query.new_empty(1, num_tokens, num_heads, head_size)
    logsumexp = query.new_empty(1, num_heads, num_tokens)
    for chunk in plan.chunks:
        part = slice(chunk.start, chunk.stop)
        keys, values = plan.keys_of(chunk, layer, key, value)
        own = Saved(query[:, :, part], keys, values, out[:, part].transpose(1, 2), logsumexp[:, :, part])
        attend(own, rule, is_causal=True)
    return out[:, plan.num_decode :]


def paged_decode(query: Tensor, layer: tuple[Tensor, Tensor], plan: PagedPlan, rule: AttentionRule) -> Tensor:
    """One query row [H, D] per sequence over its blocks."""
    out, logsumexp = torch.empty_like(query), query.new_empty(*query.shape[:2], 1)
    block_size = layer[0].shape[1]
    for row, length in enumerate(plan.context_lens.tolist()):
        blocks = plan.block_table[row, : -(-length // block_size)].long()
        keys, values = (side[blocks].flatten(0, 1)[:length].transpose(0, 1)[None] for side in layer)
        own = query[row, None, :, None], keys, values, out[row, None, :, None], logsumexp[row, None]
        attend(Saved(*own), rule, is_causal=True)
    return out
