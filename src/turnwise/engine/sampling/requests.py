"""A sampling request from the call to its answer: its parameters, its unfinished samples, and where they stop."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from turnwise.engine.model.lora import Policy
from turnwise.engine.sampling.kvcache import NO_PREFIX, Prefix
from turnwise.errors import DataError
from turnwise.models.tokenizer import load_tokenizer
from turnwise.types import PromptAltTokens, SampledSequence, SampleRequest, SampleResponse, SamplingParams, TensorData

OnDone = Callable[[SampleResponse | BaseException], None]
"""Called once, with the answer or with the error that ended the request."""
OnToken = Callable[[int, int, float], None]
"""Called with the sample's index, the token and its logprob, on the engine's thread; it must not raise."""
STOP_SLACK_TOKENS = 8
"""Tokens to decode in addition to a stop's length in characters, because a character may span several tokens."""

OTHER_ANGLES = 1 << 40
"""Added to the version of a policy, it names the same weights with the angles of long sequences."""


@dataclass(eq=False, slots=True, kw_only=True)
class OpenRequest:
    """One request that is being sampled."""

    id: int
    asked: SampleRequest
    params: SamplingParams
    """The params of `asked`, which every step reads for every row."""
    prompt: array[int]
    """The prompt's ids as an int32 array; arrays are cut and joined without a cost per item."""
    policy: Policy
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    stop_strings: list[str]
    on_done: OnDone
    on_token: OnToken | None = None
    finished: dict[int, SampledSequence] = field(default_factory=dict)
    """Finished samples, by index."""
    known_prompt_logprobs: list[float] = field(default_factory=list)
    known_topk: list[list[tuple[int, float]]] = field(default_factory=list)
    known_alternatives: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Tokens and logprobs of the prompt's alternatives, each [positions, k]."""
    num_cached: int = 0
    """Prompt tokens that were found in the KV cache."""
    num_drafted: int = 0
    """Tokens that were guessed for its samples, and checked."""
    num_guessed_right: int = 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the caller wants logprobs of the prompt's tokens, or others in their places."""
        asked = self.asked
        return asked.include_prompt_logprobs or asked.topk_prompt_logprobs > 0 or asked.prompt_alt_tokens_k > 0

    def forget_scores(self) -> None:
        """The prompt is about to be read, maybe once more."""
        for known in (self.known_prompt_logprobs, self.known_topk, self.known_alternatives):
            known.clear()

    @property
    def cuts_tail(self) -> bool:
        """Whether draws leave out some tokens of the vocabulary (top-k, top-p, min-p)."""
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0

    def response(self) -> SampleResponse:
        """The answer, once every sample is finished."""
        asked = self.asked
        return SampleResponse(
            sequences=[self.finished[i] for i in range(asked.num_samples)],
            prompt_logprobs=[None, *self.known_prompt_logprobs] if asked.include_prompt_logprobs else None,
            topk_prompt_logprobs=[None, *self.known_topk] if asked.topk_prompt_logprobs else None,
            prompt_alt_tokens=self._alternatives() if asked.prompt_alt_tokens_k else None,
            policy_version=self.policy.version,
            num_cached_prompt_tokens=self.num_cached,
            num_draft_tokens=self.num_drafted,
            num_accepted_draft_tokens=self.num_guessed_right,
        )

    def _alternatives(self) -> PromptAltTokens:
        shape = (0, self.asked.prompt_alt_tokens_k)  # all that there is of a prompt of one token
        tokens = [np.zeros(shape, dtype=np.int64), *(one for one, _ in self.known_alternatives)]
        logprobs = [np.zeros(shape, dtype=np.float32), *(one for _, one in self.known_alternatives)]
        return PromptAltTokens(
            TensorData.from_numpy(np.concatenate(tokens)), TensorData.from_numpy(np.concatenate(logprobs))
        )


