"""The C attention against torch in float64, forward and backward."""

import numpy as np
import pytest
import torch
from torch import Tensor

from cases import for_each
from turnwise.engine.attention.plans import Chunk, PagedPlan
from turnwise.engine.ops import cpu_attention
from turnwise.engine.ops.interface import AttentionRule, Saved
from turnwise.engine.sampling.kvcache import KvCache, KvShape
from turnwise.errors import DataError
from turnwise.models.layer_keys import LayerKeys

pytestmark = pytest.mark.usefixtures("library")

# (batch, heads, KV heads, queries, keys, D): one token, odd sizes, a model's shape, more than one block of keys.
CAUSAL = [
    (1, 1, 1, 1, 1, 2),
    (2, 4, 2, 5, 5, 8),
    (2, 9, 3, 61, 61, 64),
    (1, 2, 1, 400, 400, 24),
    (1, 1, 1, 790, 790, 6),
    (1, 4, 1, 60, 60, 512),
]
FULL = [
    (2, 4, 2, 37, 401, 40),
    (1, 2, 1, 7, 385, 128),
    (1, 1, 1, 50, 33, 6),
    (1, 2, 2, 13, 96, 256),
    (1, 2, 1, 13, 390, 504),
    (1, 3, 1, 1, 1, 64),
]
CPU = torch.device("cpu")
CASES = [(shape, True) for shape in CAUSAL] + [(shape, False) for shape in FULL]


def make(batch: int, heads: int, tokens: int, size: int) -> Tensor:
    """Tokens first in memory, and wider than it is read: what the layers hand over."""
    return torch.randn(batch, tokens, heads, size + 3)[..., :size].transpose(1, 2)


