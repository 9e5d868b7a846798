"""forward and forward_backward: columns in, gradients and logprobs out.

Work is cut into passes (`pack.split_batches`); each generator yields between passes, so that the engine's worker can
let the sampler run. Losses are sums over tokens, so any cut gives the same gradient.

Shape legend: T target positions of all datums of a job laid end to end, E the trained ones among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.budget import PassLimit
from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import AnyPolicy, LoraWeights, Route, Span
from turnwise.engine.ops import for_device
from turnwise.engine.training.columns import AnyLoss, DatumColumns, collate_columns
from turnwise.engine.training.logprobs import TargetHead
from turnwise.engine.training.losses import LossColumns
from turnwise.engine.training.pack import (
    MIN_SHARED,
    NO_SHARING,
    Entries,
    PackedBatch,
    make_entries,
    pack,
    split_batches,
)
from turnwise.engine.training.preference_losses import PreferenceLoss
from turnwise.types import ForwardBackwardOutput, TensorData


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One client's batch: its datums run with its adapter (or any policy, to read logprobs)."""

    weights: LoraWeights | AnyPolicy
    datums: Sequence[DatumColumns]


@dataclass(slots=True)
class _Result:
    """What a job has so far, [T]."""

    columns: LossColumns
    offsets: np.ndarray
    """[datums + 1] where each datum's positions start in T."""
    logprobs: Tensor
    entropies: Tensor | None
    is_known: Tensor


