"""Another process on the same GPU reads whole weights by their CUDA handles, as vLLM does, bit for bit."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import turnwise as tw
from naive import make_model
from turnwise.backends.servers.vllm_transfer import to_update_info
from turnwise.client.checkpoints import CheckpointStore
from turnwise.client.shared_weights import SharedWeights
from turnwise.engine import shared_weights
from turnwise.engine.config import EngineConfig
from turnwise.engine.training.adapter_files import load_tensors
from turnwise.engine.training.full_files import is_full
from turnwise.types import AdamParams, Datum, ModelInput

pytestmark = pytest.mark.gpu

READER = """
import base64, hashlib, json, pickle, sys
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

uuid, opened = str(torch.cuda.get_device_properties(0).uuid), None
print("ready", flush=True)
for line in sys.stdin:
    part = json.loads(line)
    if part == "finish":  # vLLM lets the memory go at the end of an update
        opened = buffer = None
        torch.cuda.synchronize()
        print("finished", flush=True)
        continue
    arguments = list(pickle.loads(base64.b64decode(part["ipc_handles_pickled"]))[uuid])
    arguments[6] = 0
    if opened is None or opened[0] != tuple(arguments):
        opened = (tuple(arguments), rebuild_cuda_tensor(*arguments))
    pieces = opened[1][: sum(part["tensor_sizes"])].split(part["tensor_sizes"])
    found = {}
    for name, kind, shape, piece in zip(part["names"], part["dtype_names"], part["shapes"], pieces, strict=True):
        tensor = piece.contiguous().view(getattr(torch, kind)).view(shape).clone()
        found[name] = [kind, shape, hashlib.sha256(tensor.view(-1).view(torch.uint8).cpu().numpy()).hexdigest()]
    pieces = piece = tensor = None
    print(json.dumps(found), flush=True)
"""
"""What `IPCWeightTransferEngine` of vLLM 0.32 does with a part, without vLLM."""
DATUM = Datum(ModelInput.from_ints(range(3, 60)), {"target_tokens": list(range(4, 61)), "weights": [1.0] * 57})
Found = dict[str, list[Any]]


@contextmanager
def reader() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", READER], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


def ask(process: subprocess.Popen[str], what: Any) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
    return process.stdout.readline()


def read_elsewhere(process: subprocess.Popen[str], shared: SharedWeights) -> tuple[Found, int]:
    """What the other process finds, and in how many parts."""
    found: Found = {}

    async def read() -> int:
        num_parts = 0
        async with shared.reading() as chunks:
            async for chunk in chunks:
                found.update(json.loads(ask(process, to_update_info(chunk))))
                num_parts += 1
            assert ask(process, "finish") == "finished\n"
        return num_parts

    return found, asyncio.run(read())


def saved_elsewhere(trainer: Any, name: str, tmp_path: Path) -> Found:
    """The same weights by way of files, which transformers could load."""
    directory = CheckpointStore(tmp_path).directory(trainer.save_weights_for_sampler(name).result().path)
    assert is_full(directory)
    return {
        name: [
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
        ]
        for name, tensor in load_tensors(directory / "model.safetensors").items()
    }


def learn(trainer: Any) -> None:
    trainer.forward_backward([DATUM], "cross_entropy").result()
    trainer.optim_step(AdamParams(learning_rate=1e-2)).result()


@pytest.mark.parametrize("is_tied", [False, True])
def test_another_process_reads_the_weights_of_every_version_bit_for_bit_and_memory_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tied: bool
) -> None:
    monkeypatch.setattr(shared_weights, "MIN_BUFFER_BYTES", 1)  # as large as the largest tensor: several parts
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
    )
    model = str(make_model(config, tmp_path / "model", spread=0.02))
    engine = EngineConfig(device="cuda", dtype="bfloat16", full_weights=True, kv_cache_gib=0.1)
    with tw.ServiceClient(data_dir=tmp_path, engine=engine) as service, reader() as process:
        trainer = service.create_full_training_client(model)
        learn(trainer)
        first_files = saved_elsewhere(trainer, "first", tmp_path)
        assert ("lm_head.weight" in first_files) is not is_tied, "a tied head is there once"
        first = trainer.share_weights().result()
        found, num_parts = read_elsewhere(process, first)
        assert found == first_files
        assert num_parts > 1
        learn(trainer)
        second = trainer.share_weights().result()
        found, _ = read_elsewhere(process, second)
        assert found == saved_elsewhere(trainer, "second", tmp_path)
        assert found != first_files, "they have moved"
        found, _ = read_elsewhere(process, first)
        assert found == first_files, "what was shared stays as it was"
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            read_elsewhere(process, second)
        assert torch.cuda.memory_allocated() <= before, "every buffer was given back"


def test_an_adapter_is_added_to_the_weights_that_another_process_reads(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    model = make_model(config, tmp_path / "model", spread=0.02)
    engine = EngineConfig(device="cuda", dtype="bfloat16", kv_cache_gib=0.1)
    with tw.ServiceClient(data_dir=tmp_path, engine=engine) as service, reader() as process:
        trainer = service.create_lora_training_client(str(model), rank=8, seed=1)
        base, _ = read_elsewhere(process, trainer.share_weights().result())
        learn(trainer)
        moved, num_parts = read_elsewhere(process, trainer.share_weights().result())
    assert num_parts == 1, "they fit into one buffer"
    changed = {name for name in base if base[name] != moved[name]}
    assert changed == {name for name in base if "proj" in name or name == "lm_head.weight"}, "what is adapted, no more"
