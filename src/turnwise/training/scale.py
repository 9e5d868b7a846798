"""Play held-out tasks several times, before and after training, and see what more samples, turns and tokens buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from turnwise.errors import ConfigError, DataError
from turnwise.outcomes.model import OutcomeModel
from turnwise.training.orm import score_conversations
from turnwise.training.policy import PolicySampler
from turnwise.trajectory import Message, Trajectory
from turnwise.watch.curve import BudgetLine, budgets_svg
from turnwise.watch.intervals import Interval
from turnwise.watch.scaling import ScaledAttempt, ScalePoint, scale_points

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
    """What a policy was before its training: `model.from` of its run, or its base model; None for a model as it is."""
    if policy.checkpoint is None:
        return None
    start = policy.config.model.start_from or None
    return PolicySampler(policy.config, data_dir=policy.data_dir, checkpoint=start, objects=policy.objects)


def measure_scaling(policies: Mapping[str, PolicySampler], judge: OutcomeModel | None = None) -> Scaling:
    """Play the same tasks with each policy; models are loaded one after the other.

    Args:
        judge: An outcome model that picks the best of k.
    """
    config = next(iter(policies.values())).config
    if config.eval.samples > 1 and not config.eval.temperature:
        raise ConfigError("eval.temperature is 0, so all samples of a task are alike; expected more than 0")
    points, num_failed = dict[str, list[ScalePoint]](), dict[str, int]()
    for name, policy in policies.items():
        with policy:
            played = policy.evaluate(label=name)
            groups = [[t for t in group.trajectories if t.is_judged] for group in played.played.groups]
            if all(t.is_success is None for group in groups for t in group):
                raise DataError(
                    f"{config.env.name} never says whether an attempt succeeded, so there is no success rate"
                )
            scores = None if judge is None else _score(judge, groups, policy)
        points[name] = scale_points(_attempts(groups, scores))
        num_failed[name] = played.row.num_failed
    return Scaling(world=config.env.name, samples=config.eval.samples, points=points, num_failed=num_failed)


def _score(judge: OutcomeModel, groups: Sequence[Sequence[Trajectory]], policy: PolicySampler) -> list[float]:
    judge.attach(policy.service)  # pyright: ignore[reportArgumentType]
    return score_conversations(judge, [_messages(one) for group in groups for one in group], policy.service)


def _messages(trajectory: Trajectory) -> list[Message]:
    messages = list(trajectory.start)
    for turn in trajectory.turns:
        messages += [turn.reply, *turn.observation]
    return messages


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
