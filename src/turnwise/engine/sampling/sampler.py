"""Prefill, decode, stop, logprobs: the sampler's one step over a packed batch.

`submit` takes a request at any time, `step` advances all of them by one forward pass, finished requests leave through
their `on_done`. One thread calls everything (`worker.py`).
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.budget import MemorySplit
from turnwise.engine.config import EngineConfig
from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import Policy, Route, Span, merge_into
from turnwise.engine.model.lora_bank import bank_route, make_bank
from turnwise.engine.ops.interface import DrawSettings, Ops, PendingRead, TailCut
from turnwise.engine.sampling.draw import uniforms
from turnwise.engine.sampling.graphs import DecodeGraphs
from turnwise.engine.sampling.inputs import step_inputs
from turnwise.engine.sampling.kvcache import BlockPool, KvCache
from turnwise.engine.sampling.prompt_graphs import Found, PromptGraphs
from turnwise.engine.sampling.scheduler import OnDone, OnToken, Piece, Request, Row, Scheduler, Step
from turnwise.engine.sampling.stops import StopFinder
from turnwise.errors import DataError
from turnwise.types import SampledSequence, SampleResponse, SamplingParams

PROMPT_ROWS = 128
"""Prompt positions whose logits are formed at once."""


class _Flight:
    """A step that was launched: its rows, and the tokens and logprobs that are on their way to the host."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._parts: list[tuple[Sequence[Row], PendingRead]] = []

    @property
    def has_rows(self) -> bool:
        return bool(self._parts)

    def add(self, rows: Sequence[Row], drawn: Tensor) -> None:
        """`drawn` is [2, rows] float32: token ids, logprobs."""
        for row in rows:
            row.num_pending += 1
        self._parts.append((rows, self._ops.transfer.read_later(drawn)))

    def wait(self) -> list[tuple[Sequence[Row], list[list[float]]]]:
        return [(rows, drawn.wait().tolist()) for rows, drawn in self._parts]


