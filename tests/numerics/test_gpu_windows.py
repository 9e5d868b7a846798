"""On a GPU: windows, soft caps and sinks equal plain torch in float32: trees, decode, whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from naive import make_model, random_ids, rl_datum, run, sample_many
from turnwise.engine.attention.plans import Pair, TreePlan
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.ops import torch_attention
from turnwise.engine.ops.interface import AttentionRule, Saved
from turnwise.types import LoraConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

TREE = TreePlan([0, 300, 310, 470, 601, 640], [[Pair(300, 601, 0, 300)], [Pair(470, 601, 310, 470)]])


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@pytest.mark.parametrize("window", [1, 33, 200, 5000])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("size", "lies_heads_first"), [(64, False), (256, False), (64, True)])
def test_a_tree_under_a_window_equals_plain_torch(
    window: int, has_sinks: bool, size: int, lies_heads_first: bool
) -> None:
    from turnwise.engine.ops import cuda_attention

    sinks = rand(8, seed=5) if has_sinks else None
    rule = AttentionRule(0.1, window, sinks=sinks)
    query, grad = (rand(1, 640, 8, size, seed=seed) for seed in (0, 3))
    key, value = (rand(1, 640, 2, size, seed=seed) for seed in (1, 2))
    q, k, v = (side.transpose(1, 2) for side in (query, key, value))
    if lies_heads_first:  # as after the rotation of gpt-oss
        q, k = q.contiguous(), k.contiguous()
    out, lse = cuda_attention.tree_forward(q, k, v, TREE, rule)
    grads = cuda_attention.tree_backward(grad, Saved(q, k, v, out, lse), TREE, rule)
    wide = [side.float() for side in (q, k, v)]
    want, want_lse = torch_attention.tree_forward(wide[0], wide[1], wide[2], TREE, rule)
    saved = Saved(wide[0], wide[1], wide[2], want, want_lse)
    want_grads = torch_attention.tree_backward(grad.float(), saved, TREE, rule)
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, want_lse, atol=2e-2, rtol=2e-2)
    # Whoever sees itself alone has no gradient in its query and key: what is there is rounding of the others' size.
    least = 1e-4 * max(float(expected.norm()) for expected in want_grads)
    for got, expected in zip(grads, want_grads, strict=True):
        assert float((got.float() - expected).norm()) < 2e-2 * max(float(expected.norm()), least)


@pytest.mark.parametrize(("window", "softcap"), [(None, 5.0), (1, None), (70, None), (70, 5.0), (4000, None)])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_reads_the_window_alone(
    window: int | None, softcap: float | None, has_sinks: bool, dtype: torch.dtype
) -> None:
    from turnwise.engine.ops import triton_decode

    rule = AttentionRule(0.2, window, softcap, rand(8, seed=5, dtype=dtype) if has_sinks else None)
    contexts = torch.tensor([1, 64, 65, 700, 1500], dtype=torch.int32, device="cuda")
    keys, values = (rand(500, 16, 2, 64, seed=seed, dtype=dtype) for seed in (1, 2))
    table = torch.randperm(500, generator=torch.Generator().manual_seed(3))[:475].view(5, 95).int().cuda()
    query = rand(5, 8, 64, seed=0, dtype=dtype)
    expected = torch.empty(5, 8, 64, device="cuda")
    for row, length in enumerate(contexts.tolist()):
        k, v = (side[table[row].long()].flatten(0, 1)[None, :length].transpose(1, 2).float() for side in (keys, values))
        own, lse = torch_attention.slice_forward(query[row].float()[None, :, None], k, v, True, rule)
        expected[row] = torch_attention.with_sinks(own, lse, rule)[0][0, 0]
        if window is not None:  # whoever reads before the window reads NaN
            for block in table[row, : max(0, length - window) // 16].tolist():
                keys[block], values[block] = float("nan"), float("nan")
    out = triton_decode.paged_decode(query, keys, values, table, contexts, 1520, rule)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": 2, "sliding_window": 21,
}  # fmt: skip


OWN: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "global_head_dim": 512,  # more than the flash and decode kernels take: plain torch runs these layers
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 24,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "cohere2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.2)])
def test_models_with_windows_equal_transformers(family: str, dtype: Any, tolerance: float, tmp_path: Path) -> None:
    directory = make_model(CONFIG_MAPPING[family](**SHAPE, **OWN.get(family, {})), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    engine = Engine(directory, EngineConfig(device="cuda", dtype=dtype, kv_cache_gib=0.1), name=family)

    def expected(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    adapter = engine.create_adapter(LoraConfig(rank=2, seed=1, train_mlp=False))
    stem = random_ids(70, 3)
    batch = [random_ids(150, 1), stem + random_ids(60, 4), stem + random_ids(5, 5)]
    output = run(engine.forward(adapter, [rl_datum(ids, 0) for ids in batch], "cross_entropy", None))
    for ids, columns in zip(batch, output.loss_fn_outputs, strict=True):
        assert (columns["logprobs"].to_torch() - expected(ids)).abs().mean() < tolerance
    prompts = [random_ids(9, 7), random_ids(130, 8), stem + random_ids(20, 9)]
    for _ in range(2):  # the second time from captured graphs and found blocks
        replies = sample_many(engine, [(one, engine.base_policy) for one in prompts], max_tokens=90, seed=1)
        for prompt, reply in zip(prompts, replies, strict=True):
            (own,) = reply.sequences
            want = expected([*prompt, *own.tokens])[len(prompt) - 1 :]
            assert (torch.tensor(own.logprobs) - want).abs().mean() < tolerance


def test_a_family_that_rotates_on_the_host_decodes_from_graphs(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["phimoe"](
        **SHAPE | {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    directory = make_model(config, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    engine = Engine(directory, EngineConfig(device="cuda", dtype="float32", kv_cache_gib=0.1), name="phimoe")
    (reply,) = sample_many(engine, [(random_ids(9, 7), engine.base_policy)], max_tokens=40, seed=1)
    (own,) = reply.sequences
    ids = torch.tensor([*random_ids(9, 7), *own.tokens])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None], use_cache=False).logits[0, :-1].float(), -1)
    want = logprobs.gather(1, ids[1:, None])[8:, 0]
    assert (torch.tensor(own.logprobs) - want).abs().mean() < 1e-3
