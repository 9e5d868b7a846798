"""Opponents that are models: in this process, or behind an address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwise.client.base import SamplingClient
from turnwise.envs.game import Game
from turnwise.envs.seats import OPPONENT_DEADLINE_S
from turnwise.errors import AttemptFailed, Party
from turnwise.judges.models import AddressModel, JudgeBusyError
from turnwise.renderers.base import Renderer
from turnwise.trajectory import Message
from turnwise.types import ModelInput, SamplingParams

RATE_LIMIT_WAIT_S = 1.0
"""How long we wait after an answer 429 that does not say how long."""
LEAST_WAIT_S = 0.1
"""How long we wait where we are asked to wait for less, such as 0 s, so that nobody is asked without a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOpponent:
    """Weights behind a sampling client. Weights of the policy's own base model are sampled in the same batches."""

    name: str
    sampler: SamplingClient = field(repr=False)
    renderer: Renderer = field(repr=False)
    temperature: float = 1.0
    max_tokens: int = 64
    context_length: int = 0
    """Most tokens of prompt and reply; 0: not bounded here."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply, besides the renderer's stop tokens."""
    is_scripted: bool = False

    async def reply(self, game: Game, dialogue: Sequence[Message], seed: int) -> str:  # noqa: ARG002 - it reads words
        prompt_ids = self.renderer.start(dialogue)
        max_tokens = self.max_tokens
        if self.context_length:
            max_tokens = min(max_tokens, self.context_length - len(prompt_ids))
        if max_tokens < 1:
            raise AttemptFailed(
                Party.OPPONENT,
                f"the dialogue of {self.name} has {len(prompt_ids)} tokens, and its context is {self.context_length}",
            )
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            seed=seed,
            stop=list(self.stop) or None,
            stop_token_ids=list(self.renderer.stop_ids),
        )
        prompt = ModelInput.from_ints(prompt_ids)
        response = await self.sampler.sample_async(prompt, num_samples=1, sampling_params=params)
        return self.renderer.parse(list(response.sequences[0].tokens)).content


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressOpponent:
    """A model behind an OpenAI-compatible address. It takes no seed, so its replies differ from play to play."""

    name: str
    model: AddressModel
    deadline_s: float = OPPONENT_DEADLINE_S
    """Seconds for one reply. An address that asks us to wait longer has failed."""
    is_scripted: bool = False

    async def reply(self, game: Game, dialogue: Sequence[Message], seed: int) -> str:  # noqa: ARG002
        ends_s = time.monotonic() + self.deadline_s
        while True:
            try:
                return await self.model.answer(dialogue)
            except JudgeBusyError as busy:
                wait_s = RATE_LIMIT_WAIT_S if busy.wait_s is None else max(busy.wait_s, LEAST_WAIT_S)
                if busy.wait_s is None and not busy.is_rate_limit:
                    raise
                if time.monotonic() + wait_s >= ends_s:
                    detail = f"{busy}; it asks for {wait_s:g} s, more than is left of {self.deadline_s:g} s"
                    raise AttemptFailed(Party.OPPONENT, f"{self.name}: {detail}") from busy
            await asyncio.sleep(wait_s)


@dataclass(slots=True)
class RecordedOpponent:
    """Says again what was recorded, for the replay of an attempt."""

    name: str
    said: Sequence[str]
    is_scripted: bool = False
    _next: int = 0

    async def reply(self, game: Game, dialogue: Sequence[Message], seed: int) -> str:  # noqa: ARG002
        if self._next >= len(self.said):
            raise AttemptFailed(Party.OPPONENT, f"the record has {len(self.said)} replies of {self.name}, not more")
        self._next += 1
        return self.said[self._next - 1]
