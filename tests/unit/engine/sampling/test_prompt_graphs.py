"""Prompts as a captured graph reads them, run eagerly on any device: padded, and the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from turnwise.engine.attention.plans import PagedPlan
from turnwise.engine.engine import Engine
from turnwise.engine.model.lora import Route
from turnwise.engine.ops import cpu_attention
from turnwise.engine.ops.interface import AttentionRule
from turnwise.engine.sampling import prompt_graphs
from turnwise.engine.sampling.prompt_graphs import Found, PromptGraphs, PromptShape
from turnwise.engine.sampling.requests import Piece
from turnwise.types import SampleRequest, SamplingParams
from unit.engine.sampling.test_graphs import make, play, with_graphs

pytestmark = pytest.mark.model


class WatchedPrompts(PromptGraphs):
    """Notes what it took."""

    taken: list[PromptShape]
    num_left = 0

    def find(self, pieces: Sequence[Piece], route: Route, *, draws: bool) -> Found | None:
        found = super().find(pieces, route, draws=draws)
        self.num_left += found is None
        return found

    def replay(self, found: Found, pieces: Sequence[Piece]) -> Tensor:
        self.taken.append(found.shape)
        return super().replay(found, pieces)


def varlen_prefill(
    query: Tensor, key: Tensor, value: Tensor, plan: PagedPlan, layer: int, rule: AttentionRule
) -> Tensor:
    """What the flash kernels compute from the bounds and the index, one run after the other."""
    if plan.varlen is None:
        return cpu_attention.prefill(query, key, value, plan, layer, rule)
    varlen = plan.varlen
    assert varlen.k_index is not None
    keys, values = (side.flatten(0, 1)[varlen.k_index].transpose(0, 1) for side in plan.cache.layer(layer))
    out = torch.full_like(query[0].transpose(0, 1), torch.nan)  # what no run covers may hold anything
    bounds = zip(varlen.q_bounds.tolist(), varlen.k_bounds.tolist(), strict=True)
    for (q, k), (q_stop, k_stop) in itertools.pairwise(bounds):
        assert q_stop - q <= varlen.max_q
        assert k_stop - k <= varlen.max_k
        if q_stop > q:
            sides = query[:, :, q:q_stop], keys[None, :, k:k_stop], values[None, :, k:k_stop]
            seen = torch.ones(q_stop - q, k_stop - k, dtype=torch.bool).tril(k_stop - k - (q_stop - q))
            own = torch.nn.functional.scaled_dot_product_attention(
                *sides, attn_mask=seen, scale=rule.scale, enable_gqa=True
            )
            out[q:q_stop] = own[0].transpose(0, 1)
    return out[None]


def with_prompts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> WatchedPrompts:
    monkeypatch.setattr("turnwise.engine.sampling.sampler.PromptGraphs", WatchedPrompts)
    attention = SimpleNamespace(
        tree_forward=cpu_attention.tree_forward,
        paged_decode=cpu_attention.paged_decode,
        prefill=varlen_prefill,
        can_capture_prefill=lambda *_: True,
    )
    with_graphs(engine, attention=attention)
    prompts = engine.sampler.prompt_graphs
    assert isinstance(prompts, WatchedPrompts)
    prompts.taken = []
    return prompts


@pytest.mark.parametrize(("num_policies", "num_rows"), [(1, 16), (1, 6), (1, 3), (2, 16)])
def test_padded_prompts_change_no_token(
    tiny_dir: Path, num_policies: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dialogues of several turns: fresh prompts, prompts that go on from the cache, and prompts read in pieces.

    Also with every lane taken: what pads a pass, and a capture itself, draws to nobody's.
    """
    options = {"max_num_seqs": num_rows, "merge_adapter": "always"}
    want = play(make(tiny_dir, **options), num_policies=num_policies)
    engine = make(tiny_dir, **options)
    prompts = with_prompts(engine, monkeypatch)
    assert play(engine, num_policies=num_policies) == want
    assert any(shape.draws for shape in prompts.taken) == (num_policies == 1), "two at once are not merged"
    assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks


@pytest.mark.parametrize("settings", [{"num_samples": 3}, {"top_k": 5}, {"max_tokens": 1}, {"temperature": 0.0}])
def test_several_samples_and_cut_tails_are_drawn_from_the_same_prompts(
    tiny_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = []
    for has_graphs in (False, True):
        engine = make(tiny_dir, max_num_seqs=16)
        prompts = with_prompts(engine, monkeypatch) if has_graphs else None
        replies += [sample(engine, attempt, **settings) for attempt in range(3)]
        if prompts is not None:
            is_drawn = "num_samples" not in settings and "top_k" not in settings
            assert {shape.draws for shape in prompts.taken} == {is_drawn}
    assert replies[:3] == replies[3:]


def sample(engine: Engine, attempt: int, num_samples: int = 1, **settings: Any) -> list[list[list[int]]]:
    done: dict[int, Any] = {}
    for index in range(4):
        prompt = [20 + (7 * index + i + attempt) % 60 for i in range(9 + index)]
        params = SamplingParams(seed=index, stop=[], **{"max_tokens": 4, **settings})
        request = SampleRequest(prompt, params, num_samples)
        engine.sampler.submit(request, engine.base_policy, on_done=partial(done.__setitem__, index))
    while engine.sampler.has_work:
        engine.sampler.step()
    return [[list(sequence.tokens) for sequence in done[index].sequences] for index in range(4)]


def test_a_shape_is_captured_when_it_comes_again(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tiny_dir)
    prompts = with_prompts(engine, monkeypatch)
    play(engine, num_turns=1)
    assert prompts.num_left >= len(prompts.captures) > 0


def test_a_pass_that_keeps_the_card_busy_is_not_captured(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "MOST_OPERATIONS", 1e3)
    engine = make(tiny_dir)
    prompts = with_prompts(engine, monkeypatch)
    play(engine)
    assert not prompts.taken


def test_where_no_memory_is_left_prompts_are_read_without_graphs(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want = play(make(tiny_dir))
    engine = make(tiny_dir)
    prompts = with_prompts(engine, monkeypatch)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(prompts.captures, "get", fail)
    assert play(engine) == want
    assert not prompts.taken
    assert [record.message for record in caplog.records if "no memory is left" in record.message]


def test_shapes_hold_what_they_are_for(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    request = SampleRequest(list(range(30)), SamplingParams(max_tokens=2))
    engine.sampler.submit(request, engine.base_policy, on_done=lambda _: None)
    (row,) = engine.sampler.scheduler.waiting
    assert PromptShape.of([Piece(row, 0, 30), Piece(row, 10, 29)], draws=True) == (64, 16, 128, 1024, True)
    many = PromptShape.of([Piece(row, 0, 30)] * 40, draws=False)
    assert many == (2048, 64, 128, 4096, False)
    assert many.num_blocks(16) >= 40 * 2
