"""Training passes as graphs run them, run eagerly on any device: padded, they have the gradient of plain passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from naive import displaced_adapter, random_ids, relative_error, rl_datum, run
from turnwise.engine.attention.plans import TreePlan
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.ops.interface import AttentionRule, Captured, Saved
from turnwise.engine.training.pass_graphs import PassGraphs
from turnwise.types import Datum

pytestmark = pytest.mark.model


@dataclass(slots=True)
class EagerPasses:
    """Runs a pass again where a graph would be replayed."""

    num_captured: int = 0

    def capture(self, inputs: Tensor, step: Callable[[Tensor], Tensor]) -> Captured:
        self.num_captured += 1
        outputs = step(inputs)

        def replay() -> None:
            outputs.copy_(step(inputs))

        return Captured(replay, inputs, outputs)


class VarlenAttention:
    """Reads a forest's runs from tensors as the kernels of a card do. What is in no run is not a number."""

    def tree_forward(
        self, query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, rule: AttentionRule
    ) -> tuple[Tensor, Tensor]:
        group = query.shape[1] // key.shape[1]
        key, value = (side.repeat_interleave(group, dim=1) for side in (key, value))
        scores = (query @ key.transpose(-1, -2) * rule.scale).masked_fill(~_sees(plan, query.shape[2]), -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1)

    def tree_backward(
        self, grad_out: Tensor, saved: Saved, plan: TreePlan, rule: AttentionRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            query, key, value = (side.detach().requires_grad_() for side in saved[:3])
            out, _ = self.tree_forward(query, key, value, plan, rule)
            grads = torch.autograd.grad(out, (query, key, value), grad_out)
            return grads[0], grads[1], grads[2]

    def can_capture_prefill(self, dtype: torch.dtype, head_size: int) -> bool:  # noqa: ARG002
        return True


def _sees(plan: TreePlan, num_tokens: int) -> Tensor:
    sees = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for index, part in enumerate(plan.varlen(torch.device("cpu"))):
        everything = torch.arange(num_tokens)
        queries = everything if part.q_index is None else part.q_index
        keys = everything if part.k_index is None else part.k_index
        assert part.q_bounds[-1] == len(queries), "every query is in a run"
        assert part.k_bounds[-1] == len(keys), "every key is in a run"
        assert part.q_bounds.diff().max() <= part.max_q
        assert part.k_bounds.diff().max() <= part.max_k
        edges = zip(part.q_bounds.tolist(), part.q_bounds[1:].tolist(), part.k_bounds.tolist(),
                    part.k_bounds[1:].tolist(), strict=False)  # fmt: skip
        for q_start, q_stop, k_start, k_stop in edges:
            q, k = queries[q_start:q_stop], keys[k_start:k_stop]
            seen = torch.ones(len(q), len(k), dtype=torch.bool)
            sees[q[:, None], k[None, :]] |= seen.tril() if index == 0 else seen
    return sees


def make(directory: Path, *, captures: bool) -> tuple[Engine, EagerPasses]:
    engine = Engine(directory, EngineConfig(device="cpu", kv_cache_gib=0.01, seed=1), name="tiny")
    recorder = EagerPasses()
    if captures:
        attention: Any = VarlenAttention()
        ops = replace(engine.model.ops, attention=attention, new_graph_recorder=lambda: recorder)
        engine.model.ops = ops
        assert engine.model.fused is not None
        engine.model.fused.ops = ops
        assert PassGraphs.supports(engine.model)
        engine.trainer.graphs = PassGraphs(engine.model)
    return engine, recorder


def batches() -> list[list[Datum]]:
    """Rows alone, groups that share a beginning, and a tree of three levels."""
    alone = [rl_datum(random_ids(40 + 7 * i, i), start=20, seed=i) for i in range(3)]
    prompts = [random_ids(50, 90 + i) for i in range(2)]
    groups = [rl_datum(prompts[i % 2] + random_ids(20 + i, 10 + i), start=49, seed=i) for i in range(6)]
    turn = prompts[0] + random_ids(30, 95)
    deep = [rl_datum(turn + random_ids(18 + i, 30 + i), start=70, seed=i) for i in range(3)]
    return [alone, groups, [*groups, *deep, rl_datum(turn + random_ids(20, 5), start=70)]]


def test_captured_passes_have_the_gradient_of_plain_ones(tiny_dir: Path) -> None:
    plain, _ = make(tiny_dir, captures=False)
    engine, recorder = make(tiny_dir, captures=True)
    adapters = [displaced_adapter(one) for one in (plain, engine)]
    for datums in batches():
        for turn in range(3):
            outputs = [
                run(one.forward_backward(adapter, datums, "importance_sampling", None))
                for one, adapter in zip((plain, engine), adapters, strict=True)
            ]
            assert relative_error(adapters[1].grad, adapters[0].grad) < 1e-5, f"the {turn}th time"
            for want, got in zip(outputs[0].loss_fn_outputs, outputs[1].loss_fn_outputs, strict=True):
                assert abs(want["logprobs"].to_numpy() - got["logprobs"].to_numpy()).max() < 1e-5
    assert engine.trainer.graphs is not None
    assert len(engine.trainer.graphs) == 3
    assert recorder.num_captured == 6, "forward and backward of each shape, when it came again"


def test_another_adapter_has_graphs_of_its_own_and_a_moved_one_keeps_them(tiny_dir: Path) -> None:
    plain, _ = make(tiny_dir, captures=False)
    engine, recorder = make(tiny_dir, captures=True)
    datums = batches()[1]
    for seed in (1, 2):
        want, got = (displaced_adapter(one, seed=seed) for one in (plain, engine))
        for _ in range(3):
            for one, adapter in ((plain, want), (engine, got)):
                run(one.forward_backward(adapter, datums, "cross_entropy", None))
            assert relative_error(got.grad, want.grad) < 1e-5
            for adapter in (want, got):
                adapter.grad.zero_()
                with torch.no_grad():
                    adapter.flat.mul_(1.1)
    assert recorder.num_captured == 4


def test_passes_that_only_read_have_the_logprobs_of_plain_ones(tiny_dir: Path) -> None:
    plain, _ = make(tiny_dir, captures=False)
    engine, recorder = make(tiny_dir, captures=True)
    adapters = [displaced_adapter(one) for one in (plain, engine)]
    for settings in (None, {"kl_reference": "base"}):
        for _ in range(3):
            want, got = (
                run(one.forward(adapter, batches()[1], "cross_entropy", settings)).loss_fn_outputs
                for one, adapter in zip((plain, engine), adapters, strict=True)
            )
            for one, other in zip(want, got, strict=True):
                assert abs(one["logprobs"].to_numpy() - other["logprobs"].to_numpy()).max() < 1e-5
    assert recorder.num_captured == 2, "the adapter and the base"
