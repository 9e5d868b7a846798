"""Generalised advantage estimation (arXiv:1506.02438) for dialogues: over tokens, over turns, or both.

    delta_t = r_t + gamma_t V_{t+1} - V_t          A_t = delta_t + gamma_t lambda A_{t+1}

`token`    A step is a sampled token. The step after a turn's last token is the next turn's first token: the env's
           tokens in between are no steps. gamma counts turns: it is 1 inside a turn. A turn's reward belongs to its
           last token.
`turn`     A step is a turn. Its state is the one at its start, and all its tokens get its advantage.
`bilevel`  A first pass over turns uses the states of their last tokens. A second pass over the tokens of each turn
           takes the first pass's advantage as the turn's only reward (arXiv:2510.16907).

The policy and the critic use different estimates. The policy's lambda may depend on the attempt's length
(`length_adaptive_lambda`). The critic's targets have their own lambda. Its default 1 gives plain returns, which use no
predicted value except the one after a truncated end. After the task's own end the value is 0; after a limit it is the
value of the last state.

Axes: `_N` the steps of one attempt, `_S` the tokens of one turn, `_K` the turns of an attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.credit.values import TrajectoryValues
from turnwise.errors import DataError
from turnwise.trajectory import WORLD_LABEL, Trajectory

FloatArray = NDArray[np.float64]
Level = Literal["token", "turn", "bilevel"]


def gae(
    rewards_N: Sequence[float] | FloatArray,
    values_N: Sequence[float] | FloatArray,
    *,
    discounts_N: float | Sequence[float] | FloatArray,
    lam: float,
    bootstrap: float = 0.0,
) -> FloatArray:
    """The recursion above.

    Args:
        discounts_N: the discount from each step to the next; the last one applies to `bootstrap`.
        bootstrap: value of the state after the last step; 0 if the task is over.

    >>> gae([0.0, 1.0], [0.2, 0.4], discounts_N=0.95, lam=0.9).round(6).tolist()
    [0.693, 0.6]
    """
    rewards_N, values_N = np.asarray(rewards_N, np.float64), np.asarray(values_N, np.float64)
    discounts_N = np.broadcast_to(np.asarray(discounts_N, np.float64), rewards_N.shape)
    if rewards_N.shape != values_N.shape or rewards_N.ndim != 1:
        raise DataError(f"{rewards_N.shape} rewards and {values_N.shape} values; expected one of each per step")
    if not 0 <= lam <= 1 or (discounts_N < 0).any() or (discounts_N > 1).any():
        raise DataError(f"lambda={lam}, discounts {discounts_N.tolist()}; expected numbers from 0 to 1")
    advantages_N = np.zeros_like(rewards_N)
    next_value, running = bootstrap, 0.0
    for step in reversed(range(len(rewards_N))):
        delta = rewards_N[step] + discounts_N[step] * next_value - values_N[step]
        running = delta + discounts_N[step] * lam * running
        advantages_N[step], next_value = running, values_N[step]
    return advantages_N


def length_adaptive_lambda(length: int, alpha: float) -> float:
    """`1 - 1 / (alpha length)`, at least 0 (VAPO, arXiv:2504.05118), so that the weights lambda**k sum to alpha length.

    `alpha` is how far credit reaches, as a share of the attempt. About exp(-1 / alpha) of the final reward reaches the
    first token: almost nothing at 0.05, where everything depends on the critic, and half at 1.5.

    Args:
        length: number of sampled tokens, or of turns if steps are turns; never a padded length.

    >>> [round(length_adaptive_lambda(n, 1.5), 4) for n in (10, 100)]
    [0.9333, 0.9933]
    """
    if length < 1 or alpha <= 0:
        raise DataError(f"length={length}, alpha={alpha}; expected a length of at least 1 and an alpha above 0")
    return min(1.0, max(0.0, 1.0 - 1.0 / (alpha * length)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The advantages of one attempt's tokens, and the critic's targets."""

    advantages: tuple[FloatArray, ...]
    """[S] per turn."""
    returns: tuple[FloatArray, ...]
    """[S] per turn: the critic's targets."""
    policy_lambda: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gae:
    """One way to estimate advantages and returns."""

    level: Level = "token"
    gamma: float = 1.0
    """Discount per turn."""
    policy_lambda: float | None = None
    """None: it depends on the attempt's length (`length_adaptive_lambda`)."""
    alpha: float = 1.5
    """How far credit reaches with the length-adaptive lambda."""
    critic_lambda: float = 1.0

    def __post_init__(self) -> None:
        lambdas = [self.gamma, self.critic_lambda, 0.0 if self.policy_lambda is None else self.policy_lambda]
        if not all(0 <= number <= 1 for number in lambdas) or self.alpha <= 0:
            raise DataError(f"{self}; expected gamma and lambda from 0 to 1 and alpha above 0")

    @property
    def first_only(self) -> bool:
        """Whether the critic learns only the states at the start of turns."""
        return self.level == "turn"

    def learned(self, numbers: Sequence[FloatArray]) -> list[FloatArray]:
        """The numbers of the states that the critic learns, from those of all tokens, [S] per turn."""
        return [numbers_S[:1] for numbers_S in numbers] if self.first_only else list(numbers)

    def credit(self, trajectory: Trajectory, values: TrajectoryValues) -> Credit:
        """Compute one attempt's advantages for the policy and returns for the critic."""
        values.check(trajectory)
        lam = self._lambda_of(trajectory)
        inside = [self._lambda_of_turn(len(values_S)) for values_S in values.turns]
        return Credit(
            advantages=self._advantages(trajectory, values, lam, inside),
            returns=self.returns(trajectory, values),
            policy_lambda=lam,
        )

    def returns(self, trajectory: Trajectory, values: TrajectoryValues) -> tuple[FloatArray, ...]:
        """[S] per turn: advantage with the critic's lambda, plus value. With lambda 1 these are plain returns."""
        inside = [self.critic_lambda] * len(values.turns)
        advantages = self._advantages(trajectory, values, self.critic_lambda, inside)
        return tuple(a_S + v_S for a_S, v_S in zip(advantages, self.learned(values.turns), strict=True))

    def _advantages(
        self, trajectory: Trajectory, values: TrajectoryValues, lam: float, inside: Sequence[float]
    ) -> tuple[FloatArray, ...]:
        rewards_K = [turn.reward for turn in trajectory.turns]
        match self.level:
            case "token":
                return token_gae(rewards_K, values.turns, gamma=self.gamma, lam=lam, bootstrap=values.bootstrap)
            case "turn":
                return turn_gae(rewards_K, values.turns, gamma=self.gamma, lam=lam, bootstrap=values.bootstrap)
            case "bilevel":
                return bilevel_gae(
                    rewards_K,
                    values.turns,
                    gamma=self.gamma,
                    turn_lam=lam,
                    token_lams=inside,
                    bootstrap=values.bootstrap,
                )

    def _lambda_of(self, trajectory: Trajectory) -> float:
        """The policy's lambda. An adaptive one depends on the number of steps: sampled tokens, or turns."""
        if self.policy_lambda is not None:
            return self.policy_lambda
        length = trajectory.num_sampled_tokens if self.level == "token" else len(trajectory.turns)
        return length_adaptive_lambda(length, self.alpha)

    def _lambda_of_turn(self, num_tokens: int) -> float:
        """The lambda of `bilevel`'s pass over the tokens of one turn."""
        return length_adaptive_lambda(num_tokens, self.alpha) if self.policy_lambda is None else self.policy_lambda