@dataclass(eq=False, slots=True)
class BlockTable:
    """A row's blocks in one group of layers."""

    blocks: array[int] = field(default_factory=lambda: array("i"))
    """The blocks, in the order of the row's tokens."""
    first: int = 0
    """Blocks before it are given back: no token of the row sees them any more. Their numbers mean nothing."""
    spare: list[int] = field(default_factory=list)
    """Blocks that it will fill while it reads its prompt."""
    prefix: Prefix = NO_PREFIX
    """How many of the blocks are findable."""


@dataclass(eq=False, slots=True)
class Row:
    """One unfinished sample."""

    request: OpenRequest
    index: int
    tokens: array[int]
    """The prompt and what was sampled so far."""
    logprobs: list[float] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=lambda: [BlockTable()])
    """The row's block table, for each group of layers."""
    num_computed: int = 0
    """Leading tokens whose keys and values are in the cache, or were."""
    names: dict[int, list[int]] = field(default_factory=dict)
    """Names of its prefixes in each pool with a window, as far as they are known (`windows.WindowPool.names`)."""
    lane: int = -1
    """Its index among the running rows, or -1; the device keeps the row's last token there."""
    num_pending: int = 0
    """Tokens that the launched step samples for it; the host has not read them yet."""
    first_angle: int = 0
    """The row of the model's table of angles for its first position (`model/rotation.py`)."""
    is_start_scored: bool = False
    """Whether the prompt's tokens that are predicted with the first angles have their logprobs."""

    @property
    def root(self) -> int:
        """Names what its keys and values depend on besides its tokens: the weights and the angles."""
        version = self.request.policy.version
        return version + OTHER_ANGLES if self.first_angle else version

    @property
    def blocks(self) -> array[int]:
        """The blocks of the first group. The other groups' tables have the same length while the row runs."""
        return self.tables[0].blocks

    @property
    def prefix(self) -> Prefix:
        return self.tables[0].prefix

    @property
    def num_sampled(self) -> int:
        return len(self.logprobs)

    @property
    def length(self) -> int:
        """Number of tokens, including pending ones."""
        return len(self.tokens) + self.num_pending

    @property
    def is_finishing(self) -> bool:
        """Whether the pending token is the row's last one, whatever it is."""
        return self.num_pending > 0 and len(self.logprobs) + self.num_pending >= self.request.max_tokens

    @property
    def is_leader(self) -> bool:
        """Whether this row reads the prompt for all samples of its request."""
        return self.index == 0 and self.num_sampled == 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the row must compute every prompt position itself, without the cache."""
        return self.is_leader and self.request.scores_prompt


@dataclass(eq=False, slots=True, kw_only=True)
class Ahead(Row):
    """A running row as it is if its draft is right so far: a decode pass runs it as a row of its own.

    It has its row's tokens, logprobs and tables; `num_pending` counts the tokens of the draft that it stands after.
    """

    parent: Row
    guess: int
    """The draft's token at `place`, which is this row's last one."""
    place: int

    @classmethod
    def of(cls, parent: Row, guesses: Sequence[int], lanes: Iterable[int]) -> list[Ahead]:
        """One for each token of a draft. They write their tokens to `lanes`."""
        shared = parent.request, parent.index, parent.tokens, parent.logprobs, parent.tables
        length = len(parent.tokens)
        return [
            cls(
                *shared,
                lane=lane,
                num_pending=1 + i,
                first_angle=parent.first_angle,
                parent=parent,
                guess=guess,
                place=length + i,
            )
            for i, (guess, lane) in enumerate(zip(guesses, lanes, strict=False))
        ]

    @property
    def is_right(self) -> bool:
        """Whether the row has sampled just the draft up to here."""
        tokens = self.parent.tokens
        return len(tokens) == self.place + 1 and tokens[self.place] == self.guess


class Piece(NamedTuple):
    """Tokens [start, stop) of a row that one step reads."""

    row: Row
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the row's next token can be sampled after this piece."""
        return self.stop == len(self.row.tokens)

    @property
    def ends_alone(self) -> bool:
        """Whether exactly one token is drawn after this piece, from the whole vocabulary."""
        is_one = self.row.request.asked.num_samples == 1 or not self.row.is_leader
        return self.is_last and is_one and not self.row.request.cuts_tail


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: decode rows, then pieces of prompts; each part is sorted by policy."""

    decode: Sequence[Row]
    prefill: Sequence[Piece]

    @property
    def scores_prompt(self) -> bool:
        return any(piece.row.scores_prompt for piece in self.prefill)

    @property
    def policies(self) -> set[Policy]:
        return {row.request.policy for row in self.decode} | {piece.row.request.policy for piece in self.prefill}

    def by_weights(self) -> list[Step]:
        """The step in parts that can run as one pass: a policy whose weights are all its own has a part to itself."""
        policies = self.policies
        if not policies:
            return []
        alone = sorted((policy for policy in policies if policy.full is not None), key=lambda policy: policy.version)
        if len(policies) == 1 or not alone:
            return [self]
        parts = [self._part({policy}) for policy in alone]
        rest = policies - set(alone)
        return [*parts, self._part(rest)] if rest else parts

    def _part(self, policies: set[Policy]) -> Step:
        decode = [row for row in self.decode if row.request.policy in policies]
        return Step(decode, [piece for piece in self.prefill if piece.row.request.policy in policies])

    def sampled_after(self) -> list[int]:
        """The packed tokens after which a token is sampled: every decode row, and the end of each complete prompt."""
        found = list(range(len(self.decode)))
        stop = len(self.decode)
        for piece in self.prefill:
            stop += piece.stop - piece.start
            if piece.is_last:
                found.append(stop - 1)
        return found


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one sampler."""

    vocab_size: int
    context_length: int
    """Tokens of the longest sequence that the model can read."""
    cache_tokens: int
    """Tokens that the KV cache holds."""

    def check_prompt(self, prompt: Sequence[int]) -> array[int]:
        """The prompt as int32; refuses an empty or too long one, and ids outside the vocabulary."""
        if not prompt:
            raise DataError("the prompt is empty; send at least one token")
        if len(prompt) >= self.context_length:
            raise DataError(
                f"the prompt has {len(prompt)} tokens; this model's context holds {self.context_length}, shorten it"
            )
        try:
            ids = array("i", prompt)
            is_known = int(np.frombuffer(ids, dtype=np.uint32).max()) < self.vocab_size  # a negative id is large here
        except OverflowError:
            is_known = False
        if not is_known:
            position, wrong = next((i, one) for i, one in enumerate(prompt) if not 0 <= one < self.vocab_size)
            raise DataError(
                f"token id {wrong} at position {position} of the prompt is outside this model's "
                f"vocabulary of {self.vocab_size}; was the text encoded with another model's tokenizer?"
            )
        return ids

    def max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        """Most tokens that may be sampled after a prompt; refuses a request that can never fit."""
        limit = min(params.max_tokens or self.context_length, self.context_length - num_prompt)
        if num_prompt + limit > self.cache_tokens and params.max_tokens is None:
            limit = self.cache_tokens - num_prompt
        if num_prompt + limit > self.cache_tokens or limit < 1:
            raise DataError(
                f"prompt ({num_prompt} tokens) and max_tokens ({limit}) need more than the {self.cache_tokens} tokens "
                "that the KV cache holds; shorten them or raise kv_cache_gib"
            )
        return limit


class StopFinder:
    """Finds stop strings in the decoded tail of what was sampled.

    It decodes with the model's own tokenizer, which is loaded when the first stop string asks for it.
    """

    def __init__(self, tokenizer_dir: Path) -> None:
        self.tokenizer_dir = tokenizer_dir

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.tokenizer_dir)

    def is_stop(self, row: Row) -> bool:
        """Whether the row's newest token ends it: a stop token, or the last token of a stop string."""
        request = row.request
        if row.tokens[-1] in request.stop_ids:
            return True
        if not request.stop_strings:
            return False
        window = max(len(stop) for stop in request.stop_strings) + STOP_SLACK_TOKENS
        text = self.tokenizer.decode(row.tokens[len(request.prompt) :][-window:].tolist())
        return any(stop in text for stop in request.stop_strings)