def exact_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -float("inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=2e-5)


@for_each(("shape", "is_causal"), CASES)
@for_each("num_threads", [1, 2])
def test_attention_and_its_gradients_equal_float64(
    shape: tuple[int, ...], is_causal: bool, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    batch, heads, kv_heads, queries, keys, size = shape
    scale = size**-0.5
    rule = AttentionRule(scale)
    sides = make(batch, heads, queries, size), make(batch, kv_heads, keys, size), make(batch, kv_heads, keys, size)
    out, logsumexp = make(batch, heads, queries, size), torch.empty(batch, heads, queries)
    whole = Saved(*sides, out, logsumexp)
    cpu_attention.attend(whole, rule, is_causal=is_causal)
    exact = [side.double().requires_grad_() for side in sides]
    expected, expected_sum = exact_attention(exact[0], exact[1], exact[2], is_causal=is_causal)
    close(out, expected)
    close(logsumexp, expected_sum)

    grad_out = make(batch, heads, queries, size)
    expected.backward(grad_out.double())
    dq, dk, dv = (torch.full_like(side, float("nan")) for side in sides)
    cpu_attention.attend_backward(grad_out, whole, (dq, dk, dv), rule, is_causal=is_causal)
    before = [grad.clone() for grad in (dq, dk, dv)]
    for actual, side in zip((dq, dk, dv), exact, strict=True):
        assert side.grad is not None
        close(actual, side.grad)
    cpu_attention.attend_backward(grad_out, whole, (dq, dk, dv), rule, is_causal=is_causal, is_added=True)
    for actual, once in zip((dq, dk, dv), before, strict=True):
        close(actual, 2 * once)


@for_each("keys", [1, 40, 500])
def test_two_sets_of_keys_one_after_the_other_are_one_softmax(keys: int) -> None:
    query, key, value = make(1, 4, 23, 16), make(1, 2, keys + 23, 16) * 3, make(1, 2, keys + 23, 16)
    out, logsumexp = torch.empty(1, 4, 23, 16), torch.empty(1, 4, 23)
    own, before = slice(keys, None), slice(0, keys)
    cpu_attention.attend(
        Saved(query, key[:, :, own], value[:, :, own], out, logsumexp), AttentionRule(0.3), is_causal=True
    )
    earlier = Saved(query, key[:, :, before], value[:, :, before], out, logsumexp)
    cpu_attention.attend(earlier, AttentionRule(0.3), is_causal=False, is_added=True)
    scores = query.double() @ key.double().repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    scores[..., keys:] = scores[..., keys:].masked_fill(torch.ones(23, 23).triu(1).bool(), -float("inf"))
    close(out, scores.softmax(-1) @ value.double().repeat_interleave(2, 1))
    close(logsumexp, scores.logsumexp(-1))


def test_no_queries_give_no_output_and_keys_no_gradient() -> None:
    query, key = torch.ones(1, 2, 0, 8), torch.ones(1, 2, 3, 8)
    logsumexp, grads = torch.empty(1, 2, 0), (torch.empty_like(query), torch.ones_like(key), torch.ones_like(key))
    cpu_attention.attend(Saved(query, key, key, query, logsumexp), AttentionRule(1.0), is_causal=False)
    cpu_attention.attend_backward(
        query, Saved(query, key, key, query, logsumexp), grads, AttentionRule(1.0), is_causal=False
    )
    assert not grads[1].any()
    assert not grads[2].any()


def test_a_nan_stays_visible() -> None:
    query, key, value = (torch.ones(1, 1, 20, 8) for _ in range(3))
    value[0, 0, 6, 0] = float("nan")
    out, logsumexp = torch.empty(1, 1, 20, 8), torch.empty(1, 1, 20)
    cpu_attention.attend(Saved(query, key, value, out, logsumexp), AttentionRule(1.0), is_causal=True)
    assert out[0, 0, 6:, 0].isnan().all()


def test_sides_that_do_not_agree_are_refused() -> None:
    query, key = torch.ones(1, 4, 5, 8), torch.ones(1, 3, 5, 8)
    out, logsumexp = torch.empty_like(query), torch.empty(1, 4, 5)
    with pytest.raises(DataError, match="multiple of the KV heads"):
        cpu_attention.attend(Saved(query, key, key, out, logsumexp), AttentionRule(1.0), is_causal=True)
    with pytest.raises(DataError, match=r"expected float32 \(1, 4, 5, 8\)"):
        cpu_attention.attend(
            Saved(query, key[:, :2], key[:, :2], out[:, :3], logsumexp), AttentionRule(1.0), is_causal=True
        )
    few = key[:, :2, :3]
    with pytest.raises(DataError, match="as many as queries"):
        cpu_attention.attend(Saved(query, few, few, out, logsumexp), AttentionRule(1.0), is_causal=True)


RULES = [
    (1, 1, AttentionRule(0.6, 1)),
    (40, 40, AttentionRule(0.6, 7)),
    (40, 40, AttentionRule(0.6, 1, 5.0)),
    (23, 700, AttentionRule(0.6, 50)),
    (23, 700, AttentionRule(0.6, 450, 3.0)),
    (500, 900, AttentionRule(0.6, 384, 8.0)),
    (900, 900, AttentionRule(0.6, 385)),
    (60, 60, AttentionRule(0.6, None, 4.0)),
    (9, 400, AttentionRule(0.6)),
]


@for_each(("queries", "keys", "rule"), RULES)
@for_each("num_threads", [1, 2])
def test_windows_and_soft_caps_equal_float64_when_queries_stand_at_the_last_keys(
    queries: int, keys: int, rule: AttentionRule, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    window, softcap = rule.window, rule.softcap
    sides = make(1, 4, queries, 24), make(1, 2, keys, 24), make(1, 2, keys, 24)
    whole = Saved(*sides, torch.empty(1, 4, queries, 24), torch.empty(1, 4, queries))
    cpu_attention.attend(whole, rule, is_causal=True)
    exact = [side.double().requires_grad_() for side in sides]
    scores = exact[0] @ exact[1].repeat_interleave(2, 1).transpose(-1, -2) * 0.6
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    gaps = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    scores = scores.masked_fill((gaps < 0) | (gaps >= (window or keys)), -float("inf"))
    expected = scores.softmax(-1) @ exact[2].repeat_interleave(2, 1)
    close(whole.out, expected)
    close(whole.logsumexp, scores.logsumexp(-1))
    grad_out = make(1, 4, queries, 24)
    expected.backward(grad_out.double())
    grads = tuple(torch.full_like(side, float("nan")) for side in sides)
    cpu_attention.attend_backward(grad_out, whole, grads, rule, is_causal=True)
    for actual, side in zip(grads, exact, strict=True):
        assert side.grad is not None
        close(actual, side.grad)


CACHES = [  # heads, KV heads, D, tokens of a block; then new and cached tokens of each prompt
    (4, 2, 8, 4, [(7, 0), (5, 7), (1, 3)]),
    (9, 3, 64, 16, [(33, 71), (64, 0)]),
    (2, 1, 24, 5, [(400, 9), (3, 391)]),
    (3, 1, 512, 16, [(14, 20)]),
    (1, 1, 6, 16, [(1, 0)]),
]


@for_each("shape", CACHES)
@for_each("rule", [AttentionRule(0.4), AttentionRule(0.4, 6), AttentionRule(0.4, None, 3.0)])
@for_each("num_threads", [1, 3])
def test_prompts_over_scattered_blocks_equal_float64(
    shape: tuple[int, int, int, int, list[tuple[int, int]]],
    rule: AttentionRule,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one call; blocks before a window are gone and not read, and two decode rows stand before the prompts."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    heads, kv_heads, size, block_size, prompts = shape
    needed = [-(-(new + cached) // block_size) for new, cached in prompts]
    free = iter(np.random.default_rng(1).permutation(sum(needed)).tolist())
    keys = KvCache(KvShape((LayerKeys(kv_heads, size, 0),)), [sum(needed)], block_size, torch.float32, CPU)
    for side in keys.layer(0):
        side.normal_()
    plan = prompt_plan(
        keys, [(*one, [next(free) for _ in range(count)]) for one, count in zip(prompts, needed, strict=True)], rule
    )
    query = make(1, heads, 2 + sum(new for new, _ in prompts), size)
    expected = []
    for chunk in plan.chunks:
        key, value = (
            side.double().repeat_interleave(heads // kv_heads, 1)
            for side in keys.read(0, chunk.blocks, 0, chunk.num_cached + chunk.stop - chunk.start)
        )
        scores = query[:, :, chunk.start : chunk.stop].double() @ key.transpose(-1, -2) * rule.scale
        if rule.softcap is not None:
            scores = (scores / rule.softcap).tanh() * rule.softcap
        places = chunk.num_cached + torch.arange(chunk.stop - chunk.start)[:, None] - torch.arange(key.shape[2])
        is_seen = (places >= 0) & (places < (rule.window or 1 << 30))
        expected.append(scores.masked_fill(~is_seen, -float("inf")).softmax(-1) @ value)
    if rule.window is not None:
        for chunk in plan.chunks:
            gone = chunk.blocks[: plan.first_seen(chunk) // block_size].copy()
            for side in keys.layer(0):
                side[torch.from_numpy(gone)] = float("nan")
    none = query.new_empty(1, kv_heads, 0, size)
    close(cpu_attention.prefill(query, none, none, plan, 0, rule), torch.cat(expected, dim=2).transpose(1, 2))


def prompt_plan(cache: KvCache, prompts: list[tuple[int, int, list[int]]], rule: AttentionRule) -> PagedPlan:
    """(new tokens, cached tokens, blocks) of each prompt, behind two decode rows."""
    starts = np.cumsum([2, *(new for new, _, _ in prompts)]).tolist()
    chunks = [
        Chunk(start, start + new, cached, np.array(blocks, dtype=np.int64))
        for start, (new, cached, blocks) in zip(starts, prompts, strict=False)
    ]
    none = torch.zeros(0)
    return PagedPlan(cache, none, 2, none, none, 0, chunks, window=rule.window)


def test_a_prompt_in_a_block_that_does_not_exist_is_refused() -> None:
    cache = KvCache(KvShape((LayerKeys(1, 8, 0),)), [3], 4, torch.float32, CPU)
    rule = AttentionRule(1.0)
    query = make(1, 2, 7, 8)
    for blocks in ([2, 3], [-1, 0]):
        plan = prompt_plan(cache, [(5, 0, blocks)], rule)
        with pytest.raises(DataError, match="not among the 3 blocks"):
            cpu_attention.prefill(query, query[:, :1], query[:, :1], plan, 0, rule)
