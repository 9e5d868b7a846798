"""Bradley-Terry strengths on the Elo scale, from the games that players won against each other.

wins[i, j]                        games that i won against j; a game without a winner is half a win for each
P(i beats j) = s_i / (s_i + s_j)  the strengths s that make the games most likely (Hunter 2004, the MM algorithm)
Elo_i = 400 log10(s_i)            with mean 0
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

ELO_SCALE = 400 / math.log(10)
PRIOR_GAMES = 1.0
"""Every player gets this many half-won games against an average player, so that one who won all has a rating."""


def elo_ratings(wins: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N] the ratings of N players, from the [N, N] games that each won against each."""
    strength = np.ones(len(wins))
    played, won = wins + wins.T, wins.sum(axis=1) + PRIOR_GAMES / 2
    for _ in range(500):
        against = (played / (strength[:, None] + strength[None, :])).sum(axis=1) + PRIOR_GAMES / (strength + 1.0)
        new = won / against
        if np.abs(np.log(new / strength)).max() < 1e-9:
            break
        strength = new
    elo = ELO_SCALE * np.log(strength)
    return elo - elo.mean()