# These three functions share their first parameters: `Gae` chooses one of them by its level.
def token_gae(
    rewards_K: Sequence[float] | FloatArray,
    values: Sequence[FloatArray],
    *,
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> tuple[FloatArray, ...]:
    """[S] per turn. A turn's reward belongs to its last token, and gamma applies from there to the next turn."""
    lengths = _lengths(rewards_K, values)
    ends = np.cumsum(lengths) - 1
    rewards_N, discounts_N = np.zeros(sum(lengths)), np.ones(sum(lengths))
    rewards_N[ends] = rewards_K
    discounts_N[ends] = gamma
    advantages_N = gae(rewards_N, np.concatenate(values), discounts_N=discounts_N, lam=lam, bootstrap=bootstrap)
    return tuple(np.split(advantages_N, ends[:-1] + 1))


def turn_gae(
    rewards_K: Sequence[float] | FloatArray,
    values: Sequence[FloatArray],
    *,
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> tuple[FloatArray, ...]:
    """[S] per turn, one number for all of its tokens (Turn-PPO, arXiv:2512.17008)."""
    lengths = _lengths(rewards_K, values)
    first_K = [values_S[0] for values_S in values]
    advantages_K = gae(rewards_K, first_K, discounts_N=gamma, lam=lam, bootstrap=bootstrap)
    return tuple(np.full(n, a) for n, a in zip(lengths, advantages_K, strict=True))


def bilevel_gae(
    rewards_K: Sequence[float] | FloatArray,
    values: Sequence[FloatArray],
    *,
    gamma: float,
    turn_lam: float,
    token_lams: Sequence[float],
    bootstrap: float = 0.0,
) -> tuple[FloatArray, ...]:
    """[S] per turn: a pass over turns, then a pass inside each turn that does not look beyond the turn's end."""
    _lengths(rewards_K, values)
    last_K = [values_S[-1] for values_S in values]
    returns_K = gae(rewards_K, last_K, discounts_N=gamma, lam=turn_lam, bootstrap=bootstrap) + last_K
    advantages: list[FloatArray] = []
    for return_k, values_S, lam in zip(returns_K, values, token_lams, strict=True):
        rewards_S = np.zeros(len(values_S))
        rewards_S[-1] = return_k
        advantages.append(gae(rewards_S, values_S, discounts_N=1.0, lam=lam))
    return tuple(advantages)


def whiten(
    advantages: Sequence[Sequence[FloatArray]], is_counted: Sequence[Sequence[bool]], *, eps: float = 1e-8
) -> list[tuple[FloatArray, ...]]:
    """Scale advantages to mean 0 and deviation 1 over all tokens of an optimizer step's counted turns.

    Args:
        advantages: [S] per turn, per attempt.
        is_counted: per turn, per attempt. The other turns are scaled too, but mean and deviation ignore them.
    """
    counted = [
        turn_S
        for attempt, flags in zip(advantages, is_counted, strict=True)
        for turn_S, is_in in zip(attempt, flags, strict=True)
        if is_in
    ]
    if not counted:
        return [tuple(attempt) for attempt in advantages]
    everything_N = np.concatenate(counted)
    mean, std = everything_N.mean(), everything_N.std()
    return [tuple((turn_S - mean) / (std + eps) for turn_S in attempt) for attempt in advantages]


def whiten_by_world(
    advantages: Sequence[Sequence[FloatArray]], trajectories: Sequence[Trajectory]
) -> list[tuple[FloatArray, ...]]:
    """`whiten` over the trained turns of each world of a mix by itself; of one world, over all."""
    worlds = [trajectory.labels.get(WORLD_LABEL, "") for trajectory in trajectories]
    rest: dict[str, Iterator[tuple[FloatArray, ...]]] = {}
    for world in set(worlds):
        inside = [index for index, name in enumerate(worlds) if name == world]
        flags = [[turn.is_trained for turn in trajectories[index].turns] for index in inside]
        rest[world] = iter(whiten([advantages[index] for index in inside], flags))
    return [next(rest[world]) for world in worlds]


def _lengths(rewards_K: Sequence[float] | FloatArray, values: Sequence[FloatArray]) -> list[int]:
    """[K] the number of tokens of each turn."""
    if len(rewards_K) != len(values) or not len(values):
        raise DataError(
            f"{len(rewards_K)} rewards for {len(values)} turns; expected one per turn, and at least one turn"
        )
    lengths = [len(values_S) for values_S in values]
    if 0 in lengths:
        raise DataError(f"turn {lengths.index(0)} has no values; every turn has at least one token")
    return lengths
