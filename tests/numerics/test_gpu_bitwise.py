"""`engine.bitwise` on a GPU: kernels whose rows do not depend on the batch, and an engine made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from naive import displaced_adapter, make_model, random_ids, relative_error, rl_datum, run
from same_bits import bits, play, trained
from turnwise.engine.attention.plans import PagedPlan
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.ops import bitwise_for_device
from turnwise.engine.ops.interface import AttentionRule
from turnwise.engine.sampling.kvcache import KvCache, KvShape
from turnwise.engine.training.pack import pack
from turnwise.models.layer_keys import LayerKeys

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(scope="module")
def qwen_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers of Qwen3 with two query heads for each of four key heads."""
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1088,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    return make_model(config, tmp_path_factory.mktemp("qwen"), spread=0.03)


def build(directory: Path, dtype: Literal["bfloat16", "float32"], **settings: object) -> Engine:
    given = {"device": "cuda", "dtype": dtype, "bitwise": True, "kv_cache_gib": 0.5, "seed": 1, **settings}
    return Engine(directory, EngineConfig.model_validate(given), name="bitwise")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(1088, 192), (1000, 4096)])
def test_a_row_of_a_product_has_the_same_bits_in_every_batch(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    products = bitwise_for_device(CUDA).products
    x, weight = (torch.randn(rows, inputs, device=CUDA, dtype=dtype) for rows in (1000, outputs))
    bias = torch.randn(outputs, device=CUDA, dtype=dtype)
    whole = products.linear(x, weight, bias)
    exact = x.double() @ weight.double().t() + bias.double()
    assert relative_error(whole.double(), exact) < (4e-3 if dtype is torch.bfloat16 else 1e-5)
    for first, count in ((0, 1), (7, 3), (63, 64), (130, 65), (999, 1)):
        part = products.linear(x[first : first + count], weight, bias)
        assert torch.equal(part, whole[first : first + count]), (first, count)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "size"),
    [(torch.bfloat16, 16, 8, 128), (torch.bfloat16, 9, 3, 64), (torch.bfloat16, 4, 4, 80), (torch.float32, 8, 4, 64)],
)
def test_attention_has_the_same_bits_decoded_read_and_trained(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> None:
    """The last token of a sequence: decoded, as a prompt in one piece and in two, packed alone and in a tree."""
    torch.manual_seed(0)
    attention, rule = bitwise_for_device(CUDA).attention, AttentionRule(size**-0.5)
    tokens = np.array(random_ids(300, 1), dtype=np.int64)
    length, block = len(tokens), 16
    query = torch.randn(1, heads, length, size, device=CUDA, dtype=dtype)
    key, value = (torch.randn(1, kv_heads, length, size, device=CUDA, dtype=dtype) for _ in range(2))
    alone = pack([tokens], [0])
    out, logsumexp = attention.tree_forward(query, key, value, alone.plan, rule)
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=True, scale=rule.scale, enable_gqa=True
    )
    assert relative_error(out[0].double(), exact[0].transpose(0, 1)) < (8e-3 if dtype is torch.bfloat16 else 1e-5)
    assert torch.isfinite(logsumexp).all()

    other = np.concatenate([tokens[:200], np.array(random_ids(50, 2))])
    tree = pack([tokens, other], [0, 1])
    assert tree.plan.levels, "the two share a beginning"
    index = torch.from_numpy(dict(zip(tree.members, tree.packed_index, strict=True))[0]).to(CUDA)
    wide_query, wide_key, wide_value = (
        torch.randn(1, side.shape[1], tree.num_tokens, size, device=CUDA, dtype=dtype) for side in (query, key, key)
    )
    for side, own in ((wide_query, query), (wide_key, key), (wide_value, value)):
        side[:, :, index] = own
    shared, _ = attention.tree_forward(wide_query, wide_key, wide_value, tree.plan, rule)
    assert torch.equal(shared[:, index], out)

    shape = KvShape(keys=(LayerKeys(kv_heads, size, 0),))
    cache = KvCache(shape, [64], block, dtype, CUDA)
    blocks = np.random.default_rng(0).permutation(64)[: -(-length // block)]
    slots = torch.from_numpy(blocks[np.arange(length) // block] * block + np.arange(length) % block).to(CUDA)
    cache.write(0, slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    table = torch.from_numpy(blocks.astype(np.int32))[None].to(CUDA)
    lengths = torch.tensor([length], dtype=torch.int32, device=CUDA)
    plan = PagedPlan(cache, slots[-1:], 1, table, lengths, length, ())
    last = query[0, :, -1:].transpose(0, 1)
    assert torch.equal(attention.paged_decode(last, cache.layer(0), plan, rule), out[0, -1:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_sampled_logprobs_have_the_trainers_bits(
    qwen_dir: Path, dtype: Literal["bfloat16", "float32"], count: int
) -> None:
    """Turns over the prefix cache, decoded from captured graphs; the trainer packs them as trees."""
    engine = build(qwen_dir, dtype)
    adapter, turns = play(engine, count, turns=3)
    for sampled in [*turns, [pair for turn in turns for pair in turn]]:
        assert bits(sampled) == trained(engine, adapter, sampled)
    graphs = engine.sampler.decode_graphs
    assert graphs is not None
    assert len(graphs.captures) > 0


@pytest.mark.parametrize("settings", [{"prefix_cache": False}, {"prefill_tokens": 64}, {"share_prefixes": False}])
def test_whatever_the_engine_is_told(qwen_dir: Path, settings: dict[str, object]) -> None:
    engine = build(qwen_dir, "bfloat16", **settings)
    adapter, turns = play(engine, 6, turns=2)
    sampled = [pair for turn in turns for pair in turn]
    assert bits(sampled) == trained(engine, adapter, sampled)


def test_the_usual_engine_does_not_have_the_same_bits(qwen_dir: Path) -> None:
    engine = build(qwen_dir, "bfloat16", bitwise=False, merge_adapter="never")
    adapter, (sampled,) = play(engine, 8, turns=1)
    assert bits(sampled) != trained(engine, adapter, sampled)


def test_gradients_are_the_usual_ones(qwen_dir: Path) -> None:
    datums = [rl_datum(random_ids(200, 1) + random_ids(60 + i, 10 + i), start=199, seed=i) for i in range(4)]
    grads = []
    for settings in ({"dtype": "float32", "bitwise": False}, {"bitwise": False}, {}):
        engine = build(qwen_dir, **{"dtype": "bfloat16", **settings})
        adapter = displaced_adapter(engine, rank=16, size=0.01)
        run(engine.forward_backward(adapter, datums, "importance_sampling", None))
        grads.append(adapter.grad.clone())
    exact, usual, ours = grads
    assert relative_error(ours, exact) < 1.5 * relative_error(usual, exact) + 1e-3
