"""The self-test at load: 32 tokens through trainer, prefill and decode against plain transformers.

transformers ran the same tokens before we replaced anything in the model (`model/reference.py`). Every part that both
sides have is compared: the embedding, the attention and the MLP of each layer, the last norm, and the head's logprobs.
The first part that differs is named in the error.

A difference is measured against the size of the part's output. In bfloat16, a part may be off by a few times as much
as transformers' own bfloat16 is. There a model with experts may also choose another expert for some tokens, which is no
defect, and every later part sees it: from the first experts on, half of the tokens must agree, and roughly.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.config import EngineConfig
from turnwise.engine.model.lora import Route
from turnwise.engine.model.reference import PlainRun, Reference
from turnwise.engine.model.trace import LAST_NORM, Trace, traced
from turnwise.engine.passed_tests import PassedTests
from turnwise.engine.sampling.inputs import step_inputs
from turnwise.engine.sampling.requests import BlockTable, Piece, Row, Step
from turnwise.engine.training.objective import TOKEN_LOGPROBS
from turnwise.engine.training.pack import make_entries, pack
from turnwise.errors import ModelError

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine

log = logging.getLogger(__name__)

MOST_OFF = {torch.float32: 1e-3, torch.bfloat16: 0.04}
"""The largest difference of a part, in sizes of its output, that is never an error."""
MOST_NATS = {torch.float32: 2e-3, torch.bfloat16: 0.1}
"""The same for logprobs, in nats."""
MOST_OFF_BEHIND_EXPERTS, MOST_NATS_BEHIND_EXPERTS = 0.5, 1.0
"""The same where a token's expert may be another one because of rounding."""
ROUNDINGS = 4.0
"""A part may be off by this many times what transformers' own rounding makes of it."""
NUM_DECODED = 3
"""Tokens at the end of each sequence that are decoded, not prefilled."""
HEAD = "head"


@dataclass(frozen=True, slots=True)
class OurRun:
    """One of our ways to run the tokens."""

    path: str
    """`trainer`, `prefill` or `decode`."""
    trace: Trace
    places: np.ndarray
    """[rows] which token of the reference each row of the trace is."""
    logprobs: Tensor
    """[targets] of the tokens that follow `targets`."""
    targets: np.ndarray
    """[targets] tokens of the reference, whose next token's logprob was computed."""


class SelfTest:
    """The test of one model; it is due unless it is turned off, or took long and was passed before."""

    def __init__(self, model_dir: Path, device: torch.device, dtype: torch.dtype, config: EngineConfig) -> None:
        how = " ".join(name for name in ("context_length", "bitwise") if getattr(config, name))
        how += str(config.context_length or "")
        self._passed = PassedTests(model_dir, device, dtype, how) if config.self_test else None
        self.is_due = self._passed is not None and not self._passed.has_record()

    def check(self, engine: Engine) -> None:
        """Run the test if transformers' side of it was computed at load, and forget that side."""
        references, engine.model.references = engine.model.references, ()
        if not references:
            return
        start = time.perf_counter()
        for reference in references:
            check_model(engine, reference)
        seconds = sum(one.seconds for one in references) + time.perf_counter() - start
        log.info("self-test of %s: as transformers, %.2f s", engine.name, seconds)
        if self._passed is not None:
            self._passed.record(seconds)


def check_model(engine: Engine, reference: Reference) -> None:
    """Raise a `ModelError` that names the part if the engine computes something else than transformers."""
    limits = _Limits(reference, engine.dtype, has_experts=_has_experts(engine))
    path = "trainer"
    try:
        with torch.no_grad():
            limits.check(_train(engine, reference), engine)
            path = "sampler"
            for run in _SamplerSteps(engine, reference).run():
                limits.check(run, engine)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as cause:
        raise ModelError(_told(engine, f"{path} fails: {type(cause).__name__}: {cause}")) from cause


