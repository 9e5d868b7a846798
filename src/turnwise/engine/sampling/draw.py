"""The random numbers that tokens are drawn with.

A token's randomness is one uniform number, a hash of (request seed, sample, token index): the same request gives the
same tokens whatever else is in the batch, on every device. The reported logprob is of the whole vocabulary at the
sampling temperature (at 1 when greedy), before top-k, top-p and min-p cut the tail: the distribution the trainer
computes, so that the two agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def uniforms(
    seeds: Sequence[int] | np.ndarray, samples: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray
) -> np.ndarray:
    """[B] numbers in [0, 1): splitmix64 over (seed, sample, position), 24 bits each."""
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds, dtype=np.uint64))
        state = _mix(state ^ np.asarray(samples, dtype=np.uint64))
        state = _mix(state ^ np.asarray(positions, dtype=np.uint64))
    return ((state >> np.uint64(40)).astype(np.float64) / float(1 << 24)).astype(np.float32)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
