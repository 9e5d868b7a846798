"""Decode as a graph does it, run eagerly on any device: the same tokens, launched before the host admits what waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from naive import draft_always, run, with_ops
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.model.lora import Policy, Route
from turnwise.engine.ops.interface import Captured, PendingRead
from turnwise.engine.ops.transfer import HostTransfer
from turnwise.engine.sampling.graphs import GraphCache
from turnwise.types import LoraConfig, SampleRequest, SamplingParams

pytestmark = pytest.mark.model


@dataclass(slots=True)
class EagerRecorder:
    """Runs a step again where a graph would be replayed; notes what `on_replay` gives then."""

    on_replay: Callable[[], Any] = lambda: None
    num_captured: int = 0
    seen: list[Any] = field(default_factory=list)

    def capture(self, inputs: Tensor, step: Callable[[Tensor], Tensor]) -> Captured:
        self.num_captured += 1
        outputs = step(inputs)

        def replay() -> None:
            self.seen.append(self.on_replay())
            outputs.copy_(step(inputs))

        return Captured(replay, inputs, outputs)


class CopyingTransfer(HostTransfer):
    """A graph writes its outputs over the last ones, so they are copied when a card would copy them."""

    def read_later(self, tensor: Tensor) -> PendingRead:
        return super().read_later(tensor.clone())


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
        engine.sampler.submit(SampleRequest(histories[index], params), policy, on_done=partial(go_on, index, turn))

    for index in range(len(histories)):
        ask(index, 1)
    while engine.sampler.has_work:
        engine.sampler.step()
    return histories


def make(directory: Path, **settings: Any) -> Engine:
    config: dict[str, Any] = {"kv_cache_gib": 0.01, "block_size": 4, "max_num_seqs": 6, "prefill_tokens": 48, "seed": 1}
    return Engine(directory, EngineConfig(device="cpu", **config | settings), name="tiny")


def with_graphs(engine: Engine, **changes: Any) -> EagerRecorder:
    """Give the engine a sampler that captures its steps and launches them ahead; `seen` counts the rows that waited."""
    recorder = EagerRecorder(lambda: len(engine.sampler.scheduler.waiting))
    recorders = iter([recorder])
    ops = {
        "facts": replace(engine.model.ops.facts, is_async=True, prefill_tokens=48),
        "transfer": CopyingTransfer(),
        # Decode comes first; prompts, where they are captured too, have a recorder of their own.
        "new_graph_recorder": lambda: next(recorders, EagerRecorder()),
    }
    with_ops(engine, **ops | changes)
    return recorder


@pytest.mark.parametrize("merge_adapter", ["auto", "always"])
def test_launching_decode_before_admission_changes_no_token(tiny_dir: Path, merge_adapter: str) -> None:
    want = play(make(tiny_dir, merge_adapter=merge_adapter))
    engine = make(tiny_dir, merge_adapter=merge_adapter)
    decode = with_graphs(engine)
    assert play(engine) == want
    assert max(decode.seen) > 0, "rows waited when a step was launched, and were admitted behind it"
    assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks


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
    assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks


def test_a_merged_policy_needs_new_graphs_only_where_its_weights_lie_elsewhere(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    decode = with_graphs(engine)
    narrow = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=0, train_mlp=False, train_unembed=False)))
    wide = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=0)))
    num_captured = []
    for policy in (narrow, wide, wide):
        request = SampleRequest([5, 6, 7], SamplingParams(max_tokens=3, stop=[]))
        engine.sampler.submit(request, policy, on_done=lambda _: None)
        while engine.sampler.has_work:
            engine.sampler.step()
        num_captured.append(decode.num_captured)
    assert num_captured == [1, 2, 2]


def test_buffers_that_changed_places_need_another_graph() -> None:
    """The allocator may give a layer the memory that another one had before."""
    captures = GraphCache(EagerRecorder())
    first, second = torch.zeros(4), torch.zeros(4)
    keys = []
    for merged in ({"a": first, "b": second}, {"a": second, "b": first}, {"a": first, "b": second}):
        captures.weights_moved()
        keys.append(captures.weights_key(Route(merged=merged)))
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]


def test_after_a_warm_up_nothing_is_left_to_capture(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    decode = with_graphs(engine)
    policy = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=0)))
    assert run(engine.warm_up(policy, 200)) == 4 * 3, "1, 2, 4 and 8 rows; tables of 16, 32 and 64 blocks"
    assert decode.num_captured == 12
    play(engine)
    newer = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=1)))
    assert run(engine.warm_up(newer, 200)) == 0, "a new version is merged into the same buffers"
    assert decode.num_captured == 12
    assert run(engine.warm_up(engine.base_policy, 10)) == 4


def test_a_policy_that_is_not_merged_and_a_cpu_have_nothing_to_warm_up(tiny_dir: Path) -> None:
    engine = make(tiny_dir, merge_adapter="never")
    policy = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=0)))
    assert run(engine.warm_up(policy, 200)) == 0
    with_graphs(engine)
    assert run(engine.warm_up(policy, 200)) == 0


def test_graphs_of_merged_weights_that_moved_are_dropped(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    with_graphs(engine)
    wide = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=0)))
    narrow = engine.publish(engine.create_adapter(LoraConfig(rank=2, seed=0, train_mlp=False)))

    def num_missing(policy: Policy) -> int:
        return run(engine.warm_up(policy, 10))

    assert [num_missing(policy) for policy in (engine.base_policy, wide, narrow)] == [4, 4, 4]
    graphs = engine.sampler.decode_graphs
    assert graphs is not None
    assert len(graphs.captures) == 8, "those of the wider policy read buffers that are gone"
    assert num_missing(engine.base_policy) == 0


@pytest.mark.parametrize("merge_adapter", ["auto", "never"])
def test_drafts_under_graphs_change_no_token(tiny_dir: Path, merge_adapter: str) -> None:
    """Twice the same: the second time, every reply was said before."""
    want = play(make(tiny_dir, merge_adapter=merge_adapter), num_more=9)
    engine = make(tiny_dir, merge_adapter=merge_adapter, speculation="suffix")
    decode = with_graphs(engine)
    draft_always(engine)
    num_replayed = []
    for _ in range(2):
        before = len(decode.seen)
        assert play(engine, num_more=9) == want
        num_replayed.append(len(decode.seen) - before)
    if merge_adapter == "auto":
        assert num_replayed[1] < num_replayed[0] / 2
    assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks
