"""Each fused GPU kernel against the plain torch function that it stands for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from naive import displaced_adapter, make_model, random_ids, run, sample_many
from turnwise.engine.attention.plans import PagedPlan, Pair, TreePlan
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.ops import cuda_attention, flash4, for_device, torch_attention, torch_draw, torch_layers
from turnwise.engine.ops.interface import (
    AttentionRule,
    CacheSlots,
    DrawSettings,
    Heads,
    Rotation,
    Saved,
    SoftmaxGradients,
)
from turnwise.engine.ops.torch_attention import merge
from turnwise.engine.sampling.kvcache import KvCache, KvShape
from turnwise.models.layer_keys import LayerKeys
from turnwise.types import Datum, ModelInput

pytestmark = pytest.mark.gpu

DTYPES = [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)]
N = 37


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to("cuda", dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_norms_equal_plain_torch(dtype: torch.dtype, tolerance: float) -> None:
    from turnwise.engine.ops import triton_layers

    h, delta, weight = rand(N, 576, dtype=dtype), rand(N, 576, dtype=dtype, seed=1), rand(576, dtype=dtype)
    for more in (None, delta):
        want = torch_layers.add_norm(h, more, weight, 1e-6)
        got = triton_layers.add_norm(h, more, weight, 1e-6)
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    total, _, rstd = torch_layers.add_norm(h, delta, weight, 1e-6)
    dx, dh = rand(N, 576, dtype=dtype, seed=2), rand(N, 576, dtype=dtype, seed=3)
    want = torch_layers.norm_backward(dx, total, rstd, weight, dh.clone())
    got = triton_layers.norm_backward(dx, total, rstd, weight, dh.clone())
    torch.testing.assert_close(got, want.to(dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_rotation_equals_plain_torch_and_fills_the_cache(dtype: torch.dtype, tolerance: float, has_norm: bool) -> None:
    from turnwise.engine.ops import triton_layers

    norms = (rand(64, dtype=dtype), rand(64, dtype=dtype, seed=1)) if has_norm else (None, None)
    heads = Heads(9, 3, 64, *norms, 1e-6)
    qkv = rand(N, 15 * 64, dtype=dtype)
    angles = rand(200, 32, dtype=torch.float32)
    positions = torch.randint(0, 200, (N,), generator=torch.Generator().manual_seed(0)).cuda()
    rotation = Rotation(angles.cos(), angles.sin(), positions)
    slots = 2 * torch.arange(N, device="cuda")
    empty = torch.zeros(99, 3, 64, dtype=dtype, device="cuda")
    caches = [CacheSlots(empty.clone(), empty.clone(), slots) for _ in range(2)]
    want = torch_layers.rotate(qkv, heads, rotation, caches[0])
    got = triton_layers.rotate(qkv, heads, rotation, caches[1])
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(caches[1].keys, caches[0].keys, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(caches[1].values, caches[0].values)
    grads = rand(N, 9, 64, dtype=dtype), rand(N, 3, 64, dtype=dtype), rand(N, 3, 64, dtype=dtype, seed=1)
    raw = qkv if has_norm else None
    torch.testing.assert_close(
        triton_layers.rotate_backward(grads, raw, heads, rotation),
        torch_layers.rotate_backward(grads, raw, heads, rotation),
        atol=tolerance,
        rtol=tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_the_gate_equals_plain_torch(dtype: torch.dtype, tolerance: float) -> None:
    from turnwise.engine.ops import triton_layers

    gate_up, dact = rand(N, 2 * 1536, dtype=dtype), rand(N, 1536, dtype=dtype)
    torch.testing.assert_close(
        triton_layers.swiglu(gate_up), torch_layers.swiglu(gate_up), atol=tolerance, rtol=tolerance
    )
    want = torch_layers.swiglu_backward(dact.clone(), gate_up.clone())
    got = triton_layers.swiglu_backward(dact.clone(), gate_up.clone())
    torch.testing.assert_close(got, want, atol=2 * tolerance, rtol=2 * tolerance)


def test_draws_are_the_tokens_of_plain_torch() -> None:
    logits = 3 * rand(64, 9001, dtype=torch.float32)
    logits[5, 10:] = float("-inf")
    uniform = torch.linspace(0, 0.999, 64, device="cuda")
    temperature = torch.linspace(0.3, 2, 64, device="cuda")
    temperature[::7] = 0
    settings = DrawSettings(temperature, uniform)
    want = torch_draw.draw(logits, settings)
    got = for_device(logits.device).draw(logits, settings)
    assert (got[0] == want[0]).float().mean() >= 63 / 64  # a sum's rounding may move a token to its neighbour
    same = got[0] == want[0]
    torch.testing.assert_close(got[1][same], want[1][same], atol=1e-4, rtol=1e-4)


def test_softmax_gradients_equal_autograd() -> None:
    from turnwise.engine.ops import triton_head

    logits = (3 * rand(6, 5000, dtype=torch.float32)).double().requires_grad_(True)
    temperature = torch.linspace(0.5, 2, 6, device="cuda")
    target = torch.arange(6, device="cuda") * 700
    grad, grad_entropy = rand(6, dtype=torch.float32), rand(6, dtype=torch.float32, seed=1)
    logprobs = (logits / temperature[:, None]).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    rows = torch.arange(6, device="cuda")
    (logprobs[rows, target] * grad + entropies * grad_entropy).sum().backward()
    work = logits.detach().float().clone()
    logsumexps, means = triton_head.row_stats(work, temperature)
    torch.testing.assert_close((logsumexps - means).double(), entropies.detach(), atol=1e-4, rtol=1e-4)
    given = SoftmaxGradients(temperature, logsumexps, grad, logsumexps - means, grad_entropy)
    out = triton_head.row_gradients(work, given)
    out[rows, target] += grad / temperature
    assert logits.grad is not None
    torch.testing.assert_close(out.double(), logits.grad, atol=1e-5, rtol=1e-3)


def test_parts_of_a_tree_are_merged_and_added_in_place() -> None:
    from turnwise.engine.ops import triton_tree

    out, part = rand(50, 9, 64, dtype=torch.float32), rand(12, 9, 64, dtype=torch.float32)
    lse, part_lse = rand(9, 50, dtype=torch.float32), rand(9, 12, dtype=torch.float32)
    index = torch.arange(12, device="cuda") * 4
    want, want_lse = merge(out[index].transpose(0, 1), lse[:, index], part.transpose(0, 1), part_lse)
    added = out.clone().index_add_(0, index, part)
    piecewise = out.clone()
    triton_tree.add_rows(piecewise, part, index)
    torch.testing.assert_close(piecewise, added)
    triton_tree.merge_rows(out, lse, part, part_lse, index)
    torch.testing.assert_close(out[index], want.transpose(0, 1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[:, index], want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 8, 128), (9, 3, 64)])
def test_flash_attention_4_computes_a_tree_as_dense_attention_does(
    heads: int, kv_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs the flash4 extra")
    monkeypatch.setattr(cuda_attention, "FLASH4_OPERATIONS", 0)
    plan = TreePlan([0, 300, 310, 470, 601, 640], [[Pair(300, 601, 0, 300)], [Pair(470, 601, 310, 470)]])
    query, grad = (rand(1, 640, heads, size, dtype=torch.bfloat16, seed=seed) for seed in (0, 3))
    key, value = (rand(1, 640, kv_heads, size, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    q, k, v = (side.transpose(1, 2) for side in (query, key, value))
    assert flash4.fits(q), "else this would test PyTorch's kernels"
    out, lse = cuda_attention.tree_forward(q, k, v, plan, AttentionRule(0.1))
    grads = cuda_attention.tree_backward(grad, Saved(q, k, v, out, lse), plan, AttentionRule(0.1))
    q, k, v = q.float(), k.float(), v.float()
    want, want_lse = cuda_attention.tree_forward(q, k, v, plan, AttentionRule(0.1))
    want_grads = cuda_attention.tree_backward(grad.float(), Saved(q, k, v, want, want_lse), plan, AttentionRule(0.1))
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-3)
    for got, expected in zip((out, *grads), (want, *want_grads), strict=True):
        assert (got.float() - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.fixture(scope="module")
def blocks_of_64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose linears fit the tiles of the adapter bank."""
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
    )
    return make_model(config, tmp_path_factory.mktemp("blocks"))


def test_many_adapters_in_one_launch_sample_what_each_samples_alone(blocks_of_64: Path) -> None:
    config = EngineConfig(device="cuda", dtype="float32", kv_cache_gib=0.05, seed=1)
    engine = Engine(blocks_of_64, config, name="bank")
    adapters = [displaced_adapter(engine, rank=rank, seed=rank) for rank in (2, 4, 16, 20, 32)]
    policies = [engine.base_policy, *(engine.publish(adapter) for adapter in adapters)]
    prompts = [random_ids(20 + 3 * i, i) for i in range(12)]
    requests = [(prompt, policies[i % len(policies)]) for i, prompt in enumerate(prompts)]
    together = sample_many(engine, requests, max_tokens=24, seed=4, stop=[])
    alone = [sample_many(engine, [request], max_tokens=24, seed=4, stop=[])[0] for request in requests]
    assert [r.sequences[0].tokens for r in together] == [r.sequences[0].tokens for r in alone]
    for (prompt, _), reply, adapter in zip(requests[1::6], together[1::6], adapters[:1] * 2, strict=True):
        full = prompt + list(reply.sequences[0].tokens)
        datum = Datum(ModelInput.from_ints(full[:-1]), {"target_tokens": full[1:], "weights": [1.0] * (len(full) - 1)})
        (known,) = run(engine.forward(adapter, [datum], "cross_entropy", None)).loss_fn_outputs
        torch.testing.assert_close(
            torch.tensor(known["logprobs"].data[-24:]), torch.tensor(reply.sequences[0].logprobs), atol=1e-4, rtol=1e-4
        )


