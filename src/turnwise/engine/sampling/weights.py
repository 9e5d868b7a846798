"""Which weights a sampler's tokens run with: the base, an adapter beside it, an adapter merged into a copy, or weights
that are all a policy's own.

While one policy has the sampler to itself, its adapter is merged into a second copy of the adapted weights. Otherwise
the adapters stay beside the base: in a bank where a kernel serves rows of many in one launch, else span by span.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import Policy, Route, Span, merge_into
from turnwise.engine.model.lora_bank import bank_route, make_bank
from turnwise.engine.sampling.requests import Step

PolicyRuns = Sequence[tuple[Policy, int]]
"""Neighbouring packed rows of one policy: (policy, number of rows)."""


class SamplingWeights:
    """The routes of a sampler's passes, and the merged copy of the weights."""

    def __init__(self, model: CausalModel, *, may_merge: bool, merges_always: bool) -> None:
        self.model = model
        self.may_merge = may_merge
        """Whether there is memory for the merged copy."""
        self._merges_always = merges_always
        self._bank = make_bank(model)
        self.merged: dict[str, Tensor] = {}
        """The copy, by linear and by group of linears; empty until a policy is merged."""
        self._merged_version = 0
        self.when_merged: list[Callable[[], None]] = []
        """Called after a policy was merged: its weights may be at other addresses than the last ones."""

    def route(self, step: Step, versions: Callable[[], set[int]]) -> Route:
        """The route of packed tokens; `versions` are the policies of all running and waiting rows."""
        policies = step.policies
        if len(policies) == 1:
            (policy,) = policies
            if policy.full is not None:
                return Route(full=policy.full)
            if self.may_merge and policy.has_adapter and (self._merges_always or len(versions()) == 1):
                return self.merge(policy)
        runs = [(row.request.policy, 1) for row in step.decode]
        runs += [(piece.row.request.policy, piece.stop - piece.start) for piece in step.prefill]
        return self._beside(runs)

    def alone(self, policy: Policy) -> Route:
        """The route of a policy that has the sampler to itself."""
        if policy.full is not None:
            return Route(full=policy.full)
        with torch.inference_mode():
            return self.merge(policy) if policy.has_adapter else Route()

    def merge(self, policy: Policy) -> Route:
        if self._merged_version != policy.version:
            merge_into(self.merged, self.model.matrices, self.model.groups, policy)
            self._merged_version = policy.version
            for call in self.when_merged:
                call()
        return Route(merged=self.merged)

    def logits(self, hidden: Tensor, owners: Sequence[Policy]) -> Tensor:
        """Logits [rows, V] of hidden states [rows, H], each row under its owner."""
        logits_of = self.model.logits
        if owners and owners[0].full is not None:  # all owners are the same then: see `Step.by_weights`
            return logits_of(hidden, Route(full=owners[0].full))
        if self._merged_version and all(owner.version == self._merged_version for owner in owners):
            return logits_of(hidden, Route(merged=self.merged))
        if self._bank is not None:
            return logits_of(hidden, self._beside([(owner, 1) for owner in owners]))
        order = sorted(range(len(owners)), key=lambda i: owners[i].version)
        spans = _spans([(owners[i], 1) for i in order])
        if order == list(range(len(owners))):
            return logits_of(hidden, Route(spans=spans))
        index = self.model.ops.transfer.upload(np.array(order))
        logits = logits_of(hidden[index], Route(spans=spans))
        return torch.empty_like(logits).index_copy_(0, index, logits)

    def _beside(self, runs: PolicyRuns) -> Route:
        """The route with adapters beside the base model."""
        if self._bank is not None and any(policy.has_adapter for policy, _ in runs):
            return Route(bank=bank_route(self._bank, runs, self.model.device))
        return Route(spans=_spans(runs))


def _spans(runs: PolicyRuns) -> list[Span]:
    """Runs of one policy as spans over packed tokens."""
    spans: list[Span] = []
    start = 0
    for policy, neighbours in itertools.groupby(runs, key=lambda pair: pair[0]):
        stop = start + sum(count for _, count in neighbours)
        spans.append(Span(start, stop, policy))
        start = stop
    return spans