class _Limits:
    """How far each part of the model may be from the reference."""

    def __init__(self, reference: Reference, dtype: torch.dtype, *, has_experts: bool) -> None:
        self.reference = reference
        self.dtype = dtype
        self.may_flip = has_experts and dtype is not torch.float32
        """Whether rounding may choose other experts."""
        ids = [token for sequence in reference.sequences for token in sequence]
        self.next_ids = torch.tensor([*ids[1:], 0], device=reference.exact.logits.device)

    def check(self, run: OurRun, engine: Engine) -> None:
        exact, rounded = self.reference.exact, self.reference.rounded
        least, share = MOST_OFF[self.dtype], 1.0
        index = torch.as_tensor(run.places, device=exact.logits.device)
        for part, (ours, wanted) in compared_parts(exact.trace, run).items():
            if self.may_flip and part.startswith("layer") and "att" not in part and "norm" not in part:
                least, share = MOST_OFF_BEHIND_EXPERTS, 0.5
            off = _off(ours, wanted[index], wanted, share)
            noise = 0.0 if rounded is None else _off(rounded.trace.parts[part], wanted, wanted, share)
            allowed = max(least, ROUNDINGS * noise)
            if not off <= allowed:
                raise ModelError(_told(engine, _difference(run.path, part, f"{off:.2g} of its size", f"{allowed:.2g}")))
        self._check_head(run, engine, exact, rounded)

    def _check_head(self, run: OurRun, engine: Engine, exact: PlainRun, rounded: PlainRun | None) -> None:
        index = torch.as_tensor(run.targets, device=exact.logits.device)
        wanted = self._logprobs(exact, index)
        least, share = (MOST_NATS_BEHIND_EXPERTS, 0.5) if self.may_flip else (MOST_NATS[self.dtype], 1.0)
        off = _largest((run.logprobs.float() - wanted).abs(), share)
        noise = 0.0 if rounded is None else _largest((self._logprobs(rounded, index) - wanted).abs(), share)
        allowed = max(least, ROUNDINGS * noise)
        if not off <= allowed:
            raise ModelError(_told(engine, _difference(run.path, HEAD, f"{off:.2g} nats", f"{allowed:.2g}")))

    def _logprobs(self, run: PlainRun, index: Tensor) -> Tensor:
        return torch.log_softmax(run.logits[index], -1).gather(1, self.next_ids[index, None])[:, 0]


def compared_parts(exact: Trace, run: OurRun) -> dict[str, tuple[Tensor, Tensor]]:
    """What both sides have, ours and transformers'.

    Our layers write no norm out, and a layer may run a part on all tokens at once that is none of its steps.
    """
    found = {part: (run.trace.parts.get(part), wanted) for part, wanted in exact.parts.items()}
    shapes = {part: (len(run.places), wanted.shape[1]) for part, wanted in exact.parts.items()}
    return {
        part: (ours, wanted)
        for part, (ours, wanted) in found.items()
        if ours is not None and tuple(ours.shape) == shapes[part]
    }


def _off(ours: Tensor, wanted: Tensor, everything: Tensor, share: float) -> float:
    """The distance between rows, relative to the size of the part's output."""
    size = everything.norm(dim=1).pow(2).mean().sqrt().clamp_min(1e-12)
    return _largest((ours - wanted).norm(dim=1) / size, share)


def _largest(differences: Tensor, share: float) -> float:
    """The largest of the smallest `share` of the differences."""
    if not torch.isfinite(differences).all():
        return float("inf")
    return float(differences.quantile(share))


def _train(engine: Engine, reference: Reference) -> OurRun:
    """One packed pass over a prefix tree."""
    model, sequences = engine.model, reference.sequences
    batch = pack([np.array(ids, dtype=np.int64) for ids in sequences], range(len(sequences)), min_shared=4)
    starts = np.cumsum([0, *map(len, sequences)])
    places = np.zeros(batch.num_tokens, dtype=np.int64)
    tokens, targets, next_ids = [], [], []
    for member, index in zip(batch.members, batch.packed_index, strict=True):
        own = np.arange(starts[member], starts[member + 1])
        places[index] = own
        tokens.append(index[:-1])
        targets.append(own[:-1])
        next_ids.append(np.array(sequences[member][1:], dtype=np.int64))
    numbers = np.concatenate(tokens), np.ones(sum(map(len, tokens))), np.concatenate(next_ids)
    entries = make_entries(*numbers, np.arange(len(numbers[0])), device=model.device)
    positions = batch.position_ids + reference.start.table_row
    input_ids, position_ids = model.ops.transfer.upload_all([batch.input_ids, positions])
    trace = Trace()
    with _watched(engine, trace):
        hidden = model.hidden(input_ids, position_ids, batch.plan, Route())
    trace.add(LAST_NORM, hidden)
    head = TOKEN_LOGPROBS.make_head(model, Route(), entries, with_entropy=False)
    logprobs, _ = head.outputs(hidden[entries.row_tokens])
    by_column = torch.empty_like(logprobs).index_copy_(0, entries.columns, logprobs)
    return OurRun("trainer", trace, places, by_column, np.concatenate(targets))


