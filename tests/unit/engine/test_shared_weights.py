"""Whole weights for another process: their names, their numbers, and the parts in which they come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from naive import displaced_adapter, move
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.model.merge import write_merged
from turnwise.engine.shared_weights import SharedChunk, WholeWeights
from turnwise.errors import ConfigError
from vllm_server import make_model

pytestmark = pytest.mark.model


class HostBuffer:
    """Plain memory in place of a GPU's."""

    handles: dict[str, tuple[Any, ...]] = {"device": ("handle",)}  # noqa: RUF012

    def __init__(self, num_bytes: int) -> None:
        self.bytes = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self.is_closed = False

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(scope="module")
def engine(tiny_dir: Path) -> Iterator[Engine]:
    engine = Engine(tiny_dir, EngineConfig(device="cpu", dtype="float32"), name="tiny")
    yield engine
    engine.close()


def read_all(engine: Engine, weights: WholeWeights, num_bytes: int = 0) -> tuple[dict[str, Tensor], list[SharedChunk]]:
    """What a reader finds in the buffer, part by part, as vLLM takes it apart."""
    buffers: list[HostBuffer] = []

    def make_buffer(wanted: int) -> HostBuffer:
        buffers.append(HostBuffer(num_bytes or wanted))
        return buffers[-1]

    share, found, chunks = engine.share(weights, make_buffer), dict[str, Tensor](), list[SharedChunk]()
    while (chunk := share.next_chunk()) is not None:
        chunks.append(chunk)
        pieces = buffers[0].bytes[: sum(chunk.sizes)].split(list(chunk.sizes))
        for name, kind, shape, piece in zip(chunk.names, chunk.dtypes, chunk.shapes, pieces, strict=True):
            found[name] = piece.view(getattr(torch, kind)).view(shape).clone()
    share.close()
    assert buffers[0].is_closed
    return found, chunks


def test_an_adapter_is_added_to_the_weights_and_everything_has_the_name_that_files_have(
    engine: Engine, tiny_dir: Path, tmp_path: Path
) -> None:
    adapter = displaced_adapter(engine, rank=4)
    engine.save_adapter(adapter, tmp_path / "adapter", with_optimizer=False)
    write_merged(tmp_path / "adapter", tiny_dir, tmp_path / "merged")
    expected = load_file(tmp_path / "merged" / "model.safetensors")
    weights = engine.publish_whole(adapter)
    move(adapter, 1.0, seed=1)  # what was published does not
    found, chunks = read_all(engine, weights)
    assert len(chunks) == 1
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


def test_parts_fit_the_buffer_and_no_tensor_is_left_out(engine: Engine) -> None:
    weights = engine.publish_whole(engine.create_full())
    largest = max(weights.sizes.values())
    found, chunks = read_all(engine, weights, num_bytes=largest)
    assert len(chunks) > 1
    assert all(sum(chunk.sizes) <= largest for chunk in chunks)
    assert [name for chunk in chunks for name in chunk.names] == list(weights.sizes)
    for name, tensor in found.items():
        assert torch.equal(tensor, weights.read(name)), name


def test_a_tied_head_comes_once_and_an_adapter_on_it_alone_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    tied = Engine(
        make_model(tiny_dir, tmp_path / "tied", is_tied=True), EngineConfig(device="cpu", dtype="float32"), name="tied"
    )
    assert "lm_head.weight" not in tied.publish_whole(tied.create_full()).sizes
    assert tied.publish_whole(displaced_adapter(tied, train_unembed=False)).sizes
    with pytest.raises(ConfigError, match="the adapter changes lm_head, which has no weights of its own"):
        tied.publish_whole(displaced_adapter(tied))
    tied.close()