def plain_projection(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    rest: torch.Tensor | None,
    is_gated: bool,
) -> torch.Tensor:
    if norm is not None:
        x = torch_layers.add_norm(x, None, *norm)[1]
    y = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    y = torch_layers.swiglu(y) if is_gated else y
    return y if rest is None else rest + y


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 192), (1536, 68)])
def test_products_of_few_rows_equal_plain_torch(rows: int, inputs: int, outputs: int) -> None:
    from turnwise.engine.ops import triton_rows

    x, norm = rand(rows, inputs, dtype=torch.bfloat16), (rand(inputs, dtype=torch.bfloat16), 1e-6)
    weight = rand(outputs, inputs, dtype=torch.bfloat16) / inputs**0.5
    bias = rand(outputs, dtype=torch.bfloat16)
    for is_gated in (False, True):
        rest = rand(rows, outputs // 2 if is_gated else outputs, dtype=torch.bfloat16, seed=5)
        for given in ((None, None, None), (norm, bias, rest), (norm, None, None), (None, None, rest)):
            settings: dict[str, Any] = {"norm": given[0], "rest": given[2], "is_gated": is_gated}
            got = triton_rows.project(x, weight, given[1], **settings)
            want = plain_projection(x, weight, bias=given[1], **settings)
            torch.testing.assert_close(got, want, atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize(("query_heads", "kv_heads", "size"), [(16, 8, 128), (6, 2, 64), (4, 4, 80)])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("width", [16, 128])
def test_attention_of_few_rows_equals_plain_torch_and_fills_the_cache(
    query_heads: int, kv_heads: int, size: int, has_norm: bool, width: int
) -> None:
    from turnwise.engine.ops import triton_rows

    rows, block = 3, 16
    norms = [rand(size, dtype=torch.bfloat16, seed=i) for i in range(2)] if has_norm else [None, None]
    heads = Heads(query_heads, kv_heads, size, norms[0], norms[1], 1e-6)
    most = width * block
    angles = [torch.rand(most, size // 2, device="cuda") for _ in range(2)]
    positions = torch.tensor([0, most // 3, most - 1], device="cuda")
    qkv = rand(rows, (query_heads + 2 * kv_heads) * size, dtype=torch.bfloat16)
    table = torch.randperm(rows * width).view(rows, width).int().cuda()
    slots = table.gather(1, positions[:, None] // block)[:, 0].long() * block + positions % block
    found = []
    for run_step in (plain_attention, triton_rows.attend):
        shape = KvShape((LayerKeys(kv_heads, size, 0),))
        cache = KvCache(shape, [rows * width], block, torch.bfloat16, torch.device("cuda"))
        for index, side in enumerate(cache.layer(0)):
            side.copy_(rand(*side.shape, dtype=torch.bfloat16, seed=7 + index))
        plan = PagedPlan(cache, slots, rows, table, (positions + 1).int(), most, chunks=())
        out = run_step(qkv, heads, Rotation(angles[0], angles[1], positions), plan, 0, size**-0.5)
        found.append((out, *(side.clone() for side in cache.layer(0))))
    (want, *want_cache), (got, *got_cache) = found
    torch.testing.assert_close(got, want, atol=4e-2, rtol=4e-2)
    torch.testing.assert_close(got_cache, want_cache, atol=2e-2, rtol=2e-2)


def plain_attention(
    qkv: torch.Tensor, heads: Heads, rotation: Rotation, plan: PagedPlan, layer: int, scale: float
) -> torch.Tensor:
    query, _, _ = torch_layers.rotate(qkv, heads, rotation, plan.cache_slots(layer))
    return torch_attention.paged_decode(query, plan.cache.layer(layer), plan, AttentionRule(scale)).flatten(1)
