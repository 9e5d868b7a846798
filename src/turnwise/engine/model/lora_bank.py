"""Published adapters side by side on a GPU, so that one launch serves rows of many (`ops/triton_lora.py`).

A policy takes a slot when it is first sampled from without being merged. If no slot is free, it replaces the policy
that was not used for the longest time. Ranks are padded to the bank's rank, which grows when a larger one comes. Rows
of the base model have no tile.

Shape legend: N rows, T tiles, I inputs, O outputs, R padded rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.model.fused_parts import OUTPUT_BLOCK
from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import BankRoute, LinearGroup, Policy
from turnwise.engine.model.ordered_low_rank import (
    MIN_RANK,
    TILE_ROWS,
    owners_of_outputs,
    padded_rank,
)
from turnwise.engine.ops import for_device
from turnwise.models.linears import Shape

FIRST_SLOTS = 4


@dataclass(frozen=True, slots=True)
class GroupBank:
    """The adapters of one group of linears."""

    a: Tensor
    """[slots, members, R, I]"""
    b: Tensor
    """[slots, O, R], scale included."""
    members: Tensor
    """[O / 64] int32: the linear to which each block of outputs belongs."""


class LoraBank:
    """All slots of one engine."""

    def __init__(
        self,
        groups: Sequence[LinearGroup],
        dtype: torch.dtype,
        device: torch.device,
        experts: Mapping[str, Shape] | None = None,
    ) -> None:
        self._groups = list(groups)
        self._expert_shapes = dict(experts or {})
        self._expert_rank = 1
        self._dtype, self._device = dtype, device
        self._rank = MIN_RANK
        self._num_slots = 0
        self._slot_of: OrderedDict[int, int] = OrderedDict()
        """The slot of each policy version, least recently used first."""
        self._free: list[int] = []
        self._targets: set[str] = set()
        self.generation = 0
        self.banks: dict[str, GroupBank] = {}
        self.experts: dict[str, tuple[Tensor, Tensor]] = {}
        """A [slots * E, R, I] and B [slots * E, O, R] of the routed experts of each layer, scale included."""

    @staticmethod
    def fits(groups: Sequence[LinearGroup]) -> bool:
        """Whether the linears fit the bank: a block of outputs must not belong to two linears."""
        return all(bounds.start % OUTPUT_BLOCK == 0 for group in groups for bounds in group.bounds.values())

    def slots(self, policies: Sequence[Policy]) -> dict[int, int]:
        """The slot of every policy of one step, by version; the base model has none."""
        wanted = {policy.version: policy for policy in policies if policy.has_adapter}
        rank = max([self._rank, *(policy.lora.rank for policy in wanted.values())])
        expert_rank = max([self._expert_rank, *(_expert_rank(policy) for policy in wanted.values())])
        adapted = {name for policy in wanted.values() for name in policy.pairs}
        is_larger = rank > self._rank or expert_rank > self._expert_rank or len(wanted) > self._num_slots
        if is_larger or not adapted <= self._targets:
            self._targets |= adapted
            self._expert_rank = expert_rank
            self._grow(len(wanted), padded_rank(rank))
        for version in wanted:
            if version in self._slot_of:
                self._slot_of.move_to_end(version)
        for version, policy in wanted.items():
            if version not in self._slot_of:
                slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
                self._slot_of[version] = slot
                self._fill(slot, policy)
        return {version: self._slot_of[version] for version in wanted}

    def _grow(self, num_slots: int, rank: int) -> None:
        """Make larger, empty banks; policies are copied in again when they are next used."""
        self.generation += 1
        self._num_slots = max(FIRST_SLOTS, self._num_slots, 1 << (num_slots - 1).bit_length())
        self._rank = rank
        self._slot_of.clear()
        self._free = list(range(self._num_slots))
        self.banks.clear()
        for group in self._groups:
            if not self._targets & set(group.names):
                continue
            num_out, num_in = group.weight.shape
            owners = owners_of_outputs(num_out, list(group.bounds.values()))
            self.banks[group.name] = GroupBank(
                a=self._zeros(self._num_slots, len(group.names), rank, num_in),
                b=self._zeros(self._num_slots, num_out, rank),
                members=for_device(self._device).transfer.upload(owners),
            )

        self.experts = {
            name: (
                self._zeros(self._num_slots * shape.experts, self._expert_rank, shape.inputs),
                self._zeros(self._num_slots * shape.experts, shape.outputs, self._expert_rank),
            )
            for name, shape in self._expert_shapes.items()
            if name in self._targets
        }

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _fill(self, slot: int, policy: Policy) -> None:
        pairs, rank = policy.pairs, policy.lora.rank
        for group in self._groups:
            if group.name not in self.banks:
                continue
            bank = self.banks[group.name]
            bank.a[slot].zero_()
            bank.b[slot].zero_()
            for index, (name, bounds) in enumerate(group.bounds.items()):
                if name in pairs:
                    a, b = pairs[name]
                    bank.a[slot, index, :rank] = a
                    torch.mul(b, policy.scale, out=bank.b[slot, bounds, :rank])
        for name, (bank_a, bank_b) in self.experts.items():
            count = self._expert_shapes[name].experts
            own = slice(slot * count, (slot + 1) * count)
            bank_a[own].zero_()
            bank_b[own].zero_()
            if name in pairs:
                a, b = pairs[name]
                bank_a[own, : a.shape[1]] = a
                bank_b[own, :, : a.shape[1]] = b * policy.expert_scale


def make_tiles(runs: Sequence[tuple[int, int, int]], num_tiles: int) -> np.ndarray:
    """[3, num_tiles] int32 from (first row, rows, slot) of each adapter's rows; what is left over holds no rows."""
    tiles = np.zeros((3, num_tiles), dtype=np.int32)
    filled = 0
    for first, count, slot in runs:
        for start in range(first, first + count, TILE_ROWS):
            tiles[:, filled] = start, min(TILE_ROWS, first + count - start), slot
            filled += 1
    return tiles


