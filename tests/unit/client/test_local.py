"""ServiceClient and its clients over an engine that remembers numbers instead of training weights."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from turnwise.client import base, engines
from turnwise.client.engines import EnginePool
from turnwise.client.local import LocalSamplingClient, LocalTrainingClient, ServiceClient
from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.errors import CheckpointError, ConfigError, DataError, EngineStoppedError
from turnwise.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    TensorData,
)

DEADLINE_S = 120.0
TARGETS = TensorData([2, 3], "int64")


@dataclass
class RememberingAdapter:
    lora: LoraConfig
    value: float = 0.0
    num_steps: int = 0
    trained: list[Any] = field(default_factory=list)


@dataclass
class RememberingPolicy:
    value: float
    version: int


class EchoSampler:
    """A request's one token is its policy's value; prompts of 99 never end."""

    def __init__(self) -> None:
        self.requests: dict[int, tuple[Sequence[int], RememberingPolicy, int, Callable[..., None]]] = {}
        self.num_submitted = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def submit(
        self, asked: SampleRequest, policy: RememberingPolicy, *, on_done: Callable[..., None], **_: object
    ) -> int:
        self.num_submitted += 1
        self.requests[self.num_submitted] = (asked.prompt, policy, asked.num_samples, on_done)
        return self.num_submitted

    def step(self) -> None:
        for request_id, (prompt, policy, num_samples, on_done) in list(self.requests.items()):
            if prompt != [99]:
                del self.requests[request_id]
                sequences = [SampledSequence("stop", [int(policy.value)], [-0.5])] * num_samples
                on_done(SampleResponse(sequences, [None, *[-1.0] * (len(prompt) - 1)], policy_version=policy.version))

    def cancel(self, request_id: int) -> None:
        self.requests.pop(request_id, None)


class RememberingEngine:
    """An adapter is one number: every optim_step adds one to it."""

    arch = "remembering"

    def __init__(self, directory: Path, config: EngineConfig, name: str) -> None:
        self.directory, self.config, self.name = directory, config, name
        self.sampler = EchoSampler()
        self.base_policy = RememberingPolicy(0, 1)
        self.version = 1
        self.adapters: list[RememberingAdapter] = []
        self.num_adapters = 0
        self.is_closed = False
        self.gate = threading.Event()
        self.gate.set()

    def create_adapter(self, lora: LoraConfig) -> RememberingAdapter:
        self.num_adapters += 1
        self.adapters.append(RememberingAdapter(lora))
        return self.adapters[-1]

    def create_saved(self, _directory: Path, lora: LoraConfig) -> RememberingAdapter:
        return self.create_adapter(lora)

    def drop_adapter(self, _adapter: RememberingAdapter) -> None:
        self.num_adapters -= 1

    def forward_backward(
        self, adapter: RememberingAdapter, datums: list[Datum], loss_fn: str, config: Any
    ) -> Generator[None, None, ForwardBackwardOutput]:
        yield
        assert self.gate.wait(DEADLINE_S)
        adapter.trained.append((loss_fn, config, datums))
        return ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 3.0, "num_trained_tokens:sum": 2.0})

    forward = forward_backward

    def forward_backward_custom(
        self, _adapter: RememberingAdapter, datums: list[Datum], loss_fn: Callable[..., Any]
    ) -> Generator[None, None, ForwardBackwardOutput]:
        yield
        loss, metrics = loss_fn(datums, [])
        return ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": loss, **metrics})

    def optim_step(self, adapter: RememberingAdapter, params: AdamParams) -> dict[str, float]:
        adapter.value += 1
        adapter.num_steps += 1
        return {"learning_rate": params.learning_rate}

    def sample_step(self) -> None:
        self.sampler.step()

    def publish(self, adapter: RememberingAdapter) -> RememberingPolicy:
        self.version += 1
        return RememberingPolicy(adapter.value, self.version)

    def save_adapter(self, adapter: RememberingAdapter, directory: Path, *, with_optimizer: bool) -> None:
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(self.directory)}))
        (directory / "value").write_text(f"{adapter.value} {adapter.num_steps if with_optimizer else 0}")

    def save_policy(self, policy: RememberingPolicy, directory: Path) -> None:
        self.save_adapter(RememberingAdapter(LoraConfig(), policy.value), directory, with_optimizer=False)

    def load_adapter(self, adapter: RememberingAdapter, directory: Path, *, with_optimizer: bool) -> None:
        value, num_steps = (directory / "value").read_text().split()
        adapter.value, adapter.num_steps = float(value), int(num_steps) if with_optimizer else 0

    def load_policy(self, directory: Path) -> RememberingPolicy:
        adapter = RememberingAdapter(LoraConfig())
        self.load_adapter(adapter, directory, with_optimizer=False)
        return self.publish(adapter)

    def wait(self) -> None:
        """There is no device to wait for."""

    def warm_up(self, _policy: RememberingPolicy, max_context: int) -> Generator[None, None, int]:
        yield
        return max_context

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[RememberingEngine]:
    """Every engine that was loaded in this test."""
    loaded: list[RememberingEngine] = []

    def load(directory: Path, config: EngineConfig, cluster: ClusterConfig, name: str) -> Any:  # noqa: ARG001
        loaded.append(RememberingEngine(directory, config, name))
        return loaded[-1]

    monkeypatch.setattr(engines, "POOL", EnginePool(load))
    return loaded


@pytest.fixture
def small(tmp_path: Path) -> str:
    return model_directory(tmp_path, "small")


@pytest.fixture
def service(loaded: list[RememberingEngine], tmp_path: Path) -> Iterator[ServiceClient]:
    assert not loaded
    with ServiceClient(data_dir=tmp_path / "data") as service:
        yield service


def model_directory(root: Path, name: str) -> str:
    (root / name).mkdir()
    (root / name / "config.json").write_text("{}")
    return str(root / name)


def datum() -> Datum:
    return Datum(ModelInput.from_ints([1, 2]), {"target_tokens": TARGETS, "weights": TensorData([1.0, 1.0])})


def prompt(*tokens: int) -> ModelInput:
    return ModelInput.from_ints(tokens)


def trained_value(client: LocalTrainingClient) -> int:
    """What the adapter is worth now, asked the public way."""
    return client.save_weights_and_get_sampling_client().sample(prompt(1)).result(DEADLINE_S).sequences[0].tokens[0]


def test_the_clients_are_what_the_protocols_ask_for(service: ServiceClient, small: str) -> None:
    trainer: base.TrainingClient = service.create_lora_training_client(small)
    sampler: base.SamplingClient = trainer.save_weights_and_get_sampling_client()
    assert isinstance(sampler, LocalSamplingClient)


def test_a_training_loop_in_plain_calls(service: ServiceClient, small: str) -> None:
    client = service.create_lora_training_client(base_model=small, rank=16)
    output = client.forward_backward([datum()], loss_fn="ppo").result(DEADLINE_S)
    assert output.loss == 1.5
    step = client.optim_step(AdamParams(learning_rate=0.5)).result(DEADLINE_S)
    assert step.metrics == {"learning_rate": 0.5}
    assert client.optim_step(adam_params=AdamParams()).result(DEADLINE_S)
    assert trained_value(client) == 2


async def test_a_training_loop_in_both_async_habits(service: ServiceClient, small: str) -> None:
    client = await service.create_lora_training_client_async(small)
    future = client.forward_backward_async([datum()], loss_fn="ppo")
    assert (await future.result_async()).loss == 1.5
    future = await client.forward_backward_async([datum()], "ppo")
    assert (await future.result_async()).loss == 1.5
    assert (await future).loss == 1.5
    await (await client.optim_step_async(AdamParams()))
    checkpoint = await client.save_weights_for_sampler_async(name="v1")
    checkpoint = await checkpoint.result_async()
    sampler = await service.create_sampling_client_async(model_path=checkpoint.path)
    assert (await sampler.sample_async(prompt(1), num_samples=2)).sequences[1].tokens == [1]
    assert await sampler.compute_logprobs_async(prompt(1, 2, 3)) == [None, -1.0, -1.0]
    assert await sampler.get_base_model_async() == small
    assert (await client.get_info_async()).lora_rank == 32
    sampler = await client.save_weights_and_get_sampling_client_async()
    assert (await sampler.sample(prompt(1))).sequences[0].tokens == [1]


def test_operations_run_in_call_order_without_waiting(service: ServiceClient, small: str) -> None:
    client = service.create_lora_training_client(small)
    client.optim_step(AdamParams())
    early = client.save_weights_and_get_sampling_client_submit()
    client.optim_step(AdamParams())
    assert trained_value(client) == 2
    assert early.result(DEADLINE_S).sample(prompt(1)).result(DEADLINE_S).sequences[0].tokens == [1]


def test_a_sampling_client_keeps_the_weights_it_was_made_with(service: ServiceClient, small: str) -> None:
    client = service.create_lora_training_client(small)
    sampler = client.save_weights_and_get_sampling_client()
    client.optim_step(AdamParams()).result(DEADLINE_S)
    response = sampler.sample(prompt(1)).result(DEADLINE_S)
    assert response.sequences[0].tokens == [0]
    assert response.policy_version == sampler.policy_version


def test_a_warm_up_can_be_waited_for(service: ServiceClient, small: str) -> None:
    sampler = service.create_lora_training_client(small, rank=2).save_weights_and_get_sampling_client()
    assert sampler.warm_up(100).result(DEADLINE_S) == 100, "the engine was asked for that context"
    with pytest.raises(DataError, match="max_context=0; expected at least 1 token"):
        sampler.warm_up(0)


def test_what_the_caller_changes_after_the_call_is_not_trained(
    service: ServiceClient, small: str, loaded: list[RememberingEngine]
) -> None:
    client = service.create_lora_training_client(small)
    loaded[0].gate.clear()
    weights, tokens, config = np.ones(2, dtype=np.float32), [1, 2], {"clip_low_threshold": 0.8}
    shared = TensorData(data=cast(Any, weights), dtype="float32", shape=[2])
    data = [Datum(ModelInput.from_ints(tokens), {"target_tokens": TARGETS, "weights": shared})]
    chunk_tokens = cast(list[int], data[0].model_input.chunks[0].tokens)
    future = client.forward_backward(data, "ppo", config)
    weights[:] = 7
    chunk_tokens[0] = 7
    config["clip_low_threshold"] = 7
    data.clear()
    loaded[0].gate.set()
    future.result(DEADLINE_S)
    ((_, seen_config, seen),) = loaded[0].adapters[0].trained
    assert seen_config == {"clip_low_threshold": 0.8}
    assert seen[0].model_input.to_ints() == [1, 2]
    assert seen[0].loss_fn_inputs["weights"].tolist() == [1.0, 1.0]


def test_any_sequence_of_datums_will_do_but_an_empty_one(service: ServiceClient, small: str) -> None:
    client = service.create_lora_training_client(small)
    client.forward_backward((datum(), datum()), "ppo").result(DEADLINE_S)
    for call in (client.forward, client.forward_backward):
        with pytest.raises(DataError, match=r"data is a Datum; expected a list of types\.Datum"):
            call(cast(Any, datum()), "ppo")
        with pytest.raises(DataError, match="data is empty"):
            call([], "ppo")
    with pytest.raises(DataError, match=r"data\[1\] is a dict"):
        client.forward_backward([datum(), cast(Any, {})], "ppo")


def test_a_custom_loss_runs_on_its_datums(service: ServiceClient, small: str) -> None:
    client = service.create_lora_training_client(small)
    output = client.forward_backward_custom([datum()], lambda data, _logprobs: (len(data), {"m:mean": 2.0}))
    assert output.result(DEADLINE_S).metrics == {"loss:sum": 1, "m:mean": 2.0}


def test_a_custom_loss_that_waits_for_its_own_engine_is_told_so(service: ServiceClient, small: str) -> None:
    client = service.create_lora_training_client(small)
    sampler = client.save_weights_and_get_sampling_client()
    future = client.forward_backward_custom(
        [datum()], lambda _data, _logprobs: (sampler.compute_logprobs(prompt(1)).result(), {})
    )
    with pytest.raises(RuntimeError, match="engine's own thread"):
        future.result(DEADLINE_S)


def test_optim_step_needs_one_set_of_settings(service: ServiceClient, small: str) -> None:
    client = service.create_lora_training_client(small)
    with pytest.raises(ConfigError, match="one set of settings"):
        client.optim_step()
    with pytest.raises(ConfigError, match=r"optim_step\(0.001\); expected types.AdamParams\(learning_rate=...\)"):
        client.optim_step(cast(Any, 1e-3))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_save_state_and_train_on_with_the_optimizer(
    service: ServiceClient, small: str, loaded: list[RememberingEngine]
) -> None:
    client = service.create_lora_training_client(small, rank=4, seed=3, train_unembed=False)
    client.optim_step(AdamParams())
    path = client.save_state("step-1").result(DEADLINE_S).path
    assert path == f"tinker://{client.model_id}/weights/step-1"
    again = service.create_training_client_from_state_with_optimizer(path)
    assert loaded[0].adapters[1] == RememberingAdapter(LoraConfig(rank=4, seed=3, train_unembed=False), 1.0, 1)
    assert again.model_id != client.model_id
    service.create_training_client_from_state(path)
    assert loaded[0].adapters[2].num_steps == 0


async def test_the_async_twins_of_loading(service: ServiceClient, small: str, loaded: list[RememberingEngine]) -> None:
    client = await service.create_lora_training_client_async(small)
    await client.optim_step(AdamParams())
    saved = await (await client.save_state_async("s"))
    for create in (
        service.create_training_client_from_state_async,
        service.create_training_client_from_state_with_optimizer_async,
    ):
        await create(saved.path)
        assert loaded[0].adapters[-1].value == 1
    await client.optim_step(AdamParams())
    assert (await (await client.load_state_async(saved.path))).path == saved.path
    assert loaded[0].adapters[0].num_steps == 0
    await client.load_state_with_optimizer_async(saved.path).result_async()
    assert loaded[0].adapters[0].num_steps == 1


def test_a_load_right_behind_its_save_needs_no_waiting(service: ServiceClient, small: str) -> None:
    client = service.create_lora_training_client(small)
    client.optim_step(AdamParams())
    client.save_state("a")
    client.optim_step(AdamParams())
    client.load_state(f"tinker://{client.model_id}/weights/a").result(DEADLINE_S)
    assert trained_value(client) == 1


@pytest.mark.parametrize("scheme", ["tinker://", "mint://", "turnwise://"])
def test_every_scheme_and_the_plain_directory_load(
    service: ServiceClient, small: str, tmp_path: Path, scheme: str
) -> None:
    client = service.create_lora_training_client(small)
    client.optim_step(AdamParams())
    path = client.save_weights_for_sampler("w").result(DEADLINE_S).path
    assert path == f"tinker://{client.model_id}/sampler_weights/w"
    directory = tmp_path / "data" / "checkpoints" / client.model_id / "sampler_weights" / "w"
    for spelled in (path.replace("tinker://", scheme), str(directory)):
        sampler = service.create_sampling_client(spelled)
        assert sampler.sample(prompt(1)).result(DEADLINE_S).sequences[0].tokens == [1]
        assert client.create_sampling_client(spelled).get_base_model() == small


def test_checkpoints_outlive_the_service(loaded: list[RememberingEngine], small: str, tmp_path: Path) -> None:
    metadata = {"who": "me"}
    with ServiceClient(data_dir=tmp_path, user_metadata={"run": "x"}) as service:
        client = service.create_lora_training_client(small, user_metadata=metadata)
        path = client.save_state("s", user_metadata={"step": "1"}).result(DEADLINE_S).path
        saved_id = client.model_id
    info = json.loads((tmp_path / "checkpoints" / saved_id / "weights" / "s" / "checkpoint.json").read_text())
    assert info["base_model"] == small
    assert info["user_metadata"] == {"run": "x", "who": "me", "step": "1"}
    with ServiceClient(data_dir=tmp_path) as service:
        again = service.create_training_client_from_state(path)
        assert again.get_info().model_name == small
    assert len(loaded) == 2


def test_a_peft_directory_of_somebody_else_loads(service: ServiceClient, small: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    RememberingEngine(Path(small), EngineConfig(), "x").save_policy(RememberingPolicy(5, 1), theirs)
    assert service.create_sampling_client(str(theirs)).sample(prompt(1)).result().sequences[0].tokens == [5]
    (theirs / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="pass base_model"):
        service.create_sampling_client(str(theirs))
    assert service.create_sampling_client(str(theirs), base_model=small).get_base_model() == small


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "/etc", "a b", ".hidden", "a:b", "x" * 201, "a\n"])
def test_names_that_could_leave_their_folder_are_refused(service: ServiceClient, small: str, name: str) -> None:
    client = service.create_lora_training_client(small)
    for save in (client.save_state, client.save_weights_for_sampler, client.save_weights_and_get_sampling_client):
        with pytest.raises(ConfigError, match="checkpoint name"):
            save(name)


@pytest.mark.parametrize(
    "path",
    ["tinker://x/weights/../../../etc", "tinker://../weights/x", "tinker://x/other/y", "tinker://x", "s3://a/b/c"],
)
def test_paths_that_are_no_checkpoint_paths_are_refused(service: ServiceClient, path: str) -> None:
    with pytest.raises(CheckpointError, match="expected"):
        service.create_training_client_from_state(path)


def test_an_unknown_path_names_the_nearest_ones(service: ServiceClient, small: str) -> None:
    with pytest.raises(CheckpointError, match="there are none yet"):
        service.create_sampling_client("tinker://run-1/weights/a")
    client = service.create_lora_training_client(small)
    path = client.save_state("step-10").result(DEADLINE_S).path
    with pytest.raises(CheckpointError, match="nearest of 1 in") as raised:
        client.load_state(f"tinker://{client.model_id}/weights/step-1").result(DEADLINE_S)
    assert path in str(raised.value)


def test_a_checkpoint_of_another_base_is_refused_by_name(service: ServiceClient, small: str, tmp_path: Path) -> None:
    other = model_directory(tmp_path, "other")
    path = service.create_lora_training_client(small).save_state("s").result(DEADLINE_S).path
    client = service.create_lora_training_client(other)
    with pytest.raises(CheckpointError, match=rf"belongs to the base model {small}, not to {other}"):
        client.load_state(path).result(DEADLINE_S)
    with pytest.raises(CheckpointError, match="belongs to the base model"):
        service.create_sampling_client(path, base_model=other)
    client.optim_step(AdamParams()).result(DEADLINE_S)  # the client goes on working


def test_sampler_weights_have_no_optimizer_to_load(service: ServiceClient, small: str) -> None:
    client = service.create_lora_training_client(small)
    path = client.save_weights_for_sampler("w").result(DEADLINE_S).path
    with pytest.raises(CheckpointError, match="no optimizer state"):
        client.load_state_with_optimizer(path).result(DEADLINE_S)
    client.load_state(path).result(DEADLINE_S)


def test_a_name_is_taken_once_unless_overwritten(service: ServiceClient, small: str) -> None:
    client = service.create_lora_training_client(small)
    path = client.save_state("s").result(DEADLINE_S).path
    client.optim_step(AdamParams())
    with pytest.raises(CheckpointError, match="exists; choose another name"):
        client.save_state("s").result(DEADLINE_S)
    client.save_state("s", overwrite=True).result(DEADLINE_S)
    client.load_state(path).result(DEADLINE_S)
    assert trained_value(client) == 1


def test_the_name_of_a_published_client_is_written_and_may_come_again(
    service: ServiceClient, small: str, tmp_path: Path
) -> None:
    client = service.create_lora_training_client(small)
    folder = tmp_path / "data" / "checkpoints" / client.model_id
    client.save_weights_and_get_sampling_client()
    assert not folder.exists()
    client.save_weights_and_get_sampling_client(name="latest")
    client.optim_step(AdamParams())
    client.save_weights_and_get_sampling_client("latest")
    sampler = service.create_sampling_client(f"tinker://{client.model_id}/sampler_weights/latest")
    assert sampler.sample(prompt(1)).result(DEADLINE_S).sequences[0].tokens == [1]
    assert [path.name for path in (folder / "sampler_weights").iterdir()] == ["latest"]


def test_a_save_that_fails_leaves_nothing(
    service: ServiceClient, small: str, loaded: list[RememberingEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = service.create_lora_training_client(small)

    def fail(_adapter: object, directory: Path, **_: object) -> None:
        directory.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(loaded[0], "save_adapter", fail)
    with pytest.raises(OSError, match="disk full"):
        client.save_state("s").result(DEADLINE_S)
    assert list((tmp_path / "data" / "checkpoints" / client.model_id / "weights").iterdir()) == []


def test_a_checkpoint_goes_when_its_time_is_over(service: ServiceClient, small: str, tmp_path: Path) -> None:
    client = service.create_lora_training_client(small)
    with pytest.raises(ConfigError, match="ttl_seconds=0"):
        client.save_state("s", ttl_seconds=0)
    path = client.save_state("s", ttl_seconds=3600).result(DEADLINE_S).path
    client.load_state(path).result(DEADLINE_S)
    directory = tmp_path / "data" / "checkpoints" / client.model_id / "weights" / "s"
    info = json.loads((directory / "checkpoint.json").read_text())
    info["expires_at"] = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    (directory / "checkpoint.json").write_text(json.dumps(info))
    with pytest.raises(CheckpointError, match="expired at"):
        client.load_state(path).result(DEADLINE_S)
    ServiceClient(data_dir=tmp_path / "data")
    assert not directory.exists()


def test_a_damaged_checkpoint_says_which_file(service: ServiceClient, small: str, tmp_path: Path) -> None:
    client = service.create_lora_training_client(small)
    path = client.save_state("s").result(DEADLINE_S).path
    (tmp_path / "data" / "checkpoints" / client.model_id / "weights" / "s" / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
        service.create_training_client_from_state(path)


def test_a_reference_checkpoint_reaches_the_engine_as_a_directory(
    service: ServiceClient, small: str, loaded: list[RememberingEngine]
) -> None:
    client = service.create_lora_training_client(small)
    path = client.save_weights_for_sampler("ref").result(DEADLINE_S).path
    client.forward_backward([datum()], "ppo", {"kl_reference": path}).result(DEADLINE_S)
    ((_, config, _),) = loaded[0].adapters[0].trained
    assert Path(config["kl_reference"]).is_dir()
    client.forward_backward([datum()], "ppo", {"kl_reference": "base"}).result(DEADLINE_S)


# --- engines ----------------------------------------------------------------------------------------------------------


def test_an_engine_is_loaded_on_first_use_and_shared(
    loaded: list[RememberingEngine], small: str, tmp_path: Path
) -> None:
    with ServiceClient(data_dir=tmp_path) as one, ServiceClient(data_dir=tmp_path) as two:
        assert loaded == []
        clients = [one.create_lora_training_client(small), two.create_lora_training_client(small)]
        one.create_sampling_client(base_model=small)
        assert len(loaded) == 1
        with ServiceClient(data_dir=tmp_path, engine=EngineConfig(max_num_seqs=3)) as three:
            three.create_sampling_client(base_model=small)
            assert len(loaded) == 2
        one.close()
        assert [engine.is_closed for engine in loaded] == [False, True]
        clients[0].optim_step(AdamParams()).result(DEADLINE_S)
    assert loaded[0].is_closed
    with pytest.raises(EngineStoppedError):
        clients[1].optim_step(AdamParams()).result(DEADLINE_S)
    with pytest.raises(EngineStoppedError, match="closed"):
        one.create_lora_training_client(small)


def test_two_threads_that_ask_at_once_load_once(loaded: list[RememberingEngine], small: str, tmp_path: Path) -> None:
    async def ask() -> None:
        services = [ServiceClient(data_dir=tmp_path) for _ in range(4)]
        await asyncio.gather(*(service.create_lora_training_client_async(small) for service in services))
        for service in services:
            service.close()

    asyncio.run(ask())
    assert len(loaded) == 1


def test_an_engine_that_died_is_loaded_again(
    service: ServiceClient, loaded: list[RememberingEngine], small: str
) -> None:
    sampler = service.create_sampling_client(base_model=small)

    def die() -> None:
        raise RuntimeError("device lost")

    loaded[0].sampler.step = die
    with pytest.raises(EngineStoppedError, match="device lost"):
        sampler.sample(prompt(1)).result(DEADLINE_S)
    again = service.create_sampling_client(base_model=small)
    assert again.sample(prompt(1)).result(DEADLINE_S).sequences[0].tokens == [0]


def test_an_alias_keeps_the_name_that_was_asked_for(
    loaded: list[RememberingEngine], small: str, tmp_path: Path
) -> None:
    with ServiceClient(data_dir=tmp_path, aliases={"Qwen/Qwen3-0.6B": small}) as service:
        client = service.create_lora_training_client("Qwen/Qwen3-0.6B")
        path = client.save_state("s").result(DEADLINE_S).path
        assert client.get_info().model_name == "Qwen/Qwen3-0.6B"
        assert "Qwen/Qwen3-0.6B" in [m.model_name for m in service.get_server_capabilities().supported_models]
        service.create_lora_training_client(small).load_state(path).result(DEADLINE_S)
    with ServiceClient(data_dir=tmp_path) as without:
        assert without.create_training_client_from_state(path).get_info().model_name == "Qwen/Qwen3-0.6B"
    assert {engine.name for engine in loaded} == {small}


def test_a_client_that_is_dropped_frees_its_adapter(
    service: ServiceClient, loaded: list[RememberingEngine], small: str
) -> None:
    client = service.create_lora_training_client(small)
    last = client.optim_step(AdamParams())
    del client
    gc.collect()
    last.result(DEADLINE_S)
    sampler = service.create_sampling_client(base_model=small)
    sampler.sample(prompt(1)).result(DEADLINE_S)
    assert loaded[0].num_adapters == 0


async def test_cancelling_a_task_stops_its_sampling(
    service: ServiceClient, loaded: list[RememberingEngine], small: str
) -> None:
    sampler = service.create_sampling_client(base_model=small)
    task = asyncio.create_task(sampler.sample_async(prompt(99)))
    while not loaded[0].sampler.has_work:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await sampler.sample_async(prompt(1))
    assert not loaded[0].sampler.has_work


def test_model_ids_differ_and_are_folder_names(service: ServiceClient, small: str) -> None:
    ids = {service.create_lora_training_client(small).model_id for _ in range(20)}
    assert len(ids) == 20
    assert all(":" not in model_id and "/" not in model_id for model_id in ids)


def test_arguments_that_mean_nothing_here_are_refused(service: ServiceClient) -> None:
    with pytest.raises(ConfigError, match="RemoteServiceClient"):
        ServiceClient(base_url="http://localhost:8000")
    with pytest.raises(TypeError):
        ServiceClient(unknown=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match="needs model_path"):
        service.create_sampling_client()


def test_a_prompt_of_bare_ids_is_told_what_to_do(service: ServiceClient, small: str) -> None:
    sampler = service.create_sampling_client(base_model=small)
    with pytest.raises(DataError, match=r"ModelInput\.from_ints"):
        sampler.sample(cast(Any, [1, 2]))


def test_importing_the_local_client_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, turnwise.client.local; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