class Sampler:
    def __init__(self, model: CausalModel, config: EngineConfig, memory: MemorySplit, tokenizer_dir: Path) -> None:
        self.model = model
        self.ops = model.ops
        self.config = config
        num_blocks = memory.kv_tokens // config.block_size
        self.cache = KvCache(model.kv_shape, num_blocks, config.block_size, model.dtype, model.device)
        self._flight: _Flight | None = None
        self._last_tokens = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=model.device)
        """By lane: the token that each running row sampled last."""
        self.decode_graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        if self.ops.new_graph_recorder is not None:
            num_blocks -= 1  # the last is where padded rows of a captured graph write
            self.decode_graphs = DecodeGraphs(model, self.cache, num_blocks, self._last_tokens)
            can_capture = self.ops.attention.can_capture_prefill(model.dtype, model.sizes.head_size)
            if model.fused is not None and can_capture:
                self.prompt_graphs = PromptGraphs(model, self.cache, num_blocks, self._last_tokens)
        self._bank = make_bank(model)
        self.pool = BlockPool(num_blocks, config.block_size)
        self.scheduler = Scheduler(
            self.pool,
            self.cache.copy_block,
            max_num_seqs=config.max_num_seqs,
            prefill_tokens=config.prefill_tokens or self.ops.facts.prefill_tokens,
            prefix_cache=config.prefix_cache,
        )
        self.scheduler.settle = self._settle
        self.stops = StopFinder(tokenizer_dir)
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count(1)
        self._seeds = random.Random(config.seed)
        self._merged: dict[str, Tensor] = {}
        self._merged_version = 0
        self._has_room_to_merge = memory.may_merge

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._flight is not None

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        policy: Policy,
        *,
        num_samples: int = 1,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        on_done: OnDone,
        on_token: OnToken | None = None,
    ) -> int:
        """Queue a request; bad input is refused here and now."""
        if num_samples < 1:
            raise DataError(f"num_samples={num_samples}; expected at least 1")
        max_tokens = self._check_lengths(len(prompt), params)
        request = Request(
            id=next(self._ids),
            prompt=self._checked_ids(prompt),
            params=params,
            policy=policy,
            num_samples=num_samples,
            seed=(self._seeds.getrandbits(63) if params.seed is None else params.seed) % 2**64,
            max_tokens=max_tokens,
            stop_ids=params.stop_ids(self.model.eos_ids),
            stop_strings=params.stop_strings(),
            prompt_logprobs=prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            on_done=on_done,
            on_token=on_token,
        )
        self._requests[request.id] = request
        self.scheduler.add(request)
        return request.id

    def cancel(self, request_id: int) -> None:
        """Stop working on a request; its `on_done` is not called."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.remove(request)

    def step(self) -> None:
        """One forward pass for everything that can run, and one more token for each row that is ready.

        On a GPU the pass is only launched; the tokens of the pass before it are read meanwhile, so the card never
        waits for the host. A row that turns out to have stopped gets one token too many, which is thrown away.
        """
        with torch.inference_mode():
            flight = self._launch()
            if self.ops.facts.is_async:
                flight, self._flight = self._flight, flight
            if flight is not None:
                self._land(flight)

    def _settle(self) -> bool:
        flight, self._flight = self._flight, None
        if flight is None:
            return False
        self._land(flight)
        return True

    def _launch(self) -> _Flight | None:
        """The next step, on its way; None when nothing can run.

        Running rows go first where a graph takes them: the card decodes while the host admits what waits.
        """
        flight = _Flight(self.ops)
        decode = self.scheduler.next_decode()
        if decode and self._replay(decode, flight):
            decode = []
        step = Step(decode, self.scheduler.next_pieces())
        if step.decode or step.prefill:
            self._run(step, flight)
        return flight if flight.has_rows else None

    def _replay(self, decode: Sequence[Row], flight: _Flight) -> bool:
        """Decode by a captured graph; False when there is none for these rows."""
        if self.decode_graphs is None:
            return False
        route = self._route(Step(decode, []))
        if not self._may_replay(decode, route):
            self.decode_graphs.forget_rows()
            return False
        drawn = self.decode_graphs.decode(decode, route)
        self.scheduler.finish_decode(decode)
        flight.add(decode, drawn)
        return True

    def _run(self, step: Step, flight: _Flight) -> None:
        """One packed pass: prompts, and whatever no graph decodes."""
        route = self._route(step)
        hidden = None
        if self.prompt_graphs is not None and (found := _find_graph(self.prompt_graphs, step, route)) is not None:
            if found.shape.draws:
                drawn_rows = [row for piece in step.prefill for row in self.scheduler.finish_piece(piece)]
                flight.add(drawn_rows, self.prompt_graphs.replay(found, step.prefill)[:, : len(drawn_rows)])
                return
            hidden = self.prompt_graphs.replay(found, step.prefill)
        lasts = _sampled_after(step)
        # A graph gives all rows, a bank's tiles count them all, and scoring reads them all; else the last layer runs
        # on what is sampled from.
        is_whole = hidden is not None or route.bank is not None or _scores_prompt(step)
        if hidden is None:
            input_ids, position_ids, plan = step_inputs(step, self.cache, self._last_tokens)
            rows = None if is_whole else self.ops.transfer.upload(np.array(lasts, dtype=np.int64))
            hidden = self.model.hidden(input_ids, position_ids, plan, route, rows)
        place = {token: token if is_whole else row for row, token in enumerate(lasts)}
        self.scheduler.finish_decode(step.decode)
        ready: list[Row] = list(step.decode)
        sources = list(range(len(step.decode)))
        offset = len(step.decode)
        for piece in step.prefill:
            length = piece.stop - piece.start
            if piece.row.scores_prompt:
                self._score_prompt(piece, hidden[offset : offset + length])
            offset += length
            for row in self.scheduler.finish_piece(piece):
                ready.append(row)
                sources.append(place[offset - 1])
        if ready:
            flight.add(ready, self._draw(ready, sources, hidden))

    def _may_replay(self, decode: Sequence[Row], route: Route) -> bool:
        """One set of weights, and no tail to cut: what the captured graphs do."""
        return not _has_adapters(route) and not any(cuts_tail(row.request.params) for row in decode)

    def _draw(self, ready: list[Row], sources: list[int], hidden: Tensor) -> Tensor:
        """[2, rows] float32: token ids and logprobs, drawn from hidden states `sources`; lanes get the tokens too."""
        owners = {source: row.request.policy for source, row in zip(sources, ready, strict=True)}
        place = {source: i for i, source in enumerate(owners)}
        indices = [list(owners), [place[source] for source in sources], [row.lane for row in ready]]
        index, places, lanes, temperature, uniform, *tail = self.ops.transfer.upload_all(
            [*(np.array(numbers, dtype=np.int64) for numbers in indices), *_draw_arrays(ready)]
        )
        logits = self._logits(hidden[index], list(owners.values()))
        if len(owners) < len(sources):
            logits = logits[places]
        settings = DrawSettings(temperature, uniform, TailCut(*tail) if tail else None)
        tokens, logprobs = self.ops.draw(logits, settings)
        self._last_tokens.index_copy_(0, lanes, tokens)
        return torch.stack([tokens.float(), logprobs])

    def _land(self, flight: _Flight) -> None:
        """Read the tokens of a step, book them, and let go of the rows that they complete."""
        for rows, drawn in flight.wait():
            tokens, logprobs = drawn
            for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
                row.num_pending -= 1
                request = row.request
                if request.id not in self._requests or row.index in request.finished:
                    continue  # cancelled, failed, or stopped one token ago
                if token < 0 or logprob != logprob:
                    self._fail(request, DataError("the model's logits are not finite; are the weights damaged?"))
                    continue
                self.scheduler.advance(row, int(token), logprob)
                if request.on_token is not None:
                    request.on_token(row.index, int(token), logprob)
                is_stop = self._is_stop(row)
                if is_stop or len(row.logprobs) >= request.max_tokens:
                    self._complete(row, is_stop=is_stop)

    def _is_stop(self, row: Row) -> bool:
        request = row.request
        if row.tokens[-1] in request.stop_ids:
            return True
        if not request.stop_strings:
            return False
        return self.stops.ends_with_stop(row.tokens[len(request.prompt) :].tolist(), request.stop_strings)

    def _complete(self, row: Row, *, is_stop: bool) -> None:
        request = row.request
        self.scheduler.retire(row)
        sampled = row.tokens[len(request.prompt) :].tolist()
        request.finished[row.index] = SampledSequence("stop" if is_stop else "length", sampled, row.logprobs)
        if len(request.finished) == request.num_samples:
            del self._requests[request.id]
            request.on_done(_response(request))

    def _fail(self, request: Request, error: BaseException) -> None:
        if self._requests.pop(request.id, None) is not None:
            self.scheduler.remove(request)
            request.on_done(error)

    def fail_all(self, error: BaseException) -> None:
        """Every request that is here ends with `error`."""
        for request in list(self._requests.values()):
            self._fail(request, error)

    def warm_up(self, policy: Policy, max_context: int) -> Generator[None, None, int]:
        """Capture the decode graphs of one policy for contexts of up to `max_context` tokens; returns how many.

        Nobody has to: a graph that is missing is captured when a step first needs it. There are none on a CPU, and
        those of a policy that is not merged depend on who else samples.
        """
        if self.decode_graphs is None or (policy.has_adapter and not self._has_room_to_merge):
            return 0
        num_blocks = -(-max_context // self.config.block_size)
        wanted = self.decode_graphs.missing(self.config.max_num_seqs, num_blocks, self._alone(policy))
        for bucket, width in wanted:
            self.decode_graphs.capture(bucket, width, self._alone(policy))
            yield
        return len(wanted)

    def get_ready(self, policy: Policy) -> None:
        """Merge a policy before anybody samples from it, if nobody samples: the card has time, and later it has not."""
        if self.ops.facts.is_async and policy.has_adapter and self._has_room_to_merge and not self.has_work:
            with torch.inference_mode():
                self._merge(policy)

    def _alone(self, policy: Policy) -> Route:
        with torch.inference_mode():
            return self._merge(policy) if policy.has_adapter else Route()

    def drop_cache(self) -> None:
        """Forget every prefix."""
        self.pool.clear()

    def _route(self, step: Step) -> Route:
        """The adapter of every packed token: merged into the weights when one policy has the sampler to itself."""
        if self._may_merge(step):
            policy = step.decode[0].request.policy if step.decode else step.prefill[0].row.request.policy
            return self._merge(policy)
        lengths = [(row.request.policy, 1) for row in step.decode]
        lengths += [(piece.row.request.policy, piece.stop - piece.start) for piece in step.prefill]
        return self._unmerged(lengths)

    def _merge(self, policy: Policy) -> Route:
        if self._merged_version != policy.version:
            merge_into(self._merged, self.model.linears, self.model.groups, policy)
            self._merged_version = policy.version
            for graphs in (self.decode_graphs, self.prompt_graphs):
                if graphs is not None:
                    graphs.captures.weights_moved()
        return Route(merged=self._merged)

    def _unmerged(self, lengths: Sequence[tuple[Policy, int]]) -> Route:
        """Adapters beside the base, for neighbouring runs of (policy, rows)."""
        if self._bank is not None and any(policy.has_adapter for policy, _ in lengths):
            return Route(bank=bank_route(self._bank, lengths, self.model.device))
        return Route(spans=_spans(lengths))

    def _may_merge(self, step: Step) -> bool:
        if not self._has_room_to_merge:
            return False
        policies = {row.request.policy for row in step.decode} | {p.row.request.policy for p in step.prefill}
        if len(policies) != 1 or not next(iter(policies)).has_adapter:
            return False
        return self.config.merge_adapter == "always" or len(self.scheduler.policies()) == 1

    def _logits(self, hidden: Tensor, owners: Sequence[Policy]) -> Tensor:
        head = self.model.head
        if self._merged_version and all(owner.version == self._merged_version for owner in owners):
            return head.apply_route(hidden, Route(merged=self._merged))
        if self._bank is not None:
            return head.apply_route(hidden, self._unmerged([(owner, 1) for owner in owners]))
        order = sorted(range(len(owners)), key=lambda i: owners[i].version)
        spans = _spans([(owners[i], 1) for i in order])
        if order == list(range(len(owners))):
            return head.apply_route(hidden, Route(spans=spans))
        index = self.ops.transfer.upload(np.array(order))
        logits = head.apply_route(hidden[index], Route(spans=spans))
        return torch.empty_like(logits).index_copy_(0, index, logits)

    def _score_prompt(self, piece: Piece, hidden: Tensor) -> None:
        """Logprobs (temperature 1) of the prompt tokens that this piece's positions predict."""
        request = piece.row.request
        targets = request.prompt[piece.start + 1 : piece.stop + 1]
        for start in range(0, len(targets), PROMPT_ROWS):
            chosen = torch.tensor(targets[start : start + PROMPT_ROWS], device=hidden.device)
            rows = hidden[start : start + len(chosen)]
            logits = self._logits(rows, [request.policy] * len(chosen)).float()
            logprobs = torch.log_softmax(logits, dim=-1)
            request.known_prompt_logprobs += logprobs.gather(1, chosen[:, None])[:, 0].tolist()
            if request.topk_prompt_logprobs:
                values, ids = logprobs.topk(request.topk_prompt_logprobs, dim=-1)
                request.known_topk += [
                    list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
                ]

    def _check_lengths(self, num_tokens: int, params: SamplingParams) -> int:
        context = self.model.max_context_length
        if not num_tokens:
            raise DataError("the prompt is empty; send at least one token")
        if num_tokens >= context:
            raise DataError(f"the prompt has {num_tokens} tokens; this model's context holds {context}, shorten it")
        max_tokens = min(params.max_tokens or context, context - num_tokens)
        capacity = self.pool.num_blocks * self.config.block_size
        if num_tokens + max_tokens > capacity and params.max_tokens is None:
            max_tokens = capacity - num_tokens
        if num_tokens + max_tokens > capacity or max_tokens < 1:
            raise DataError(
                f"prompt ({num_tokens} tokens) and max_tokens ({max_tokens}) need more than the {capacity} tokens "
                "that the KV cache holds; shorten them or raise kv_cache_gib"
            )
        return max_tokens

    def _checked_ids(self, prompt: Sequence[int]) -> array[int]:
        vocab = self.model.vocab_size
        try:
            ids = array("i", prompt)
            is_known = int(np.frombuffer(ids, dtype=np.uint32).max()) < vocab  # a negative id is a large one here
        except OverflowError:
            is_known = False
        if not is_known:
            position, wrong = next((i, token) for i, token in enumerate(prompt) if not 0 <= token < vocab)
            raise DataError(
                f"token id {wrong} at position {position} of the prompt is outside this model's "
                f"vocabulary of {vocab}; was the text encoded with another model's tokenizer?"
            )
        return ids


