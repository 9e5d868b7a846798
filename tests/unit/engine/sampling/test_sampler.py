"""Requests from submit to answer: stops, limits, cancellation, and what is given back."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from naive import sample, sample_many
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.errors import DataError
from turnwise.types import LoraConfig, SampleRequest, SampleResponse, SamplingParams

pytestmark = pytest.mark.model

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def engine(tiny_dir: Path) -> Engine:
    return Engine(tiny_dir, EngineConfig(device="cpu", kv_cache_gib=0.01, seed=1), name="tiny")


def free_sample(engine: Engine, max_tokens: int = 40, seed: int = 3) -> list[int]:
    """What is sampled when nothing stops it."""
    return list(sample(engine, PROMPT, engine.base_policy, max_tokens=max_tokens, seed=seed).sequences[0].tokens)


def test_a_closed_engine_frees_its_memory_without_a_garbage_collection(tiny_dir: Path) -> None:
    engine = Engine(tiny_dir, EngineConfig(device="cpu", kv_cache_gib=0.01, seed=1), name="tiny")
    free_sample(engine)
    parts = [weakref.ref(part) for part in (engine.model, engine.sampler, engine.sampler.cache, engine.trainer)]
    gc.disable()
    try:
        engine.close()
        assert [part() for part in parts] == [None] * 4
    finally:
        gc.enable()


def test_a_stop_token_ends_the_sequence_and_is_returned(engine: Engine) -> None:
    tokens = free_sample(engine)
    stop = tokens[12]
    (sequence,) = sample(engine, PROMPT, engine.base_policy, max_tokens=40, seed=3, stop=[stop]).sequences
    assert list(sequence.tokens) == tokens[: tokens.index(stop) + 1]
    assert sequence.stop_reason == "stop"
    assert sequence.logprobs is not None
    assert len(sequence.logprobs) == len(sequence.tokens)


def test_stop_token_ids_are_the_other_spelling(engine: Engine) -> None:
    tokens = free_sample(engine)
    stop = tokens[7]
    params = {"max_tokens": 40, "seed": 3, "stop": None, "stop_token_ids": [stop]}
    (sequence,) = sample(engine, PROMPT, engine.base_policy, **params).sequences
    assert list(sequence.tokens) == tokens[: tokens.index(stop) + 1]


def test_without_a_stop_of_its_own_a_request_stops_at_the_end_of_sequence_token(engine: Engine) -> None:
    (eos,) = engine.model.eos_ids
    for seed in range(200):
        (sequence,) = sample(engine, PROMPT, engine.base_policy, max_tokens=60, seed=seed, stop=None).sequences
        if sequence.stop_reason == "stop":
            assert sequence.tokens[-1] == eos
            assert eos not in list(sequence.tokens)[:-1]
            break
    else:
        raise AssertionError("no sample reached the end-of-sequence token")
    (endless,) = sample(engine, PROMPT, engine.base_policy, max_tokens=60, seed=seed, stop=[]).sequences
    assert len(endless.tokens) == 60
    assert endless.stop_reason == "length"


def test_a_stop_string_ends_the_sequence_with_the_token_that_completes_it(engine: Engine) -> None:
    tokens = free_sample(engine)
    tokenizer = engine.sampler.stops.tokenizer
    text = tokenizer.decode(tokens[9:12])
    (sequence,) = sample(engine, PROMPT, engine.base_policy, max_tokens=40, seed=3, stop=[text]).sequences
    assert list(sequence.tokens) == tokens[: len(sequence.tokens)]
    assert text in tokenizer.decode(list(sequence.tokens))
    assert text not in tokenizer.decode(list(sequence.tokens)[:-1])
    assert sequence.stop_reason == "stop"


def test_samples_of_one_prompt_share_its_blocks_and_differ(engine: Engine) -> None:
    prompt = PROMPT * 6
    engine.sampler.drop_cache()
    reply = sample(engine, prompt, engine.base_policy, num_samples=8, max_tokens=12, seed=9)
    assert len({tuple(s.tokens) for s in reply.sequences}) > 1
    again = sample(engine, prompt, engine.base_policy, num_samples=8, max_tokens=12, seed=9)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in reply.sequences]
    assert again.num_cached_prompt_tokens == 32


def requests_at_once(engine: Engine, num_groups: int, group_size: int, length: int) -> list[SampleResponse]:
    """As a rollout asks: each attempt of a group by a request of its own, all of them before the first step."""
    prompts = [[20 + (31 * g + 7 * i) % 400 for i in range(length)] for g in range(num_groups)]
    asked = [(prompt, engine.base_policy) for prompt in prompts for _ in range(group_size)]
    return sample_many(engine, asked, max_tokens=6, seed=1)


def test_requests_with_a_common_beginning_that_come_at_once_read_it_once(tiny_dir: Path) -> None:
    replies = {}
    for is_cached in (True, False):
        config = EngineConfig(device="cpu", kv_cache_gib=0.02, seed=1, prefill_tokens=100_000, prefix_cache=is_cached)
        engine = Engine(tiny_dir, config, name="tiny")
        answers = requests_at_once(engine, num_groups=3, group_size=5, length=150)
        replies[is_cached] = [list(answer.sequences[0].tokens) for answer in answers]
        num_read = sum(150 - answer.num_cached_prompt_tokens for answer in answers)
        whole = -(-150 // config.block_size) * config.block_size
        assert num_read == 15 * 150 if not is_cached else num_read <= 3 * 150 + 12 * (150 - whole + config.block_size)
        assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks
    assert replies[True] == replies[False]


def test_a_prompt_read_in_pieces_keeps_its_siblings_waiting_and_loses_none(tiny_dir: Path) -> None:
    config = EngineConfig(device="cpu", kv_cache_gib=0.02, seed=1, prefill_tokens=70, max_num_seqs=3)
    engine = Engine(tiny_dir, config, name="tiny")
    answers = requests_at_once(engine, num_groups=2, group_size=6, length=300)
    assert len(answers) == 12
    cached = sorted(answer.num_cached_prompt_tokens for answer in answers)
    assert cached[:2] == [0, 0]
    assert cached[2] >= 300 - 64 - config.block_size
    assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks


@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
def test_siblings_wait_for_each_other_no_longer_than_a_step(tiny_dir: Path, block_size: int) -> None:
    """Of a block that none of them fills nothing is found in the cache."""
    config = EngineConfig(device="cpu", kv_cache_gib=0.05, seed=1, prefill_tokens=100_000, block_size=block_size)
    engine, num_steps = Engine(tiny_dir, config, name="tiny"), 0
    for _ in range(20):
        request = SampleRequest([20 + i % 400 for i in range(250)], SamplingParams(max_tokens=1, stop=[]))
        engine.sampler.submit(request, engine.base_policy, on_done=lambda _: None)
    while engine.sampler.has_work:
        engine.sampler.step()
        num_steps += 1
    assert num_steps <= 4


def test_siblings_of_a_request_that_is_cancelled_while_they_wait_read_for_themselves(tiny_dir: Path) -> None:
    config = EngineConfig(device="cpu", kv_cache_gib=0.02, seed=1, prefill_tokens=70)
    engine, done = Engine(tiny_dir, config, name="tiny"), []
    request = SampleRequest([20 + i % 400 for i in range(300)], SamplingParams(max_tokens=3, stop=[]))
    first = engine.sampler.submit(request, engine.base_policy, on_done=done.append)
    for _ in range(3):
        engine.sampler.submit(request, engine.base_policy, on_done=done.append)
    engine.sampler.step()
    engine.sampler.cancel(first)
    while engine.sampler.has_work:
        engine.sampler.step()
    assert len(done) == 3
    assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks


def test_decode_goes_on_between_the_pieces_of_a_long_prompt(tiny_dir: Path) -> None:
    engine = Engine(tiny_dir, EngineConfig(device="cpu", kv_cache_gib=0.01, seed=1, prefill_tokens=16), name="tiny")
    drawn: list[str] = []

    def ask(name: str, prompt: list[int], max_tokens: int) -> None:
        request = SampleRequest(prompt, SamplingParams(max_tokens=max_tokens, stop=[], seed=1), 1)
        engine.sampler.submit(
            request, engine.base_policy, on_done=lambda _: None, on_token=lambda *_: drawn.append(name)
        )

    ask("short", PROMPT, 60)
    engine.sampler.step()
    ask("long", [3 + i % 50 for i in range(320)], 5)
    for step in range(20):  # pieces of 16 tokens
        assert drawn == ["short"] * (1 + step), "one token in each step, and none of the long prompt's"
        engine.sampler.step()
    assert drawn.count("long") == 1, "the last piece gives its first token"
    while engine.sampler.has_work:
        engine.sampler.step()
    assert (drawn.count("short"), drawn.count("long")) == (60, 5)


def test_without_a_seed_two_requests_differ(engine: Engine) -> None:
    replies = sample_many(engine, [(PROMPT, engine.base_policy)] * 2, max_tokens=30)
    assert replies[0].sequences[0].tokens != replies[1].sequences[0].tokens


def test_max_tokens_none_fills_the_context(engine: Engine) -> None:
    prompt = [5] * (engine.max_context_length - 20)
    (sequence,) = sample(engine, prompt, engine.base_policy, max_tokens=None, seed=1).sequences
    assert len(sequence.tokens) == 20


def test_a_cancelled_request_frees_its_blocks_and_never_answers(engine: Engine) -> None:
    replies: list[SampleResponse | BaseException] = []
    before = engine.sampler.pool.num_available
    asked = SampleRequest(PROMPT, SamplingParams(max_tokens=200, stop=[]), num_samples=3)
    ids = [engine.sampler.submit(asked, engine.base_policy, on_done=replies.append) for _ in range(2)]
    for _ in range(5):
        engine.sampler.step()
    for request in ids:
        engine.sampler.cancel(request)
    assert not engine.sampler.has_work
    assert engine.sampler.pool.num_available == before
    engine.sampler.cancel(ids[0])
    assert replies == []


def test_a_request_that_can_never_fit_is_refused_at_once(tiny_dir: Path) -> None:
    small = Engine(tiny_dir, EngineConfig(device="cpu", kv_cache_gib=64 * 512 / 2**30), name="tiny")
    endless = SampleRequest(PROMPT, SamplingParams(max_tokens=500))
    with pytest.raises(DataError, match="kv_cache_gib"):
        small.sampler.submit(endless, small.base_policy, on_done=print)
    (sequence,) = sample(small, PROMPT, small.base_policy, max_tokens=40).sequences
    assert len(sequence.tokens) == 40


def test_weights_that_are_not_finite_fail_the_request_and_not_the_engine(tiny_dir: Path) -> None:
    engine = Engine(tiny_dir, EngineConfig(device="cpu", kv_cache_gib=0.01), name="tiny")

    adapter = engine.create_adapter(LoraConfig(rank=2, seed=1))
    adapter.flat.fill_(float("nan"))
    with pytest.raises(DataError, match="not finite"):
        sample(engine, PROMPT, engine.publish(adapter), max_tokens=4)
    assert not engine.sampler.has_work
    assert len(sample(engine, PROMPT, engine.base_policy, max_tokens=4).sequences[0].tokens) == 4


def alternatives(engine: Engine, prompt: list[int], count: int, **params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and logprobs [prompt - 1, count]."""
    answers = sample_many(engine, [(prompt, engine.base_policy)], max_tokens=1, prompt_alt_tokens_k=count, **params)
    found = answers[0].prompt_alt_tokens
    assert found is not None
    return found.tokens.to_numpy(), found.logprobs.to_numpy()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_alternatives_to_prompt_tokens_follow_the_models_distribution_at_the_temperature(
    engine: Engine, temperature: float
) -> None:
    size, count = engine.vocab_size, 40_000
    (scored,) = sample_many(engine, [(PROMPT, engine.base_policy)], max_tokens=1, topk_prompt_logprobs=size)
    assert scored.topk_prompt_logprobs is not None
    known = np.zeros((len(PROMPT) - 1, size))
    for row, pairs in enumerate(scored.topk_prompt_logprobs[1:]):
        for token, logprob in pairs or ():
            known[row, token] = logprob
    tokens, logprobs = alternatives(engine, PROMPT, count, temperature=temperature, seed=7)
    assert tokens.shape == logprobs.shape == (len(PROMPT) - 1, count)
    np.testing.assert_allclose(logprobs, np.take_along_axis(known, tokens, axis=1), atol=1e-5)
    expected = np.exp(known / temperature)
    expected /= expected.sum(axis=1, keepdims=True)
    seen = np.stack([np.bincount(row, minlength=size) for row in tokens])
    kept = expected * count >= 20
    errors = (seen - expected * count)[kept] / np.sqrt((expected * (1 - expected) * count)[kept])
    assert 0.8 < errors.std() < 1.2, "as chance would have it, and neither closer nor further"
    assert abs(errors).max() < 5.5
    assert len({tuple(row[:20]) for row in tokens}) == len(tokens), "each position draws for itself"


def test_alternatives_are_the_same_for_the_same_seed_however_the_prompt_is_read(tiny_dir: Path, engine: Engine) -> None:
    prompt = [5 + index * 7 % 300 for index in range(300)]
    pieces = Engine(tiny_dir, EngineConfig(device="cpu", kv_cache_gib=0.01, prefill_tokens=64), name="tiny")
    whole, in_pieces, other = (
        alternatives(one, prompt, 3, seed=seed) for one, seed in ((engine, 7), (pieces, 7), (engine, 8))
    )
    assert (whole[0] == in_pieces[0]).mean() > 0.99
    assert (whole[0] == other[0]).mean() < 0.1
    greedy, _ = alternatives(engine, PROMPT, 2, temperature=0)
    (top,) = sample_many(engine, [(PROMPT, engine.base_policy)], max_tokens=1, topk_prompt_logprobs=1)
    assert greedy.tolist() == [[pairs[0][0]] * 2 for pairs in (top.topk_prompt_logprobs or ()) if pairs]
    nothing, _ = alternatives(engine, [5], 2)
    assert nothing.shape == (0, 2), "nothing predicts a prompt's first token"
