"""GRPO on single-turn tasks: `run_grpo(adapter)` is the whole loop of MinT's RL overview, done with care.

One step: publish the weights; sample a group of responses for each prompt of the batch, all at once; let the adapter
score them; centre the rewards inside each group; train on the sampled ids with one `forward_backward` and one
`optim_step`. Ids and logprobs are used exactly as the sampler returned them, and the trainer computes its own at the
sampling temperature, so that on-policy every ratio is 1.

A group whose rewards are all equal says nothing about which response was better: it is dropped and counted. A step
that is left with no group is recorded and skipped, and the weights stay as they are.

`kl_penalty_coef` adds coef * KL(policy || base model) to the loss, as the k2 estimator (log p - log ref)^2 / 2 on the
sampled tokens. On-policy its gradient is that of the reverse KL, and equals in expectation that of lowering advantages
by coef * (log p - log ref). Taken inside `forward_backward`, the reference logprobs come from the base model at the
datum's own temperature, so the term is exact at any sampling temperature; a sampling client's `compute_logprobs` would
give them at temperature 1. The KL concerns every response, so with it no group is dropped: those with equal rewards
are trained with advantage 0.

Why this loop does not call `turnwise.train`: MinT's programs expect these requests and these numbers, and a run of
`train` makes others.

- A prompt is a list of token ids that the adapter makes, such as those of `"Q: What is 3 + 5?\\nA:"`. `train` plays
  worlds of messages, and a renderer turns them into ids with the chat template. Ids that travel as text, decoded and
  encoded again, may come back as other ids.
- All responses of a group come from one request with one seed. `train` plays every attempt by itself, with a seed of
  its own, so the same seed would draw other responses.
- Every response token weighs 1, and datums have Tinker's columns alone. Methods of `train` divide by the size of the
  step, and add the column `mask`.
- The service needs `create_lora_training_client` and nothing else. It is asked for the weights, the gradient and the
  update of each step, and at the end for the final sampler weights. `train` reads the model's sizes and tokenizer from
  its files here, keeps a run directory, and saves checkpoints from which a run can be resumed.

The two share the advantages (`turnwise.credit`), the table of losses, the clients with their deadlines, and the view
that prints. `run_grpo` with a data set is a run of `train`.

Axis `_G`: the responses of a group.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from turnwise.client.base import ApiFuture, SamplingClient, TrainingClient
from turnwise.credit.advantages import center_by_group, is_constant_group
from turnwise.envs.prompts import PromptWorld
from turnwise.envs.rows import Row
from turnwise.errors import ConfigError, DataError
from turnwise.losses.table import find_loss
from turnwise.single_turn.adapter import AdapterError, Dataset, RLAdapter
from turnwise.single_turn.config import RLConfig
from turnwise.types import Datum, ModelInput, SampledSequence, SampleResponse, SamplingParams
from turnwise.watch.terminal import LineView

if TYPE_CHECKING:
    from turnwise.training.run import Run

__all__ = ["AdapterError", "RLAdapter", "RLConfig", "RunResult", "StepRecord", "response_to_datum", "run_grpo"]

log = logging.getLogger(__name__)
T = TypeVar("T")


class TrainingService(Protocol):
    """The part of a `ServiceClient` that a run uses."""

    def create_lora_training_client(
        self,
        base_model: str,
        *,
        rank: int = ...,
        seed: int | None = ...,
        train_mlp: bool = ...,
        train_attn: bool = ...,
        train_unembed: bool = ...,
    ) -> TrainingClient: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step did."""

    step: int
    num_steps: int
    rewards: tuple[float, ...]
    """The reward of every response, group by group."""
    num_groups: int
    num_equal_groups: int
    """Groups whose responses all got the same reward."""
    num_datums: int
    num_dropped_groups: int
    """Groups that were not trained on: the equal ones, unless there is a KL term to train on."""
    num_sampled_tokens: int
    loss: float | None
    """Mean over trained tokens; None when the step was skipped."""
    kl: float | None
    """Mean estimate of KL(policy || base model) per token before the update; None when no KL was asked for."""
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Everything that `forward_backward` and `optim_step` reported; empty when the step was skipped."""

    @property
    def reward_mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    @property
    def is_skipped(self) -> bool:
        return self.num_datums == 0

    def line(self) -> str:
        """The record in one readable line."""
        used = self.num_groups - self.num_dropped_groups
        loss = "skipped" if self.loss is None else f"{round(self.loss, 4) + 0.0:.4f}"  # no -0.0000
        kl = "" if self.kl is None else f"  kl {self.kl:.5f}"
        return (
            f"step {self.step + 1}/{self.num_steps}  reward {self.reward_mean:.3f}  "
            f"groups {used} used, {self.num_dropped_groups} dropped  loss {loss}{kl}  "
            f"tokens {self.num_sampled_tokens}  {self.seconds:.1f} s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run leaves."""

    path: str
    """The final sampler weights, for `create_sampling_client(model_path=...)`."""
    steps: tuple[StepRecord, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """One prompt and its scored responses."""

    prompt: Sequence[int]
    responses: Sequence[SampledSequence]
    rewards_G: Sequence[float]

    @property
    def is_equal(self) -> bool:
        return is_constant_group(self.rewards_G)

    def to_datums(self, config: RLConfig) -> list[Datum]:
        advantages_G = center_by_group(self.rewards_G).tolist()
        return [
            response_to_datum(self.prompt, response, advantage, config)
            for response, advantage in zip(self.responses, advantages_G, strict=True)
        ]


@overload
def run_grpo(
    adapter: RLAdapter[Any],
    config: RLConfig | None = None,
    *,
    service_client: TrainingService | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
) -> RunResult: ...


@overload
def run_grpo(adapter: Iterable[Row] | Path | str, config: None = None, **train: Any) -> Run: ...


def run_grpo(
    adapter: RLAdapter[Any] | Iterable[Row] | Path | str,
    config: RLConfig | None = None,
    *,
    service_client: TrainingService | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    **train: Any,
) -> RunResult | Run:
    """Train a new LoRA adapter on a single-turn task: an adapter in MinT's form, or a data set in TRL's.

    With `reward_funcs` the first argument is a data set: rows with a `prompt` (a text or messages), as a list of dicts,
    a `datasets.Dataset` or a file. The functions score completions (`turnwise.envs.prompts`). That is a whole run of
    `turnwise.train`, with evaluations on held-out rows, checkpoints and a directory, and gives back a `Run`.

    Args:
        adapter: The task, or the data set.
        service_client: Where the training client comes from; default: an in-process `ServiceClient` for this run.
        on_step: Receives each step's record; default: an observer that prints its line.
        train: With a data set: `reward_funcs`, `reward_weights`, `test_rows`, `max_tokens`, and everything that
            `turnwise.train` takes, such as `model`, `steps`, `directory`.

    >>> import turnwise as tw
    >>> def is_loud(completions, **columns):
    ...     return [float(text.isupper()) for text in completions]
    >>> rows = [{"prompt": f"Say {word} loud."} for word in ("hello", "yes", "no", "good", "bad", "well")]
    >>> small = {"eval": {"tasks": 0}, "rollout": {"group_size": 2}, "observer": tw.Observer()}
    >>> tw.run_grpo(rows, reward_funcs=[is_loud], model="tiny", steps=1, max_tokens=4, **small).state
    'finished'
    >>> class Shouting(tw.RLAdapter[str]):
    ...     def build_dataset(self):
    ...         return ["hello", "good morning"]
    ...     def make_prompt(self, sample, tokenizer):
    ...         return tokenizer.encode(f"Say it loud: {sample}")
    ...     def compute_reward(self, response_text, sample):
    ...         return float(response_text.isupper())
    >>> settings = tw.RLConfig(base_model="tiny", num_steps=1, batch_size=1)
    >>> len(tw.run_grpo(Shouting(), settings, on_step=lambda record: None).steps)
    1
    """
    if not isinstance(adapter, RLAdapter):
        return _train_on_rows(adapter, config, train)
    if train:
        raise ConfigError(f"{', '.join(sorted(train))} goes with a data set; an adapter's settings are in RLConfig")
    config = config or RLConfig()
    report = on_step or _tell_view
    if service_client is not None:
        return _run(adapter, config, service_client, report)
    from turnwise.client.local import ServiceClient

    with ServiceClient() as service:
        return _run(adapter, config, service, report)


def _train_on_rows(rows: Iterable[Row] | Path | str, config: RLConfig | None, options: dict[str, Any]) -> Run:
    from turnwise.training.run import train

    if "reward_funcs" not in options:
        raise ConfigError(
            f"run_grpo got {type(rows).__name__}; expected an RLAdapter, or a data set with reward_funcs=[function]"
        )
    if config is not None:
        raise ConfigError("RLConfig belongs to an adapter; with a data set give the options of turnwise.train")
    names = ("reward_funcs", "reward_weights", "test_rows", "max_tokens")
    world = PromptWorld(rows=rows, **{name: options.pop(name) for name in names if name in options})
    return train(world, **options)


def response_to_datum(prompt: Sequence[int], response: SampledSequence, advantage: float, config: RLConfig) -> Datum:
    """One response as a datum: position i predicts `target_tokens[i]`, so the response's first token is predicted by
    the prompt's last position, at index len(prompt) - 1."""
    tokens, logprobs = list(response.tokens), response.logprobs
    if not tokens:
        raise DataError("the sampler returned a response of no tokens; there is nothing to train on")
    if logprobs is None or len(logprobs) != len(tokens):
        came = "no logprobs" if logprobs is None else f"{len(logprobs)} logprobs"
        raise DataError(f"the sampler returned {len(tokens)} tokens with {came}; expected one for each token")
    full = [*prompt, *tokens]
    num_before, num_tokens = len(prompt) - 1, len(tokens)
    is_response = [0.0] * num_before + [1.0] * num_tokens
    inputs: dict[str, Any] = {
        "target_tokens": full[1:],
        "weights": is_response,
        "logprobs": [0.0] * num_before + list(logprobs),
        "advantages": [0.0] * num_before + [advantage] * num_tokens,
        "temperature": [1.0] * num_before + [config.temperature] * num_tokens,
    }
    if not find_loss(config.loss_fn).is_separable:
        inputs["sequence_ratio_mask"] = is_response
    return Datum(model_input=ModelInput.from_ints(full[:-1]), loss_fn_inputs=inputs)


def _run(
    adapter: RLAdapter[Any], config: RLConfig, service: TrainingService, report: Callable[[StepRecord], None]
) -> RunResult:
    dataset = Dataset.build(adapter)
    lora = config.lora
    trainer = service.create_lora_training_client(
        config.base_model,
        rank=lora.rank,
        seed=lora.seed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
        train_unembed=lora.train_unembed,
    )
    tokenizer = trainer.get_tokenizer()
    seeds = random.Random(config.seed)
    sampler = _publish(trainer, config)
    records: list[StepRecord] = []
    for step, batch in enumerate(itertools.islice(_batches(len(dataset.samples), config), config.num_steps)):
        started = time.monotonic()
        groups = _sample_groups(sampler, dataset, batch, tokenizer, config, seeds)
        record = _train(trainer, groups, config, step, started)
        adapter.evaluate(step, list(record.rewards), record.num_datums)
        records.append(record)
        report(record)
        if record.is_skipped:
            log.warning("step %d skipped: in each of its groups all responses got the same reward", step + 1)
        elif step + 1 < config.num_steps:
            sampler = _publish(trainer, config)
    saved = trainer.save_weights_for_sampler(config.save_name).result(config.deadline_s)
    return RunResult(path=saved.path, steps=tuple(records))


def _batches(num_samples: int, config: RLConfig) -> Iterator[list[int]]:
    """Indices into the dataset, forever: every epoch is a new shuffle, and a batch may reach into the next one."""
    order = random.Random(config.seed)

    def walk() -> Iterator[int]:
        while True:
            yield from order.sample(range(num_samples), num_samples)

    indices = walk()
    while True:
        yield list(itertools.islice(indices, config.batch_size))


def _sample_groups(
    sampler: SamplingClient,
    dataset: Dataset,
    batch: Sequence[int],
    tokenizer: Any,
    config: RLConfig,
    seeds: random.Random,
) -> list[_Group]:
    """One scored group per sample of the batch; every prompt is under way before the first is waited for."""
    prompts = [dataset.prompt(index, tokenizer) for index in batch]
    futures: list[ApiFuture[SampleResponse]] = []
    try:
        for prompt in prompts:
            params = SamplingParams(
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                seed=seeds.getrandbits(63),
                stop_token_ids=[tokenizer.eos_token_id],
            )
            futures.append(sampler.sample(ModelInput.from_ints(prompt), config.group_size, params))
        groups: list[_Group] = []
        for index, prompt, future in zip(batch, prompts, futures, strict=True):
            responses = future.result(config.deadline_s).sequences
            if len(responses) != config.group_size:
                raise DataError(f"the sampler returned {len(responses)} responses; {config.group_size} were asked for")
            texts = [tokenizer.decode(list(response.tokens), skip_special_tokens=True) for response in responses]
            groups.append(_Group(prompt, responses, [dataset.reward(index, text) for text in texts]))
        return groups
    finally:
        for future in futures:
            future.cancel()  # only what an error left under way


def _train(
    trainer: TrainingClient, groups: Sequence[_Group], config: RLConfig, step: int, started: float
) -> StepRecord:
    """One `forward_backward` and one `optim_step`, or neither when no group has anything to teach."""
    equal = [group for group in groups if group.is_equal]
    has_kl = config.kl_penalty_coef > 0
    used = list(groups) if has_kl else [group for group in groups if not group.is_equal]
    datums = [datum for group in used for datum in group.to_datums(config)]
    loss: float | None = None
    metrics: dict[str, float] = {}
    if datums:
        output = trainer.forward_backward(datums, config.loss_fn, config.loss_fn_config).result(config.deadline_s)
        update = trainer.optim_step(config.adam_params).result(config.deadline_s)
        loss, metrics = output.loss, {**output.metrics, **update.metrics}
    return StepRecord(
        step=step,
        num_steps=config.num_steps,
        rewards=tuple(reward for group in groups for reward in group.rewards_G),
        num_groups=len(groups),
        num_equal_groups=len(equal),
        num_dropped_groups=len(groups) - len(used),
        num_datums=len(datums),
        num_sampled_tokens=sum(len(response.tokens) for group in groups for response in group.responses),
        loss=loss,
        kl=metrics.get("kl_reference:mean") if has_kl else None,
        seconds=time.monotonic() - started,
        metrics=metrics,
    )


def _publish(trainer: TrainingClient, config: RLConfig) -> SamplingClient:
    return _call_within(config.deadline_s, "publishing weights", trainer.save_weights_and_get_sampling_client)


def _call_within(deadline_s: float, what: str, call: Callable[[], T]) -> T:
    """`call()` on a thread of its own, so that a call which gives no future can be waited for with a deadline too."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
            future.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    return ApiFuture(future, what).result(deadline_s)


def _tell_view(record: StepRecord) -> None:
    LineView().message(record.line())
