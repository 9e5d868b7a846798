"""What decides which attempts are good: the world's verifier, a judge, an outcome model, or nothing."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from turnwise.config.config import Config
from turnwise.envs.base import Task
from turnwise.errors import ConfigError
from turnwise.judges import Judge, Rubric
from turnwise.judges.cache import FileCache
from turnwise.judges.models import AddressModel, EmbeddedModel, JudgeModel
from turnwise.outcomes.model import is_outcome_model, open_outcome_model
from turnwise.outcomes.pairwise import win_shares
from turnwise.rounds.config import WORDS, FlywheelConfig
from turnwise.rounds.store import AttemptVerdict, PlayedAttempt
from turnwise.runtime.blocking import run_to_end
from turnwise.training.orm import score_conversations
from turnwise.training.setup import make_service
from turnwise.trajectory import Message

MAX_REASON = 500
ANSWERS = "judge.db"
"""The file of a judge's answers, beside the pools."""


class VerdictSource(Protocol):
    """Judges attempts in batches."""

    def judge(self, attempts: Sequence[PlayedAttempt]) -> list[AttemptVerdict]: ...

    def close(self) -> None: ...


def check_source(options: FlywheelConfig) -> None:
    """Refuse a source of verdicts that is not there, before anything is played."""
    if options.verdict not in WORDS and not is_outcome_model(Path(options.verdict).expanduser()):
        raise ConfigError(
            f"flywheel.verdict={options.verdict} is no outcome model; expected {', '.join(WORDS)}, or a directory that "
            "turnwise orm train made"
        )
    if options.judge_key_variable and not os.environ.get(options.judge_key_variable):
        raise ConfigError(f"the environment variable {options.judge_key_variable} is not set; export the judge's key")


def open_source(options: FlywheelConfig, config: Config, directory: Path, verdict: str) -> VerdictSource:
    """What judges a round's attempts.

    Args:
        verdict: `flywheel.verdict`, or the outcome model that has taken its place.
    """
    if options.verdict == "verifier":
        return Verifier(options.threshold)
    if options.verdict == "none":
        return NoVerdict()
    if options.verdict == "judge":
        return JudgeVerdict(options, config, directory)
    if options.verdict == "pairwise":
        return PairwiseVerdict(options, config, directory)
    return OutcomeVerdict(options, config, directory, verdict)


