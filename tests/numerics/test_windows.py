"""Sliding windows, soft caps, sinks and scaled logits: what transformers computes, in contexts of several windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from naive import displaced_adapter, make_model, random_ids, relative_error, rl_datum, run, sample, sample_many
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.runtime import tolerances
from turnwise.types import LoraConfig, SampleRequest, SampleResponse, SamplingParams

WINDOW = 21
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
}
MIXED = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {"layer_types": MIXED, "logit_scale": 0.3},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"layer_types": MIXED, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    "gemma4_text": {
        "layer_types": MIXED,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
    },
    "gpt_oss": {"layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "phi3": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "smollm3": {"use_sliding_window": True, "layer_types": MIXED, "no_rope_layers": [1, 1, 1, 0]},
    "starcoder2": {},
}
"""Other families with windows are in the table of families, which compares shorter contexts."""


def make_engine(family: str, folder: Path, **settings: Any) -> tuple[Engine, Any]:
    """Our engine and transformers' own model, of random weights; norms and sinks differ from their first values."""
    directory = make_model(CONFIG_MAPPING[family](**SHAPE | FAMILIES[family]), folder / family)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "sinks" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_gib=0.01, **settings)
    return Engine(directory, config, name=family), model


def expected_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_trainer_prefill_and_decode_equal_transformers_several_windows_long(family: str, tmp_path: Path) -> None:
    engine, model = make_engine(family, tmp_path, prefill_tokens=48)
    adapter = engine.create_adapter(LoraConfig(rank=2, seed=1, train_mlp=False))
    stem = random_ids(70, 3)
    batch = [random_ids(150, 1), stem + random_ids(60, 4), stem + random_ids(5, 5), stem[:40] + random_ids(9, 6)]
    output = run(engine.forward(adapter, [rl_datum(ids, 0) for ids in batch], "cross_entropy", None))
    for ids, columns in zip(batch, output.loss_fn_outputs, strict=True):
        error = (columns["logprobs"].to_torch() - expected_logprobs(model, ids)).abs().max()
        assert error < tolerances.LOGPROBS, ("trained", len(ids), error)
    prompts = [random_ids(9, 7), random_ids(130, 8), stem + random_ids(20, 9)]
    replies = sample_many(engine, [(one, engine.base_policy) for one in prompts], max_tokens=60, seed=1)
    for prompt, reply in zip(prompts, replies, strict=True):
        (own,) = reply.sequences
        error = (torch.tensor(own.logprobs) - expected_logprobs(model, [*prompt, *own.tokens])[len(prompt) - 1 :]).abs()
        assert error.max() < tolerances.LOGPROBS, ("sampled", len(prompt), error)
    scored = sample(engine, prompts[1], engine.base_policy, max_tokens=1, prompt_logprobs=True).prompt_logprobs
    assert scored is not None
    error = (torch.tensor(scored[1:]) - expected_logprobs(model, prompts[1])).abs().max()
    assert error < tolerances.LOGPROBS, ("read", error)


def check_replies(model: Any, prompt: list[int], reply: SampleResponse, what: str) -> None:
    for own in reply.sequences:
        want = expected_logprobs(model, [*prompt, *own.tokens])[len(prompt) - 1 :]
        error = (torch.tensor(own.logprobs) - want).abs().max()
        assert error < tolerances.LOGPROBS, (what, len(prompt), error)


def poison_what_nobody_holds(engine: Engine) -> None:
    """Fill every block that no row holds with NaN: whoever reads one has NaN logprobs."""
    scheduler, cache = engine.sampler.scheduler, engine.sampler.cache
    for group, pool in enumerate(engine.sampler.pools):
        tables = [row.tables[group] for row in (*scheduler.running, *scheduler.reading)]
        held = {block for table in tables for block in (*table.blocks[table.first :], *table.spare)}
        unheld = torch.tensor(sorted(set(range(pool.num_blocks)) - held))
        for layer in range(engine.model.sizes.num_layers):
            if cache.group_of[layer] == group:
                for side in cache.layer(layer):
                    side[unheld] = float("nan")


