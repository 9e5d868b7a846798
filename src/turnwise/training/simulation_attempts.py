"""Which attempts a simulated run plays: drawn from a distribution, or as a real run played them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from turnwise.errors import ConfigError

P99_SIGMAS = 2.3263
"""Standard deviations from the median of a normal distribution to its 99th percentile."""


@dataclass(frozen=True, slots=True)
class AttemptShape:
    """What one attempt asks for."""

    turns: int
    tokens: float
    """Sampled tokens of all turns."""
    env_s: float
    """Seconds in calls of the env, all turns together."""


DrawGroups = Callable[[Random, Sequence[int], int], Sequence[Sequence[AttemptShape]]]
"""Draws the attempts of groups that are dealt at the same time, given the groups' numbers, and how many attempts each
has."""


def lognormal_groups(*, turns: int, tokens_per_turn: float, env_median_s: float, env_p99_s: float) -> DrawGroups:
    """Attempts of equal length whose env answers after a log-normal time, drawn anew for every call."""
    if turns < 1 or tokens_per_turn <= 0:
        raise ConfigError(f"turns must be at least 1 and tokens above 0; got {turns} and {tokens_per_turn}")
    if not (0 < env_median_s <= env_p99_s or env_median_s == env_p99_s == 0):
        raise ConfigError(f"the env's median and 99th percentile must rise from 0; got {env_median_s}, {env_p99_s}")
    sigma = math.log(env_p99_s / env_median_s) / P99_SIGMAS if env_median_s else 0.0

    def draw(random: Random) -> AttemptShape:
        env_s = 0.0
        if env_median_s:
            env_s = sum(env_median_s * math.exp(sigma * random.gauss(0, 1)) for _ in range(turns))
        return AttemptShape(turns, turns * tokens_per_turn, env_s)

    return lambda random, numbers, size: [[draw(random) for _ in range(size)] for _ in numbers]


def recorded_groups(steps: Sequence[Sequence[Sequence[AttemptShape]]]) -> DrawGroups:
    """Groups as a run played them and in its order, and then whole steps at random: what was slow together stays
    together.

    Attempts of one group often start in the same world, and all attempts of a step share how busy the machine was.
    """
    played = [group for step in steps for group in step]

    def draw(random: Random, numbers: Sequence[int], size: int) -> list[Sequence[AttemptShape]]:
        groups = [played[number] for number in numbers if number < len(played)]
        while len(groups) < len(numbers):
            step = random.choice(steps)
            groups += random.sample(step, len(step))
        return [group if len(group) == size else random.choices(group, k=size) for group in groups[: len(numbers)]]

    return draw