def count_tiles(lengths: Sequence[int]) -> int:
    return sum(-(-length // TILE_ROWS) for length in lengths)


def bank_route(bank: LoraBank, lengths: Sequence[tuple[Policy, int]], device: torch.device) -> BankRoute:
    """The route of packed rows, given as neighbouring runs of (policy, rows)."""
    runs = _runs(bank.slots([policy for policy, _ in lengths]), lengths)
    tiles = make_tiles(runs, max(1, count_tiles([count for _, count, _ in runs])))
    return BankRoute(bank.banks, bank.generation, runs, for_device(device).transfer.upload(tiles), bank.experts)


def _expert_rank(policy: Policy) -> int:
    return max((shape.rank(policy.lora) for shape in policy.shapes.values() if shape.experts), default=1)


def _runs(slots: Mapping[int, int], lengths: Sequence[tuple[Policy, int]]) -> list[tuple[int, int, int]]:
    """(first row, rows, slot) of every run, neighbours of one policy together."""
    runs: list[tuple[int, int, int]] = []
    row = 0
    for policy, count in lengths:
        slot = slots.get(policy.version)
        if slot is not None:
            if runs and runs[-1][2] == slot and sum(runs[-1][:2]) == row:
                runs[-1] = (runs[-1][0], runs[-1][1] + count, slot)
            else:
                runs.append((row, count, slot))
        row += count
    return runs


def make_bank(model: CausalModel) -> LoraBank | None:
    """Make a bank for the model's linears; None if no kernel reads one, or if the linears do not fit its tiles."""
    if model.shards is not None:
        return None  # weights in parts run one adapter's rows after the other
    groups = [*model.groups, LinearGroup.join([model.head])]
    if model.ops.add_low_rank is None or model.fused is None or not LoraBank.fits(groups):
        return None
    experts = {name: shape for name, shape in model.shapes.items() if shape.experts}
    return LoraBank(groups, model.dtype, model.device, experts)
