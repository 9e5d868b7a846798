"""The sampler's logprobs are the trainer's, whatever the batch, the cache and the weights' form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from naive import NaiveModel, assert_close, displaced_adapter, move, random_ids, run, sample, sample_many, with_ops
from turnwise.engine.engine import Engine
from turnwise.engine.training.trainable import LoraAdapter
from turnwise.runtime import tolerances
from turnwise.types import Datum, ModelInput, SampledSequence, SampleRequest, SamplingParams

MakeEngine = Callable[..., Engine]


def trainer_logprobs(
    engine: Engine, adapter: LoraAdapter, prompt: list[int], sequence: SampledSequence, temperature: float
) -> np.ndarray:
    full = prompt + list(sequence.tokens)
    columns = {"target_tokens": full[1:], "temperature": [temperature or 1.0] * (len(full) - 1)}
    datum = Datum(ModelInput.from_ints(full[:-1]), columns)
    output = run(engine.forward(adapter, [datum], "cross_entropy", None))
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(prompt) - 1 :]


@pytest.mark.parametrize("merge", ["always", "never"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6, 1.7])
def test_sampler_logprobs_equal_the_trainers(
    arch_dir: Path, make_engine: MakeEngine, temperature: float, merge: str
) -> None:
    engine = make_engine(arch_dir, merge_adapter=merge)
    adapter = displaced_adapter(engine)
    prompt = random_ids(21, 1)
    reply = sample(engine, prompt, engine.publish(adapter), num_samples=3, max_tokens=30, temperature=temperature)
    for sequence in reply.sequences:
        assert len(sequence.tokens) == 30
        want = trainer_logprobs(engine, adapter, prompt, sequence, temperature)
        assert_close(sequence.logprobs, want, tolerances.LOGPROBS)


def test_they_agree_across_the_turns_of_a_conversation_that_reuses_its_cache(make_engine: MakeEngine) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    policy = engine.publish(adapter)
    history = random_ids(25, 2)
    for turn in range(6):
        reply = sample(engine, history, policy, max_tokens=19, temperature=1.0)
        (sequence,) = reply.sequences
        assert_close(sequence.logprobs, trainer_logprobs(engine, adapter, history, sequence, 1.0), tolerances.LOGPROBS)
        if turn:
            assert reply.num_cached_prompt_tokens >= len(history) - 16 - 13
        history = history + list(sequence.tokens) + random_ids(12, 30 + turn)


def test_greedy_tokens_are_the_argmax_of_a_naive_model(arch_dir: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(arch_dir)
    adapter = displaced_adapter(engine)
    naive = NaiveModel(arch_dir, adapter)
    prompt = random_ids(17, 3)
    (sequence,) = sample(engine, prompt, engine.publish(adapter), max_tokens=12, temperature=0.0).sequences
    ids = list(prompt)
    for token in sequence.tokens:
        assert token == int(naive.logits(ids)[-1].argmax())
        ids.append(token)


@pytest.mark.parametrize("settings", [{}, {"prefix_cache": False}, {"prefill_tokens": 7}, {"block_size": 5}])
def test_tokens_depend_on_seed_and_weights_alone(make_engine: MakeEngine, settings: dict[str, object]) -> None:
    """Alone or among 32 others, cache on or off, prompts read whole or in pieces: the same tokens and logprobs."""
    reference = make_engine()
    engine = make_engine(**settings)
    adapters = [displaced_adapter(e) for e in (reference, engine)]
    policies = [e.publish(a) for e, a in zip((reference, engine), adapters, strict=True)]
    prompts = [random_ids(5 + i, 100 + i) for i in range(32)]
    shared = random_ids(40, 99)
    prompts[5:9] = [shared + random_ids(3, i) for i in range(4)]
    together = sample_many(engine, [(p, policies[1]) for p in prompts], max_tokens=20, seed=42)
    for index in (0, 5, 6, 31):
        alone = sample(reference, prompts[index], policies[0], max_tokens=20, seed=42)
        assert together[index].sequences[0].tokens == alone.sequences[0].tokens
        assert_close(together[index].sequences[0].logprobs, alone.sequences[0].logprobs, tolerances.LOGPROBS)


def test_several_policies_share_a_batch_without_touching_each_other(make_engine: MakeEngine) -> None:
    engine = make_engine()
    adapters = [displaced_adapter(engine, rank=r, seed=r, train_mlp=r != 3) for r in (2, 3, 9)]
    policies = [engine.base_policy, *(engine.publish(a) for a in adapters)]
    prompt = random_ids(30, 7)
    together = sample_many(engine, [(prompt, p) for p in policies for _ in range(2)], max_tokens=15, seed=1)
    engine.sampler.drop_cache()
    for index, policy in enumerate(policies):
        alone = sample(engine, prompt, policy, max_tokens=15, seed=1)
        engine.sampler.drop_cache()
        for twin in together[2 * index : 2 * index + 2]:
            assert twin.sequences[0].tokens == alone.sequences[0].tokens
            assert_close(twin.sequences[0].logprobs, alone.sequences[0].logprobs, tolerances.LOGPROBS)


def test_no_cached_block_survives_a_weight_change(make_engine: MakeEngine) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    prompt = random_ids(64, 8)
    sample(engine, prompt, engine.publish(adapter), max_tokens=4)
    assert sample(engine, prompt, engine.publish(adapter), max_tokens=4).num_cached_prompt_tokens == 0
    move(adapter, 0.05, seed=1)
    policy = engine.publish(adapter)
    reply = sample(engine, prompt, policy, max_tokens=10)
    assert reply.num_cached_prompt_tokens == 0
    assert_close(
        reply.sequences[0].logprobs,
        trainer_logprobs(engine, adapter, prompt, reply.sequences[0], 1.0),
        tolerances.LOGPROBS,
    )
    assert sample(engine, prompt, policy, max_tokens=4).num_cached_prompt_tokens == 48


def test_a_published_policy_does_not_move_with_its_adapter(make_engine: MakeEngine) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    policy = engine.publish(adapter)
    prompt = random_ids(20, 9)
    before = sample(engine, prompt, policy, max_tokens=8, temperature=0.0)
    adapter.flat.add_(1.0)
    engine.sampler.drop_cache()
    after = sample(engine, prompt, policy, max_tokens=8, temperature=0.0)
    assert before.sequences[0].tokens == after.sequences[0].tokens


def test_a_full_cache_makes_requests_wait_or_start_over_and_changes_no_token(make_engine: MakeEngine) -> None:
    roomy, cramped = make_engine(), make_engine(kv_cache_gib=40 * 16 * 256 / 2**30)
    assert cramped.sampler.pool.num_blocks <= 40
    prompts = [random_ids(50, 200 + i) for i in range(12)]
    want = sample_many(roomy, [(p, roomy.base_policy) for p in prompts], num_samples=3, max_tokens=60, seed=5)
    got = sample_many(cramped, [(p, cramped.base_policy) for p in prompts], num_samples=3, max_tokens=60, seed=5)
    assert cramped.sampler.scheduler.num_preemptions > 0
    for a, b in zip(want, got, strict=True):
        for one, two in zip(a.sequences, b.sequences, strict=True):
            assert one.tokens == two.tokens
            assert_close(one.logprobs, two.logprobs, tolerances.LOGPROBS)
    assert cramped.sampler.pool.num_available == cramped.sampler.pool.num_blocks


def test_prompt_logprobs_equal_a_naive_model(arch_dir: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(arch_dir, prefill_tokens=16)
    adapter = displaced_adapter(engine)
    prompt = random_ids(45, 10)
    policy = engine.publish(adapter)
    sample(engine, prompt, policy, max_tokens=1)  # fills the cache, which must not hide prompt positions
    reply = sample(engine, prompt, policy, num_samples=2, max_tokens=3, prompt_logprobs=True, topk_prompt_logprobs=5)
    want = torch.log_softmax(NaiveModel(arch_dir, adapter).logits(prompt), dim=-1).detach()
    assert reply.prompt_logprobs is not None
    assert reply.topk_prompt_logprobs is not None
    assert reply.prompt_logprobs[0] is None
    assert_close(reply.prompt_logprobs[1:], [float(want[i, t]) for i, t in enumerate(prompt[1:])], tolerances.LOGPROBS)
    for position, row in enumerate(reply.topk_prompt_logprobs[1:]):
        values, ids = want[position].topk(5)
        assert row is not None
        assert [token for token, _ in row] == ids.tolist()
        assert_close([value for _, value in row], values.numpy(), tolerances.LOGPROBS)


def test_samples_follow_the_models_distribution(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=512)
    prompt = random_ids(6, 11)
    reply = sample(engine, prompt, engine.base_policy, num_samples=4000, max_tokens=1, temperature=0.9, seed=77)
    probs = torch.softmax(NaiveModel(engine.model_dir).logits(prompt)[-1] / 0.9, dim=-1).detach().numpy()
    counts = np.bincount([s.tokens[0] for s in reply.sequences], minlength=len(probs))
    common = probs * 4000 >= 8
    expected, seen = probs[common] * 4000, counts[common]
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < common.sum() + 6 * np.sqrt(2 * common.sum())


@pytest.mark.parametrize(
    ("cut", "allowed"),
    [
        ({"top_k": 3}, lambda p: np.argsort(-p)[:3]),
        ({"top_p": 0.5}, lambda p: np.argsort(-p)[: 1 + int((np.cumsum(np.sort(p)[::-1]) < 0.5).sum())]),
        ({"min_p": 0.4}, lambda p: np.nonzero(p >= 0.4 * p.max())[0]),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_a_cut_tail_is_never_sampled_and_logprobs_stay_those_of_the_whole_vocabulary(
    make_engine: MakeEngine, cut: dict[str, float], allowed
) -> None:
    engine = make_engine(max_num_seqs=512)
    prompt = random_ids(6, 12)
    reply = sample(engine, prompt, engine.base_policy, num_samples=300, max_tokens=1, temperature=0.8, seed=3, **cut)
    probs = torch.softmax(NaiveModel(engine.model_dir).logits(prompt)[-1] / 0.8, dim=-1).detach().numpy()
    seen = {s.tokens[0] for s in reply.sequences}
    assert seen == set(allowed(probs).tolist())
    for s in reply.sequences[:20]:
        assert_close(s.logprobs, [np.log(probs[s.tokens[0]])], tolerances.LOGPROBS)


@pytest.mark.parametrize("kv_cache_gib", [0.01, 0.00003])
def test_launching_ahead_changes_no_token(make_engine: MakeEngine, kv_cache_gib: float) -> None:
    """A step that is launched before the tokens of the last are known, also when blocks run out, stops and forks."""

    def play(*, is_async: bool) -> list[list[tuple[object, list[int]]]]:
        engine = make_engine(kv_cache_gib=kv_cache_gib, block_size=4, max_num_seqs=8)
        with_ops(engine, facts=replace(engine.model.ops.facts, is_async=is_async))
        policies = [engine.base_policy, engine.publish(displaced_adapter(engine))]
        replies: dict[int, Any] = {}
        for i in range(14):
            params = SamplingParams(max_tokens=3 + i, seed=i, stop=[9, 10, 11, 12] if i % 2 else [])
            request = SampleRequest(random_ids(5 + 3 * (i % 3), i), params, num_samples=1 + i % 3)
            engine.sampler.submit(request, policies[i % 3 == 0], on_done=partial(replies.__setitem__, i))
        while engine.sampler.has_work:
            engine.sampler.step()
        assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks
        return [[(s.stop_reason, list(s.tokens)) for s in replies[i].sequences] for i in range(14)]

    assert play(is_async=True) == play(is_async=False)


def test_one_sequence_at_a_time_without_prefixes_gives_each_prompt_the_same_bits_whatever_else_is_asked(
    make_engine: MakeEngine,
) -> None:
    """What `rollout.deterministic` rests on; prompts begin alike, so a prefix could be reused."""
    engine = make_engine(max_num_seqs=1, prefix_cache=False)
    policy = engine.publish(displaced_adapter(engine))
    prompts = [random_ids(40, 1) + random_ids(3 + 5 * index, 2 + index) for index in range(8)]
    alone = [sample(engine, prompt, policy, max_tokens=20, seed=7) for prompt in prompts]
    together = sample_many(engine, [(prompt, policy) for prompt in reversed(prompts)], max_tokens=20, seed=7)
    for one, other in zip(alone, reversed(together), strict=True):
        assert one.sequences == other.sequences
