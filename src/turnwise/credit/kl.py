"""KL(policy || reference) as a part of the advantages: a token pays for being likelier than the reference makes it.

    A_i += coef * (mean(x) - x_i),     x_i = log q_i - log ref_i

x is read off the sampler, so the penalty is a constant of the loss, and its gradient is that of the KL itself (the k1
estimator; inside a loss k1 has no gradient at all). The mean is over the trained tokens of the optimizer step: a
policy that has moved by the same amount everywhere is not pushed about. It is added after the group's baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import DataError


def kl_advantages(
    log_ratios: Sequence[NDArray[np.float64]], *, coef: float, gamma: float = 0.0
) -> list[NDArray[np.float64]]:
    """[S] per attempt what is added to the advantage of each of its trained tokens.

    Args:
        log_ratios: [S] per attempt log(sampler / reference) of its trained tokens, in the order they were sampled.
        gamma: how much of the next trained token's penalty a token shares; what the env says in between is no step.
    """
    everything_N = np.concatenate([np.zeros(0), *log_ratios])
    if not np.isfinite(everything_N).all():
        raise DataError("a log-ratio to the reference that is not finite; sampler and reference disagree on a token")
    if not len(everything_N):
        return [np.zeros(0) for _ in log_ratios]
    return [_sum_ahead(coef * (everything_N.mean() - own_S), gamma) for own_S in log_ratios]


def _sum_ahead(values_S: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """Each value plus gamma times the sum at the next one."""
    found_S = values_S.copy()
    if gamma:
        for at in range(len(found_S) - 2, -1, -1):
            found_S[at] += gamma * found_S[at + 1]
    return found_S
