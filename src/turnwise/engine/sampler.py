"""Prefill, decode, stop, logprobs: the sampler's one step over a packed batch.

`submit` takes a request at any time, `step` advances all of them by one forward pass, finished requests leave through
their `on_done`. One thread calls everything (`worker.py`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from turnwise.engine.attention import Chunk, PagedPlan
from turnwise.engine.config import EngineConfig
from turnwise.engine.draw import DrawSettings, draw, uniforms
from turnwise.engine.graphs import DecodeGraphs
from turnwise.engine.kvcache import BlockPool, KvCache
from turnwise.engine.lora import AnyPolicy, BasePolicy, Policy, Route, Span, merge_into
from turnwise.engine.models import CausalModel
from turnwise.engine.scheduler import OnDone, Piece, Request, Row, Scheduler, Step
from turnwise.engine.stops import StopFinder
from turnwise.errors import DataError
from turnwise.types import SampledSequence, SampleResponse, SamplingParams

PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
PROMPT_ROWS = 128
"""Prompt positions whose logits are formed at once."""


class Sampler:
    def __init__(self, model: CausalModel, config: EngineConfig, num_blocks: int, tokenizer_dir: Path) -> None:
        self.model = model
        self.config = config
        self.cache = KvCache(model.kv_shape, num_blocks, config.block_size, model.dtype, model.device)
        self._graphs: DecodeGraphs | None = None
        if model.device.type == "cuda":
            num_blocks -= 1  # the last is where padded rows of a captured graph write
            self._graphs = DecodeGraphs(model, self.cache, scratch_block=num_blocks)
        self.pool = BlockPool(num_blocks, config.block_size)
        self.scheduler = Scheduler(
            self.pool,
            self.cache.copy_block,
            max_num_seqs=config.max_num_seqs,
            prefill_tokens=config.prefill_tokens or PREFILL_TOKENS[model.device.type],
            prefix_cache=config.prefix_cache,
        )
        self.stops = StopFinder(tokenizer_dir)
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count(1)
        self._seeds = random.Random(config.seed)
        self._merged: dict[str, Tensor] = {}
        self._merged_version = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        policy: AnyPolicy,
        *,
        num_samples: int = 1,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        on_done: OnDone,
    ) -> int:
        """Queue a request; bad input is refused here and now."""
        tokens = [int(token) for token in prompt]
        if num_samples < 1:
            raise DataError(f"num_samples={num_samples}; expected at least 1")
        max_tokens = self._check_lengths(tokens, params)
        self._check_ids(tokens)
        request = Request(
            id=next(self._ids),
            prompt=tokens,
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
        """One forward pass for everything that can run, and one more token for each row that is ready."""
        step = self.scheduler.next_step()
        if not step.decode and not step.prefill:
            return
        with torch.inference_mode():
            self._run(step)

    def _run(self, step: Step) -> None:
        route = self._route(step)
        if self._graphs is not None and self._may_replay(step, route):
            drawn = self._graphs.decode(step.decode, route)
            for row in step.decode:
                self.scheduler.finish_decode(row)
            self._emit(step.decode, *drawn)
            return
        input_ids, position_ids, plan = self._inputs(step)
        hidden = self.model.hidden(input_ids, position_ids, plan, route)
        for row in step.decode:
            self.scheduler.finish_decode(row)
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
                sources.append(offset - 1)
        if ready:
            self._sample(ready, sources, hidden)

    def _may_replay(self, step: Step, route: Route) -> bool:
        """Decode alone, with one set of weights, and no tail to cut: what the captured graphs do."""
        is_plain = not step.prefill and not any(isinstance(span.weights, Policy) for span in route.spans)
        return is_plain and not any(cuts_tail(row.request.params) for row in step.decode)

    def _sample(self, ready: list[Row], sources: list[int], hidden: Tensor) -> None:
        unique = sorted(set(sources))
        place = {source: i for i, source in enumerate(unique)}
        index = torch.tensor(unique, device=hidden.device)
        owners = {source: row.request.policy for source, row in zip(sources, ready, strict=True)}
        logits = self._logits(hidden[index], [owners[source] for source in unique])
        if len(unique) < len(sources):
            logits = logits[torch.tensor([place[s] for s in sources], device=hidden.device)]
        tokens, logprobs = draw(logits, self._settings(ready))
        self._emit(ready, tokens.tolist(), logprobs.tolist())

    def _emit(self, rows: Sequence[Row], tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if token < 0 or logprob != logprob:
                self._fail(row.request, DataError("the model's logits are not finite; are the weights damaged?"))
            elif row.request.id in self._requests:
                self.scheduler.advance(row, token, logprob)
                self._check_stop(row)

    def _check_stop(self, row: Row) -> None:
        request = row.request
        sampled = row.tokens[len(request.prompt) :]
        is_stop = sampled[-1] in request.stop_ids or self.stops.ends_with_stop(sampled, request.stop_strings)
        if not is_stop and len(sampled) < request.max_tokens:
            return
        self.scheduler.retire(row)
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

    def drop_cache(self) -> None:
        """Forget every prefix."""
        self.pool.clear()

    def _inputs(self, step: Step) -> tuple[Tensor, Tensor, PagedPlan]:
        device, size = self.model.device, self.config.block_size
        tokens = [row.tokens[-1] for row in step.decode]
        positions = [len(row.tokens) - 1 for row in step.decode]
        slots = [row.blocks[p // size] * size + p % size for row, p in zip(step.decode, positions, strict=True)]
        chunks = []
        for piece in step.prefill:
            row = piece.row
            start = len(tokens)
            tokens += row.tokens[piece.start : piece.stop]
            positions += range(piece.start, piece.stop)
            slots += [row.blocks[p // size] * size + p % size for p in range(piece.start, piece.stop)]
            cached = torch.tensor(row.blocks[: -(-piece.start // size)], device=device)
            chunks.append(Chunk(start, len(tokens), piece.start, cached))
        width = max((len(row.blocks) for row in step.decode), default=0)
        table = [row.blocks + [0] * (width - len(row.blocks)) for row in step.decode]
        context_lens = [len(row.tokens) for row in step.decode]
        plan = PagedPlan(
            cache=self.cache,
            slots=torch.tensor(slots, device=device),
            num_decode=len(step.decode),
            block_table=torch.tensor(table, dtype=torch.int32, device=device),
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
            max_context=max(context_lens, default=0),
            chunks=chunks,
        )
        return torch.tensor(tokens, device=device), torch.tensor(positions, device=device), plan

    def _route(self, step: Step) -> Route:
        """The adapter of every packed token: merged into the weights when one policy has the sampler to itself."""
        if self._may_merge(step):
            policy = step.decode[0].request.policy if step.decode else step.prefill[0].row.request.policy
            assert isinstance(policy, Policy)
            if self._merged_version != policy.version:
                merge_into(self._merged, self.model.linears, policy)
                self._merged_version = policy.version
            return Route(merged=self._merged)
        lengths = [(row.request.policy, 1) for row in step.decode]
        lengths += [(piece.row.request.policy, piece.stop - piece.start) for piece in step.prefill]
        return Route(spans=_spans(lengths))

    def _may_merge(self, step: Step) -> bool:
        if self.config.merge_adapter == "never":
            return False
        policies = {row.request.policy for row in step.decode} | {p.row.request.policy for p in step.prefill}
        if len(policies) != 1 or isinstance(next(iter(policies)), BasePolicy):
            return False
        return self.config.merge_adapter == "always" or len(self.scheduler.policies()) == 1

    def _logits(self, hidden: Tensor, owners: Sequence[AnyPolicy]) -> Tensor:
        head = self.model.head
        if self._merged_version and all(owner.version == self._merged_version for owner in owners):
            return head.apply_route(hidden, Route(merged=self._merged))
        order = sorted(range(len(owners)), key=lambda i: owners[i].version)
        spans = _spans([(owners[i], 1) for i in order])
        if order == list(range(len(owners))):
            return head.apply_route(hidden, Route(spans=spans))
        index = torch.tensor(order, device=hidden.device)
        logits = head.apply_route(hidden[index], Route(spans=spans))
        return torch.empty_like(logits).index_copy_(0, index, logits)

    def _settings(self, rows: Sequence[Row]) -> DrawSettings:
        device = self.model.device
        params = [row.request.params for row in rows]
        noise = uniforms([r.request.seed for r in rows], [r.index for r in rows], [r.num_sampled for r in rows])
        return DrawSettings(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            top_k=torch.tensor([p.top_k for p in params], device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
            uniform=torch.from_numpy(noise).to(device),
            is_cut=any(cuts_tail(p) for p in params),
        )

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

    def _check_lengths(self, tokens: Sequence[int], params: SamplingParams) -> int:
        context = self.model.max_context_length
        if not tokens:
            raise DataError("the prompt is empty; send at least one token")
        if len(tokens) >= context:
            raise DataError(f"the prompt has {len(tokens)} tokens; this model's context holds {context}, shorten it")
        max_tokens = min(params.max_tokens or context, context - len(tokens))
        capacity = self.pool.num_blocks * self.config.block_size
        if len(tokens) + max_tokens > capacity and params.max_tokens is None:
            max_tokens = capacity - len(tokens)
        if len(tokens) + max_tokens > capacity or max_tokens < 1:
            raise DataError(
                f"prompt ({len(tokens)} tokens) and max_tokens ({max_tokens}) need more than the {capacity} tokens "
                "that the KV cache holds; shorten them or raise kv_cache_gib"
            )
        return max_tokens

    def _check_ids(self, tokens: Sequence[int]) -> None:
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.model.vocab_size:
            wrong = low if low < 0 else high
            raise DataError(
                f"token id {wrong} at position {tokens.index(wrong)} of the prompt is outside this model's vocabulary "
                f"of {self.model.vocab_size}; was the text encoded with another model's tokenizer?"
            )


def cuts_tail(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _spans(lengths: Sequence[tuple[AnyPolicy, int]]) -> list[Span]:
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