class _SamplerSteps:
    """All prompts in two pieces each, then the last tokens one by one, all sequences together."""

    def __init__(self, engine: Engine, reference: Reference) -> None:
        self.engine, self.sequences = engine, reference.sequences
        self.flat = torch.tensor([token for ids in self.sequences for token in ids], device=engine.device)
        self.starts = np.cumsum([0, *map(len, self.sequences)])
        num_blocks = -(-max(map(len, self.sequences)) // engine.sampler.cache.block_size)
        self.rows: list[Row] = []
        for i, ids in enumerate(self.sequences):
            blocks = array("i", range(i * num_blocks, (i + 1) * num_blocks))  # nobody else uses the cache yet
            prompt = array("i", ids[:-NUM_DECODED])
            tables = [BlockTable(blocks) for _ in engine.sampler.pools]  # it writes to none of them
            row = Row(cast(Any, None), 0, prompt, tables=tables, lane=i, first_angle=reference.start.table_row)
            self.rows.append(row)
        self.last_tokens = torch.zeros(len(self.rows), dtype=torch.int64, device=engine.device)

    def run(self) -> Iterator[OurRun]:
        """Prefill, then decode."""
        yield _join(self._prefill())
        yield _join(self._decode())

    def _prefill(self) -> Iterator[OurRun]:
        edges = [(0, len(row.tokens) // 2, len(row.tokens)) for row in self.rows]
        for part in range(2):
            pieces = [Piece(row, own[part], own[part + 1]) for row, own in zip(self.rows, edges, strict=True)]
            places = [np.arange(p.start, p.stop) + start for p, start in zip(pieces, self.starts, strict=False)]
            yield self._step("prefill", Step([], pieces), np.concatenate(places))

    def _decode(self) -> Iterator[OurRun]:
        for _ in range(NUM_DECODED):
            for i, (row, ids) in enumerate(zip(self.rows, self.sequences, strict=True)):
                self.last_tokens[i] = ids[len(row.tokens)]
                row.tokens.append(ids[len(row.tokens)])
            lengths = np.array([len(row.tokens) for row in self.rows])
            yield self._step("decode", Step(self.rows, []), self.starts[:-1] + lengths - 1)

    def _step(self, path: str, step: Step, places: np.ndarray) -> OurRun:
        engine, trace = self.engine, Trace()
        with _watched(engine, trace):
            input_ids, position_ids, plan = step_inputs(step, engine.sampler.cache, self.last_tokens)
            hidden = engine.model.hidden(input_ids, position_ids, plan, Route())
        trace.add(LAST_NORM, hidden)
        is_followed = ~np.isin(places, self.starts[1:] - 1)
        targets = places[is_followed]
        rows = hidden[torch.as_tensor(np.nonzero(is_followed)[0], device=hidden.device)]
        logits = engine.sampler.weights.logits(rows, [engine.base_policy] * len(rows)).float()
        next_ids = self.flat[torch.as_tensor(targets + 1, device=hidden.device)]
        return OurRun(path, trace, places, torch.log_softmax(logits, -1).gather(1, next_ids[:, None])[:, 0], targets)


def _join(runs: Iterator[OurRun]) -> OurRun:
    """The runs of several passes as one."""
    parts = list(runs)
    trace = Trace()
    for run in parts:
        for part, rows in run.trace.parts.items():
            trace.add(part, rows)
    places, targets = (np.concatenate([getattr(run, name) for run in parts]) for name in ("places", "targets"))
    return OurRun(parts[0].path, trace, places, torch.cat([run.logprobs for run in parts]), targets)


@contextmanager
def _watched(engine: Engine, trace: Trace) -> Iterator[None]:
    """Fill `trace` from the layers that run: ours, or transformers'."""
    fused = engine.model.fused
    if fused is None:
        with traced(engine.model.body, engine.model.sizes.num_layers, trace):
            yield
        return
    fused.trace = trace
    try:
        yield
    finally:
        fused.trace = None


def _has_experts(engine: Engine) -> bool:
    return any("expert" in name for name, _ in engine.model.body.named_parameters())


def _difference(path: str, part: str, off: str, allowed: str) -> str:
    return f"{path} differs at {_in_words(part)}: by {off}, allowed are {allowed}"


def _in_words(part: str) -> str:
    """`layer 3 self_attn` -> `layer 3 attention (self_attn)`."""
    words = part.split()
    if len(words) != 3:
        return f"the {part}"
    kind = "attention" if "att" in words[2] else "norm" if "norm" in words[2] else "MLP"
    return f"layer {words[1]} {kind} ({words[2]})"


def _told(engine: Engine, what: str) -> str:
    dtype = str(engine.dtype).removeprefix("torch.")
    return (
        f"the self-test of {engine.name} ({engine.arch}, {dtype} on {engine.device}) against transformers: {what}. "
        "Training and sampling would be wrong without a word, so the model is refused. "
        "engine.self_test=false loads it all the same"
    )