@pytest.mark.parametrize(("family", "flat_groups"), [("mistral", [True]), ("gemma3_text", [False, True])])
def test_blocks_before_the_window_are_given_back_and_never_read(
    family: str, flat_groups: list[bool], tmp_path: Path
) -> None:
    engine, model = make_engine(family, tmp_path, prefill_tokens=40, prefix_cache=False)
    prompts = [random_ids(90, 1), random_ids(200, 2)]
    replies: dict[int, SampleResponse] = {}
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=220, seed=3, stop=[])

        def keep(reply: SampleResponse | BaseException, index: int = index) -> None:
            assert isinstance(reply, SampleResponse)
            replies[index] = reply

        engine.sampler.submit(SampleRequest(prompt, params, 2), engine.base_policy, on_done=keep)
    used: list[list[int]] = []
    while engine.sampler.has_work:
        engine.sampler.step()
        poison_what_nobody_holds(engine)
        used.append([pool.num_blocks - pool.num_available for pool in engine.sampler.pools])
    for index, prompt in enumerate(prompts):
        check_replies(model, prompt, replies[index], family)
    size = engine.config.block_size
    for group, is_flat in enumerate(flat_groups):
        most = max(one[group] for one in used)
        window_blocks = 4 * (-(-WINDOW // size) + 4)  # 4 rows
        assert (most <= window_blocks + 2 * 40 // size) == is_flat, (group, most, window_blocks)
    assert all(pool.num_available == pool.num_blocks for pool in engine.sampler.pools)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_conversations_go_on_from_their_last_window_and_siblings_share_a_beginning(family: str, tmp_path: Path) -> None:
    engine, model = make_engine(family, tmp_path, prefill_tokens=64)
    talk = random_ids(100, 1)
    size = engine.config.block_size
    for turn in range(3):
        reply = sample(engine, talk, engine.base_policy, max_tokens=45, seed=turn)
        check_replies(model, talk, reply, "turn")
        if turn:
            assert reply.num_cached_prompt_tokens >= len(talk) - 7 - 2 * size
        talk = [*talk, *reply.sequences[0].tokens, *random_ids(7, turn)]
    same = sample_many(engine, [(talk, engine.base_policy)] * 3, num_samples=2, max_tokens=40, seed=9)
    for reply in same:
        check_replies(model, talk, reply, "sibling")
        assert reply.num_cached_prompt_tokens > 0


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_beginning_whose_blocks_are_gone_is_computed_again(family: str, tmp_path: Path) -> None:
    engine, model = make_engine(family, tmp_path, prefill_tokens=64)
    talk, size = random_ids(160, 1), engine.config.block_size
    check_replies(model, talk, sample(engine, talk, engine.base_policy, max_tokens=60, seed=1), "first")
    windowed = engine.sampler.pools[-1]
    branch = talk[: 5 * size] + random_ids(30, 2)
    held = windowed.allocate_many(windowed.num_available)  # whatever was kept for later is overwritten
    for layer in range(engine.model.sizes.num_layers):
        if engine.sampler.cache.group_of[layer] == len(engine.sampler.pools) - 1:
            for side in engine.sampler.cache.layer(layer):
                side[torch.tensor(held)] = float("nan")
    windowed.release(held)
    for prompt, num_cached in ((branch, 0), ([*talk, *random_ids(9, 3)], 5 * size)):  # the branch brings its stem back
        reply = sample(engine, prompt, engine.base_policy, max_tokens=30, seed=2)
        assert reply.num_cached_prompt_tokens == num_cached
        check_replies(model, prompt, reply, "again")
    reply = sample(engine, [*branch, *random_ids(3, 4)], engine.base_policy, max_tokens=30, seed=2)
    assert reply.num_cached_prompt_tokens > 0
    check_replies(model, [*branch, *random_ids(3, 4)], reply, "found")


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_few_blocks_give_the_same_tokens_as_many(family: str, tmp_path: Path) -> None:
    many, model = make_engine(family, tmp_path, prefill_tokens=32)
    prompts = [random_ids(30 + 25 * i, i) for i in range(5)]
    requests = [(prompt, many.base_policy) for prompt in prompts]
    expected = sample_many(many, requests, num_samples=2, max_tokens=70, seed=4)
    spare = [
        pool.allocate_many(pool.num_available - (16 if window else 40))
        for pool, window in zip(many.sampler.pools, many.sampler.cache.windows, strict=True)
    ]
    actual = sample_many(many, requests, num_samples=2, max_tokens=70, seed=4)
    assert many.sampler.scheduler.num_preemptions > 0
    for prompt, reply, want in zip(prompts, actual, expected, strict=True):
        check_replies(model, prompt, reply, "preempted")
        assert [one.tokens for one in reply.sequences] == [one.tokens for one in want.sequences]
    for pool, held in zip(many.sampler.pools, spare, strict=True):
        pool.release(held)
        assert pool.num_available == pool.num_blocks


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_gradients_of_a_packed_tree_equal_those_of_plain_transformers(family: str, tmp_path: Path) -> None:
    engine, model = make_engine(family, tmp_path)
    adapter = displaced_adapter(engine, rank=2, train_mlp=False)
    stem = random_ids(60, 1)
    datums = [rl_datum(stem + random_ids(12 + 30 * i, i), start=50, seed=i) for i in range(3)]
    datums += [rl_datum(stem[:30] + random_ids(40, 8), start=20, seed=8)]
    run(engine.forward_backward(adapter, datums, "importance_sampling", None))
    leaves = {
        name: (a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_())
        for name, (a, b) in adapter.pairs.items()
    }
    weights = dict(model.named_parameters())
    changed = {
        f"{name}.weight": weights[f"{name}.weight"].detach() + adapter.scale * (b @ a)
        for name, (a, b) in leaves.items()
    }
    for datum in datums:
        inputs = {key: torch.tensor(value.to_numpy()) for key, value in datum.loss_fn_inputs.items()}
        ids = torch.tensor([datum.model_input.to_ints()])
        logits = torch.func.functional_call(model, changed, (ids,), {"use_cache": False}).logits[0]
        logprobs = torch.log_softmax(logits, -1).gather(1, inputs["target_tokens"][:, None].long())[:, 0]
        ratios = (logprobs - inputs["logprobs"]).exp()
        (-(inputs["mask"] * ratios * inputs["advantages"]).sum()).backward(retain_graph=True)
    for name, sides in leaves.items():
        for got, leaf in zip(adapter.grad_pairs[name], sides, strict=True):
            assert leaf.grad is not None
            assert relative_error(got, leaf.grad) < 2e-4, name