class Trainer:
    """Runs jobs through the model; jobs of several adapters may share a pass."""

    def __init__(self, model: CausalModel, limit: PassLimit, *, share_prefixes: bool) -> None:
        self.model = model
        self.limit = limit
        self.min_shared = MIN_SHARED if share_prefixes else NO_SHARING

    def logprobs(self, job: Job, *, only_trained: bool, with_entropy: bool = False) -> Generator[None, None, _Result]:
        """Logprobs of the targets under `job.weights`, no gradient; of the trained ones alone when asked."""
        result = self._start(job, with_entropy)
        for members in self._passes(job, only_trained=only_trained):
            with torch.no_grad():
                batch = pack([d.input_ids for d in job.datums], members, min_shared=self.min_shared)
                route = Route(spans=[Span(0, batch.num_tokens, job.weights)])
                entries = self._entries(job, result, batch, 0, only_trained)
                hidden = self._hidden(batch, route, entries.row_tokens)
                head = TargetHead(self.model.head, route, entries, with_entropy=with_entropy)
                self._store(result, entries.columns, *head.logprobs(hidden))
            yield
        return result

    def add_reference(self, job: Job, result: _Result, reference: AnyPolicy) -> Generator[None, None, None]:
        """Give a result's loss columns the logprobs of `reference`, for a KL term."""
        known = yield from self.logprobs(replace(job, weights=reference), only_trained=True)
        result.columns = replace(result.columns, ref_logprobs_T=known.logprobs)

    def forward_backward(
        self, jobs: Sequence[Job], loss: AnyLoss, reference: AnyPolicy | None
    ) -> Generator[None, None, list[ForwardBackwardOutput]]:
        """Accumulate each job's gradient in its adapter; jobs are cut into passes alike and run side by side."""
        results = [self._start(job, loss.needs_entropy) for job in jobs]
        if reference is not None:
            for job, result in zip(jobs, results, strict=True):
                yield from self.add_reference(job, result, reference)
        passes = [self._passes(job, only_trained=True) for job in jobs]
        if isinstance(loss, PreferenceLoss) and any(len(own) > 1 for own in passes):
            for job, result in zip(jobs, results, strict=True):
                yield from self._whole_batch(job, result, loss)
            return [_output(job, result, loss) for job, result in zip(jobs, results, strict=True)]
        for index in range(max((len(p) for p in passes), default=0)):
            members = [p[index] if index < len(p) else [] for p in passes]
            self._backward_pass(jobs, results, members, loss)
            yield
        return [_output(job, result, loss) for job, result in zip(jobs, results, strict=True)]

    def _whole_batch(self, job: Job, result: _Result, loss: PreferenceLoss) -> Generator[None, None, None]:
        """A loss over pairs that no single pass can hold: all logprobs first, then the gradient through the model."""
        known = yield from self.logprobs(job, only_trained=True)
        result.logprobs, result.is_known = known.logprobs, known.is_known
        grad_T, _ = token_gradients(loss, result.logprobs, None, result.columns)
        yield from self.backward_from(job, grad_T)

    def backward_from(self, job: Job, grad_T: Tensor) -> Generator[None, None, None]:
        """Accumulate the gradient of sum(grad_T * logprobs_T): a loss that was differentiated elsewhere."""
        result = self._start(job, False)
        for members in self._passes(job, only_trained=True):
            self._run_backward([job], [result], [members], lambda _job, _l, _e, columns: (grad_T[columns], None))
            yield

    def _start(self, job: Job, with_entropy: bool) -> _Result:
        device = self.model.device
        columns = collate_columns(list(job.datums)).to(device)
        offsets = np.cumsum([0, *(len(d.input_ids) for d in job.datums)])
        zeros = torch.zeros(int(offsets[-1]), device=device)
        known = torch.zeros(int(offsets[-1]), dtype=torch.bool, device=device)
        return _Result(columns, offsets, zeros, zeros.clone() if with_entropy else None, known)

    def _passes(self, job: Job, *, only_trained: bool) -> list[list[int]]:
        """The job's datums, cut into passes; a datum with nothing to train is not run for its gradient."""
        chosen = [i for i, datum in enumerate(job.datums) if datum.mask.any() or not only_trained]
        sequences = [job.datums[i].input_ids for i in chosen]
        batches = split_batches(sequences, self.limit, min_shared=self.min_shared)
        return [[chosen[i] for i in batch] for batch in batches]

    def _entries(self, job: Job, result: _Result, batch: PackedBatch, first_token: int, only_trained: bool) -> Entries:
        tokens, temperatures, targets, columns = [], [], [], []
        for member, index in zip(batch.members, batch.packed_index, strict=True):
            datum = job.datums[member]
            wanted = datum.mask if only_trained else np.arange(len(datum.input_ids)) >= datum.target_start
            positions = np.nonzero(wanted)[0]
            tokens.append(index[positions] + first_token)
            temperatures.append(datum.temperature[positions])
            targets.append(datum.target_ids[positions])
            columns.append(positions + result.offsets[member])
        parts = (np.concatenate(x) if x else np.zeros(0) for x in (tokens, temperatures, targets, columns))
        return make_entries(*parts, device=self.model.device)

    def _hidden(self, batch: PackedBatch, route: Route, rows: Tensor) -> Tensor:
        device = self.model.device
        input_ids, position_ids = for_device(device).transfer.upload_all([batch.input_ids, batch.position_ids])
        return self.model.hidden(input_ids, position_ids, batch.plan, route, rows)

    def _backward_pass(
        self, jobs: Sequence[Job], results: Sequence[_Result], members: Sequence[list[int]], loss: AnyLoss
    ) -> None:
        if loss.is_separable:

            def gradients(job: int, logprobs: Tensor, entropies: Tensor | None, columns: Tensor):
                return token_gradients(loss, logprobs, entropies, results[job].columns.slice(columns))

            self._run_backward(jobs, results, members, gradients)
            return
        for index, (job, result) in enumerate(zip(jobs, results, strict=True)):
            self._sequence_pass(job, result, members[index], loss)

    def _sequence_pass(self, job: Job, result: _Result, members: list[int], loss: AnyLoss) -> None:
        """A loss over whole sequences: logprobs first, then the gradient by a second head product."""
        if not members:
            return
        batch, route, entries, _ = self._packed([job], [result], [members])
        with torch.enable_grad():
            rows = self._hidden(batch, route, entries.row_tokens)
        head = TargetHead(self.model.head, route, entries, with_entropy=loss.needs_entropy)
        with torch.no_grad():
            logprobs, entropies = head.logprobs(rows.detach())
        self._store(result, entries.columns, logprobs, entropies)
        # The loss groups tokens by datum, so it sees this pass's positions in datum order.
        order = torch.argsort(entries.columns)
        inverse = torch.argsort(order)
        sorted_columns = result.columns.slice(entries.columns[order])
        sorted_entropies = None if entropies is None else entropies[order]
        grad, grad_entropy = token_gradients(loss, logprobs[order], sorted_entropies, sorted_columns)
        grad_E, grad_entropy_E = grad[inverse], None if grad_entropy is None else grad_entropy[inverse]

        def stored(_l: Tensor, _e: Tensor | None, picked: slice):
            return grad_E[picked], None if grad_entropy_E is None else grad_entropy_E[picked]

        with torch.no_grad():
            grad_rows, _, _ = head.backward(rows.detach(), stored)
        if rows.requires_grad:
            rows.backward(grad_rows)

    def _run_backward(
        self,
        jobs: Sequence[Job],
        results: Sequence[_Result],
        members: Sequence[list[int]],
        gradients: Callable[[int, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor | None]],
    ) -> None:
        """One packed pass for all jobs; the entries of a job are one run, so none has to be looked for."""
        batch, route, entries, edges = self._packed(jobs, results, members)
        with torch.enable_grad():
            rows = self._hidden(batch, route, entries.row_tokens)

        def by_job(logprobs: Tensor, entropies: Tensor | None, picked: slice) -> tuple[Tensor, Tensor | None]:
            parts = []
            for job, (low, high) in enumerate(itertools.pairwise(edges)):
                start, stop = max(low, picked.start), min(high, picked.stop)
                if start < stop:
                    own = slice(start - picked.start, stop - picked.start)
                    own_entropies = None if entropies is None else entropies[own]
                    parts.append(gradients(job, logprobs[own], own_entropies, entries.columns[start:stop]))
            if len(parts) == 1:
                return parts[0]
            filled = [torch.zeros_like(grad) if entropy is None else entropy for grad, entropy in parts]
            return torch.cat([grad for grad, _ in parts]), None if entropies is None else torch.cat(filled)

        with_entropy = results[0].entropies is not None
        head = TargetHead(self.model.head, route, entries, with_entropy=with_entropy)
        with torch.no_grad():
            grad_rows, logprobs, entropies = head.backward(rows.detach(), by_job)
        if rows.requires_grad:
            rows.backward(grad_rows)
        for result, (low, high) in zip(results, itertools.pairwise(edges), strict=True):
            own_entropies = None if entropies is None else entropies[low:high]
            self._store(result, entries.columns[low:high], logprobs[low:high], own_entropies)

    def _packed(
        self, jobs: Sequence[Job], results: Sequence[_Result], members: Sequence[list[int]]
    ) -> tuple[PackedBatch, Route, Entries, list[int]]:
        """Each job's datums as a forest of their own, one after the other, and where each job's entries start."""
        batches, spans, entries, edges = [], [], [], [0]
        token = 0
        for job, result, chosen in zip(jobs, results, members, strict=True):
            if chosen:
                batch = pack([d.input_ids for d in job.datums], chosen, min_shared=self.min_shared)
                spans.append(Span(token, token + batch.num_tokens, job.weights))
                entries.append(self._entries(job, result, batch, token, True))
                batches.append(batch)
                token += batch.num_tokens
            edges.append(sum(len(part.columns) for part in entries))
        return PackedBatch.join(batches), Route(spans=spans), Entries.join(entries), edges

    @staticmethod
    def _store(result: _Result, columns: Tensor, logprobs: Tensor, entropies: Tensor | None) -> None:
        result.logprobs[columns] = logprobs
        result.is_known.index_fill_(0, columns, True)  # an assignment of True would make the host wait
        if result.entropies is not None and entropies is not None:
            result.entropies[columns] = entropies


