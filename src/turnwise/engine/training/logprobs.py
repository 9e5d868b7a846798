"""Hidden states -> target logprobs, entropies, and their gradients, in chunks; never a full [N, V] tensor.

The logits of a chunk of rows are computed once. If token i's loss needs only token i's logprob, the loss is evaluated
at once, and the chunk's gradient is computed from the same exponentials. That needs no second head product, and nothing
is kept. A loss over whole sequences runs a first pass for the logprobs and a second one for the gradient.

Shape legend: R rows of hidden states (one chunk at a time), E entries (targets read from those rows), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.model.logits import finish_logits, logit_slopes
from turnwise.engine.model.lora import LoraLinear, Route
from turnwise.engine.model.ordered_low_rank import add_in_order
from turnwise.engine.ops import for_device
from turnwise.engine.ops.interface import SoftmaxGradients
from turnwise.engine.training.pack import Entries
from turnwise.models.blocks import LogitRule

TokenGradients = Callable[[Tensor, Tensor | None, slice], tuple[Tensor, Tensor | None]]
"""(logprobs [E], entropies [E] or None, which entries they are) -> d loss / d logprob, d loss / d entropy."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows [start, stop) of a chunk belong to one adapter's A and B (float32) and, in training, their gradients."""

    start: int
    stop: int
    a: Tensor
    b: Tensor
    scale: float
    grad_a: Tensor | None
    grad_b: Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Softmax of one chunk of rows, unnormalised: `exps` = exp(logit / T - max).

    Where fused kernels run, `exps` still holds the logits and `sums` their log-sum-exp.
    """

    rows: slice
    """The chunk's rows in the batch."""
    targets_E: Tensor
    """The target of each entry that reads the chunk."""
    local_E: Tensor
    """The row of each entry, counted within the chunk."""
    exps_RV: Tensor
    sums_R: Tensor
    logprobs_E: Tensor
    entropies_R: Tensor | None
    slopes_RV: Tensor | None = None
    """d logit / d product of the head, where the model caps its logits."""


