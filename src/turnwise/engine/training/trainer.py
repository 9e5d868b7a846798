"""forward and forward_backward: they turn checked datums into gradients and outputs.

Work is cut into passes (`pack.split_batches`). Each generator yields between passes, so that the engine's worker can
let the sampler run. Losses are sums over positions, so any cut gives the same gradient. What is computed at a position
(a target's logprob, a state's value) is the job's objective.

Shape legend: T positions of all datums of a job laid end to end, E the positions that one pass reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.budget import PassLimit
from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import Policy, Route, Span
from turnwise.engine.model.routing import ReplayedRouting
from turnwise.engine.training.objective import TOKEN_LOGPROBS, Objective, PassDatum, PassHead, PassLoss
from turnwise.engine.training.pack import (
    MIN_SHARED,
    NO_SHARING,
    Entries,
    PackedBatch,
    make_entries,
    pack,
    split_batches,
)
from turnwise.engine.training.pass_graphs import PassGraphs
from turnwise.engine.training.routing_memory import RoutingMemory, replayed, routing_metrics
from turnwise.types import ForwardBackwardOutput, TensorData


class Routed(Protocol):
    """Weights that packed tokens can run with: a trainable, or a policy whose logprobs are read."""

    def span(self, start: int, stop: int) -> Span: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One client's batch: its datums, and the weights that they run with."""

    weights: Routed
    datums: Sequence[PassDatum]
    objective: Objective = TOKEN_LOGPROBS
    replays: bool = True
    """Whether the experts are those that the sampler chose, where it kept them; not for another model's logprobs."""


@dataclass(slots=True)
class JobResult:
    """The results of a job so far; tensors are [T]."""

    columns: Any
    """The columns that the loss reads besides the outputs."""
    offsets: np.ndarray
    """[datums + 1] where each datum's positions start in T."""
    outputs: Tensor
    """The objective's number at each position that was read, 0 elsewhere."""
    entropies: Tensor | None
    is_known: Tensor
    """True at positions that were read."""
    routings: list[ReplayedRouting] = field(default_factory=list)
    """The routing of the passes that used the sampler's experts."""


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job whose passes have run."""

    job: TrainingJob
    result: JobResult
    loss: PassLoss

    def output(self) -> ForwardBackwardOutput:
        """What the client gets."""
        metrics = self.loss.metrics(self.result.outputs, self.result.entropies, self.result.columns)
        metrics |= routing_metrics(self.result.routings)
        return ForwardBackwardOutput("ArrayRecord", outputs_by_datum(self.job, self.result), metrics)


@dataclass(frozen=True, slots=True)
class _Share:
    """One job's part of one pass."""

    job: TrainingJob
    result: JobResult
    members: Sequence[int]
    """The indices of the job's datums in this pass."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """One packed forward pass over the shares of one or several jobs."""

    shares: Sequence[_Share]
    batch: PackedBatch
    route: Route
    entries: Entries
    edges: Sequence[int]
    """[shares + 1] where each share's entries start in E."""


ShareGradients = Callable[[_Share, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor | None]]
"""(share, its outputs, its entropies, where they stand in T) -> d loss / d output, d loss / d entropy."""


