"""Reads from a real run what `turnwise cluster simulate` needs: rates, attempts, and the run's own settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml
from turnwise.errors import ConfigError
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import AttemptRow
from turnwise.training.simulation import ClusterShape, MeasuredRates
from turnwise.training.simulation_attempts import AttemptShape, recorded_groups

NUM_READ_ATTEMPTS = 2000
"""The newest attempts of a run are enough to know how long attempts are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run as a simulation sees it."""

    rates: MeasuredRates
    shape: ClusterShape
    step_s: float
    """Mean seconds of a step, without the first ones, which start things up and fill the pool."""
    num_steps: int
    """Steps that the mean is taken over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """Metrics of a run's steps, added up."""

    step_s: float
    train_s: float
    tokens: float
    sampler_wait_s: float
    env_wait_s: float
    tries: float
    failures: float


def read_measured_run(path: str | Path, *, publish_s: float = 0.0) -> MeasuredRun:
    """Read the rates of a run.

    Its metrics hold training and publishing as one time. `publish_s` says how much of it publishing takes; the trainer
    gets the rest.
    """
    with RunReader(path) as run:
        config = config_from_yaml(run.config_yaml, str(run.directory))
        played, num_first = [step for step, _ in run.metric("time/step_s")], config.train.max_staleness + 1
        steps = played[num_first:]
        if len(steps) < 2:
            raise ConfigError(
                f"{run.directory} has {len(played)} steps with times; at least {num_first + 2} are needed"
            )
        _check_is_modelled(config)
        sums = _add_up(run, steps)
        groups = _read_groups(run, played, sums)
    cluster, is_local = config.cluster, config.rollout.backend == "local"
    num_samplers = cluster.samplers if is_local else max(1, len(config.rollout.url))
    is_colocated = not cluster.has_own_samplers if is_local else config.rollout.placement == "colocated"
    num_steps, train = len(steps), config.train
    shape = ClusterShape(
        samplers=num_samplers,
        learners=config.cluster.learners,
        is_colocated=is_colocated,
        tasks_per_step=train.tasks_per_step,
        group_size=config.rollout.group_size,
        max_staleness=train.max_staleness,
        concurrency=max(1, config.rollout.max_concurrency // num_samplers),
    )
    train_s = (sums.train_s - publish_s * num_steps) * (1 - _shared(sums, shape) / 2)
    if train_s <= 0:
        raise ConfigError(
            f"training and publishing took {sums.train_s / num_steps:.3g} s a step in {path}; publishing alone cannot "
            f"take {publish_s:g} s of it"
        )
    return MeasuredRun(
        rates=MeasuredRates(
            sampler=(_sampler_point(sums, shape),),
            trainer=sums.tokens / train_s / config.cluster.learners,
            draw_groups=recorded_groups(groups),
            publish_s=publish_s,
            attempt_failure=min(0.99, sums.failures / sums.tries) if sums.tries else 0.0,
        ),
        shape=shape,
        step_s=sums.step_s / num_steps,
        num_steps=num_steps,
    )


def _check_is_modelled(config: Config) -> None:
    """Refuse what would be simulated as something else."""
    train = config.train
    odd = {
        "train.accumulate": train.accumulate > 1,
        "train.min_batch": train.batch_size != train.tasks_per_step,
        "train.max_wait": train.max_wait not in (0, train.max_staleness),
    }
    names = [name for name, is_odd in odd.items() if is_odd]
    if names:
        raise ConfigError(f"the simulation knows no {' and no '.join(names)}; read another run, or give rates yourself")


def _add_up(run: RunReader, steps: Sequence[int]) -> _Sums:
    def total(name: str) -> float:
        values = dict(run.metric(name))
        return sum(values.get(step, 0.0) for step in steps)

    step_s, shares = dict(run.metric("time/step_s")), dict(run.metric("time/training_share"))
    failures = [name for name in run.metric_names() if name.startswith("rollout/failures_")]
    sums = _Sums(
        step_s=sum(step_s[step] for step in steps),
        train_s=sum(step_s[step] * shares[step] for step in steps),
        tokens=total("rollout/tokens_drawn"),
        sampler_wait_s=total("rollout/sampler_wait_s"),
        env_wait_s=total("rollout/env_wait_s"),
        tries=total("rollout/tries"),
        failures=sum(total(name) for name in failures),
    )
    if not sums.tokens or not sums.sampler_wait_s:
        raise ConfigError(f"{run.directory} sampled nothing while it trained, so it has no rates to read")
    return sums


def _sampler_point(sums: _Sums, shape: ClusterShape) -> tuple[float, float]:
    """The rate of a full sampler, from the tokens/s that one reply got.

    In a run that plays ahead on the trainer's device, the two share it while a step trains: a reply then gets half of
    its rate. The simulation adds that by itself.
    """
    drawing_s = sums.sampler_wait_s
    if shape.max_staleness and shape.is_colocated:
        drawing_s *= 1 - min(1.0, sums.train_s / sums.step_s) / 2
    in_flight = shape.tasks_per_step * (shape.max_staleness + 1) * shape.group_size / shape.samplers
    count = min(shape.concurrency, in_flight)
    return (count, count * sums.tokens / drawing_s)


def _shared(sums: _Sums, shape: ClusterShape) -> float:
    """Share of the training time in which the sampler used the device too: half of it was then the sampler's."""
    if not shape.max_staleness or not shape.is_colocated:
        return 0.0
    return min(1.0, sums.sampler_wait_s / sums.step_s)


def _read_groups(run: RunReader, steps: Sequence[int], sums: _Sums) -> list[list[list[AttemptShape]]]:
    """Turns, tokens and time in the env of the stored attempts, by step and group.

    A run stores the time of a whole attempt. What its replies took, on average over its step, is subtracted; the rest
    is scaled so that the mean is the measured one.
    """
    drawn, waited = dict(run.metric("rollout/tokens_drawn")), dict(run.metric("rollout/sampler_wait_s"))
    stored = [row for row in run.attempts(phase="train") if row.num_turns and row.num_sampled_tokens]
    seen: list[tuple[AttemptRow, float]] = []
    for row in stored[-NUM_READ_ATTEMPTS:]:
        if row.step in steps and drawn.get(row.step):
            replies_s = row.num_sampled_tokens * waited[row.step] / drawn[row.step]
            seen.append((row, max(0.0, run.stored_dialogue(row.id).duration_s - replies_s)))
    if not seen:
        raise ConfigError(f"{run.directory} stores no attempts of training, so their lengths are unknown")
    mean_s = sums.env_wait_s * fmean(row.num_sampled_tokens for row, _ in seen) / sums.tokens
    scale = mean_s / fmean(seconds for _, seconds in seen) if any(seconds for _, seconds in seen) else 0.0
    groups: defaultdict[int, defaultdict[str, list[AttemptShape]]] = defaultdict(lambda: defaultdict(list))
    for row, seconds in seen:
        groups[row.step][row.task_id].append(AttemptShape(row.num_turns, row.num_sampled_tokens, scale * seconds))
    return [list(by_task.values()) for by_task in groups.values()]