def row_chunks(entries: Entries, vocab_size: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Slices (rows, entries) of the chunks, which cover all rows and entries."""
    num_rows = len(entries.row_tokens)
    step = max(16, for_device(device).facts.logits_chunk_bytes // (vocab_size * 4))
    bounds = np.searchsorted(entries.host_rows, np.arange(0, num_rows + step, step)).tolist()
    for i, start in enumerate(range(0, num_rows, step)):
        yield slice(start, min(start + step, num_rows)), slice(bounds[i], bounds[i + 1])


class TargetHead:
    """The unembedding with its adapters, applied to the rows of one packed batch."""

    def __init__(
        self, head: LoraLinear, route: Route, entries: Entries, *, with_entropy: bool, rule: LogitRule
    ) -> None:
        self.head = head
        self.rule = rule
        self.entries = entries
        self.with_entropy = with_entropy
        self.spans = _row_spans(head, route, entries)
        self.weight, self.bias = (head.weight, head.bias) if route.full is None else route.full.weights.head
        self._grads = None if route.full is None or route.full.grads is None else route.full.grads.head
        self.ops = route.ops_for(head.weight.device)
        is_wide = self.ops.facts.has_wide_activations
        self._fused = self.ops.softmax_for(torch.float32 if is_wide else self.weight.dtype)

    def outputs(self, hidden_RH: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute logprobs and entropies [E] without a gradient."""
        logprobs, entropies = [], []
        for rows, picked in row_chunks(self.entries, self.head.out_features, hidden_RH.device):
            chunk = self._forward(hidden_RH[rows], rows, picked)
            logprobs.append(chunk.logprobs_E)
            if chunk.entropies_R is not None:
                entropies.append(chunk.entropies_R[chunk.local_E])
        return _cat(logprobs, hidden_RH), _cat(entropies, hidden_RH) if self.with_entropy else None

    def backward(self, hidden_RH: Tensor, gradients: TokenGradients) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute d loss / d hidden [R, H], logprobs and entropies [E]; add adapter gradients in place."""
        grad_hidden = torch.empty_like(hidden_RH)
        logprobs, entropies = [], []
        for rows, picked in row_chunks(self.entries, self.head.out_features, hidden_RH.device):
            chunk = self._forward(hidden_RH[rows], rows, picked)
            entropies_E = None if chunk.entropies_R is None else chunk.entropies_R[chunk.local_E]
            grad_E, grad_entropy_E = gradients(chunk.logprobs_E, entropies_E, picked)
            grad_logits = self._grad_product(chunk, self._grad_logits(chunk, grad_E, grad_entropy_E))
            grad_hidden[rows] = self._grad_hidden(grad_logits, hidden_RH, rows)
            logprobs.append(chunk.logprobs_E)
            if entropies_E is not None:
                entropies.append(entropies_E)
            del chunk, grad_logits  # freed before the next chunk is formed
        return grad_hidden, _cat(logprobs, hidden_RH), _cat(entropies, hidden_RH) if self.with_entropy else None

    def _forward(self, hidden_RH: Tensor, rows: slice, picked: slice) -> _Chunk:
        logits = self.ops.products.linear(hidden_RH, self.weight, self.bias)
        for span in self._spans_in(rows):
            if self.ops.is_bitwise:
                own = slice(0, logits.shape[1]), (span.a.to(hidden_RH.dtype), span.b.to(hidden_RH.dtype))
                add_in_order(hidden_RH, logits, slice(span.start, span.stop), [own], span.scale, self.ops)
                continue
            low = hidden_RH[span.start : span.stop].to(span.a.dtype) @ span.a.t()
            logits[span.start : span.stop] += (low @ span.b.t()).mul_(span.scale).to(logits.dtype)
        logits = finish_logits(logits, self.rule)
        slopes = logit_slopes(logits, self.rule)
        local_E, targets_E = self.entries.rows[picked] - rows.start, self.entries.targets[picked]
        temperatures_R = self.entries.row_temperatures[rows]
        if self._fused is not None:
            logsumexps, means = self._fused.row_stats(logits, temperatures_R)
            chosen_E = logits[local_E, targets_E].float() / temperatures_R[local_E]
            entropies = logsumexps - means if self.with_entropy else None
            logprobs_E = chosen_E - logsumexps[local_E]
            return _Chunk(rows, targets_E, local_E, logits, logsumexps, logprobs_E, entropies, slopes)
        logits = logits.float()
        logits /= temperatures_R[:, None]
        logits -= logits.amax(dim=-1, keepdim=True)
        chosen_E = logits[local_E, targets_E]
        if not self.with_entropy:
            exps = logits.exp_()
            sums = exps.sum(dim=-1)
            return _Chunk(rows, targets_E, local_E, exps, sums, chosen_E - sums.log()[local_E], None, slopes)
        exps = logits.exp()
        sums = exps.sum(dim=-1)
        # H = log sum - E[logit]; an underflowed exp is 0 and its logit finite, so the product is 0.
        entropies = sums.log() - (logits.mul_(exps).sum(dim=-1) / sums)
        return _Chunk(rows, targets_E, local_E, exps, sums, chosen_E - sums.log()[local_E], entropies, slopes)

    def _grad_logits(self, chunk: _Chunk, grad_E: Tensor, grad_entropy_E: Tensor | None) -> Tensor:
        """d loss / d logits [R, V] (before the temperature), written over the chunk's exponentials."""
        local_E, sums_R = chunk.local_E, chunk.sums_R
        temperatures_R = self.entries.row_temperatures[chunk.rows]
        total_R = torch.zeros_like(sums_R).index_add_(0, local_E, grad_E)
        entropy_R = None
        if grad_entropy_E is not None and chunk.entropies_R is not None:
            entropy_R = torch.zeros_like(sums_R).index_add_(0, local_E, grad_entropy_E)
        if self._fused is not None:
            given = SoftmaxGradients(temperatures_R, sums_R, total_R, chunk.entropies_R, entropy_R)
            grad = self._fused.row_gradients(chunk.exps_RV, given)
            own_E = (grad_E / temperatures_R[local_E]).to(grad.dtype)
            return grad.index_put_((local_E, chunk.targets_E), own_E, accumulate=True)
        if entropy_R is None or chunk.entropies_R is None:
            grad = chunk.exps_RV.mul_((-total_R / sums_R)[:, None])
        else:
            # d H / d logit_v = -p_v (log p_v + H)
            probs = chunk.exps_RV.div_(sums_R[:, None])
            logprobs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log_()
            logprobs.add_(chunk.entropies_R[:, None]).mul_(-entropy_R[:, None]).sub_(total_R[:, None])
            grad = probs.mul_(logprobs)
        grad.index_put_((local_E, chunk.targets_E), grad_E, accumulate=True)
        return grad.div_(temperatures_R[:, None])

    def _grad_product(self, chunk: _Chunk, grad_logits: Tensor) -> Tensor:
        """d loss / d product of the head, written over that of the logits."""
        if chunk.slopes_RV is not None:
            grad_logits.mul_(chunk.slopes_RV)
        return grad_logits if self.rule.scale == 1 else grad_logits.mul_(self.rule.scale)

    def _grad_hidden(self, grad_logits: Tensor, hidden_RH: Tensor, rows: slice) -> Tensor:
        weight = self.weight
        hidden = hidden_RH[rows]
        narrow = grad_logits.to(hidden.dtype)
        grad_hidden = self.ops.products.multiply(narrow, weight)
        if self._grads is not None:
            self._add_head_gradients(narrow, hidden, *self._grads)
        for span in self._spans_in(rows):
            own = slice(span.start, span.stop)
            grad_low = (grad_logits[own] @ span.b.to(grad_logits.dtype)).float().mul_(span.scale)
            grad_hidden[own] += (grad_low @ span.a).to(grad_hidden.dtype)
            if span.grad_a is not None and span.grad_b is not None:
                rows_f32 = hidden[own].float()
                span.grad_a.addmm_(grad_low.t(), rows_f32)
                low = (rows_f32 @ span.a.t()).to(grad_logits.dtype)
                span.grad_b.add_(grad_logits[own].t() @ low, alpha=span.scale)
        return grad_hidden

    def _add_head_gradients(self, grad_logits: Tensor, hidden: Tensor, grad_weight: Tensor, grad_bias: Any) -> None:
        """Add the gradients of the head's own weights, if all weights are trained."""
        self.ops.products.multiply(grad_logits.t(), hidden, out=grad_weight, is_added=True)
        if grad_bias is not None:
            grad_bias.add_(grad_logits.sum(dim=0, dtype=grad_bias.dtype))

    def _spans_in(self, rows: slice) -> Iterator[RowSpan]:
        for span in self.spans:
            start, stop = max(span.start, rows.start), min(span.stop, rows.stop)
            if start < stop:
                yield replace(span, start=start - rows.start, stop=stop - rows.start)


def _row_spans(head: LoraLinear, route: Route, entries: Entries) -> list[RowSpan]:
    """Convert the route's spans over packed tokens into spans over the head's rows (rows are sorted by token)."""
    spans: list[RowSpan] = []
    for span in route.spans:
        if head.name not in span.weights.pairs:
            continue
        start, stop = np.searchsorted(entries.host_tokens, [span.start, span.stop]).tolist()
        a, b = span.weights.pairs[head.name]
        grad_a, grad_b = (span.weights.grad_pairs or {}).get(head.name, (None, None))
        spans.append(RowSpan(start, stop, a.detach().float(), b.detach().float(), span.weights.scale, grad_a, grad_b))
    return spans


def _cat(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, device=like.device)
