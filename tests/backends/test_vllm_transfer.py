"""Whole weights that a real vLLM server reads in the trainer's memory (`rollout.weight_transfer=ipc`).

Memory is a mapped file here, because this vLLM runs on a CPU (`cpu_memory/`). CUDA's handles are opened in
`tests/numerics/test_gpu_shared_weights.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import turnwise as tw
from turnwise.backends.servers.dialect import ServedWeights
from turnwise.backends.servers.http import JsonServer
from turnwise.backends.servers.vllm_dialect import VllmDialect
from turnwise.cli import main
from turnwise.engine import engine, shared_weights
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import DeviceInfo
from turnwise.errors import ServiceError
from turnwise.runlog.reader import RunReader
from turnwise.training import weight_transfer
from turnwise.types import Datum, ModelInput, SampledSequence, SampleRequest, SamplingParams
from vllm_server import RANK, Served

pytestmark = pytest.mark.timeout(900)  # the first one installs vLLM, and a server takes a minute to start

PROMPT = (1, *range(40, 90))
REQUEST = SampleRequest(PROMPT, SamplingParams(max_tokens=24, seed=5, stop=[]))
DATUM = Datum(ModelInput.from_ints(PROMPT[:-1]), {"target_tokens": PROMPT[1:], "weights": [1.0] * (len(PROMPT) - 1)})
OWN = ServedWeights(version=0)
ECHO = f"{Path(__file__).parents[1] / 'e2e' / 'echo_world.py'}:EchoWorld"


class MappedBuffer:
    """Bytes of a file, with a handle as long as CUDA's: vLLM writes its device into the seventh place."""

    def __init__(self, file: Path, num_bytes: int) -> None:
        self.bytes = torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8)
        self.handles = {"GPU-of-a-test": (str(file), num_bytes, *[0] * 13)}
        self.is_closed = False

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights come in several parts."""
    monkeypatch.setattr(shared_weights, "MIN_BUFFER_BYTES", 1)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tw.ServiceClient]:
    with tw.ServiceClient(data_dir=tmp_path, engine=EngineConfig(device="cpu", dtype="float32")) as service:
        yield service


@asynccontextmanager
async def talking(served: Served) -> AsyncIterator[VllmDialect]:
    dialect = VllmDialect(served.url, served.use(replaces_weights=True, reads_memory=True))
    await dialect.facts()
    server = JsonServer(served.url)
    try:
        yield dialect
    finally:
        await dialect.replace_weights(sorted(served.model.glob("*.safetensors")), 0)
        await dialect.close()
        await server.post("/update_weight_version", {"new_version": "default"}, deadline_s=10)
        await server.close()


def learn(trainer: Any) -> None:
    trainer.forward_backward([DATUM], "cross_entropy").result()
    trainer.optim_step(tw.types.AdamParams(learning_rate=2e-2)).result()


def logprobs_by(trainer: Any, sequence: SampledSequence) -> list[float]:
    ids = [*PROMPT, *sequence.tokens]
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    output = trainer.forward([Datum(ModelInput.from_ints(ids[:-1]), inputs)], "cross_entropy").result()
    return output.loss_fn_outputs[0]["logprobs"].tolist()[len(PROMPT) - 1 :]


@pytest.mark.parametrize("trained", ["adapter", "all weights"])
async def test_a_server_samples_from_the_weights_in_the_trainers_memory_after_every_update(
    vllm: Served, service: tw.ServiceClient, tmp_path: Path, trained: str
) -> None:
    buffers: list[MappedBuffer] = []

    def make_buffer(num_bytes: int) -> MappedBuffer:
        buffers.append(MappedBuffer(tmp_path / f"memory-{len(buffers)}", num_bytes))
        return buffers[-1]

    model = str(vllm.model)
    is_lora = trained == "adapter"
    trainer: Any = (
        service.create_lora_training_client(model, rank=RANK, seed=1)
        if is_lora
        else service.create_full_training_client(model)
    )
    async with talking(vllm) as dialect:
        for version in (1, 2):
            learn(trainer)
            shared = await trainer.share_weights(make_buffer)
            await dialect.receive_weights(shared, version)
            (sequence,) = (await dialect.generate(REQUEST, OWN)).sequences
            assert set(sequence.versions or ()) == {version}
            assert sequence.logprobs == pytest.approx(logprobs_by(trainer, sequence), abs=1e-3)
        assert all(buffer.is_closed for buffer in buffers)
        learn(trainer)  # what was shared does not move
        await dialect.receive_weights(shared, 3)
        (again,) = (await dialect.generate(REQUEST, OWN)).sequences
        assert again.tokens == sequence.tokens
        assert again.logprobs == pytest.approx(sequence.logprobs, abs=1e-5)
        shared.release()
        with pytest.raises(ServiceError, match="were released"):
            await dialect.receive_weights(shared, 4)
        (after,) = (await dialect.generate(REQUEST, OWN)).sequences
        assert set(after.versions or ()) == {3}, "and the server goes on"


async def test_an_update_that_breaks_off_is_an_error_and_the_next_one_is_taken(
    vllm: Served, service: tw.ServiceClient, tmp_path: Path
) -> None:
    trainer = service.create_lora_training_client(str(vllm.model), rank=RANK, seed=1)
    learn(trainer)

    class Breaking(MappedBuffer):
        """Its second part cannot be opened: the file is gone, and the handle leads nowhere."""

        @property
        def handles(self) -> dict[str, tuple[Any, ...]]:
            self.num_sent += 1
            return {} if self.num_sent > 1 else self._handles

        @handles.setter
        def handles(self, handles: dict[str, tuple[Any, ...]]) -> None:
            self.num_sent, self._handles = 0, handles

    async with talking(vllm) as dialect:
        broken = await trainer.share_weights(lambda size: Breaking(tmp_path / "broken", size))
        with pytest.raises(ServiceError, match="IPC handle not found for GPU UUID GPU-of-a-test"):
            await dialect.receive_weights(broken, 1)
        whole = await trainer.share_weights(lambda size: MappedBuffer(tmp_path / "whole", size))
        await dialect.receive_weights(whole, 2)
        (sequence,) = (await dialect.generate(REQUEST, OWN)).sequences
        assert set(sequence.versions or ()) == {2}
        assert sequence.logprobs == pytest.approx(logprobs_by(trainer, sequence), abs=1e-3)


@pytest.mark.parametrize("trained", ["model.rank=8", "model.train=full"])
async def test_a_run_publishes_every_version_out_of_its_memory_and_writes_no_weights_for_the_server(
    vllm: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: str
) -> None:
    buffers: list[MappedBuffer] = []

    def make_buffer(num_bytes: int, _device: torch.device) -> MappedBuffer:
        assert not list((directory / "served").rglob("model*.safetensors")), "nothing is written for the server"
        buffers.append(MappedBuffer(tmp_path / f"memory-{len(buffers)}", num_bytes))
        return buffers[-1]

    directory = tmp_path / "run"
    monkeypatch.setattr(engine, "CudaBuffer", make_buffer)
    gpu = DeviceInfo(kind="cuda", dtype="float32")
    monkeypatch.setattr(weight_transfer, "find_device", lambda _: gpu)
    small = ("train.steps=2", "train.tasks_per_step=2", "rollout.group_size=6", "warmup.steps=2", "eval.tasks=0")
    options = (f"rollout.url={vllm.url}", "rollout.publish=weights", "engine.dtype=float32", "run.dialogues=0")
    command = ["train", ECHO, f"model={vllm.model}", "rollout.backend=vllm", *small, *options, trained]
    try:
        done = await asyncio.to_thread(main, [*command, "rollout.weight_transfer=ipc", f"run.dir={directory}"])
        assert done == 0
    finally:
        async with talking(vllm):
            pass
    assert len(buffers) >= 2, "one for each version that was published"
    assert all(buffer.is_closed for buffer in buffers)
    with RunReader(directory) as run:
        assert [row.is_exact for row in run.certificates()] == [True, True]
        attempts = [run.attempt(row.id) for row in run.attempts(phase="train")]
    assert {(one.row.step, turn.versions[0]) for one in attempts for turn in one.trajectory.turns} == {(1, 0), (2, 1)}