def _sampled_after(step: Step) -> list[int]:
    """The packed tokens that something is sampled after: every decode row, and the end of each prompt that ends."""
    stops = itertools.accumulate((piece.stop - piece.start for piece in step.prefill), initial=len(step.decode))
    next(stops)
    ends = [stop - 1 for piece, stop in zip(step.prefill, stops, strict=True) if piece.is_last]
    return [*range(len(step.decode)), *ends]


def _find_graph(graphs: PromptGraphs, step: Step, route: Route) -> Found | None:
    """The graph that reads this step's prompts, and draws what follows each if that is one token."""
    if step.decode or route.bank is not None or not graphs.are_few(step.prefill):
        return None
    if _has_adapters(route) or _scores_prompt(step):
        return None
    return graphs.find(step.prefill, route, draws=all(_ends_alone(piece) for piece in step.prefill))


def _has_adapters(route: Route) -> bool:
    """Beside the base, span by span."""
    return any(span.weights.pairs for span in route.spans)


def _scores_prompt(step: Step) -> bool:
    return any(piece.row.scores_prompt for piece in step.prefill)


def _ends_alone(piece: Piece) -> bool:
    """One token is drawn after it, from the whole vocabulary."""
    is_one = piece.row.request.num_samples == 1 or not piece.row.is_leader
    return piece.is_last and is_one and not cuts_tail(piece.row.request.params)


