"""Prefill, decode, stop, logprobs: the sampler's one step over a packed batch.

`submit` accepts a request at any time, `step` advances all requests by one forward pass, and `on_done` is called for
each finished request. One thread calls everything (`worker.py`).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.budget import MemorySplit
from turnwise.engine.config import EngineConfig
from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import Policy, Route
from turnwise.engine.ops.interface import DrawSettings, Ops, PendingRead, TailCut
from turnwise.engine.sampling.graphs import DecodeGraphs
from turnwise.engine.sampling.inputs import alternative_uniforms, draw_arrays, step_inputs
from turnwise.engine.sampling.kvcache import BlockPool, KvCache
from turnwise.engine.sampling.prompt_graphs import Found, PromptGraphs
from turnwise.engine.sampling.requests import (
    Ahead,
    OnDone,
    OnToken,
    OpenRequest,
    Piece,
    RequestLimits,
    Row,
    Step,
    StopFinder,
)
from turnwise.engine.sampling.scheduler import Scheduler
from turnwise.engine.sampling.speculation import MOST_AHEAD, Speculation
from turnwise.engine.sampling.weights import SamplingWeights
from turnwise.engine.sampling.windows import WindowPool
from turnwise.engine.training.routing_memory import RoutingMemory
from turnwise.errors import DataError
from turnwise.types import SampledSequence, SampleRequest

PROMPT_ROWS = 128
"""Number of prompt positions whose logits are computed at once."""


class _LaunchedStep:
    """A step that was launched: its rows, and the tokens and logprobs that are on their way to the host."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._parts: list[tuple[Sequence[Row], PendingRead]] = []
        self.num_decoded = 0
        """Rows that decode, drafts included."""
        self.has_drafts = False
        self.has_prompts = False

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
    """All requests of one engine, sampled together."""

    def __init__(self, model: CausalModel, config: EngineConfig, memory: MemorySplit, tokenizer_dir: Path) -> None:
        self.model = model
        self.ops = model.ops
        self.config = config
        num_blocks = [tokens // config.block_size for tokens in memory.kv_group_tokens]
        num_choices = model.num_choices if config.routing_replay else (0, 0)
        self.routing = RoutingMemory(*num_choices) if config.routing_replay else None
        """What the trainer learns of the experts that were chosen; None where nobody asks."""
        shape = replace(model.kv_shape, num_choices=num_choices)
        self.cache = KvCache(shape, num_blocks, config.block_size, model.activation_dtype, model.device)
        self.weights = SamplingWeights(
            model, may_merge=memory.may_merge, merges_always=config.merge_adapter == "always"
        )
        self._launched: _LaunchedStep | None = None
        self._booked: _LaunchedStep | None = None
        """The step whose tokens this one has read."""
        is_speculating = config.speculation == "suffix"
        self._draft_lanes = range(config.max_num_seqs, config.max_num_seqs + (MOST_AHEAD if is_speculating else 0))
        self._last_tokens = torch.zeros(self._draft_lanes.stop + 1, dtype=torch.int64, device=model.device)
        """The token that each running row sampled last, by lane; then those of drafts, and one that nobody reads."""
        self.speculation: Speculation | None = None
        if is_speculating:
            self.speculation = Speculation(is_async=self.ops.facts.is_async, most_tokens=model.angle_switch)
        self._has_stale_lanes = False
        """Whether the host knows tokens that are not in their lanes: those that drafts have told."""
        self.decode_graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        # Without a kernel for experts, the host reads how many rows each expert has, which no graph can hold.
        can_capture = not model.experts or self.ops.experts.can_capture
        if self.ops.new_graph_recorder is not None and can_capture:
            num_blocks = [count - 1 for count in num_blocks]  # padded rows of a captured graph write to the last block
            self._make_graphs(num_blocks)
        self.pools = [
            BlockPool(count, config.block_size) if window is None else WindowPool(count, config.block_size, window)
            for count, window in zip(num_blocks, self.cache.windows, strict=True)
        ]
        """The blocks of each group of layers."""
        self.scheduler = Scheduler(
            self.pools,
            self.cache.copy_block,
            max_num_seqs=config.max_num_seqs,
            prefill_tokens=config.prefill_tokens or self.ops.facts.prefill_tokens,
            prefix_cache=config.prefix_cache,
            angle_switch=model.angle_switch,
        )
        self.scheduler.settle = self._settle
        self.stops = StopFinder(tokenizer_dir)
        self.limits = RequestLimits(
            model.vocab_size, model.max_context_length, self.scheduler.tables.most_tokens or model.max_context_length
        )
        self._requests: dict[int, OpenRequest] = {}
        self._ids = itertools.count(1)
        self._seeds = random.Random(config.seed)

    def _make_graphs(self, scratch_blocks: Sequence[int]) -> None:
        model = self.model
        self.decode_graphs = DecodeGraphs(model, self.cache, scratch_blocks, self._last_tokens)
        self.weights.when_merged.append(self.decode_graphs.captures.weights_moved)
        is_plain = self.cache.windows == (None,)  # a captured prompt reads all keys of its sequence
        if (
            is_plain
            and model.fused is not None
            and self.ops.attention.can_capture_prefill(model.dtype, model.sizes.largest_head)
        ):
            self.prompt_graphs = PromptGraphs(model, self.cache, scratch_blocks, self._last_tokens)
            self.weights.when_merged.append(self.prompt_graphs.captures.weights_moved)

    @property
    def pool(self) -> BlockPool:
        """The blocks of the first group: the layers that see everything, if there are any."""
        return self.pools[0]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._launched is not None

    def submit(self, asked: SampleRequest, policy: Policy, *, on_done: OnDone, on_token: OnToken | None = None) -> int:
        """Queue a request and return its id; bad input is refused at once."""
        if asked.num_samples < 1:
            raise DataError(f"num_samples={asked.num_samples}; expected at least 1")
        params = asked.sampling_params
        request = OpenRequest(
            id=next(self._ids),
            asked=asked,
            params=params,
            prompt=self.limits.check_prompt(asked.prompt),
            policy=policy,
            seed=(self._seeds.getrandbits(63) if params.seed is None else params.seed) % 2**64,
            max_tokens=self.limits.max_tokens(len(asked.prompt), params),
            stop_ids=params.stop_ids(self.model.eos_ids),
            stop_strings=params.stop_strings(),
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
            self._give_up(request)

    def start_again(self) -> None:
        """Begin all requests from their prompts: a step failed, and what it left in the cache is unknown.

        The same seeds draw the same tokens again. Only a sampler that does not run ahead of its device can do this.
        """
        assert self._launched is None, "the device may still write to the cache"
        requests, self._requests = list(self._requests.values()), {}
        for request in requests:
            self._give_up(request)
        self.drop_cache()
        for before in requests:
            request = replace(before, finished={}, num_cached=0)
            request.forget_scores()
            self._requests[request.id] = request
            self.scheduler.add(request)

    def step(self) -> None:
        """Run one forward pass for everything that can run, and sample one token for each row that is ready.

        On a GPU the pass is only launched. Meanwhile the tokens of the previous pass are read, so the GPU never waits
        for the host. A row that turns out to have stopped gets one extra token, which is dropped.
        """
        # What other programs do to a CPU meanwhile is not what a pass costs; a GPU works while the thread waits for it.
        clock = time.perf_counter if self.ops.facts.is_async else time.thread_time
        started_s = clock()
        self._booked = None
        with torch.inference_mode():
            launched = self._launch()
            if self.ops.facts.is_async:
                launched, self._launched = self._launched, launched
            if launched is not None:
                self._book(launched)
        booked = self._booked
        if self.speculation is not None and booked is not None and not booked.has_prompts:
            self.speculation.costs.add(booked.num_decoded, has_drafts=booked.has_drafts, seconds=clock() - started_s)

    def warm_up(self, policy: Policy, max_context: int) -> Generator[None, None, int]:
        """Capture the decode graphs of one policy for contexts of up to `max_context` tokens; returns how many.

        This is optional: a missing graph is captured when a step first needs it. There are no graphs on a CPU. The
        graphs of a policy that is not merged depend on the other policies that sample.
        """
        if self.decode_graphs is None or (policy.has_adapter and not self.weights.may_merge):
            return 0
        num_blocks = -(-max_context // self.config.block_size)
        wanted = self.decode_graphs.missing(self.config.max_num_seqs, num_blocks, self.weights.alone(policy))
        for bucket, width in wanted:
            self.decode_graphs.capture(bucket, width, self.weights.alone(policy))
            yield
        return len(wanted)

    def get_ready(self, policy: Policy) -> None:
        """Merge a policy before its first request, if no request is running, because the GPU is idle now."""
        if self.ops.facts.is_async and policy.has_adapter and self.weights.may_merge and not self.has_work:
            self.weights.alone(policy)

    def drop_cache(self) -> None:
        """Forget every prefix."""
        for pool in self.pools:
            pool.clear()

    def close(self) -> None:
        """Let the memory go when nothing refers to this any more, and not at the next garbage collection."""
        self.scheduler.settle = lambda: False

    def _settle(self) -> bool:
        """Wait for the tokens of the launched step and add them to their rows; False if there are none."""
        launched, self._launched = self._launched, None
        if launched is None:
            return False
        self._book(launched)
        return True

    def _launch(self) -> _LaunchedStep | None:
        """Launch the next step; None if nothing can run.

        If a graph can decode the running rows, they go first: the GPU decodes while the host admits waiting rows.
        """
        launched = _LaunchedStep(self.ops)
        decode = self._next_decode()
        launched.num_decoded = len(decode)
        launched.has_drafts = self.speculation is not None and any(isinstance(row, Ahead) for row in decode)
        if decode and self._replay(decode, launched):
            decode = []
        step = Step(decode, self.scheduler.next_pieces())
        launched.has_prompts = bool(step.prefill)
        for part in step.by_weights():
            self._run(part, launched)
        return launched if launched.has_rows else None

    def _next_decode(self) -> list[Row]:
        """The rows that decode now, each with its draft behind it."""
        if self._launched is not None and self._launched.has_drafts:
            self._settle()  # how far its rows have come is not known before
        decode = self.scheduler.next_decode()
        if self.speculation is None:
            return decode
        drafts = self.speculation.plan(decode)
        if drafts and self._settle():
            decode = self.scheduler.next_decode()
            drafts = self.speculation.plan(decode)
        guesses = {row: found[: self.scheduler.room_ahead(row, len(found))] for row, found in drafts}
        has_drafts, was_stale = any(guesses.values()), self._has_stale_lanes
        self._has_stale_lanes = has_drafts
        if not decode or not (has_drafts or was_stale):
            return decode
        if has_drafts:
            lanes = iter(self._draft_lanes)
            for row, found in guesses.items():
                row.request.num_drafted += len(found)
            decode = [one for row in decode for one in (row, *Ahead.of(row, guesses.get(row, ()), lanes))]
        last = [row.guess if isinstance(row, Ahead) else row.tokens[-1] for row in decode]
        arrays = [np.array(numbers, dtype=np.int64) for numbers in ([row.lane for row in decode], last)]
        self._last_tokens.index_copy_(0, *self.ops.transfer.upload_all(arrays))
        return decode

    def _replay(self, decode: Sequence[Row], launched: _LaunchedStep) -> bool:
        """Decode with a captured graph; False if there is none for these rows."""
        if self.decode_graphs is None:
            return False
        if len(Step(decode, []).by_weights()) > 1:  # a graph reads one set of weights
            self.decode_graphs.forget_rows()
            return False
        route = self.weights.route(Step(decode, []), self.scheduler.policies)
        # A graph has one set of weights and of angles, and draws from the whole vocabulary.
        if _has_adapters(route) or any(row.request.cuts_tail or row.first_angle for row in decode):
            self.decode_graphs.forget_rows()
            return False
        drawn = self.decode_graphs.decode(decode, route)
        self.scheduler.finish_decode(decode)
        launched.add(decode, drawn)
        return True

    def _run(self, step: Step, launched: _LaunchedStep) -> None:
        """Run one packed pass: prompts, and the rows that no graph decodes."""
        route = self.weights.route(step, self.scheduler.policies)
        hidden = None
        if self.prompt_graphs is not None and (found := _find_graph(self.prompt_graphs, step, route)) is not None:
            if found.shape.draws:
                drawn_rows = [row for piece in step.prefill for row in self.scheduler.finish_piece(piece)]
                launched.add(drawn_rows, self.prompt_graphs.replay(found, step.prefill)[:, : len(drawn_rows)])
                return
            hidden = self.prompt_graphs.replay(found, step.prefill)
        lasts = step.sampled_after()
        # Graphs, banks, scoring and the record of chosen experts need all rows; otherwise the last layer runs only on
        # the rows that are sampled from.
        is_whole = hidden is not None or route.bank is not None or step.scores_prompt or self.routing is not None
        if hidden is None:
            input_ids, position_ids, plan = step_inputs(step, self.cache, self._last_tokens)
            rows = None if is_whole else self.ops.transfer.upload(np.array(lasts, dtype=np.int64))
            hidden = self.model.hidden(input_ids, position_ids, plan, route, rows)
        row_of_token = {token: token if is_whole else row for row, token in enumerate(lasts)}
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
                sources.append(row_of_token[offset - 1])
        if ready:
            launched.add(ready, self._draw(ready, sources, hidden))

    def _draw(self, ready: list[Row], sources: list[int], hidden: Tensor) -> Tensor:
        """[2, rows] float32: token ids and logprobs, drawn from hidden states `sources`; lanes get the tokens too."""
        owners = {source: row.request.policy for source, row in zip(sources, ready, strict=True)}
        place = {source: i for i, source in enumerate(owners)}
        indices = [list(owners), [place[source] for source in sources], [row.lane for row in ready]]
        index, places, lanes, temperature, uniform, *tail = self.ops.transfer.upload_all(
            [*(np.array(numbers, dtype=np.int64) for numbers in indices), *draw_arrays(ready)]
        )
        logits = self.weights.logits(hidden[index], list(owners.values()))
        if len(owners) < len(sources):
            logits = logits[places]
        settings = DrawSettings(temperature, uniform, TailCut(*tail) if tail else None)
        tokens, logprobs = self.ops.draw(logits, settings)
        self._last_tokens.index_copy_(0, lanes, tokens)
        return torch.stack([tokens.float(), logprobs])

    def _score_prompt(self, piece: Piece, hidden: Tensor) -> None:
        """Logprobs (temperature 1) of the prompt tokens that this piece's positions predict, and what else is asked.

        Positions before `first_angle` have other angles; their logprobs are known already.
        """
        request = piece.row.request
        num_top = request.asked.topk_prompt_logprobs
        begin = max(piece.start, piece.row.first_angle)
        targets, hidden = request.prompt[begin + 1 : piece.stop + 1], hidden[begin - piece.start :]
        for start in range(0, len(targets), PROMPT_ROWS):
            chosen = torch.tensor(targets[start : start + PROMPT_ROWS], device=hidden.device)
            rows = hidden[start : start + len(chosen)]
            logits = self.weights.logits(rows, [request.policy] * len(chosen)).float()
            logprobs = torch.log_softmax(logits, dim=-1)
            request.known_prompt_logprobs += logprobs.gather(1, chosen[:, None])[:, 0].tolist()
            if request.asked.prompt_alt_tokens_k:
                first = begin + start + 1
                request.known_alternatives.append(_draw_alternatives(request, logits, logprobs, first))
            if num_top:
                values, ids = logprobs.topk(num_top, dim=-1)
                request.known_topk += [
                    list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
                ]

    def _book(self, launched: _LaunchedStep) -> None:
        """Read the tokens of a step, append them to their rows, and release the rows that are complete."""
        self._booked = launched
        num_right = 0
        for rows, drawn in launched.wait():
            tokens, logprobs = drawn
            for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
                row.num_pending -= 1
                request = row.request
                if request.id not in self._requests or row.index in request.finished:
                    continue  # cancelled, failed, or stopped one token ago
                if isinstance(row, Ahead):
                    if not row.is_right:
                        continue
                    row = row.parent
                    request.num_guessed_right += 1
                    num_right += 1
                    self.scheduler.finish_decode([row])  # the guessed token ran, too
                if token < 0 or logprob != logprob:
                    self._fail(request, DataError("the model's logits are not finite; are the weights damaged?"))
                    continue
                self.scheduler.advance(row, int(token), logprob)
                if request.on_token is not None:
                    request.on_token(row.index, int(token), logprob)
                is_stop = self.stops.is_stop(row)
                if is_stop or len(row.logprobs) >= request.max_tokens:
                    self._complete(row, is_stop=is_stop)
        if self.speculation is not None and launched.has_drafts:
            self.speculation.checked(num_right)

    def _complete(self, row: Row, *, is_stop: bool) -> None:
        request = row.request
        if self.routing is not None:
            num_tokens = len(row.tokens) - 1  # the last token was drawn and did not run
            choices = self.cache.read_choices(self.ops.transfer.upload(np.array(row.blocks)), num_tokens)
            self.routing.add(row.tokens[:num_tokens], self.ops.transfer.read_later(choices.contiguous()))
        self.scheduler.retire(row)
        if self.speculation is not None:
            self.speculation.finish(row)
        sampled = row.tokens[len(request.prompt) :].tolist()
        request.finished[row.index] = SampledSequence("stop" if is_stop else "length", sampled, row.logprobs)
        if len(request.finished) == request.asked.num_samples:
            del self._requests[request.id]
            request.on_done(request.response())

    def _fail(self, request: OpenRequest, error: BaseException) -> None:
        if self._requests.pop(request.id, None) is not None:
            self._give_up(request)
            request.on_done(error)

    def _give_up(self, request: OpenRequest) -> None:
        self.scheduler.remove(request)
        if self.speculation is not None:
            self.speculation.forget(request)


def _draw_alternatives(
    request: OpenRequest, logits: Tensor, logprobs: Tensor, first: int
) -> tuple[np.ndarray, np.ndarray]:
    """[rows, k] tokens, drawn at the request's temperature in place of prompt tokens `first` and on, and logprobs."""
    count, temperature = request.asked.prompt_alt_tokens_k, request.params.temperature
    if temperature == 0:
        tokens = logits.argmax(dim=-1, keepdim=True).expand(-1, count)
    else:
        random = alternative_uniforms(request.seed, range(first, first + len(logits)), count)
        running = torch.softmax(logits.double() / temperature, dim=-1).cumsum(dim=-1)
        goals = torch.from_numpy(random).to(running) * running[:, -1:]
        tokens = torch.searchsorted(running, goals, right=True).clamp_max(logits.shape[1] - 1)
    return tokens.cpu().numpy(), logprobs.gather(1, tokens).cpu().numpy()


def _find_graph(graphs: PromptGraphs, step: Step, route: Route) -> Found | None:
    """The graph that reads this step's prompts, and draws the next token of each if all need exactly one."""
    if step.decode or route.bank is not None or not graphs.are_few(step.prefill):
        return None
    if _has_adapters(route) or step.scores_prompt or any(piece.row.first_angle for piece in step.prefill):
        return None
    return graphs.find(step.prefill, route, draws=all(piece.ends_alone for piece in step.prefill))


def _has_adapters(route: Route) -> bool:
    """Whether some rows use an adapter beside the base model, span by span."""
    return any(span.weights.pairs for span in route.spans)
