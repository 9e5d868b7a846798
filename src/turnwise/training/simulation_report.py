"""What a simulation says for each number of devices, and what would make it faster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random

from turnwise.errors import ConfigError
from turnwise.training.simulation import ClusterShape, Forecast, MeasuredRates, simulate
from turnwise.training.simulation_attempts import AttemptShape, DrawGroups
from turnwise.training.simulation_rates import MeasuredRun

STALENESS = "one more update of staleness"
"""It is a choice, no part that could be faster, so it is shown beside what bounds a run."""
MIN_GAIN = 0.02
"""A change that gains less than this is no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """Which simulations to make."""

    rates: MeasuredRates
    shape: ClusterShape
    """How a step is made up; its devices are replaced by each of `devices`."""
    devices: Sequence[int]
    learner_share: float = 0.25
    """Share of the devices that learn, unless all do both."""
    grows: bool = False
    """The tasks of a step grow with the devices, so that each device has as much to do as at the first number."""
    num_steps: int = 20
    seed: int = 0

    def shape_for(self, num_devices: int) -> ClusterShape:
        """The cluster with that many devices."""
        shape = self.shape
        if self.grows:
            tasks = round(shape.tasks_per_step * num_devices / self.devices[0])
            shape = replace(shape, tasks_per_step=max(1, tasks))
        if shape.is_colocated:
            return replace(shape, samplers=num_devices, learners=num_devices)
        if num_devices < 2:
            raise ConfigError(
                "one device cannot both sample and learn on devices of their own: use --placement colocated"
            )
        learners = min(num_devices - 1, max(1, round(num_devices * self.learner_share)))
        return replace(shape, samplers=num_devices - learners, learners=learners)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """One number of devices: what happens there, and why."""

    shape: ClusterShape
    forecast: Forecast
    bound: str
    """The part of `gains` that gains most, the staleness limit aside; `balanced` if none gains anything."""
    gains: dict[str, float]
    """How much faster steps get if one part alone is twice as good: 0.5 is 50 % more steps/s."""

    def to_json(self) -> dict[str, object]:
        forecast = self.forecast
        return {
            "devices": self.shape.num_devices,
            **asdict(self.shape),
            "steps_per_s": forecast.steps_per_s,
            "step_s": forecast.step_s,
            "tokens_per_s": forecast.tokens_per_s,
            "staleness_mean": forecast.staleness_mean,
            "staleness_p95": forecast.staleness_p95,
            "sampler_idle": forecast.sampler_idle,
            "learner_idle": forecast.learner_idle,
            "env_idle": forecast.env_idle,
            "bound": self.bound,
            "gains": self.gains,
        }


def make_regimes(plan: SimulationPlan) -> list[Regime]:
    """Simulate every number of devices."""
    return [_regime(plan, plan.shape_for(count)) for count in plan.devices]


def _regime(plan: SimulationPlan, shape: ClusterShape) -> Regime:
    forecast = simulate(plan.rates, shape, num_steps=plan.num_steps, seed=plan.seed)
    gains = {
        name: forecast.step_s / simulate(rates, other, num_steps=plan.num_steps, seed=plan.seed).step_s - 1
        for name, rates, other in _changes(plan.rates, shape)
    }
    best = max(gains.keys() - {STALENESS}, key=lambda name: (gains[name], name))
    return Regime(shape=shape, forecast=forecast, bound=best if gains[best] >= MIN_GAIN else "balanced", gains=gains)


def _changes(rates: MeasuredRates, shape: ClusterShape) -> Iterable[tuple[str, MeasuredRates, ClusterShape]]:
    """Each part alone twice as good; failures gone; one more update of staleness. What costs nothing is left out."""
    yield "samplers", replace(rates, sampler=tuple((count, 2 * rate) for count, rate in rates.sampler)), shape
    yield "learners", replace(rates, trainer=2 * rates.trainer, sync_s=rates.sync_s / 2), shape
    yield "env latency", replace(rates, draw_groups=_with_fast_envs(rates.draw_groups)), shape
    yield "places for attempts", rates, replace(shape, concurrency=2 * shape.concurrency, max_envs=2 * shape.max_envs)
    yield STALENESS, rates, replace(shape, max_staleness=shape.max_staleness + 1)
    if rates.publish_s:
        yield "publishing", replace(rates, publish_s=rates.publish_s / 2), shape
    if rates.attempt_failure or rates.device_failures_per_h:
        yield "failures", replace(rates, attempt_failure=0.0, device_failures_per_h=0.0), shape


def _with_fast_envs(draw: DrawGroups) -> DrawGroups:
    def draw_fast(random: Random, numbers: Sequence[int], size: int) -> list[list[AttemptShape]]:
        return [[replace(one, env_s=one.env_s / 2) for one in group] for group in draw(random, numbers, size)]

    return draw_fast


def check_against(run: MeasuredRun, *, seed: int = 0) -> dict[str, float]:
    """The seconds of a step of the run itself, simulated and measured."""
    predicted = simulate(run.rates, run.shape, num_steps=run.num_steps, seed=seed).step_s
    return {"predicted_s": predicted, "measured_s": run.step_s, "error": predicted / run.step_s - 1}


def regime_lines(regimes: Sequence[Regime]) -> list[str]:
    """The table that a person reads."""
    names = ("devices", "samplers", "learners", "attempts", "steps/s", "s/step", "stale", "p95", "idle: samplers")
    rows = [[*names, "learners", "envs", "if staler", "bound by"]]
    for regime in regimes:
        shape, forecast = regime.shape, regime.forecast
        gain = regime.gains.get(regime.bound)
        rows.append(
            [
                f"{shape.num_devices:,}",
                f"{shape.samplers:,}",
                f"{shape.learners:,}",
                f"{shape.tasks_per_step * shape.group_size:,}",
                f"{forecast.steps_per_s:.3g}",
                f"{forecast.step_s:.3g}",
                f"{forecast.staleness_mean:.2f}",
                f"{forecast.staleness_p95}",
                f"{forecast.sampler_idle:.0%}",
                f"{forecast.learner_idle:.0%}",
                f"{forecast.env_idle:.0%}",
                f"{regime.gains[STALENESS]:+.0%}",
                regime.bound if gain is None else f"{regime.bound} (+{gain:.0%})",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    ]
