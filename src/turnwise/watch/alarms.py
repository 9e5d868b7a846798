"""Alarms: which metric left its band, why it matters and what to change.

These are watched: the gap between the weights that sampled and those that learn (KL), the gap between sampler and
trainer on the same weights (drift), the share of a batch that still counts (ESS), the share of groups that were too old
to use, the policy's entropy, gradients that are exactly 0 step after step, and play between two sides that
collapses. An alarm is reported when a number leaves its band and again when it returns, not at every step between.

Drift has two bands: a bound, and a multiple of what it was in the run's own first steps. A sampler that rounds more
than the trainer drifts from the start, and keeps drifting by the same amount; drift that grows means that something
changed.

Rising entropy alone causes no alarm: policies that learn long tasks explore more, and do better (UI-TARS-2,
arXiv:2509.02544). It is an alarm if the reward has fallen too. Each turn and each kind of reply is watched separately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NotRequired, TypedDict

from pydantic import Field

from turnwise.errors import TurnwiseError
from turnwise.runtime.section import Section
from turnwise.watch.behaviour import ENTROPY, WHOLE, entropy_place
from turnwise.watch.trends import STRETCH_STEPS, has_fallen

BASELINE_STEPS = 3
"""The first steps, whose mean entropy is the baseline of later ones."""
MIN_RISE = 0.05
"""Nats per token: a smaller rise does not count, even if it is a large multiple of a small baseline."""
ZERO_GRADIENT_STEPS = 3
"""Steps in a row that learned from tokens, and whose gradient was exactly 0: one such step may be an accident."""
AGREEMENT_STEPS = 3
"""Steps over which the agreement of outcome model and verifier is taken."""
AGREEMENT, AGREEMENT_OF_WORLD = "rollout/env_outcome_agreement_mean", "world/outcome_agreement_"
"""The metric of it, and how those of the members of a mix begin."""
DRIFT_STEPS = 3
"""Steps whose median drift is compared with the first steps: one odd batch is no trend."""
MIN_DRIFT = 1e-6
"""k2 per token. A drift below this is float32's rounding; how much it grew says nothing."""


class AlarmError(TurnwiseError):
    """A number stayed out of its band for as long as the config allows."""


