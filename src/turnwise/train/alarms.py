"""Numbers that left their bands, in words: what is wrong, why it matters, what to change.

The gap between the weights that sampled and those that learn (KL), how much of a batch still counts (ESS), how much
was too old to use, and the policy's entropy. An alarm is told when a number leaves its band and again when it is back,
not at every step between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from pydantic import Field

from turnwise.errors import TurnwiseError
from turnwise.section import Section

BASELINE_STEPS = 3
"""The entropy of so many steps is what later ones are held against."""


class AlarmError(TurnwiseError):
    """A number stayed out of its band for as long as the config allows."""


class AlarmConfig(Section):
    """Bands whose crossing is told, and ends a run where it says so."""

    max_kl: float = Field(
        default=0.01, gt=0, description="Of KL(sampler || trainer) per token (k2), on what a step learns from."
    )
    min_ess: float = Field(
        default=0.5, ge=0, lt=1, description="Of the effective share of a step's tokens once their ratios count."
    )
    max_stale_share: float = Field(
        default=0.1, ge=0, le=1, description="Of a step's groups that were dropped because they were too old."
    )
    entropy_fall: float = Field(
        default=0.1, ge=0, lt=1, description="Lowest entropy, as a share of what the first steps had."
    )
    entropy_rise: float = Field(default=3.0, gt=1, description="Highest entropy, in the same unit.")
    stop_after: int = Field(
        default=0, ge=0, description="End the run after so many steps in a row with the same alarm; 0 never does."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A number that is out of its band, or (`is_over`) back in it."""

    name: str
    value: float
    bound: float
    is_over: bool = False

    def __str__(self) -> str:
        what, why, remedy = _WORDS[self.name]
        if self.is_over:
            return f"alarm over: {what} is {self.value:.3g} again (band ends at {self.bound:.3g})"
        side = "under" if self.value < self.bound else "over"
        return f"alarm: {what} is {self.value:.3g}, {side} {self.bound:.3g}: {why}. {remedy}"


_WORDS: Mapping[str, tuple[str, str, str]] = {
    "kl": (
        "KL(sampler || trainer)",
        "the weights moved away from those that sampled, so ratios do not correct the gradient well any more",
        "Lower train.learning_rate or train.max_staleness, or set method.old_policy=true with method.loss_fn=ppo",
    ),
    "ess": (
        "the effective share of the batch",
        "a few tokens with large ratios make most of the gradient, which is how lagging runs begin to diverge",
        "Lower train.max_staleness or train.learning_rate, or reject with method.correction=token_mask",
    ),
    "stale": (
        "the share of groups that were too old",
        "what was played is thrown away, and long dialogues go first",
        "Lower train.max_wait to train.max_staleness, raise train.max_staleness, or play fewer tasks per step",
    ),
    "entropy_low": (
        "the entropy per token, as a share of what it was,",
        "the policy says almost the same every time, and its groups stop to differ",
        "Lower train.learning_rate, set method.entropy_coef=0.001, or add method.kl_coef",
    ),
    "entropy_high": (
        "the entropy per token, as a share of what it was,",
        "the policy is coming apart: it says anything",
        "Lower train.learning_rate, add method.kl_coef, or look at the rewards",
    ),
}


class AlarmState(TypedDict):
    """What `Alarms` knows, ready for JSON."""

    active: dict[str, int]
    entropies: list[float]


@dataclass(slots=True)
class Alarms:
    """Watches the metrics of a run, step by step."""

    config: AlarmConfig
    active: dict[str, int] = field(default_factory=dict[str, int])
    """By name: for how many steps in a row."""
    _entropies: list[float] = field(default_factory=list[float])

    def check(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """What changed with this step; raises when an alarm has lasted as long as it may."""
        changes: list[Alarm] = []
        for name, value, bound, is_out in self._readings(metrics):
            if is_out:
                self.active[name] = self.active.get(name, 0) + 1
                if self.active[name] == 1:
                    changes.append(Alarm(name=name, value=value, bound=bound))
            elif self.active.pop(name, 0):
                changes.append(Alarm(name=name, value=value, bound=bound, is_over=True))
        return changes

    def stop_if_lasting(self) -> None:
        limit = self.config.stop_after
        lasting = [name for name, count in self.active.items() if limit and count >= limit]
        if lasting:
            what, why, remedy = _WORDS[lasting[0]]
            raise AlarmError(f"{what} was out of its band for {limit} steps in a row: {why}. {remedy}")

    def to_state(self) -> AlarmState:
        return AlarmState(active=dict(self.active), entropies=list(self._entropies))

    def restore(self, state: AlarmState) -> None:
        self.active, self._entropies = dict(state["active"]), list(state["entropies"])

    def _readings(self, metrics: Mapping[str, float]) -> list[tuple[str, float, float, bool]]:
        """(name, value, bound, whether it is out of its band) of everything that this step measured."""
        config = self.config
        readings: list[tuple[str, float, float, bool]] = []
        kl, ess = metrics.get("train/kl_sampler_trainer_k2"), metrics.get("train/ess_fraction")
        if kl is not None:
            readings.append(("kl", kl, config.max_kl, not kl <= config.max_kl))  # nan is out, too
        if ess is not None:
            readings.append(("ess", ess, config.min_ess, not ess >= config.min_ess))
        stale = metrics.get("pool/stale_share")
        if stale is not None:
            readings.append(("stale", stale, config.max_stale_share, stale > config.max_stale_share))
        entropy = metrics.get("rollout/entropy_estimate")
        if entropy is not None and math.isfinite(entropy):
            readings += self._entropy(entropy)
        return readings

    def _entropy(self, entropy: float) -> list[tuple[str, float, float, bool]]:
        if len(self._entropies) < BASELINE_STEPS:
            self._entropies.append(entropy)
            return []
        share = entropy / max(sum(self._entropies) / len(self._entropies), 1e-9)
        low, high = self.config.entropy_fall, self.config.entropy_rise
        return [("entropy_low", share, low, share < low), ("entropy_high", share, high, share > high)]
