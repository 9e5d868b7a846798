"""Guessed tokens change nothing: the same tokens and logprobs as without guesses, whatever was guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from naive import (
    NaiveModel,
    assert_close,
    displaced_adapter,
    draft_always,
    make_model,
    random_ids,
    run,
    sample,
    sample_many,
    with_ops,
)
from turnwise.engine.engine import Engine
from turnwise.engine.training.trainable import LoraAdapter
from turnwise.runtime import tolerances
from turnwise.types import Datum, ModelInput, SampledSequence, SampleRequest, SampleResponse, SamplingParams

MakeEngine = Callable[..., Engine]


def assert_same(got: Sequence[SampleResponse], want: Sequence[SampleResponse]) -> None:
    for one, other in zip(got, want, strict=True):
        for mine, theirs in zip(one.sequences, other.sequences, strict=True):
            assert mine.tokens == theirs.tokens
            assert mine.stop_reason == theirs.stop_reason
            assert_close(mine.logprobs, theirs.logprobs, tolerances.LOGPROBS)


def num_guessed(replies: Sequence[SampleResponse]) -> tuple[int, int]:
    """Tokens that were guessed, and those that were right."""
    return sum(r.num_draft_tokens for r in replies), sum(r.num_accepted_draft_tokens for r in replies)


def assert_right_and_wrong(replies: Sequence[SampleResponse]) -> None:
    """Both ways were taken: some guesses held and some did not."""
    drafted, accepted = num_guessed(replies)
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}]
)
def test_tokens_and_logprobs_are_those_without_guesses(
    arch_dir: Path, make_engine: MakeEngine, params: dict[str, Any]
) -> None:
    """Siblings of several prompts, then the same again with other seeds: what was said before is guessed."""
    prompts = [random_ids(20 + 3 * i, i) for i in range(3)]
    replies: dict[str, list[SampleResponse]] = {}
    for speculation in ("none", "suffix"):
        engine = make_engine(arch_dir, speculation=speculation)
        if speculation == "suffix":
            draft_always(engine)
        policy = engine.publish(displaced_adapter(engine))
        replies[speculation] = [
            reply
            for seed in (1, 2, 1)
            for reply in sample_many(
                engine, [(p, policy) for p in prompts], num_samples=4, max_tokens=50, seed=seed, **params
            )
        ]
        assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks
    assert_same(replies["suffix"], replies["none"])
    assert_right_and_wrong(replies["suffix"])
    assert num_guessed(replies["none"]) == (0, 0)


def test_a_reply_that_was_said_before_needs_a_fraction_of_the_steps(make_engine: MakeEngine) -> None:
    engine = draft_always(make_engine(speculation="suffix"))
    prompt, num_steps = random_ids(30, 1), []
    for _ in range(2):
        engine.sampler.submit(
            SampleRequest(prompt, SamplingParams(max_tokens=60, seed=4, stop=[])),
            engine.base_policy,
            on_done=lambda _: None,
        )
        steps = 0
        while engine.sampler.has_work:
            engine.sampler.step()
            steps += 1
        num_steps.append(steps)
    assert num_steps[1] < num_steps[0] / 4


def test_samples_follow_the_models_distribution(make_engine: MakeEngine) -> None:
    """The second token of many samples, which is guessed from what earlier samples said after the same first one."""
    engine = draft_always(make_engine(speculation="suffix", max_num_seqs=64))
    prompt, count = random_ids(6, 11), 4000
    reply = sample(engine, prompt, engine.base_policy, num_samples=count, max_tokens=3, temperature=0.8, seed=77)
    assert_right_and_wrong([reply])
    naive = NaiveModel(engine.model_dir)

    def probs(ids: list[int]) -> np.ndarray:
        return torch.softmax(naive.logits(ids)[-1] / 0.8, dim=-1).detach().double().numpy()

    first = probs(prompt)
    second = np.sum([chance * probs([*prompt, token]) for token, chance in enumerate(first)], axis=0)
    counts = np.bincount([s.tokens[1] for s in reply.sequences], minlength=len(first))
    common = second * count >= 8
    expected, seen = second[common] * count, counts[common]
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < common.sum() + 6 * np.sqrt(2 * common.sum())


def trainer_logprobs(engine: Engine, adapter: LoraAdapter, prompt: list[int], sequence: SampledSequence) -> np.ndarray:
    full = prompt + list(sequence.tokens)
    datum = Datum(ModelInput.from_ints(full[:-1]), {"target_tokens": full[1:]})
    output = run(engine.forward(adapter, [datum], "cross_entropy", None))
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(prompt) - 1 :]


def test_turns_that_reuse_the_cache_after_wrong_guesses_keep_the_trainers_logprobs(make_engine: MakeEngine) -> None:
    """Keys of wrong guesses were written where later tokens of the dialogue stand."""
    engine = draft_always(make_engine(speculation="suffix", block_size=4))
    adapter = displaced_adapter(engine)
    policy, drafted = engine.publish(adapter), np.zeros(2, dtype=int)
    history = random_ids(25, 2)
    for turn in range(8):
        replies = [sample(engine, history, policy, max_tokens=19, temperature=1.0, seed=seed) for seed in range(4)]
        for reply in replies:
            (sequence,) = reply.sequences
            assert_close(sequence.logprobs, trainer_logprobs(engine, adapter, history, sequence), tolerances.LOGPROBS)
            drafted += num_guessed([reply])
        if turn:
            assert replies[0].num_cached_prompt_tokens >= len(history) - 4 - 3 - 1
        history = history + list(replies[-1].sequences[0].tokens) + random_ids(3, 30 + turn)
    assert 0 < drafted[1] < drafted[0]


def test_policies_that_share_a_batch_guess_from_each_other_and_keep_their_own_tokens(make_engine: MakeEngine) -> None:
    found: dict[str, list[SampleResponse]] = {}
    for speculation in ("none", "suffix"):
        engine = make_engine(speculation=speculation)
        if speculation == "suffix":
            draft_always(engine)
        adapters = [displaced_adapter(engine, rank=r, seed=r, train_mlp=r != 3) for r in (2, 3, 9)]
        policies = [engine.base_policy, *(engine.publish(a) for a in adapters)]
        prompt = random_ids(30, 7)
        asked = [(prompt, p) for p in policies for _ in range(2)]
        found[speculation] = [r for seed in (1, 2, 1) for r in sample_many(engine, asked, max_tokens=25, seed=seed)]
    assert_same(found["suffix"], found["none"])
    assert_right_and_wrong(found["suffix"])


def play(engine: Engine) -> list[list[tuple[object, list[int]]]]:
    """Requests with stops, forks and two policies; some are given up on the way."""
    policies = [engine.base_policy, engine.publish(displaced_adapter(engine))]
    replies: dict[int, Any] = {}
    given_up = []
    for i in range(16):
        params = SamplingParams(max_tokens=5 + 2 * i, seed=i // 2, temperature=0.5, stop=[9, 10] if i % 4 == 1 else [])
        request = SampleRequest(random_ids(5 + 3 * (i % 3), i // 2), params, num_samples=1 + i % 3)
        number = engine.sampler.submit(request, policies[i % 3 == 0], on_done=partial(replies.__setitem__, i))
        if i in (12, 15):
            given_up.append(number)
    for step in range(10_000):
        if not engine.sampler.has_work:
            break
        engine.sampler.step()
        if step == 6:
            for number in given_up:
                engine.sampler.cancel(number)
    assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks
    return [[(s.stop_reason, list(s.tokens)) for s in replies[i].sequences] for i in range(16) if i not in (12, 15)]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kv_cache_gib", [0.01, 0.00004])
def test_a_small_cache_stops_forks_and_cancelled_requests_change_no_token(
    make_engine: MakeEngine, kv_cache_gib: float, is_async: bool
) -> None:
    """Also where steps are launched before the tokens of the last are known."""
    settings = {"kv_cache_gib": kv_cache_gib, "block_size": 4, "max_num_seqs": 8}
    want = play(make_engine(**settings))
    engine = make_engine(**settings, speculation="suffix")
    with_ops(engine, facts=replace(engine.model.ops.facts, is_async=is_async))
    assert play(draft_always(engine)) == want
    assert play(draft_always(engine)) == want, "everything was said before"


def test_layers_with_windows_give_back_blocks_under_drafts(tmp_path: Path, make_engine: MakeEngine) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 21}
    shape: dict[str, Any] = {**sizes, **heads, "layer_types": ["sliding_attention", "full_attention"] * 2}
    directory = make_model(CONFIG_MAPPING["gemma3_text"](**shape), tmp_path / "gemma3")
    found: dict[str, list[SampleResponse]] = {}
    for speculation in ("none", "suffix"):
        engine = make_engine(directory, speculation=speculation, block_size=4)
        if speculation == "suffix":
            draft_always(engine)
        asked = [(random_ids(30, 7), engine.base_policy)] * 3
        found[speculation] = [
            reply
            for seed in (1, 2, 1)
            for reply in sample_many(engine, asked, max_tokens=60, temperature=0.5, seed=seed)
        ]
        assert all(pool.num_available == pool.num_blocks for pool in engine.sampler.pools)
    assert_same(found["suffix"], found["none"])
    assert_right_and_wrong(found["suffix"])


def test_in_bitwise_mode_guesses_change_no_bit(make_engine: MakeEngine) -> None:
    prompts = [random_ids(20 + 3 * i, i) for i in range(3)]
    replies: dict[str, list[SampleResponse]] = {}
    for speculation in ("none", "suffix"):
        engine = make_engine(speculation=speculation, bitwise=True)
        if speculation == "suffix":
            draft_always(engine)
        policy = engine.publish(displaced_adapter(engine))
        asked = [(prompt, policy) for prompt in prompts]
        replies[speculation] = [
            reply for seed in (1, 2, 1) for reply in sample_many(engine, asked, 4, max_tokens=50, seed=seed)
        ]
    assert_right_and_wrong(replies["suffix"])
    for guessed, plain in zip(replies["suffix"], replies["none"], strict=True):
        for one, other in zip(guessed.sequences, plain.sequences, strict=True):
            assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