class Trainer:
    """Runs jobs through the model; jobs of several trainables may share a pass."""

    def __init__(self, model: CausalModel, limit: PassLimit, *, share_prefixes: bool, captures: bool) -> None:
        self.model = model
        self.limit = limit
        self.min_shared = MIN_SHARED if share_prefixes else NO_SHARING
        self.routing: RoutingMemory | None = None
        """The sampler's choice of experts, where passes use it."""
        self.graphs = PassGraphs(model) if captures and PassGraphs.supports(model) else None
        """Captured passes, where the device can capture them and the config asks for it."""

    def read(
        self, job: TrainingJob, *, only_trained: bool, with_entropy: bool = False
    ) -> Generator[None, None, JobResult]:
        """Compute the objective's numbers with `job.weights`, without a gradient."""
        result = self.start_result(job, with_entropy)
        for members in self._passes(job, only_trained=only_trained):
            with torch.no_grad():
                work = self._pack([_Share(job, result, members)], only_trained=only_trained)
                head = self._head(work, with_entropy=with_entropy)
                outputs, entropies = head.outputs(self._hidden(work))
                _store(result, work.entries.columns, outputs, entropies)
            yield
        return result

    def add_reference(self, job: TrainingJob, result: JobResult, reference: Policy) -> Generator[None, None, None]:
        """Give a result's loss columns the logprobs of `reference`, for a KL term."""
        known = yield from self.read(replace(job, weights=reference, replays=False), only_trained=True)
        result.columns = replace(result.columns, ref_logprobs_T=known.outputs)

    def forward_backward(
        self, jobs: Sequence[TrainingJob], loss: PassLoss, reference: Policy | None
    ) -> Generator[None, None, list[JobResult]]:
        """Add each job's gradient to its trainable. Jobs share passes, so all must have the same objective."""
        results = [self.start_result(job, loss.needs_entropy) for job in jobs]
        if reference is not None:
            for job, result in zip(jobs, results, strict=True):
                yield from self.add_reference(job, result, reference)
        passes = [self._passes(job, only_trained=True) for job in jobs]
        if loss.spans_datums and any(len(own) > 1 for own in passes):
            for job, result in zip(jobs, results, strict=True):
                yield from self._whole_batch(job, result, loss)
            return results
        for members in itertools.zip_longest(*passes, fillvalue=()):
            triples = zip(jobs, results, members, strict=True)
            shares = [_Share(job, result, chosen) for job, result, chosen in triples if chosen]
            if loss.is_separable:
                self._backward_pass(shares, loss)
            else:
                for share in shares:
                    self._sequence_pass(share, loss)
            yield
        return results

    def backward_from(self, job: TrainingJob, grad_T: Tensor) -> Generator[None, None, None]:
        """Add the gradient of sum(grad_T * outputs_T): a loss that was differentiated elsewhere."""
        result = self.start_result(job, False)
        for members in self._passes(job, only_trained=True):
            share = _Share(job, result, members)
            self._run_backward([share], lambda _share, _outputs, _entropies, columns: (grad_T[columns], None))
            yield

    def _whole_batch(self, job: TrainingJob, result: JobResult, loss: PassLoss) -> Generator[None, None, None]:
        """Run a loss over pairs that do not fit into one pass: first all logprobs, then the gradient through the
        model."""
        known = yield from self.read(job, only_trained=True)
        result.outputs, result.is_known = known.outputs, known.is_known
        grad_T, _ = position_gradients(loss, result.outputs, None, result.columns)
        yield from self.backward_from(job, grad_T)

    def start_result(self, job: TrainingJob, with_entropy: bool) -> JobResult:
        """A result in which nothing is known yet."""
        device = self.model.device
        columns = job.objective.collate(job.datums).to(device)
        offsets = np.cumsum([0, *(len(d.input_ids) for d in job.datums)])
        zeros = torch.zeros(int(offsets[-1]), device=device)
        known = torch.zeros(int(offsets[-1]), dtype=torch.bool, device=device)
        return JobResult(columns, offsets, zeros, zeros.clone() if with_entropy else None, known)

    def _passes(self, job: TrainingJob, *, only_trained: bool) -> list[list[int]]:
        """Cut the job's datums into passes; a datum without any position to read does not run."""
        chosen = [i for i, d in enumerate(job.datums) if len(d.asked(only_trained=only_trained).positions)]
        sequences = [job.datums[i].input_ids for i in chosen]
        switch = self.model.angle_switch
        batches = split_batches(sequences, self.limit, min_shared=self.min_shared, switch=switch)
        return [[chosen[i] for i in batch] for batch in batches]

    def _pack(self, shares: Sequence[_Share], *, only_trained: bool) -> _Pass:
        """Pack each job's datums as one forest, one job after the other."""
        batches, spans, entries, edges = [], [], [], [0]
        choices = []
        token = 0
        for share in shares:
            sequences = [d.input_ids for d in share.job.datums]
            batch = pack(sequences, share.members, min_shared=self.min_shared, switch=self.model.angle_switch)
            spans.append(share.job.weights.span(token, token + batch.num_tokens))
            entries.append(self._entries(share, batch, token, only_trained))
            if self._replays(share.job):
                assert self.routing is not None, "asked above"
                choices.append(self.routing.replay(batch, sequences))
            batches.append(batch)
            token += batch.num_tokens
            edges.append(edges[-1] + len(entries[-1].columns))
        route = Route.of(spans)
        if choices:
            route.routing = replayed(choices, self.model.ops)
            for share in shares:
                share.result.routings.append(route.routing)
        return _Pass(shares, PackedBatch.join(batches), route, Entries.join(entries), edges)

    def _replays(self, job: TrainingJob) -> bool:
        return self.routing is not None and job.replays and job.objective is TOKEN_LOGPROBS

    def _entries(self, share: _Share, batch: PackedBatch, first_token: int, only_trained: bool) -> Entries:
        tokens, temperatures, targets, columns = [], [], [], []
        for member, index in zip(batch.members, batch.packed_index, strict=True):
            asked = share.job.datums[member].asked(only_trained=only_trained)
            tokens.append(index[asked.positions] + first_token)
            temperatures.append(asked.temperatures)
            targets.append(asked.targets)
            columns.append(asked.positions + share.result.offsets[member])
        parts = (np.concatenate(x) for x in (tokens, temperatures, targets, columns))
        return make_entries(*parts, device=self.model.device)

    def _hidden(self, work: _Pass) -> Tensor:
        """Hidden states [R, H] of the rows that the head reads."""
        batch = work.batch
        if self.graphs is not None:
            hidden = self.graphs.hidden(batch, work.route, work.entries.row_tokens)
            if hidden is not None:
                return hidden
        input_ids, position_ids = self.model.ops.transfer.upload_all([batch.input_ids, batch.position_ids])
        return self.model.hidden(input_ids, position_ids, batch.plan, work.route, work.entries.row_tokens)

    def _head(self, work: _Pass, *, with_entropy: bool) -> PassHead:
        objective = work.shares[0].job.objective
        return objective.make_head(self.model, work.route, work.entries, with_entropy=with_entropy)

    def _backward_pass(self, shares: Sequence[_Share], loss: PassLoss) -> None:
        """Run a loss of single positions: the head computes each chunk's gradient right after its outputs."""

        def gradients(share: _Share, outputs: Tensor, entropies: Tensor | None, columns: Tensor):
            return position_gradients(loss, outputs, entropies, share.result.columns.slice(columns))

        self._run_backward(shares, gradients)

    def _sequence_pass(self, share: _Share, loss: PassLoss) -> None:
        """Run a loss over whole sequences: outputs first, then the gradient with a second head product."""
        work = self._pack([share], only_trained=True)
        result, columns = share.result, work.entries.columns
        with torch.enable_grad():
            rows = self._hidden(work)
        head = self._head(work, with_entropy=loss.needs_entropy)
        with torch.no_grad():
            outputs, entropies = head.outputs(rows.detach())
        _store(result, columns, outputs, entropies)
        # The loss groups positions by datum, so it sees this pass's positions in datum order.
        order = torch.argsort(columns)
        inverse = torch.argsort(order)
        sorted_columns = result.columns.slice(columns[order])
        sorted_entropies = None if entropies is None else entropies[order]
        grad, grad_entropy = position_gradients(loss, outputs[order], sorted_entropies, sorted_columns)
        grad_E, grad_entropy_E = grad[inverse], None if grad_entropy is None else grad_entropy[inverse]

        def stored(_outputs: Tensor, _entropies: Tensor | None, picked: slice):
            return grad_E[picked], None if grad_entropy_E is None else grad_entropy_E[picked]

        with torch.no_grad():
            grad_rows, _, _ = head.backward(rows.detach(), stored)
        if rows.requires_grad:
            rows.backward(grad_rows)

    def _run_backward(self, shares: Sequence[_Share], gradients: ShareGradients) -> None:
        """Run one packed pass backward. The entries of a share are neighbours, so a slice selects them."""
        work = self._pack(shares, only_trained=True)
        columns_E, edges = work.entries.columns, work.edges
        with torch.enable_grad():
            rows = self._hidden(work)

        def by_share(outputs: Tensor, entropies: Tensor | None, picked: slice) -> tuple[Tensor, Tensor | None]:
            parts = []
            for share, (low, high) in zip(shares, itertools.pairwise(edges), strict=True):
                start, stop = max(low, picked.start), min(high, picked.stop)
                if start < stop:
                    own = slice(start - picked.start, stop - picked.start)
                    own_entropies = None if entropies is None else entropies[own]
                    parts.append(gradients(share, outputs[own], own_entropies, columns_E[start:stop]))
            if len(parts) == 1:
                return parts[0]
            filled = [torch.zeros_like(grad) if entropy is None else entropy for grad, entropy in parts]
            return torch.cat([grad for grad, _ in parts]), None if entropies is None else torch.cat(filled)

        head = self._head(work, with_entropy=shares[0].result.entropies is not None)
        with torch.no_grad():
            grad_rows, outputs, entropies = head.backward(rows.detach(), by_share)
        if rows.requires_grad:
            rows.backward(grad_rows)
        for share, (low, high) in zip(shares, itertools.pairwise(edges), strict=True):
            own_entropies = None if entropies is None else entropies[low:high]
            _store(share.result, columns_E[low:high], outputs[low:high], own_entropies)


