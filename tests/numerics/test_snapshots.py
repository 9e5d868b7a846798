"""Snapshots hold a training adapter whole, and sums of adapters change the weights by the sum of their changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from naive import displaced_adapter, random_ids, rl_datum, run
from turnwise.engine.engine import Engine
from turnwise.engine.training.snapshots import read_snapshot, write_snapshot, write_sum
from turnwise.errors import CheckpointError
from turnwise.types import AdamParams

MakeEngine = Callable[..., Engine]
DATUM = rl_datum(random_ids(30, 1), start=0)


def test_a_snapshot_between_two_steps_goes_on_bit_for_bit(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine, rank=3)
    run(engine.forward_backward(adapter, [DATUM], "importance_sampling", None))
    engine.optim_step(adapter, AdamParams(learning_rate=1e-2))
    run(engine.forward_backward(adapter, [DATUM], "importance_sampling", None))
    write_snapshot(engine, adapter, tmp_path / "snapshot")
    other = read_snapshot(engine, adapter.lora, tmp_path / "snapshot")
    assert torch.equal(adapter.grad, other.grad)
    for each in (adapter, other):
        engine.optim_step(each, AdamParams(learning_rate=1e-2))
    assert torch.equal(adapter.flat, other.flat)
    assert adapter.num_steps == other.num_steps == 2


def test_a_sum_changes_every_weight_by_the_weighted_sum(
    arch_dir: Path, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(arch_dir)
    sources = [displaced_adapter(engine, rank=3), displaced_adapter(engine, rank=5, train_mlp=False)]
    for index, adapter in enumerate(sources):
        engine.save_adapter(adapter, tmp_path / str(index), with_optimizer=False)
    lora = write_sum(engine, [tmp_path / "0", tmp_path / "1"], [0.75, -2.0], tmp_path / "sum")
    assert lora.rank == 8
    summed = engine.load_policy(tmp_path / "sum")
    for name, (a, b) in summed.pairs.items():
        expected = sum(
            coefficient * source.scale * source.pairs[name][1] @ source.pairs[name][0]
            for source, coefficient in zip(sources, [0.75, -2.0], strict=True)
            if name in source.pairs
        )
        assert isinstance(expected, torch.Tensor)
        torch.testing.assert_close(summed.scale * b @ a, expected.detach(), rtol=1e-4, atol=1e-5)


def test_ranks_that_add_up_to_too_much_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    engine.save_adapter(displaced_adapter(engine, rank=300), tmp_path / "a", with_optimizer=False)
    with pytest.raises(CheckpointError, match="1200"):
        write_sum(engine, [tmp_path / "a"] * 4, [0.25] * 4, tmp_path / "sum")
