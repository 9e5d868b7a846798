"""What a server must answer: when it is asked for the first time or comes back, and in every reply."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.backends.servers.http import ServerGoneError
from turnwise.client.base import TrainingClient
from turnwise.errors import ConfigError
from turnwise.types import Datum, ModelInput, SampledSequence, SampleRequest, SampleResponse, SamplingParams

MAX_MODEL_GAP = 0.25
"""How far a server's logprobs may be from the trainer's, in nats on average. Rounding in bfloat16 is
0.04 to 0.06 (docs/backends.md); another model is further away."""
SENTENCE = "A quick check: two plus two is four, Paris is the capital of France, and water is wet."
NUM_COMPARED = 32
"""Tokens that a server draws to show which model it serves."""


class Probe:
    """Asks a server for a token before it takes requests: one that accepts and never answers stays out."""

    @property
    def request(self) -> SampleRequest:
        """What the server is asked."""
        return SampleRequest((1, 2, 3), SamplingParams(max_tokens=1, seed=0))

    async def check(self, url: str, drawn: SampledSequence) -> None:
        """Raise `ConfigError` where what the newest version drew shows that the server is not what the run needs."""


class ModelProbe(Probe):
    """Also compares what a server draws with the trainer, from the moment that there is one.

    A server at an address may come back as another process with another model, or join late. The trainer may be an
    update ahead of the newest version when it is asked; one update moves logprobs far less than another model does, and
    a server that is refused is asked again.
    """

    def __init__(self, model_directory: Path, most_tokens: int) -> None:
        """Args:
        most_tokens: What servers read at most, prompt and reply together.
        """
        self._model_directory = model_directory
        self._most_tokens = most_tokens
        self._trainer: TrainingClient | None = None
        self.models: dict[str, str] = {}
        """What each server at an address says that it serves."""
        self._accepted: dict[str, str] = {}
        """What each server said when it was let in for the first time."""

    def take(self, trainer: TrainingClient | None) -> None:
        """Compare with this trainer from now on."""
        self._trainer = trainer

    @property
    def request(self) -> SampleRequest:
        return super().request if self._trainer is None else self.request_by(self._trainer.get_tokenizer())

    def check_name(self, url: str, model: str) -> None:
        """Refuse a server that says that it serves another model than before."""
        self.models[url], known = model, self._accepted.get(url, model)
        if known != model:
            raise ConfigError(
                f"the server at {url} came back with another model: it serves {model}, and served {known} before; "
                "start it with that one again"
            )

    async def check(self, url: str, drawn: SampledSequence) -> None:
        if self._trainer is not None:
            await self.compare_with(self._trainer, url, drawn)
        if url in self.models:
            self._accepted.setdefault(url, self.models[url])

    def request_by(self, tokenizer: Any) -> SampleRequest:
        """A sentence to go on with. It is not scored itself: see `VllmDialect`."""
        prompt: list[int] = tokenizer.encode(SENTENCE)[: max(1, self._most_tokens // 2)]
        params = SamplingParams(max_tokens=min(NUM_COMPARED, self._most_tokens - len(prompt)), seed=0, stop=[])
        return SampleRequest(prompt, params)

    async def compare_with(self, trainer: TrainingClient, url: str, drawn: SampledSequence) -> None:
        """Refuse a server whose logprobs are not the trainer's: it serves another model under the right name."""
        prompt = list(map(int, self.request_by(trainer.get_tokenizer()).prompt))
        ids = [*prompt, *drawn.tokens]
        columns = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
        datum = Datum(model_input=ModelInput.from_ints(ids[:-1]), loss_fn_inputs=columns)
        output = await trainer.forward([datum], "cross_entropy")
        self.compare(url, drawn, output.loss_fn_outputs[0]["logprobs"].tolist()[len(prompt) - 1 :])

    def compare(self, url: str, drawn: SampledSequence, expected: Sequence[float]) -> None:
        """Refuse a server whose logprobs are not these."""
        pairs = list(zip(drawn.logprobs or (), expected, strict=True))
        gap = sum(abs(theirs - ours) for theirs, ours in pairs) / len(pairs)
        if not gap <= MAX_MODEL_GAP:
            raise ConfigError(
                f"the server at {url} does not serve the run's model {self._model_directory}: its logprobs of "
                f"{len(pairs)} tokens are {gap:.2g} from ours on average; expected at most {MAX_MODEL_GAP}"
            )


def check_answer(response: SampleResponse, request: SampleRequest, url: str) -> None:
    """Refuse an answer that cannot be trained on: a logprob is never invented."""
    if len(response.sequences) != request.num_samples:
        raise ServerGoneError(f"{url} returned {len(response.sequences)} replies; {request.num_samples} were asked for")
    for sequence in response.sequences:
        num_logprobs = len(sequence.logprobs or ())
        if not sequence.tokens or num_logprobs != len(sequence.tokens):
            raise ServerGoneError(f"{url} returned {len(sequence.tokens)} tokens and {num_logprobs} logprobs")
        if not all(math.isfinite(value) and value <= 1e-3 for value in sequence.logprobs or ()):
            raise ServerGoneError(f"{url} returned a logprob that is none: not finite, or above 0")
