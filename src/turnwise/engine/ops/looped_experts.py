"""Products of rows with their experts' matrices, one expert after the other: on a CPU, and the reference elsewhere.

Shape legend: M rows, G groups (experts), I inputs, O outputs, A and B columns of a gradient's two sides.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from turnwise.engine.ops.interface import Groups, ProductOps


class LoopedExperts:
    """Each expert's rows are one product; the host reads how many rows each expert has."""

    can_capture = False

    def __init__(self, products: ProductOps) -> None:
        self._products = products

    def group(self, keys_M: Tensor, num_groups: int) -> Groups:
        sorted_keys, order = torch.sort(keys_M, stable=True)
        places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        ends = torch.searchsorted(sorted_keys, torch.arange(num_groups, device=order.device), right=True)
        return Groups(order, places, ends, host_ends=ends.tolist())

    def multiply(
        self,
        x_MI: Tensor,
        weights_GIO: Tensor,
        groups: Groups,
        *,
        out: Tensor | None = None,
        alpha: float = 1.0,
        is_added: bool = False,
    ) -> Tensor:
        if out is None:
            out = x_MI.new_zeros(len(x_MI), weights_GIO.shape[2])
            is_added = False
        for group, rows in _runs(groups):
            weight, x = weights_GIO[group], x_MI[rows]
            if not is_added and alpha == 1.0 and weight.stride(0) == 1:
                out[rows] = self._products.linear(x, weight.t())
            else:
                self._products.multiply(x, weight, out=out[rows], alpha=alpha, is_added=is_added)
        return out

    def add_outer(self, left_MA: Tensor, right_MB: Tensor, groups: Groups, out_GAB: Tensor, alpha: float) -> None:
        for group, rows in _runs(groups):
            self._products.multiply(left_MA[rows].t(), right_MB[rows], out=out_GAB[group], alpha=alpha, is_added=True)


def _runs(groups: Groups) -> Iterator[tuple[int, slice]]:
    """(group, its rows) of every group that has rows."""
    assert groups.host_ends is not None, "made by `group` of the same ops"
    start = 0
    for group, stop in enumerate(groups.host_ends):
        if stop > start:
            yield group, slice(start, stop)
        start = stop
