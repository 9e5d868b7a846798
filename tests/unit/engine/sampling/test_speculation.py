"""When a guess pays: what passes cost, and how often a place tells the next token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from naive import FreeDrafts, draft_always, sample, sample_many
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.sampling.drafts import SuffixIndex
from turnwise.engine.sampling.speculation import MOST_ROWS, Costs, HitRates, PassCosts, Trust
from turnwise.types import SampleRequest, SamplingParams

pytestmark = pytest.mark.model

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def make(directory: Path) -> Engine:
    return Engine(directory, EngineConfig(device="cpu", kv_cache_gib=0.01, seed=1, speculation="suffix"), name="tiny")


def test_costs_of_passes_are_found_from_their_times() -> None:
    costs, rng = PassCosts(row=0.08, draft=0.0), np.random.default_rng(0)
    for _ in range(400):
        num_rows, has_drafts = int(rng.integers(1, 20)), bool(rng.integers(2))
        seconds = (0.02 + 0.001 * num_rows + 0.005 * has_drafts) * rng.uniform(0.9, 1.1)
        costs.add(num_rows, has_drafts=has_drafts, seconds=seconds)
    found = costs.now
    assert found is not None
    assert found.base == pytest.approx(0.02, rel=0.25)
    assert found.row == pytest.approx(0.001, rel=0.5)
    assert found.draft == pytest.approx(0.005, rel=0.5)


def test_one_slow_pass_does_not_make_all_look_slow() -> None:
    costs = PassCosts(row=0.08, draft=0.0)
    for index in range(100):
        costs.add(4, has_drafts=False, seconds=5.0 if index == 90 else 0.02)
    assert costs.now is not None
    assert costs.now.seconds(4, has_drafts=False) < 0.03


def test_before_rows_differ_a_row_costs_what_is_believed() -> None:
    costs = PassCosts(row=0.08, draft=0.0)
    for _ in range(50):
        costs.add(1, has_drafts=False, seconds=0.0108)
    assert costs.now is not None
    assert costs.now.base == pytest.approx(0.01, rel=0.02)
    assert costs.now.row == pytest.approx(0.0008, rel=0.02)


def test_rates_differ_by_how_many_tokens_agree() -> None:
    rates = HitRates()
    for index in range(400):
        rates.add(2, is_right=index % 4 == 0)
        rates.add(40, is_right=True)
    assert rates.of(3) == pytest.approx(0.25, abs=0.05)
    assert rates.of(63) > 0.95
    assert rates.of(8) == 0.25


def test_drafts_that_were_wrong_too_often_are_trusted_less_for_a_while() -> None:
    trust = Trust()
    for _ in range(50):
        trust.add(expected=2.0, num_right=1)
    assert trust.factor == pytest.approx(0.5, abs=0.1)
    for _ in range(200):
        trust.recover()
    assert trust.factor > 0.95
    trust.add(expected=1.0, num_right=100)
    assert trust.factor == 1.0


def test_a_sampler_that_guesses_nothing_looks_less_often_until_fewer_rows_run(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    speculation = engine.sampler.speculation
    assert speculation is not None
    speculation.costs = FreeDrafts()
    num_looks = []
    for rows in (4, 1):
        looked = 0
        for seed in range(rows):
            asked = SampleRequest([20 + seed, 30, 40], SamplingParams(max_tokens=100, seed=seed, stop=[]))
            engine.sampler.submit(asked, engine.base_policy, on_done=lambda _: None)
        speculation.index = SuffixIndex()  # nothing was said before
        for _ in range(30):
            engine.sampler.step()
            looked += speculation.has_looked
        num_looks.append(looked)
        while engine.sampler.has_work:
            engine.sampler.step()
    assert 4 <= num_looks[0] < 25
    assert num_looks[1] >= 4


def test_nothing_is_guessed_where_a_row_costs_as_much_as_it_can_win(tiny_dir: Path) -> None:
    engine = draft_always(make(tiny_dir))
    speculation = engine.sampler.speculation
    assert speculation is not None
    sample(engine, PROMPT, engine.base_policy, max_tokens=40, seed=3)
    assert sample(engine, PROMPT, engine.base_policy, max_tokens=40, seed=3).num_draft_tokens > 0
    speculation.costs.now = Costs(base=0.01, row=1.0, draft=0.0)
    assert sample(engine, PROMPT, engine.base_policy, max_tokens=40, seed=3).num_draft_tokens == 0


def test_nothing_is_guessed_beside_many_sequences(tiny_dir: Path) -> None:
    for num_rows in (MOST_ROWS, MOST_ROWS + 1):
        engine = draft_always(make(tiny_dir))
        for _ in range(2):  # the second time, everything was said before
            replies = sample_many(engine, [(PROMPT, engine.base_policy)] * num_rows, max_tokens=12, seed=3)
        assert any(reply.num_draft_tokens for reply in replies) == (num_rows <= MOST_ROWS), num_rows


def test_drafts_stop_where_a_pass_with_them_would_wait_too_long(tiny_dir: Path) -> None:
    engine = draft_always(make(tiny_dir))
    speculation = engine.sampler.speculation
    assert speculation is not None
    speculation.costs.now = Costs(base=1.0, row=1e-9, draft=30.0)
    sample(engine, PROMPT, engine.base_policy, max_tokens=40, seed=3)
    assert sample(engine, PROMPT, engine.base_policy, max_tokens=40, seed=3).num_draft_tokens == 0


def test_a_stop_string_inside_a_draft_ends_the_sequence_there(tiny_dir: Path) -> None:
    engine = draft_always(make(tiny_dir))
    (free,) = sample(engine, PROMPT, engine.base_policy, max_tokens=40, seed=3).sequences
    tokens, tokenizer = list(free.tokens), engine.sampler.stops.tokenizer
    text = tokenizer.decode(tokens[9:12])
    reply = sample(engine, PROMPT, engine.base_policy, max_tokens=40, seed=3, stop=[text])
    (sequence,) = reply.sequences
    assert reply.num_accepted_draft_tokens > 0
    assert list(sequence.tokens) == tokens[: len(sequence.tokens)]
    assert text in tokenizer.decode(list(sequence.tokens))
    assert text not in tokenizer.decode(list(sequence.tokens)[:-1])
    assert sequence.stop_reason == "stop"
    assert sequence.logprobs is not None
    assert len(sequence.logprobs) == len(sequence.tokens)


def test_a_stop_token_inside_a_draft_ends_the_sequence_there(tiny_dir: Path) -> None:
    engine = draft_always(make(tiny_dir))
    (free,) = sample(engine, PROMPT, engine.base_policy, max_tokens=40, seed=3).sequences
    tokens = list(free.tokens)
    reply = sample(engine, PROMPT, engine.base_policy, max_tokens=40, seed=3, stop=[tokens[12]])
    assert list(reply.sequences[0].tokens) == tokens[: tokens.index(tokens[12]) + 1]
    assert reply.num_accepted_draft_tokens == reply.num_draft_tokens > 0, "nothing is guessed after a stop"


def test_drafts_end_with_max_tokens_and_tokens_are_told_one_by_one(tiny_dir: Path) -> None:
    engine = draft_always(make(tiny_dir))
    first, second = (sample(engine, PROMPT, engine.base_policy, max_tokens=21, seed=3) for _ in range(2))
    assert second.sequences[0].tokens == first.sequences[0].tokens
    assert len(second.sequences[0].tokens) == 21
    assert second.num_accepted_draft_tokens == second.num_draft_tokens


def test_memory_for_drafts_is_let_go_with_their_rows(tiny_dir: Path) -> None:
    """Ten batches of siblings: the index holds finished replies and prompts, and nothing of rows that are done."""
    engine = draft_always(make(tiny_dir))
    speculation = engine.sampler.speculation
    assert speculation is not None
    for seed in range(10):
        sample_many(engine, [(PROMPT, engine.base_policy)] * 3, num_samples=2, max_tokens=10, seed=seed)
    assert speculation.index.num_tokens == len(PROMPT) + 10 * 3 * 2 * (10 + len(PROMPT))
    assert speculation.num_followed == 0
