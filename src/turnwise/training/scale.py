"""Play held-out tasks several times, before and after training, and see what more samples, turns and tokens buy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnwise.client.checkpoints import CheckpointStore
from turnwise.config.files import config_from_yaml
from turnwise.credit.gae import Gae
from turnwise.credit.values import read_values, value_sequences
from turnwise.errors import ConfigError, DataError
from turnwise.outcomes.model import OutcomeModel
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.checkpoint import saved_critic
from turnwise.training.orm import SCORED_AT_ONCE, score_conversations
from turnwise.training.policy import PolicySampler
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.watch.curve import BudgetLine, budgets_svg
from turnwise.watch.intervals import Interval
from turnwise.watch.scaling import ScaleChange, ScaledAttempt, ScalePoint, scale_changes, scale_points

ANSWER_LABEL = "answer"
"""The label under which a world records an attempt's final answer, in the form in which answers are compared."""
PANELS = {"pass@k": "samples", "best of k": "samples", "majority of k": "samples", "turns": "turns", "tokens": "tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Success against budget, for each policy by name."""

    world: str
    samples: int
    points: Mapping[str, Sequence[ScalePoint]]
    num_failed: Mapping[str, int]
    """Attempts that failed and were not judged."""
    changes: Sequence[ScaleChange] = ()
    """What the second policy has more than the first, paired by task; empty for one policy."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def svg(self, title: str) -> str:
        panels: dict[str, list[BudgetLine]] = {}
        for kind, panel in PANELS.items():
            for name, points in self.points.items():
                own = [(p.budget, Interval(p.success, p.success_low, p.success_high)) for p in points if p.kind == kind]
                if own:
                    line = name if kind == panel else f"{kind}, {name}"
                    panels.setdefault(panel, []).append(BudgetLine(line, own))
        return budgets_svg(title, panels)


def start_of(policy: PolicySampler) -> PolicySampler | None:
    """What a policy was before its RL; None for a model as it is. Its `why` says in words which weights these are.

    That is the run's checkpoint of step 0, after its warm-up, where the run keeps it; else what the run started from:
    `model.from`, or the base model.
    """
    if policy.checkpoint is None:
        return None
    config = policy.config
    start = config.model.start_from or None
    why = "the weights of model.from" if start else "the base model"
    if config.warmup.steps:
        warm = _after_warmup(policy.data_dir)
        start = start if warm is None else warm
        why = f"{why}: the run keeps no checkpoint of step 0, so what its warm-up taught counts as training"
        why = why if warm is None else "step 0 of the run, after its warm-up"
    return PolicySampler(config, data_dir=policy.data_dir, checkpoint=start, why=why, objects=policy.objects)


def _after_warmup(directory: Path | None) -> str | None:
    """The checkpoint of a run after its warm-up and before its first step; None where it is not kept."""
    if directory is None or not is_run(directory):
        return None
    with RunReader(directory) as run:
        wanted = config_from_yaml(run.config_yaml, str(directory)).warmup.steps
        kept = [row for row in run.checkpoints() if row.step == 0 and row.warmup_steps == wanted]
    return kept[-1].path if kept and CheckpointStore(directory).has(kept[-1].path) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticJudge:
    """A run's critic as a judge of attempts: its value in the last state that it learns, which is the one before the
    last token of the last reply, or the start of the last turn where it learns only those."""

    path: str
    """The path of the saved critic."""
    gae: Gae
    """The states that the critic learns."""

    def score(self, attempts: Sequence[Trajectory], policy: PolicySampler) -> list[float]:
        client = policy.service.create_training_client_from_state(self.path)
        found: list[float] = []
        for first in range(0, len(attempts), SCORED_AT_ONCE):
            batch = attempts[first : first + SCORED_AT_ONCE]
            asked = [value_sequences(one) for one in batch]
            output = client.forward([each.question() for own in asked for each in own], "value").result()
            answers = iter(one["values"].tolist() for one in output.loss_fn_outputs)
            for one, sequences in zip(batch, asked, strict=True):
                values = read_values(one, sequences, [next(answers) for _ in sequences])
                found.append(float(self.gae.learned(values.turns)[-1][-1]))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeJudge:
    """An outcome model as a judge of attempts."""

    model: OutcomeModel

    def score(self, attempts: Sequence[Trajectory], policy: PolicySampler) -> list[float]:
        self.model.attach(policy.service)  # pyright: ignore[reportArgumentType]
        return score_conversations(self.model, [one.messages for one in attempts], policy.service)


def critic_of(policy: PolicySampler) -> CriticJudge:
    """The critic that was saved with a policy."""
    directory, checkpoint = policy.data_dir, policy.checkpoint
    if directory is not None and checkpoint is not None and is_run(directory):
        with RunReader(directory) as run:
            rows = [row for row in run.checkpoints() if row.path == checkpoint]
        saved = saved_critic(directory, rows[0]) if rows else None
        if saved is not None:
            return CriticJudge(path=saved.path, gae=policy.config.method.make_gae())
    raise ConfigError(
        "--critic needs a run with a critic (method=ppo), which saves it beside the policy; or take --orm"
    )


def measure_scaling(policies: Mapping[str, PolicySampler], judge: OutcomeJudge | CriticJudge | None = None) -> Scaling:
    """Play the same tasks with each policy; models are loaded one after the other.

    Args:
        judge: Picks the best of k.
    """
    config = next(iter(policies.values())).config
    if config.eval.samples > 1 and not config.eval.temperature:
        raise ConfigError("eval.temperature is 0, so all samples of a task are alike; expected more than 0")
    points, num_failed = dict[str, list[ScalePoint]](), dict[str, int]()
    by_policy: list[dict[str, list[ScaledAttempt]]] = []
    for name, policy in policies.items():
        with policy:
            played = policy.evaluate(label=name)
            groups = [[t for t in group.trajectories if t.is_judged] for group in played.played.groups]
            if all(t.is_success is None for group in groups for t in group):
                raise DataError(
                    f"{config.env.name} never says whether an attempt succeeded, so there is no success rate"
                )
            scores = None if judge is None else judge.score([one for group in groups for one in group], policy)
        attempts = _attempts(groups, scores)
        points[name] = scale_points(attempts)
        num_failed[name] = played.row.num_failed
        by_policy.append(dict(zip(_names(played.played.groups), attempts, strict=True)))
    return Scaling(
        world=config.env.name,
        samples=config.eval.samples,
        points=points,
        num_failed=num_failed,
        changes=scale_changes(*by_policy) if len(by_policy) == 2 else (),
    )


def _names(groups: Sequence[TrajectoryGroup]) -> list[str]:
    """The task of each group; against a panel of opponents, with the number of the time that it is played."""
    times: Counter[str] = Counter()
    found: list[str] = []
    for group in groups:
        times[group.task_id] += 1
        found.append(f"{group.task_id} {times[group.task_id]}")
    return found


def _attempts(groups: Sequence[Sequence[Trajectory]], scores: Sequence[float] | None) -> list[list[ScaledAttempt]]:
    rest = iter(scores) if scores is not None else None
    return [
        [
            ScaledAttempt(
                is_success=one.is_success is True,
                num_turns=len(one.turns),
                num_tokens=one.num_sampled_tokens,
                score=None if rest is None else next(rest),
                answer=one.labels.get(ANSWER_LABEL),
            )
            for one in group
        ]
        for group in groups
    ]
