"""Experts on a GPU: the kernels, captured decoding and gradients agree with the CPU; replay lowers bfloat16's drift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from naive import displaced_adapter, make_model, random_ids, relative_error, rl_datum, run, sample_many
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.ops import for_device, torch_products
from turnwise.engine.ops.looped_experts import LoopedExperts

pytestmark = pytest.mark.gpu

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "num_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "sliding_window": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe", "mixtral"])
def moe_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(CONFIG_MAPPING[request.param](**SHAPE), tmp_path_factory.mktemp(request.param), spread=0.05)


def load(directory: Path, device: str, **settings: Any) -> Engine:
    more = {"device": device, "dtype": "float32", "kv_cache_gib": 0.2, "seed": 3, "merge_adapter": "never", **settings}
    return Engine(directory, EngineConfig.model_validate(more), name=directory.name)


@pytest.mark.parametrize(
    ("rows", "groups", "inputs", "outputs"),
    [(8, 128, 64, 48), (40, 16, 200, 4), (700, 16, 4, 136), (5000, 16, 256, 384)],
)
def test_the_kernels_compute_what_a_loop_over_experts_does(rows: int, groups: int, inputs: int, outputs: int) -> None:
    device, loop = torch.device("cuda"), LoopedExperts(torch_products)
    experts = for_device(device).experts
    assert experts.can_capture, "Triton runs here"
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        keys = torch.randint(0, groups + (rows < 1000), (rows,), device=device)
        ours, theirs = experts.group(keys, groups), loop.group(keys, groups)
        assert torch.equal(ours.order, theirs.order)
        assert torch.equal(ours.ends, theirs.ends)
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        weights = torch.randn(groups, outputs, inputs, device=device, dtype=dtype).transpose(1, 2)
        assert relative_error(experts.multiply(x, weights, ours), loop.multiply(x, weights, theirs)) < tolerance
        start = torch.randn(rows, outputs, device=device, dtype=dtype)
        sums = [
            one.multiply(x, weights, g, out=start.clone(), alpha=0.5, is_added=True)
            for one, g in ((experts, ours), (loop, theirs))
        ]
        assert relative_error(*sums) < tolerance
        outers = [torch.zeros(groups, outputs, inputs, device=device) for _ in range(2)]
        experts.add_outer(start, x, ours, outers[0], 0.3)
        loop.add_outer(start, x, theirs, outers[1], 0.3)
        assert relative_error(*outers) < tolerance


def test_captured_decoding_with_a_bank_of_adapters_draws_the_cpus_tokens(moe_dir: Path) -> None:
    drawn = []
    for device in ("cpu", "cuda"):
        engine = load(moe_dir, device)
        policies = [engine.publish(displaced_adapter(engine, rank=rank, seed=rank)) for rank in (8, 4)]
        requests = [(random_ids(20 + i, i), policies[i % 2]) for i in range(6)]
        replies = sample_many(engine, requests, max_tokens=24, seed=1, temperature=1.0)
        drawn.append([(list(r.sequences[0].tokens), np.asarray(r.sequences[0].logprobs)) for r in replies])
        if device == "cuda":
            assert engine.sampler.decode_graphs is not None
            assert len(engine.sampler.decode_graphs.captures) > 0
    assert [tokens for tokens, _ in drawn[0]] == [tokens for tokens, _ in drawn[1]]
    assert max(abs(a - b).max() for (_, a), (_, b) in zip(*drawn, strict=True)) < 1e-3


def test_gradients_of_experts_are_the_cpus(moe_dir: Path) -> None:
    datums = [rl_datum(random_ids(300 + i, i), start=100, seed=i) for i in range(4)]
    grads = []
    for device in ("cpu", "cuda"):
        engine = load(moe_dir, device)
        adapter = displaced_adapter(engine, rank=8, train_router=True)
        run(engine.forward_backward(adapter, datums, "importance_sampling", None))
        grads.append(adapter.grad.cpu())
    assert relative_error(grads[1], grads[0]) < 1e-3


def test_replay_lowers_the_drift_of_bfloat16(moe_dir: Path) -> None:
    engine = load(moe_dir, "cuda", dtype="bfloat16", routing_replay=True)
    adapter = displaced_adapter(engine, rank=8, size=0.01)
    prompts = [random_ids(64, i) for i in range(32)]
    replies = sample_many(engine, [(p, engine.publish(adapter)) for p in prompts], max_tokens=32, seed=1)
    datums = [rl_datum([*p, *r.sequences[0].tokens], 0) for p, r in zip(prompts, replies, strict=True)]
    k2 = []
    for memory in (engine.trainer.routing, None):
        engine.trainer.routing = memory
        output = run(engine.forward(adapter, datums, "cross_entropy", None))
        known = zip(output.loss_fn_outputs, replies, strict=True)
        gaps = [out["logprobs"].to_numpy()[-32:] - np.asarray(r.sequences[0].logprobs) for out, r in known]
        k2.append(float(np.mean(np.square(gaps))) / 2)
    print(f"k2 replayed {k2[0]:.3g}, own choice {k2[1]:.3g}")
    assert k2[0] < k2[1]
