"""Bad input gets a clear error on that call, and the client goes on working."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import turnwise
from turnwise.client.local import LocalSamplingClient, LocalTrainingClient, ServiceClient
from turnwise.errors import CheckpointError, ConfigError, DataError, ModelNotFoundError, TurnwiseError
from turnwise.types import AdamParams, Datum, ModelInput, SamplingParams

IDS = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def service(tiny_dir: Path) -> Iterator[ServiceClient]:
    assert tiny_dir.is_dir()
    with turnwise.ServiceClient() as service:
        yield service


@pytest.fixture(scope="module")
def trainer(service: ServiceClient) -> LocalTrainingClient:
    return service.create_lora_training_client("tiny", rank=4)


@pytest.fixture(scope="module")
def sampler(trainer: LocalTrainingClient) -> LocalSamplingClient:
    return trainer.save_weights_and_get_sampling_client()


def datum(ids: list[int] = IDS, **columns: list[float]) -> Datum:
    ones = [1.0] * (len(ids) - 1)
    inputs = {"target_tokens": ids[1:], "weights": ones, "logprobs": [-1.0] * len(ones), "advantages": ones}
    return Datum(model_input=ModelInput.from_ints(ids[:-1]), loss_fn_inputs={**inputs, **columns})


def backward(
    trainer: LocalTrainingClient, *datums: Datum, loss_fn: str = "importance_sampling", **config: float
) -> object:
    return trainer.forward_backward(list(datums), loss_fn, config or None).result(timeout=120)


@dataclass(frozen=True)
class Clients:
    trainer: LocalTrainingClient
    sampler: LocalSamplingClient
    service: ServiceClient


Call = Callable[[Clients], object]
BAD: dict[str, tuple[Call, type[TurnwiseError], str]] = {
    "unknown loss": (
        lambda on: backward(on.trainer, datum(), loss_fn="importance_samplin"),
        ConfigError,
        "importance_sampling",
    ),
    "unknown loss setting": (lambda on: backward(on.trainer, datum(), clip_hi=1.0), ConfigError, "clip_hi"),
    "misaligned lengths": (lambda on: backward(on.trainer, datum(logprobs=[-1.0, -1.0])), DataError, r"4.*4.*2"),
    "NaN advantage": (
        lambda on: backward(on.trainer, datum(advantages=[1.0, math.nan, 0, 0])),
        DataError,
        "advantages",
    ),
    "target id out of range": (lambda on: backward(on.trainer, datum([5, 6, 10**6])), DataError, "1000000"),
    "datum longer than the context": (lambda on: backward(on.trainer, datum([5] * 3000)), DataError, "2999"),
    "no datums": (lambda on: backward(on.trainer), DataError, "at least one Datum"),
    "prompt longer than the context": (
        lambda on: on.sampler.sample(ModelInput.from_ints([5] * 3000), 1, SamplingParams()).result(timeout=120),
        DataError,
        "3000 tokens",
    ),
    "prompt id out of range": (
        lambda on: on.sampler.sample(ModelInput.from_ints([5, -3]), 1, SamplingParams()).result(timeout=120),
        DataError,
        "-3 at position 1",
    ),
    "empty prompt": (
        lambda on: on.sampler.sample(ModelInput.empty(), 1, SamplingParams()).result(timeout=120),
        DataError,
        "empty",
    ),
    "no samples": (
        lambda on: on.sampler.sample(ModelInput.from_ints([5]), 0, SamplingParams()).result(timeout=120),
        DataError,
        "num_samples=0",
    ),
    "negative temperature": (lambda _: SamplingParams(temperature=-1.0), DataError, "temperature"),
    "rank 0": (lambda on: on.service.create_lora_training_client("tiny", rank=0), DataError, "rank=0"),
    "nothing to train": (
        lambda on: on.service.create_lora_training_client(
            "tiny", train_mlp=False, train_attn=False, train_unembed=False
        ),
        DataError,
        "nothing would be trained",
    ),
    "unknown model": (
        lambda on: on.service.create_lora_training_client("nobody/nothing"),
        ModelNotFoundError,
        "nobody/nothing",
    ),
    "unknown checkpoint": (
        lambda on: on.trainer.load_state("tinker://nobody/weights/nothing").result(timeout=120),
        CheckpointError,
        "nothing",
    ),
    "checkpoint name that climbs": (
        lambda on: on.trainer.save_state("../out").result(timeout=120),
        TurnwiseError,
        r"\.\./out",
    ),
    "negative learning rate": (lambda _: AdamParams(learning_rate=-1.0), DataError, "learning_rate"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_the_client_goes_on(
    name: str, trainer: LocalTrainingClient, sampler: LocalSamplingClient, service: ServiceClient
) -> None:
    call, error, words = BAD[name]
    with pytest.raises(error, match=words):
        call(Clients(trainer, sampler, service))
    output = trainer.forward_backward([datum()], "importance_sampling").result(timeout=120)
    assert math.isfinite(output.loss)
    assert trainer.optim_step(AdamParams(learning_rate=0.0)).result(timeout=120) is not None
    reply = sampler.sample(ModelInput.from_ints(IDS), 1, SamplingParams(max_tokens=2)).result(timeout=120)
    assert len(reply.sequences[0].tokens) >= 1