def token_gradients(
    loss: AnyLoss, logprobs: Tensor, entropies: Tensor | None, columns: LossColumns
) -> tuple[Tensor, Tensor | None]:
    """d loss / d logprob and d loss / d entropy, by autograd over the token vectors alone."""
    with torch.enable_grad():
        leaves = [logprobs.detach().requires_grad_(True)]
        if entropies is not None:
            leaves.append(entropies.detach().requires_grad_(True))
        total = loss(leaves[0], leaves[1] if entropies is not None else None, columns).sum()
        if not total.requires_grad:
            return torch.zeros_like(logprobs), None
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    grad = grads[0] if grads[0] is not None else torch.zeros_like(logprobs)
    return grad, grads[1] if entropies is not None else None


def outputs_of(job: Job, result: _Result) -> list[dict[str, TensorData]]:
    """Per datum: logprobs and what is known of them, aligned with the target tokens as the caller gave them."""
    logprobs, is_known = result.logprobs.cpu().numpy(), result.is_known.cpu().numpy()
    outputs = []
    for datum, start, stop in zip(job.datums, result.offsets, result.offsets[1:], strict=False):
        own = slice(int(start) + datum.target_start, int(stop))
        outputs.append(
            {
                "logprobs": TensorData.from_numpy(logprobs[own]),
                "mask": TensorData.from_numpy(is_known[own].astype(np.float32)),
            }
        )
    return outputs


def _output(job: Job, result: _Result, loss: AnyLoss) -> ForwardBackwardOutput:
    metrics = loss.metrics(result.logprobs, result.entropies, result.columns)
    return ForwardBackwardOutput("ArrayRecord", outputs_of(job, result), metrics)
