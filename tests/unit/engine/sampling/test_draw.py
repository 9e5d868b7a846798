"""The random numbers that tokens are drawn with."""

from __future__ import annotations

import numpy as np

from turnwise.engine.sampling.draw import uniforms


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