def _store(result: JobResult, columns: Tensor, outputs: Tensor, entropies: Tensor | None) -> None:
    result.outputs[columns] = outputs
    result.is_known.index_fill_(0, columns, True)  # assigning True by index would make the host wait for the device
    if result.entropies is not None and entropies is not None:
        result.entropies[columns] = entropies


def position_gradients(
    loss: PassLoss, outputs: Tensor, entropies: Tensor | None, columns: Any
) -> tuple[Tensor, Tensor | None]:
    """d loss / d output and d loss / d entropy, by autograd over these vectors alone."""
    with torch.enable_grad():
        leaves = [outputs.detach().requires_grad_(True)]
        if entropies is not None:
            leaves.append(entropies.detach().requires_grad_(True))
        total = loss(leaves[0], leaves[1] if entropies is not None else None, columns).sum()
        if not total.requires_grad:
            return torch.zeros_like(outputs), None
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    grad = grads[0] if grads[0] is not None else torch.zeros_like(outputs)
    return grad, grads[1] if entropies is not None else None


def outputs_by_datum(job: TrainingJob, result: JobResult) -> list[dict[str, TensorData]]:
    """Per datum: the objective's numbers and where they are known, aligned with what the caller sent."""
    outputs, is_known = result.outputs.cpu().numpy(), result.is_known.cpu().numpy()
    found = []
    for datum, start, stop in zip(job.datums, result.offsets, result.offsets[1:], strict=False):
        own = slice(int(start) + datum.target_start, int(stop))
        found.append(
            {
                job.objective.output_name: TensorData.from_numpy(outputs[own]),
                "mask": TensorData.from_numpy(is_known[own].astype(np.float32)),
            }
        )
    return found
