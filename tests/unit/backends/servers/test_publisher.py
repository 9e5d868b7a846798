"""Publishing to servers: what is written, loaded, kept and removed, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import gc
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sglang_stub import SglangStub, sglang_stubs
from turnwise.backends import BackendSetup
from turnwise.backends.servers.dialect import ServedWeights
from turnwise.backends.servers.http import KEY_VARIABLE
from turnwise.backends.sglang import SglangDialect, SglangPublisher
from turnwise.client.base import ApiFuture, TrainingClient
from turnwise.client.fake import RecordingTrainer, ScriptedSampler
from turnwise.client.local import ServiceClient
from turnwise.config.files import load_config
from turnwise.errors import CheckpointError, ConfigError, ServiceError
from turnwise.training.policy import find_policy
from turnwise.types import AdamParams, Datum, ModelInput, SamplingParams

pytestmark = pytest.mark.model
PROMPT = ModelInput.from_ints([5, 6, 7, 8])


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[list[SglangStub]]:
    assert tiny_dir.is_dir()
    with sglang_stubs(2, tmp_path_factory.mktemp("stubs")) as servers:
        yield servers


def make_publisher(urls: list[str], run_directory: Path, model: Path, *options: str) -> SglangPublisher:
    quick = ("rollout.server_deadline_s=10", "rollout.server_wait_s=2", "rollout.max_trajectory_tokens=64", *options)
    config = load_config("guess_number", ["rollout.backend=sglang", f"rollout.url={','.join(urls)}", *quick])
    return SglangPublisher(
        BackendSetup(
            rollout=config.rollout, model_directory=model, run_directory=run_directory, engine=config.engine_in_use
        )
    )


def train_a_little(trainer: TrainingClient) -> None:
    columns = {"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4}
    trainer.forward_backward([Datum(model_input=PROMPT, loss_fn_inputs=columns)], "cross_entropy")
    trainer.optim_step(AdamParams(learning_rate=1e-2)).result()


async def until(is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < give_up_s
        gc.collect()
        await asyncio.sleep(0.01)


def open_sockets() -> int:
    return sum("socket:" in str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())


async def test_a_version_is_served_while_somebody_holds_it_and_is_gone_when_nobody_does(
    stubs: list[SglangStub], tmp_path: Path, tiny_dir: Path
) -> None:
    run = tmp_path / "run"
    sockets = open_sockets()
    with ServiceClient(data_dir=run) as service:
        trainer = service.create_lora_training_client("tiny", rank=4, seed=1)
        async with make_publisher([stub.url for stub in stubs], run, tiny_dir) as publisher:
            old = await publisher.publish(trainer, 0)
            train_a_little(trainer)
            new = await publisher.publish(trainer, 1)
            params = SamplingParams(max_tokens=4, seed=3)
            drawn = [await sampler.sample_async(PROMPT, 1, params) for sampler in (old, new)]
            assert [one.policy_version for one in drawn] == [0, 1]
            assert drawn[0].sequences[0].logprobs != drawn[1].sequences[0].logprobs, "two versions side by side"
            here = await trainer.save_weights_and_get_sampling_client_async()
            expected = (await here.sample_async(PROMPT, 1, params)).sequences[0]
            assert list(drawn[1].sequences[0].tokens) == list(expected.tokens)
            assert drawn[1].sequences[0].logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            await until(lambda: all(len(stub.adapters) == 2 for stub in stubs))
            for stub in stubs:
                stub.draw_s = 600.0
            under_way = old.sample(PROMPT, 1, params)
            del old, drawn
            gc.collect()
            await asyncio.sleep(0.1)
            assert all(len(stub.adapters) == 2 for stub in stubs), "a request under way keeps its version"
            for stub in stubs:
                stub.draw_s = 0.0
            assert (await under_way).policy_version == 0
            del under_way
            await until(lambda: all(len(stub.adapters) == 1 for stub in stubs))
            await until(lambda: len(list((run / "served").iterdir())) == 1)
        assert not any(stub.adapters for stub in stubs), "servers are left as they were found"
        assert not (run / "served").exists()
        with pytest.raises((ServiceError, RuntimeError)):
            await new.sample_async(PROMPT, 1, params)
    assert "turnwise fleet" not in [thread.name for thread in threading.enumerate()]
    await until(lambda: open_sockets() <= sockets)


async def test_files_are_served_without_a_trainer(stubs: list[SglangStub], tmp_path: Path, tiny_dir: Path) -> None:
    with ServiceClient(data_dir=tmp_path) as service:
        trainer = service.create_lora_training_client("tiny", rank=4, seed=1)
        train_a_little(trainer)
        path = trainer.save_state("kept").result().path
        files = next((tmp_path / "checkpoints").glob("*/weights/kept"))
        expected = service.create_sampling_client(model_path=path).compute_logprobs(PROMPT).result()
        base = service.create_sampling_client(base_model="tiny").compute_logprobs(PROMPT).result()
    async with make_publisher([stubs[0].url], tmp_path / "run", tiny_dir) as publisher:
        for adapter, logprobs in ((files, expected), (None, base)):
            sampler = await publisher.serve(adapter, 7)
            assert (await sampler.compute_logprobs_async(PROMPT))[1:] == pytest.approx(logprobs[1:], abs=1e-4)
            reply = await sampler.sample_async(PROMPT, 2, SamplingParams(max_tokens=3))
            assert (reply.policy_version, len(reply.sequences)) == (7, 2)
        assert sampler.get_tokenizer().encode("one") == stubs[0].service.create_sampling_client(
            base_model="tiny"
        ).get_tokenizer().encode("one")
    assert not stubs[0].adapters


async def test_a_server_with_an_api_key_is_used_with_the_key_in_the_environment_and_named_without_it(
    stubs: list[SglangStub], tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs[0].key = "a-secret"
    try:
        for key, words in {"": "wants an API key", "another": "does not take the key"}.items():
            monkeypatch.setenv(KEY_VARIABLE, key)
            async with make_publisher([stubs[0].url], tmp_path, tiny_dir) as publisher:
                with pytest.raises(ConfigError, match=f"{stubs[0].url}.* {words}.* TURNWISE_SERVER_KEY to its key"):
                    await publisher.serve(None)
        monkeypatch.setenv(KEY_VARIABLE, "a-secret")
        async with make_publisher([stubs[0].url], tmp_path, tiny_dir) as publisher:
            sampler = await publisher.serve(None)
            assert (await sampler.sample_async(PROMPT, 1, SamplingParams(max_tokens=2))).sequences[0].tokens
    finally:
        stubs[0].key = ""


class TrainerOnAFullDisk(RecordingTrainer):
    def save_weights_for_sampler(self, name: str, *_: Any, **__: Any) -> ApiFuture[Any]:
        future: Future[Any] = Future()
        future.set_exception(OSError(errno.ENOSPC, "No space left on device"))
        return ApiFuture(future, f"save {name}")


async def test_a_full_disk_is_a_named_error_and_nothing_reaches_a_server(
    stubs: list[SglangStub], tmp_path: Path, tiny_dir: Path
) -> None:
    async with make_publisher([stubs[0].url], tmp_path, tiny_dir) as publisher:
        with pytest.raises(CheckpointError, match=r"version 3 could not be written under .*No space left on device"):
            await publisher.publish(TrainerOnAFullDisk(ScriptedSampler([])), 3)
    assert not stubs[0].adapters
    with ServiceClient(data_dir=tmp_path) as service:
        trainer = service.create_lora_training_client("tiny", rank=4, seed=1)
        (tmp_path / "served").write_text("in the way")
        async with make_publisher([stubs[0].url], tmp_path, tiny_dir) as publisher:
            with pytest.raises(CheckpointError, match="version 0 could not be written"):
                await publisher.publish(trainer, 0)
    assert not stubs[0].adapters


async def test_a_server_with_another_model_is_refused_by_what_it_says_and_by_its_logprobs(
    stubs: list[SglangStub], tmp_path: Path, tiny_dir: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_dir, other)
    weights = {name: value * np.float32(30) for name, value in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with ServiceClient(data_dir=tmp_path) as service:
        trainer = service.create_lora_training_client(str(other), rank=4, seed=1)
        async with make_publisher([stubs[0].url], tmp_path, other) as publisher:
            with pytest.raises(ConfigError, match=f"{stubs[0].url} does not serve the run's model .*its logprobs"):
                await publisher.publish(trainer, 0)
        stubs[0].vocab_size = 77
        try:
            async with make_publisher([stubs[0].url], tmp_path, tiny_dir) as publisher:
                with pytest.raises(ConfigError, match="with 77 tokens in its vocabulary"):
                    await publisher.publish(trainer, 0)
        finally:
            stubs[0].vocab_size = None


async def test_a_server_that_comes_back_with_another_model_is_left_out_until_it_has_the_runs_own(
    stubs: list[SglangStub], tmp_path: Path, tiny_dir: Path
) -> None:
    other = Path(shutil.copytree(tiny_dir, tmp_path / "other"))
    weights = {name: value * np.float32(30) for name, value in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    stub = stubs[1]
    with ServiceClient(data_dir=tmp_path) as service:
        trainer = service.create_lora_training_client("tiny", rank=4, seed=1)
        async with make_publisher([stub.url for stub in stubs], tmp_path, tiny_dir) as publisher:

            def num_ready() -> float:
                return publisher.take_metrics()["fleet/servers_ready"]

            sampler = await publisher.publish(trainer, 0)

            async def come_back(model: str, name: str) -> None:
                stub.kill()
                await until(lambda: num_ready() == 1)
                stub.model, stub.name = model, name
                stub.start()

            for model, name in ((str(other), "tiny"), ("tiny", "renamed")):
                before = stub.num_asked
                await come_back(model, name)
                await until(lambda: stub.num_asked >= before + 2)  # noqa: B023 - it is called in this round alone
                assert num_ready() == 1
            await come_back("tiny", "tiny")
            await until(lambda: num_ready() == 2)
            assert len(stub.adapters) == 1
            reply = await sampler.sample_async(PROMPT, 1, SamplingParams(max_tokens=4))
            assert reply.policy_version == 0


def test_files_are_not_measured_on_a_server_with_another_model(
    stubs: list[SglangStub], tmp_path: Path, tiny_dir: Path
) -> None:
    copy, other = (Path(shutil.copytree(tiny_dir, tmp_path / name)) for name in ("the-same", "another"))
    weights = {name: value * np.float32(30) for name, value in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    served = ["rollout.backend=sglang", f"rollout.url={stubs[0].url}", "engine.dtype=float32"]
    with find_policy(str(copy), overrides=served) as policy:
        assert policy.sample("Hi", max_tokens=2), "the model counts, not what it is called"
    refused = pytest.raises(ConfigError, match=f"{stubs[0].url} does not serve the run's model")
    with find_policy(str(other), overrides=served) as policy, refused:
        policy.sample("Hi", max_tokens=2)


async def test_a_publication_that_is_broken_off_leaves_nothing_on_servers_that_have_it_already(
    stubs: list[SglangStub], tmp_path: Path, tiny_dir: Path
) -> None:
    quick, slow = stubs
    with ServiceClient(data_dir=tmp_path) as service:
        trainer = service.create_lora_training_client("tiny", rank=4, seed=1)
        async with make_publisher([stub.url for stub in stubs], tmp_path, tiny_dir) as publisher:
            kept = await publisher.publish(trainer, 0)
            slow.load_s = 600.0
            publication = asyncio.create_task(publisher.publish(trainer, 1))
            await until(lambda: len(quick.adapters) == 2)
            publication.cancel()
            slow.load_s = 0.0
            with pytest.raises(asyncio.CancelledError):
                await publication
            assert len(quick.adapters) == 1
            assert len(list((tmp_path / "served").iterdir())) == 1
            del kept


async def test_a_resumed_run_unloads_what_the_process_before_it_left_and_nothing_of_other_runs(
    stubs: list[SglangStub], tmp_path: Path, tiny_dir: Path
) -> None:
    stub, run = stubs[0], tmp_path / "run"
    with ServiceClient(data_dir=run) as service:
        trainer = service.create_lora_training_client("tiny", rank=4, seed=1)
        dialect = SglangDialect(stub.url)
        for name in ("turnwise-0123456789-v4-4", "somebody-elses"):
            trainer.save_weights_for_sampler(name).result()
            place = (run / "served" if name.startswith("turnwise") else tmp_path) / name
            shutil.copytree(next((run / "checkpoints").glob(f"*/sampler_weights/{name}")), place)
            await dialect.load(ServedWeights(version=4, adapter=place))
        await dialect.close()
        assert set(stub.adapters) == {"turnwise-0123456789-v4-4", "somebody-elses"}
        async with make_publisher([stub.url], run, tiny_dir) as publisher:
            sampler = await publisher.publish(trainer, 4)
            assert "turnwise-0123456789-v4-4" not in stub.adapters
            assert len(stub.adapters) == 2
            assert sampler.version == 4
        assert set(stub.adapters) == {"somebody-elses"}
        stub.lose_adapters()
