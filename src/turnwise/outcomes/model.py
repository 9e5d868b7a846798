"""A trained outcome model: asked about a whole conversation, it says how probable a success is.

    classifier   the value head of a critic, read at the end of the conversation; its loss is the squared error, which
                 is lowest at the true probability, so its scores are calibrated as far as it has learned
    generative   a model that writes a reason and a verdict; its score is the share of `num_votes` replies that say yes;
                 a reply without a verdict does not

`orm.json` in its directory says which kind it is, and which checkpoint. `attach` loads it with the service that holds
the run's own models; the base weights are shared where they are the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.outcomes.verdict_world import is_cut_text, read_verdict, verdict_messages
from turnwise.renderers import Renderer, get_renderer
from turnwise.trajectory import Message
from turnwise.types import Datum, ModelInput, SamplingParams, TensorData

FILE = "orm.json"
Kind = Literal["classifier", "generative"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeInfo:
    """What `orm.json` says."""

    kind: Kind
    base_model: str
    checkpoint: str
    """Its directory, relative to the outcome model's own."""
    worlds: tuple[str, ...]
    max_chars: int = 6000
    max_tokens: int = 96
    num_votes: int = 4
    max_prompt_tokens: int = 0
    """Tokens that a classifier reads; of a longer conversation it reads the beginning and the end. 0: any number."""
    num_cut: int = 0
    """The number of longer attempts among those that it was trained and measured on."""

    def write(self, directory: Path) -> None:
        part = directory / f"{FILE}.part"
        part.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        part.replace(directory / FILE)


class ModelSource(Protocol):
    """Makes the clients of checkpoints, as a service does."""

    def create_training_client_from_state(self, path: str) -> TrainingClient: ...

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient: ...


def is_outcome_model(path: Path) -> bool:
    return (path / FILE).is_file()


def open_outcome_model(directory: str | Path) -> OutcomeModel:
    """The outcome model of a directory; nothing is loaded before `attach`."""
    place = Path(directory).expanduser()
    if not is_outcome_model(place):
        raise ConfigError(f"{directory} is no outcome model: it holds no {FILE}; make one with: turnwise orm train")
    fields: dict[str, Any] = json.loads((place / FILE).read_text(encoding="utf-8"))
    worlds = tuple(fields.pop("worlds"))
    return OutcomeModel(place, OutcomeInfo(**fields, worlds=worlds))


class OutcomeModel:
    """Scores conversations from 0 to 1."""

    def __init__(self, directory: Path, info: OutcomeInfo) -> None:
        """`open_outcome_model` makes these."""
        self.directory = directory
        self.info = info
        self._client: TrainingClient | None = None
        self._sampler: SamplingClient | None = None
        self._renderer: Renderer | None = None

    def cuts(self, conversation: Sequence[Message]) -> bool:
        """Whether a conversation is too long for the model to be read whole. A loaded model knows."""
        if self._renderer is None:
            raise TurnwiseError(f"the outcome model {self.directory} is not loaded; call attach(service) first")
        if self.info.kind == "generative":
            return is_cut_text(conversation, self.info.max_chars)
        return 0 < self.info.max_prompt_tokens < len(read_ids(self._renderer, conversation))

    @property
    def is_attached(self) -> bool:
        return self._renderer is not None

    def attach(self, service: ModelSource) -> None:
        """Load it. The code that makes the clients of a run calls this before the run begins."""
        path = str((self.directory / self.info.checkpoint).resolve())
        if self.info.kind == "classifier":
            self._client = service.create_training_client_from_state(path)
            self._renderer = get_renderer(self._client.get_tokenizer())
        else:
            self._sampler = service.create_sampling_client(model_path=path)
            self._renderer = get_renderer(self._sampler.get_tokenizer())

    async def score(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """The probability of success of each conversation."""
        if self._renderer is None:
            raise TurnwiseError(f"the outcome model {self.directory} is not loaded; call attach(service) first")
        if not conversations:
            return []
        if self._client is not None:
            datums = [value_question(self._renderer, one, self.info.max_prompt_tokens) for one in conversations]
            return await read_scores(self._client, datums)
        return await asyncio.gather(*(self._ask(one) for one in conversations))

    async def _ask(self, conversation: Sequence[Message]) -> float:
        assert self._sampler is not None, "attach loads one of the two"
        assert self._renderer is not None
        prompt = self._renderer.start(verdict_messages(conversation, self.info.max_chars))
        params = SamplingParams(
            max_tokens=self.info.max_tokens, temperature=1.0, seed=0, stop_token_ids=list(self._renderer.stop_ids)
        )
        response = await self._sampler.sample_async(
            ModelInput.from_ints(prompt), num_samples=self.info.num_votes, sampling_params=params
        )
        said = [read_verdict(self._renderer.parse(one.tokens).content) for one in response.sequences]
        # A reply without a verdict is no yes: attempts that make the model babble must not earn more than failures.
        return sum(verdict is True for verdict in said) / len(said)


def value_question(renderer: Renderer, conversation: Sequence[Message], max_tokens: int = 0) -> Datum:
    """The datum that asks a critic for its value at the end of a conversation."""
    ids = cut_middle(read_ids(renderer, conversation), max_tokens)
    mask = [0.0] * (len(ids) - 1) + [1.0]
    return Datum(ModelInput.from_ints(ids), {"mask": TensorData(mask)})


def read_ids(renderer: Renderer, conversation: Sequence[Message]) -> list[int]:
    """What a classifier reads of a conversation. Only tools have names: on other messages these are marks of our own,
    such as that of a request for a summary, which a template might show."""
    plain = [one if one.role == "tool" else replace(one, name=None) for one in conversation]
    return list(renderer.start(plain))


def cut_middle(ids: list[int], max_tokens: int) -> list[int]:
    """The ids. Of a longer conversation, the first quarter of `max_tokens`, which has the task, and then the newest.

    >>> cut_middle([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    [1, 7, 8, 9]
    """
    if not max_tokens or len(ids) <= max_tokens:
        return ids
    first = max_tokens // 4
    return [*ids[:first], *ids[len(ids) - (max_tokens - first) :]]


def value_lesson(question: Datum, label: bool, weight: float) -> Datum:
    """The same datum with what the value should be."""
    zeros = [0.0] * (len(question.loss_fn_inputs["mask"].tolist()) - 1)
    returns, weights = TensorData([*zeros, float(label)]), TensorData([*zeros, weight])
    return Datum(question.model_input, {**question.loss_fn_inputs, "returns": returns, "weights": weights})


async def read_scores(client: TrainingClient, questions: Sequence[Datum]) -> list[float]:
    """Values at the last positions, as probabilities: a value beyond the scale counts as 0 or 1."""
    output = await client.forward(list(questions), "value")
    values = [one["values"].tolist()[-1] for one in output.loss_fn_outputs]
    return [min(1.0, max(0.0, float(value))) for value in values]
