"""Decode as a graph does it, run eagerly on any device: the same tokens, launched before the host admits what waits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from naive import run
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.model.lora import Route
from turnwise.engine.sampling import draw
from turnwise.engine.sampling.graphs import Captured, Captures, DecodeGraphs, StepGraphs
from turnwise.engine.sampling.scheduler import Row
from turnwise.types import LoraConfig, SamplingParams

pytestmark = pytest.mark.model


@dataclass(frozen=True, slots=True)
class Rerun:
    """Stands where a captured graph does."""

    replay: Callable[[], object]


class EagerCaptures(Captures):
    """Runs the step again where a graph would be replayed."""

    def _capture(self, inputs: Tensor, step: Callable[[Tensor], Tensor]) -> Captured:
        outputs = step(inputs)
        return Captured(cast(Any, Rerun(lambda: outputs.copy_(step(inputs)))), inputs, outputs)


class Eager(StepGraphs):
    """Everything of the graphs that it is mixed into but the capture."""

    def __init__(self, engine: Engine) -> None:
        sampler = engine.sampler
        scratch = sampler.pool.allocate()
        assert scratch is not None
        super().__init__(sampler.model, sampler.cache, scratch, sampler._last_tokens)
        self.captures = EagerCaptures(sampler.model.device)


class EagerGraphs(Eager, DecodeGraphs):
    """Notes how many rows waited when a step was launched."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.scheduler = engine.sampler.scheduler
        self.num_waiting: list[int] = []

    def decode(self, rows: Sequence[Row], route: Route) -> Tensor:
        self.num_waiting.append(len(self.scheduler.waiting))
        return super().decode(rows, route).clone()


@pytest.fixture(autouse=True)
def _plain_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton may be installed where there is no GPU."""
    monkeypatch.setattr(draw, "has_triton", lambda: False)


def play(engine: Engine, *, num_policies: int = 1, num_turns: int = 3, num_more: int = 0) -> list[list[int]]:
    """Dialogues of unequal turns that go on by themselves, so that rows finish and wait at every step."""
    policies = [engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=i))) for i in range(num_policies)]
    rng = np.random.default_rng(0)
    histories: list[list[int]] = rng.integers(20, engine.vocab_size, (9, 21)).tolist()

    def go_on(index: int, turn: int, reply: Any) -> None:
        histories[index] += [*reply.sequences[0].tokens, 30 + turn, 31, 32]
        if turn < num_turns:
            ask(index, turn + 1)

    def ask(index: int, turn: int) -> None:
        params = SamplingParams(max_tokens=5 + (index + turn) % 4 + num_more, seed=10 * index + turn, stop=[])
        policy = policies[index % num_policies]
        engine.sampler.submit(histories[index], params, policy, on_done=partial(go_on, index, turn))

    for index in range(len(histories)):
        ask(index, 1)
    while engine.sampler.has_work:
        engine.sampler.step()
    return histories


def make(directory: Path, **settings: Any) -> Engine:
    config: dict[str, Any] = {"kv_cache_gib": 0.01, "block_size": 4, "max_num_seqs": 6, "prefill_tokens": 48, "seed": 1}
    return Engine(directory, EngineConfig(device="cpu", **config | settings), name="tiny")


def with_graphs(engine: Engine) -> EagerGraphs:
    graphs = engine.sampler._graphs = EagerGraphs(engine)
    engine.sampler._is_async = True
    return graphs


@pytest.mark.parametrize("merge_adapter", ["auto", "always"])
def test_launching_decode_before_admission_changes_no_token(tiny_dir: Path, merge_adapter: str) -> None:
    want = play(make(tiny_dir, merge_adapter=merge_adapter))
    engine = make(tiny_dir, merge_adapter=merge_adapter)
    graphs = with_graphs(engine)
    assert play(engine) == want
    assert max(graphs.num_waiting) > 0, "rows waited when a step was launched, and were admitted behind it"
    assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks - 1, "all but the scratch block"


def test_two_policies_each_merged_in_its_own_part_of_a_step_give_the_same_tokens(tiny_dir: Path) -> None:
    want = play(make(tiny_dir, merge_adapter="always"), num_policies=2)
    engine = make(tiny_dir, merge_adapter="always")
    with_graphs(engine)
    assert play(engine, num_policies=2) == want


def test_running_out_of_blocks_under_graphs_changes_no_token(tiny_dir: Path) -> None:
    want = play(make(tiny_dir), num_turns=2, num_more=14)
    engine = make(tiny_dir)
    with_graphs(engine)
    held = engine.sampler.pool.allocate_many(engine.sampler.pool.num_available - 24)
    assert play(engine, num_turns=2, num_more=14) == want
    assert engine.sampler.scheduler.num_preemptions > 0
    engine.sampler.pool.release(held)
    assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks - 1


def test_the_weights_of_a_graph_are_looked_up_again_when_a_policy_was_merged(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    graphs = with_graphs(engine)
    narrow = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=0, train_mlp=False, train_unembed=False)))
    wide = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=0)))
    keys = []
    for policy in (narrow, wide, wide):
        engine.sampler.submit([5, 6, 7], SamplingParams(max_tokens=3, stop=[]), policy, on_done=lambda _: None)
        while engine.sampler.has_work:
            engine.sampler.step()
        keys.append(graphs.captures._merged_key)
    merged = engine.sampler._merged
    places = [part for name in sorted(merged) for part in (name, merged[name].data_ptr())]
    assert keys[0] != keys[1] == keys[2] == ("merged", *places)


def test_buffers_that_changed_places_need_another_graph(tiny_dir: Path) -> None:
    """The allocator may give a layer the memory that another one had before."""
    graphs = with_graphs(make(tiny_dir))
    first, second = torch.zeros(4), torch.zeros(4)
    keys = []
    for merged in ({"a": first, "b": second}, {"a": second, "b": first}, {"a": first, "b": second}):
        graphs.captures.weights_moved()
        keys.append(graphs.captures.weights_key(Route(merged=merged)))
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]


def test_after_a_warm_up_nothing_is_left_to_capture(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    graphs = with_graphs(engine)
    policy = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=0)))
    assert run(engine.warm_up(policy, 200)) == 4 * 3, "1, 2, 4 and 8 rows; tables of 16, 32 and 64 blocks"
    captured = set(graphs.captures._captured)
    assert {shape for shape, _ in captured} == set(itertools.product((1, 2, 4, 8), (16, 32, 64)))
    play(engine)
    newer = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=1)))
    assert run(engine.warm_up(newer, 200)) == 0, "a new version is merged into the same buffers"
    assert set(graphs.captures._captured) == captured
    assert run(engine.warm_up(engine.base_policy, 10)) == 4


def test_a_policy_that_is_not_merged_and_a_cpu_have_nothing_to_warm_up(tiny_dir: Path) -> None:
    engine = make(tiny_dir, merge_adapter="never")
    policy = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=0)))
    assert run(engine.warm_up(policy, 200)) == 0
    with_graphs(engine)
    assert run(engine.warm_up(policy, 200)) == 0


def test_graphs_of_merged_weights_that_moved_are_dropped(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    graphs = with_graphs(engine)
    wide = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=0)))
    narrow = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=0, train_mlp=False)))
    for policy in (engine.base_policy, wide, narrow):
        assert run(engine.warm_up(policy, 10)) == 4
    assert {weights[0] for _, weights in graphs.captures._captured} == {"base", "merged"}
    assert len(graphs.captures._captured) == 8, "those of the wider policy read buffers that are gone"
