"""Tokens drawn in plain torch: the inverse CDF, greedy rows and cut tails."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.engine.ops.interface import DrawSettings, TailCut
from turnwise.engine.ops.torch_draw import draw, inverse_cdf


@pytest.mark.parametrize("vocab", [3, 256, 257, 1000])
def test_inverse_cdf_is_numpys(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(50, vocab, generator=generator) ** 4
    weights[:, ::3] = 0
    uniform = torch.rand(50, generator=generator)
    got = inverse_cdf(weights, uniform)
    for row in range(50):
        running = np.cumsum(weights[row].double().numpy())
        want = int(np.searchsorted(running, float(uniform[row]) * running[-1], side="right"))
        assert int(got[row]) == want


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_the_ends_of_the_interval_pick_an_entry_that_has_weight(uniform: float) -> None:
    weights = torch.zeros(2, 600)
    weights[:, [1, 300]] = torch.tensor([0.25, 0.75])
    expected = 1 if uniform == 0 else 300
    assert inverse_cdf(weights, torch.full((2,), uniform)).tolist() == [expected, expected]


def test_greedy_takes_the_largest_logit_with_its_logprob_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    tokens, logprobs = draw(logits, DrawSettings(torch.zeros(1), torch.full((1,), 0.5)))
    assert tokens.tolist() == [1]
    assert float(logprobs[0]) == pytest.approx(float(torch.log_softmax(logits, -1)[0, 1]))


def test_rows_with_and_without_a_cut_share_a_batch() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0, 0.0]] * 2)
    uniform = torch.full((2,), 0.9999)
    cut = TailCut(top_k=torch.tensor([1, -1]), top_p=torch.ones(2), min_p=torch.zeros(2))
    tokens, _ = draw(logits, DrawSettings(torch.ones(2), uniform, cut))
    assert tokens.tolist() == [0, 3]
