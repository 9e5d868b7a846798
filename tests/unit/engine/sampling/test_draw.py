"""Drawing tokens: counter-based randomness and the inverse CDF."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turnwise.engine.sampling.draw import DrawSettings, draw_torch, inverse_cdf, uniforms


def settings_for(rows: int, **changes: torch.Tensor) -> DrawSettings:
    values = {
        "temperature": torch.ones(rows),
        "top_k": torch.full((rows,), -1),
        "top_p": torch.ones(rows),
        "min_p": torch.zeros(rows),
        "uniform": torch.rand(rows, generator=torch.Generator().manual_seed(0)),
    }
    return DrawSettings(**{**values, **changes}, is_cut=any(k in changes for k in ("top_k", "top_p", "min_p")))


def test_uniforms_depend_on_seed_sample_and_position_alone() -> None:
    together = uniforms([5, 5, 5, 6], [0, 1, 0, 0], [0, 0, 1, 0])
    assert len(set(together.tolist())) == 4
    assert uniforms([5], [0], [1])[0] == together[2]


def test_uniforms_are_uniform() -> None:
    n = 20_000
    values = uniforms([3] * n, [0] * n, list(range(n)))
    assert values.min() >= 0
    assert values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert abs(counts - n / 20).max() < 6 * np.sqrt(n / 20)


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
    tokens, logprobs = draw_torch(logits, settings_for(1, temperature=torch.zeros(1)))
    assert tokens.tolist() == [1]
    assert float(logprobs[0]) == pytest.approx(float(torch.log_softmax(logits, -1)[0, 1]))


def test_rows_with_and_without_a_cut_share_a_batch() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0, 0.0]] * 2)
    uniform = torch.full((2,), 0.9999)
    tokens, _ = draw_torch(logits, settings_for(2, top_k=torch.tensor([1, -1]), uniform=uniform))
    assert tokens.tolist() == [0, 3]