def cuts_tail(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _draw_arrays(rows: Sequence[Row]) -> list[np.ndarray]:
    """Temperatures and uniform numbers; and, where some row cuts its tail, the arrays of `TailCut`."""
    params = [row.request.params for row in rows]
    num_sampled = [row.num_sampled + row.num_pending for row in rows]
    arrays = [
        np.array([p.temperature for p in params], dtype=np.float32),
        uniforms([row.request.seed for row in rows], [row.index for row in rows], num_sampled),
    ]
    if not any(cuts_tail(p) for p in params):
        return arrays
    return [
        *arrays,
        np.array([p.top_k for p in params], dtype=np.int64),
        np.array([p.top_p for p in params], dtype=np.float32),
        np.array([p.min_p for p in params], dtype=np.float32),
    ]


def _spans(lengths: Sequence[tuple[Policy, int]]) -> list[Span]:
    """Neighbouring runs of one policy, as spans over packed tokens."""
    spans: list[Span] = []
    start = 0
    for policy, run in itertools.groupby(lengths, key=lambda pair: pair[0]):
        stop = start + sum(length for _, length in run)
        spans.append(Span(start, stop, policy))
        start = stop
    return spans


def _response(request: Request) -> SampleResponse:
    return SampleResponse(
        sequences=[request.finished[i] for i in range(request.num_samples)],
        prompt_logprobs=[None, *request.known_prompt_logprobs] if request.prompt_logprobs else None,
        topk_prompt_logprobs=[None, *request.known_topk] if request.topk_prompt_logprobs else None,
        policy_version=request.policy.version,
        num_cached_prompt_tokens=request.num_cached,
    )
