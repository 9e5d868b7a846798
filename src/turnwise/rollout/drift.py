"""How far the sampler's logprobs are from the trainer's, token by token, split by the age of the weights that sampled.

    gap = trainer logprob - sampler logprob,    k2 = gap^2 / 2

At **lag 0** the trainer holds the very weights that sampled, so a gap is numerics: another dtype, another kernel,
another server, or a fault such as an adapter that was not loaded. At **lag 1 and more** the weights have moved since,
and the gap is mostly what was learned. One number over both would hide a broken sampler behind staleness, and would
call staleness a fault. So each lag has numbers of its own, and only lag 0 is called drift.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.trajectory import Trajectory, Turn

BEYOND = 0.1
"""Nats. A gap larger than this changes a token's weight by more than 10%; float32 samplers stay far below it."""
MAX_LAG = 8
"""Lags above this are counted together."""

TurnLogprobs = Sequence[float] | NDArray[np.float32] | None
"""[S] what the trainer gave the sampled ids of one turn; None for a turn that was not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagDrift:
    """The gaps of all tokens that were sampled by weights of one age."""

    lag: int
    """Updates between the weights that sampled and those that learn; `MAX_LAG` + 1 stands for all above."""
    num_tokens: int
    mean_k2: float
    mean_abs: float
    max_abs: float
    num_beyond: int
    """Tokens with a gap of more than `BEYOND`."""

    @property
    def beyond_share(self) -> float:
        return self.num_beyond / self.num_tokens

    @property
    def name(self) -> str:
        """`1`, `2`, ... or `later`, as in names of metrics."""
        return str(self.lag) if self.lag <= MAX_LAG else "later"

    def line(self) -> str:
        """The drift at this lag as a printable line."""
        why = "numerics" if self.lag == 0 else "older weights"
        return (
            f"lag {self.name} ({why}): mean k2 {self.mean_k2:.2e}, mean |gap| {self.mean_abs:.2e}, "
            f"worst {self.max_abs:.2e}, {self.beyond_share:.1%} of {self.num_tokens} tokens beyond {BEYOND:g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """The place of a sampled token, and its logprob then."""

    task_id: str
    attempt: int
    turn: int
    token: int
    """Index among the turn's sampled ids."""
    token_id: int
    sampler_logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken(SampledToken):
    """The token with the largest gap at lag 0."""

    trainer_logprob: float

    @property
    def gap(self) -> float:
        return self.trainer_logprob - self.sampler_logprob

    def __str__(self) -> str:
        return (
            f"{self.task_id} attempt {self.attempt}, turn {self.turn}, token {self.token} (id {self.token_id}): "
            f"sampler {self.sampler_logprob:.4f}, trainer {self.trainer_logprob:.4f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """The gaps of one step."""

    by_lag: tuple[LagDrift, ...] = ()
    worst: WorstToken | None = None
    """At lag 0. None where no token of lag 0 was trained."""
    num_broken: int = 0
    """Tokens whose gap is no finite number; they count in no mean."""

    @property
    def now(self) -> LagDrift | None:
        """Lag 0; None where every token is older."""
        return next((one for one in self.by_lag if one.lag == 0), None)

    def metrics(self) -> dict[str, float]:
        """The numbers of a step, under `drift/`. A step without tokens of lag 0 has none of lag 0."""
        found: dict[str, float] = {}
        for one in self.by_lag:
            if one.lag == 0:
                found |= {
                    "tokens": float(one.num_tokens),
                    "k2": one.mean_k2,
                    "abs_mean": one.mean_abs,
                    "abs_max": one.max_abs,
                    "beyond_share": one.beyond_share,
                }
            else:
                found |= {f"lag_{one.name}_k2": one.mean_k2, f"lag_{one.name}_tokens": float(one.num_tokens)}
        if self.num_broken:
            found |= {"broken_tokens": float(self.num_broken)}
        return {f"drift/{name}": value for name, value in found.items()}

    def lines(self) -> list[str]:
        """The drift at all lags as printable lines."""
        lines = [one.line() for one in self.by_lag]
        if self.worst is not None:
            lines.append(f"worst token: {self.worst}")
        if self.num_broken:
            lines.append(f"{self.num_broken} tokens have no finite logprob on one of the two sides")
        return lines

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> DriftReport:
        worst = fields["worst"]
        return DriftReport(
            by_lag=tuple(LagDrift(**one) for one in fields["by_lag"]),
            worst=None if worst is None else WorstToken(**worst),
            num_broken=fields["num_broken"],
        )


def measure_drift(played: Iterable[tuple[Trajectory, Sequence[TurnLogprobs]]], version: int) -> DriftReport:
    """Compare the logprobs of trained turns.

    Args:
        played: attempts, each with the trainer's logprobs of its turns.
        version: the version of the trainer's weights that gave them.
    """
    gaps: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
    worst: WorstToken | None = None
    num_broken = 0
    for trajectory, answers in played:
        for index, (turn, logprobs) in enumerate(zip(trajectory.turns, answers, strict=True)):
            if logprobs is None:
                continue
            gaps_S = np.asarray(logprobs, np.float64) - np.asarray(turn.sampler_logprobs, np.float64)
            is_finite_S = np.isfinite(gaps_S)
            num_broken += int((~is_finite_S).sum())
            lags_S = _lags(turn, version)
            for lag in np.unique(lags_S[is_finite_S]).tolist():
                gaps[lag].append(gaps_S[is_finite_S & (lags_S == lag)])
            sizes_S = np.where(is_finite_S & (lags_S == 0), np.abs(gaps_S), -1.0)
            token = int(np.argmax(sizes_S))
            if sizes_S[token] >= 0 and (worst is None or sizes_S[token] > abs(worst.gap)):
                worst = WorstToken(
                    task_id=trajectory.task_id,
                    attempt=trajectory.attempt,
                    turn=index,
                    token=token,
                    token_id=turn.sampled_ids[token],
                    sampler_logprob=turn.sampler_logprobs[token],
                    trainer_logprob=float(logprobs[token]),
                )
    by_lag = tuple(_of_lag(lag, np.concatenate(gaps[lag])) for lag in sorted(gaps))
    return DriftReport(by_lag=by_lag, worst=worst, num_broken=num_broken)


def _lags(turn: Turn, version: int) -> NDArray[np.int64]:
    """[S] the age of the weights behind each token.

    If the weights changed during a turn, its last tokens were drawn by new weights that read what the old ones left in
    the KV cache. That is staleness too, so no token of such a turn has lag 0.
    """
    versions = turn.versions
    lags_S = np.clip(version - np.array(versions, np.int64), 0, MAX_LAG + 1)
    return np.maximum(lags_S, 1) if len(set(versions)) > 1 else lags_S


def _of_lag(lag: int, gaps_N: NDArray[np.float64]) -> LagDrift:
    sizes_N = np.abs(gaps_N)
    return LagDrift(
        lag=lag,
        num_tokens=len(gaps_N),
        mean_k2=float((gaps_N**2).mean() / 2),
        mean_abs=float(sizes_N.mean()),
        max_abs=float(sizes_N.max()),
        num_beyond=int((sizes_N > BEYOND).sum()),
    )
