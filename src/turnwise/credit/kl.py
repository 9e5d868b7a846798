"""KL(policy || reference) as a part of the advantages: a token that is likelier than under the reference pays for it.

    A_i += coef * (mean(x) - x_i),     x_i = log q_i - log ref_i

x uses the sampler's logprobs, so the penalty is a constant in the loss, and the gradient is that of the KL itself (the
k1 estimator; as a term of the loss, k1 would have no gradient). The mean is over the trained tokens of the optimizer
step, so a policy that moved by the same amount everywhere gets no penalty. It is added after the group's baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import DataError


def kl_advantages(
    log_ratios: Sequence[NDArray[np.float64]], *, coef: float, gamma: float = 0.0
) -> list[NDArray[np.float64]]:
    """[S] per attempt: what to add to the advantage of each trained token.

    Args:
        log_ratios: [S] per attempt: log(sampler / reference) of its trained tokens, in the order of sampling.
        gamma: discount from one trained token to the next; the env's tokens in between do not count.
    """
    everything_N = np.concatenate([np.zeros(0), *log_ratios])
    if not np.isfinite(everything_N).all():
        raise DataError("a log-ratio to the reference is not finite: sampler and reference disagree on a token")
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