class AlarmConfig(Section):
    """Bands of metrics: a metric outside its band is reported, and may end the run."""

    max_kl: float = Field(
        default=0.01, gt=0, description="Largest KL(sampler || trainer) per token (k2) on the data of a step."
    )
    # A server in bfloat16 beside a trainer in float32 is healthy at 0.0034 (SmolLM2, docs/backends.md): logits of 16 to
    # 32 are rounded to steps of 0.125. Three times that, 0.01, is an error of sqrt(2 * 0.01) = 0.14 nats per token, the
    # bound of a certificate in bfloat16. float32 stays below 1e-8; `drift_growth` watches what is far below the bound.
    max_drift: float = Field(
        default=0.01,
        gt=0,
        description="Largest drift per token (k2): sampler against trainer, over tokens that the newest weights drew.",
    )
    drift_growth: float = Field(
        default=10.0,
        gt=1,
        description="Largest drift of the last steps, as a multiple of the drift in the run's first steps.",
    )
    min_ess: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="Smallest effective share of a step's tokens after their ratios are counted.",
    )
    max_stale_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Largest share of a step's groups that were dropped because they were too old.",
    )
    entropy_fall: float = Field(
        default=0.1, ge=0, lt=1, description="Lowest entropy, as a share of the entropy in the first steps."
    )
    entropy_rise: float = Field(
        default=3.0,
        gt=1,
        description="Highest entropy, as a multiple of the entropy in the first steps, of all replies, a turn "
        "or a kind of reply; checked only if the reward has fallen.",
    )
    min_agreement: float = Field(
        default=0.05, ge=0, lt=1, description="In `negotiate`: smallest share of a step's games with a deal."
    )
    min_openings: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Against models: smallest diversity of first replies among attempts with the same start; 0: all "
        "begin alike, 1: all differ.",
    )
    max_exploitation: float = Field(
        default=0.4,
        gt=0,
        description="With a pool: how much larger a share of games the policy may win against its newest snapshot than "
        "against older ones and the base model.",
    )
    max_seat_gap: float = Field(
        default=0.8,
        gt=0,
        description="With opponent.train=both: how much larger a share of games one seat may win than the other.",
    )
    min_outcome_agreement: float = Field(
        default=0.7,
        ge=0,
        lt=1,
        description="With reward.model: smallest share of attempts on which outcome model and verifier agree, over the "
        "last steps.",
    )
    stop_after: int = Field(
        default=0, ge=0, description="End the run after this many steps in a row with the same alarm; 0 never ends it."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A number that is out of its band, or (`is_over`) back in it."""

    name: str
    value: float
    bound: float
    is_over: bool = False
    place: str = ""
    """For an entropy: the turn or the kind of reply, as the end of a phrase. For drift: the worst token."""

    @property
    def what(self) -> str:
        """The number that is watched, in words."""
        return _WORDS[self.name][0].format(place=self.place)

    @property
    def why(self) -> str:
        """Why it matters."""
        return _WORDS[self.name][1]

    @property
    def remedy(self) -> str:
        """What to change."""
        return _WORDS[self.name][2]

    def __str__(self) -> str:
        what, why, remedy = self.what, self.why, self.remedy
        if self.is_over and self.name == "entropy_high":
            return f"alarm over: {what} is {self.value:.3g}, and the reward has not fallen"
        if self.is_over:
            return f"alarm over: {what} is {self.value:.3g} again (band ends at {self.bound:.3g})"
        if self.name == "zero_gradient":
            return f"alarm: {what} is {self.value:.0f}: {why}. {remedy}"
        side = "under" if self.value < self.bound else "over"
        worst = f". Worst token: {self.place}" if self.place and self.name.startswith("drift") else ""
        return f"alarm: {what} is {self.value:.3g}, {side} {self.bound:.3g}: {why}. {remedy}{worst}"


_WORDS: Mapping[str, tuple[str, str, str]] = {
    "kl": (
        "KL(sampler || trainer)",
        "the weights moved away from those that sampled, so ratios do not correct the gradient well any more",
        "Lower train.learning_rate or train.max_staleness, or set method.old_policy=true with method.loss_fn=ppo",
    ),
    "drift": (
        "the drift (k2) of the sampler from the trainer on the same weights",
        "the sampler computes other numbers than the trainer: it rounds more, or has other weights or another prompt",
        "Check the sampler's model, adapter and dtype (float32 drifts least), or set rollout.backend=local",
    ),
    "drift_growth": (
        "the drift (k2) of the last steps, as a multiple of that of the first ones,",
        "sampler and trainer come apart on the same weights, which often ends in a collapse",
        "Check that every version reaches the sampler, use a float32 sampler, and keep method.correction on",
    ),
    "ess": (
        "the effective share of the batch",
        "a few tokens with large ratios make most of the gradient, which is how lagging runs begin to diverge",
        "Lower train.max_staleness or train.learning_rate, or reject with method.correction=token_mask",
    ),
    "stale": (
        "the share of groups that were too old",
        "attempts are thrown away, long dialogues first",
        "Lower train.max_wait to train.max_staleness, raise train.max_staleness, or play fewer tasks per step",
    ),
    "entropy_low": (
        "the entropy per token, as a share of what it was,",
        "the policy says almost the same every time, so the attempts of a group no longer differ",
        "Lower train.learning_rate, set method.entropy_coef=0.001, or add method.kl_coef",
    ),
    "entropy_high": (
        "the entropy per token{place}, as a share of what it was,",
        "the reward has fallen too: the policy's replies become random",
        "Lower train.learning_rate, add method.kl_coef, or look at the rewards",
    ),
    "agreement": (
        "the share of games with a deal",
        "the sides do not agree any more, and without a deal there is little to learn from",
        "Lower train.learning_rate, play a mixed pool of opponents, or start from a longer warm-up",
    ),
    "openings": (
        "the diversity of first replies within a group",
        "all attempts of a group begin in the same way, so they hardly differ",
        "Lower train.learning_rate, set method.entropy_coef=0.001, or play a pool of opponents",
    ),
    "seat_gap": (
        "the gap between the shares of games that the two seats win",
        "one seat takes what the other gives away, so neither learns to negotiate",
        "Lower train.learning_rate, play a pool of opponents, or start from a longer warm-up",
    ),
    "exploitation": (
        "the extra share of games won against the newest own snapshot",
        "the policy learns to beat what it was last, and not what it was before",
        "Raise opponent.base_weight and opponent.scripted_weight, or opponent.keep_last",
    ),
    "outcome_model": (
        "the share of attempts on which the outcome model and the verifier agree{place}",
        "the policy has found what the outcome model rewards and the verifier does not",
        "Train the outcome model again on attempts of this run (turnwise orm train), or raise reward.weights.outcome",
    ),
    "zero_gradient": (
        "the number of steps in a row with a gradient of exactly 0",
        "tokens were learned from, and the weights did not move",
        "Check that the loss depends on its logprobs (no detach()), and that advantages and weights are not all 0",
    ),
}


class AlarmState(TypedDict):
    """The state of `Alarms`, ready for JSON."""

    active: dict[str, int]
    entropies: list[float]
    """Entropy of all replies in the first steps."""
    entropies_by_place: NotRequired[dict[str, list[float]]]
    """Entropies of turns and kinds of replies in the first steps, by metric."""
    rewards: NotRequired[list[float]]
    """Rewards of the last steps."""
    best_rewards: NotRequired[list[float]]
    """Rewards of the best stretch of steps so far."""
    zero_gradients: NotRequired[int]
    """Steps in a row with a gradient of exactly 0."""
    first_drifts: NotRequired[list[float]]
    """Drift of the first steps."""
    last_drifts: NotRequired[list[float]]
    """Drift of the last steps."""
    agreements: NotRequired[list[float]]
    """Agreement of outcome model and verifier in the last steps."""
    agreements_by_world: NotRequired[dict[str, list[float]]]
    """The same for each member of a mix."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """One metric of a step, and whether it is out of its band."""

    name: str
    value: float
    bound: float
    is_out: bool
    place: str = ""


def _is_agreement(name: str) -> bool:
    return name == AGREEMENT or name.startswith(AGREEMENT_OF_WORLD)


@dataclass(slots=True)
class Alarms:
    """Watches the metrics of a run, step by step."""

    config: AlarmConfig
    active: dict[str, int] = field(default_factory=dict[str, int])
    """Alarm name to the number of steps in a row for which it has lasted."""
    _entropies: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Metric to its values in the first steps."""
    _rewards: list[float] = field(default_factory=list[float])
    _best_rewards: list[float] = field(default_factory=list[float])
    _num_zero_gradients: int = 0
    _first_drifts: list[float] = field(default_factory=list[float])
    _last_drifts: list[float] = field(default_factory=list[float])
    _agreements: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By member of a mix; all together by the empty name."""

    def check(self, metrics: Mapping[str, float], worst_token: str = "") -> list[Alarm]:
        """The alarms that began or ended with this step.

        Args:
            worst_token: where the largest gap between sampler and trainer is, for alarms about drift.
        """
        changes: list[Alarm] = []
        for one in self._readings(metrics, worst_token):
            alarm = Alarm(name=one.name, value=one.value, bound=one.bound, place=one.place, is_over=not one.is_out)
            if one.is_out:
                self.active[one.name] = self.active.get(one.name, 0) + 1
                if self.active[one.name] == 1:
                    changes.append(alarm)
            elif self.active.pop(one.name, 0):
                changes.append(alarm)
        return changes

    def stop_if_lasting(self) -> None:
        limit = self.config.stop_after
        lasting = [name for name, count in self.active.items() if limit and count >= limit]
        if lasting:
            what, why, remedy = _WORDS[lasting[0]]
            what = what.format(place="")
            raise AlarmError(f"{what} was out of its band for {limit} steps in a row: {why}. {remedy}")

    def to_state(self) -> AlarmState:
        return AlarmState(
            active=dict(self.active),
            entropies=self._entropies.get(WHOLE, []),
            entropies_by_place={name: first for name, first in self._entropies.items() if name != WHOLE},
            rewards=list(self._rewards),
            best_rewards=list(self._best_rewards),
            zero_gradients=self._num_zero_gradients,
            first_drifts=list(self._first_drifts),
            last_drifts=list(self._last_drifts),
            agreements=list(self._agreements.get("", [])),
            agreements_by_world={world: list(last) for world, last in self._agreements.items() if world},
        )

    def restore(self, state: AlarmState) -> None:
        self.active = dict(state["active"])
        places = state.get("entropies_by_place", {})
        self._entropies = {name: list(first) for name, first in {WHOLE: state["entropies"], **places}.items()}
        self._rewards = list(state.get("rewards", []))
        self._best_rewards = list(state.get("best_rewards", []))
        self._num_zero_gradients = state.get("zero_gradients", 0)
        self._first_drifts = list(state.get("first_drifts", []))
        self._last_drifts = list(state.get("last_drifts", []))
        worlds = state.get("agreements_by_world", {})
        self._agreements = {world: list(last) for world, last in {"": state.get("agreements", []), **worlds}.items()}

    def _readings(self, metrics: Mapping[str, float], worst_token: str) -> list[_Reading]:
        """The watched metrics that this step measured."""
        config = self.config
        readings = self._drift_readings(metrics, worst_token)
        is_drifting = any(one.name == "drift" and one.is_out for one in readings)
        kl, ess = metrics.get("train/kl_sampler_trainer_k2"), metrics.get("train/ess_fraction")
        if kl is not None:
            # nan is outside the band too. A drift is part of this number, and its own alarm names the right cause.
            readings.append(_Reading("kl", kl, config.max_kl, not kl <= config.max_kl and not is_drifting))
        if ess is not None:
            readings.append(_Reading("ess", ess, config.min_ess, not ess >= config.min_ess))
        stale = metrics.get("pool/stale_share")
        if stale is not None:
            readings.append(_Reading("stale", stale, config.max_stale_share, stale > config.max_stale_share))
        readings += self._opponent_readings(metrics)
        readings += self._outcome_readings(metrics)
        norm = metrics.get("train/grad_norm")
        if norm is not None:  # a step that learned from nothing has none
            self._num_zero_gradients = self._num_zero_gradients + 1 if norm == 0 else 0
            count, bound = float(self._num_zero_gradients), float(ZERO_GRADIENT_STEPS)
            readings.append(_Reading("zero_gradient", count, bound, count >= bound))
        return readings + self._entropy_readings(metrics)

    def _drift_readings(self, metrics: Mapping[str, float], worst_token: str) -> list[_Reading]:
        """Whether sampler and trainer are too far apart on the same weights, and whether they come apart."""
        drift, config = metrics.get("drift/k2"), self.config
        if drift is None:  # no token of the step was drawn by the newest weights
            return []
        is_out = not drift <= config.max_drift
        readings = [_Reading("drift", drift, config.max_drift, is_out, worst_token if is_out else "")]
        if not math.isfinite(drift):
            return readings
        if len(self._first_drifts) < BASELINE_STEPS:
            self._first_drifts.append(drift)
            return readings
        self._last_drifts = [*self._last_drifts, drift][-DRIFT_STEPS:]
        usual, last = max(fmean(self._first_drifts), MIN_DRIFT), median(self._last_drifts)
        has_grown = len(self._last_drifts) == DRIFT_STEPS and last > config.drift_growth * usual
        place = worst_token if has_grown else ""
        return [*readings, _Reading("drift_growth", last / usual, config.drift_growth, has_grown, place)]

    def _opponent_readings(self, metrics: Mapping[str, float]) -> list[_Reading]:
        """Whether play between two sides collapses."""
        config = self.config
        watched = (
            ("agreement", "rollout/env_agreement_mean", config.min_agreement, True),
            ("openings", "opponent/opening_diversity", config.min_openings, True),
            ("exploitation", "opponent/exploitation", config.max_exploitation, False),
            ("seat_gap", "opponent/seat_gap", config.max_seat_gap, False),
        )
        return [
            _Reading(name, metrics[key], bound, metrics[key] < bound if is_floor else metrics[key] > bound)
            for name, key, bound, is_floor in watched
            if key in metrics
        ]

    def _outcome_readings(self, metrics: Mapping[str, float]) -> list[_Reading]:
        """Whether outcome model and verifier have parted, over the last steps: one batch is small. In a mix the world
        counts in which they agree least, which a mean over all would hide."""
        measured = {name: value for name, value in metrics.items() if math.isfinite(value) and _is_agreement(name)}
        for name, agreement in measured.items():
            world = "" if name == AGREEMENT else name.removeprefix(AGREEMENT_OF_WORLD)
            self._agreements[world] = [*self._agreements.get(world, []), agreement][-AGREEMENT_STEPS:]
        known = {world: fmean(last) for world, last in self._agreements.items() if len(last) == AGREEMENT_STEPS}
        if not known or not measured:
            return []
        worst, bound = min(known, key=lambda world: (known[world], world)), self.config.min_outcome_agreement
        place = f" in {worst}" if worst else ""
        return [_Reading("outcome_model", known[worst], bound, known[worst] < bound, place)]

    def _entropy_readings(self, metrics: Mapping[str, float]) -> list[_Reading]:
        """Whether the whole entropy is low, and whether the place where it rose most is high."""
        has_fallen = self._has_reward_fallen(metrics.get("rollout/reward_mean"))
        low, high = self.config.entropy_fall, self.config.entropy_rise
        readings: list[_Reading] = []
        risen: list[_Reading] = []
        for name, entropy in metrics.items():
            if not name.startswith(ENTROPY) or not math.isfinite(entropy):
                continue
            first = self._entropies.setdefault(name, [])
            if len(first) < BASELINE_STEPS:
                first.append(entropy)
                continue
            usual = sum(first) / len(first)
            share = entropy / max(usual, 1e-9)
            if name == WHOLE:
                readings.append(_Reading("entropy_low", share, low, share < low))
            is_high = share > high and entropy - usual > MIN_RISE and has_fallen
            risen.append(_Reading("entropy_high", share, high, is_high, entropy_place(name)))
        worst = sorted(risen, key=lambda one: (one.is_out, one.value))[-1:]
        return readings + worst

    def _has_reward_fallen(self, reward: float | None) -> bool:
        """Whether the last steps had less reward than the best ones before, by more than chance explains."""
        if reward is not None and math.isfinite(reward):
            self._rewards = [*self._rewards, reward][-STRETCH_STEPS:]
        if len(self._rewards) < STRETCH_STEPS:
            return False
        if not self._best_rewards or fmean(self._rewards) > fmean(self._best_rewards):
            self._best_rewards = list(self._rewards)
            return False
        return has_fallen(self._best_rewards, self._rewards)