class Verifier:
    """The world itself. Where it calls no attempt a success or not, its reward is the score."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def judge(self, attempts: Sequence[PlayedAttempt]) -> list[AttemptVerdict]:
        return [self._one(attempt) for attempt in attempts]

    def close(self) -> None:
        pass

    def _one(self, attempt: PlayedAttempt) -> AttemptVerdict:
        trajectory = attempt.trajectory
        if trajectory.is_success is not None:
            score = float(trajectory.is_success)
        else:
            score = 0.0 if trajectory.is_truncated else trajectory.total_reward
        return AttemptVerdict(attempt_id=attempt.id, source="verifier", score=score, is_good=score >= self._threshold)


class NoVerdict:
    """Every attempt is good: what a flywheel is without a verdict."""

    def judge(self, attempts: Sequence[PlayedAttempt]) -> list[AttemptVerdict]:
        return [AttemptVerdict(attempt_id=one.id, source="none", score=1.0, is_good=True) for one in attempts]

    def close(self) -> None:
        pass


class AskedModel:
    """The model that a judge asks, loaded in this process or behind an address, and what it has answered."""

    def __init__(self, options: FlywheelConfig, config: Config, directory: Path) -> None:
        self.answers = FileCache(directory / ANSWERS)
        self.model: JudgeModel = EmbeddedModel(options.judge_model)
        self._service = None
        if options.judge_url:
            key = os.environ.get(options.judge_key_variable, "") if options.judge_key_variable else ""
            self.model = AddressModel(base_url=options.judge_url, model=options.judge_model, api_key=key)
        else:
            self._service = make_service(config, None)
            assert isinstance(self.model, EmbeddedModel)
            self.model.attach(self._service)

    def close(self) -> None:
        self.answers.close()
        if self._service is not None:
            self._service.close()


class JudgeReward:
    """The judge's score as the reward of an attempt, in place of the world's own: what the RL stage learns from.

    Which attempts succeed is still for the world to say.
    """

    def __init__(self, options: FlywheelConfig, config: Config, directory: Path) -> None:
        self._asked = AskedModel(options, config, directory)
        self._judge = Judge(self._asked.model, Rubric(criteria=options.rubric), cache=self._asked.answers)

    async def __call__(self, task: Task, messages: Sequence[Message]) -> float:
        """Score a finished attempt at `task`; the rubric alone says what counts."""
        del task
        verdict = await self._judge.score(messages)
        assert verdict.score is not None, "the fallback `fail` gives a score or raises"
        return verdict.score

    def close(self) -> None:
        self._asked.close()


class JudgeVerdict:
    """A model with a rubric. Its answers are kept beside the pools, so that nothing is asked twice."""

    def __init__(self, options: FlywheelConfig, config: Config, directory: Path) -> None:
        self._asked = AskedModel(options, config, directory)
        self._threshold = options.threshold
        self._judge = Judge(self._asked.model, Rubric(criteria=options.rubric), cache=self._asked.answers)

    def judge(self, attempts: Sequence[PlayedAttempt]) -> list[AttemptVerdict]:
        return run_to_end(self._ask(attempts))

    async def _ask(self, attempts: Sequence[PlayedAttempt]) -> list[AttemptVerdict]:
        answers = await asyncio.gather(*(self._judge.score(one.trajectory.messages) for one in attempts))
        return [
            AttemptVerdict(
                attempt_id=one.id,
                source="judge",
                score=verdict.score or 0.0,  # the fallback `fail` gives a score or raises
                is_good=(verdict.score or 0.0) >= self._threshold,
                reason=verdict.answer[:MAX_REASON],
            )
            for one, verdict in zip(attempts, answers, strict=True)
        ]

    def close(self) -> None:
        self._asked.close()


class PairwiseVerdict:
    """A judge compares the attempts of each group two by two; the score is the share of wins inside the group.

    Its answers are kept like those of a judge that scores.
    """

    def __init__(self, options: FlywheelConfig, config: Config, directory: Path) -> None:
        self._asked = AskedModel(options, config, directory)
        self._options = options

    def judge(self, attempts: Sequence[PlayedAttempt]) -> list[AttemptVerdict]:
        groups: dict[str, list[PlayedAttempt]] = defaultdict(list)
        for one in attempts:
            groups[one.task_id].append(one)
        return [verdict for group in groups.values() for verdict in run_to_end(self._compare(group))]

    async def _compare(self, group: Sequence[PlayedAttempt]) -> list[AttemptVerdict]:
        dialogues = [one.trajectory.messages for one in group]
        shares = await win_shares(self._asked.model, self._options.rubric, dialogues, self._asked.answers)
        bound = self._options.threshold
        return [
            AttemptVerdict(attempt_id=one.id, source="pairwise", score=share, is_good=share >= bound)
            for one, share in zip(group, shares, strict=True)
        ]

    def close(self) -> None:
        self._asked.close()


class OutcomeVerdict:
    """An outcome model."""

    def __init__(self, options: FlywheelConfig, config: Config, directory: Path, verdict: str) -> None:
        self._model = open_outcome_model(verdict)
        own, place = directory.resolve(), Path(verdict)
        self._source = str(place.relative_to(own)) if place.is_relative_to(own) else verdict
        self._threshold = options.threshold
        self._service = make_service(config, None)

    def judge(self, attempts: Sequence[PlayedAttempt]) -> list[AttemptVerdict]:
        scores = score_conversations(self._model, [one.trajectory.messages for one in attempts], self._service)
        return [
            AttemptVerdict(attempt_id=one.id, source=self._source, score=score, is_good=score >= self._threshold)
            for one, score in zip(attempts, scores, strict=True)
        ]

    def close(self) -> None:
        self._service.close()
