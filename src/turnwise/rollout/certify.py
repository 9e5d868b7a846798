"""The token-exactness certificate: what is trained is what was sampled, and trainer and sampler agree on it.

For every turn, three things are checked: its sampled ids are the trained ids of a datum, after exactly the prompt that
the sampler saw; the prompt extends the ids before it, or a new datum starts there; and the trainer's logprob of each
token equals the sampler's. With the weights that sampled (before the optimizer step) the gap is only rounding: the mean
of k2 = gap^2 / 2 per token is under 1e-4 in float32 and 1e-2 in bfloat16. A larger gap is reported with its trajectory,
turn, token and likely cause.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from turnwise.credit.datums import trajectory_to_datums
from turnwise.errors import DataError
from turnwise.rollout.drift import DriftReport, SampledToken
from turnwise.runtime import tolerances
from turnwise.trajectory import Trajectory, Turn
from turnwise.types import Datum

TrainerLogprobs = Callable[[list[Datum]], Sequence[Sequence[float]]]
"""A function from datums to the logprob of each target at its `temperature`, as the training client's `forward`
gives."""

Link = Literal["first", "extends", "splits", "lost", "left out"]

SPIKE = 25.0
"""A single token counts as drift if it exceeds the tolerance this many times."""
SMALL_GAP = 0.2
"""Gaps from rounding are smaller than this, even in bfloat16."""
MAX_DRIFTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift(SampledToken):
    """One turn that fails the check, and its first token that does."""

    trainer_logprob: float | None
    """None if there is no logprob to compare."""
    cause: str
    """The likely cause, guessed from where the gaps are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCheck:
    """The certificate's result for one turn."""

    task_id: str
    attempt: int
    turn: int
    num_tokens: int
    is_trained: bool
    has_same_ids: bool
    """Whether the trained ids are the sampled ids."""
    link: Link
    """How the turn follows the one before: it starts the first datum, extends the last datum, starts another datum (a
    split), is left out because it is not trained, or was not found (lost)."""
    max_gap: float
    """Largest |trainer logprob - sampler logprob|."""
    mean_k2: float
    is_drifting: bool

    def line(self) -> str:
        """The check as a printable line."""
        ids = "ids equal" if self.has_same_ids else "ids DIFFER"
        gaps = (
            f"largest gap {self.max_gap:.2e}, mean k2 {self.mean_k2:.2e}" if self.num_tokens else "no logprobs compared"
        )
        verdict = "  DRIFTS" if self.is_drifting else ""
        return f"  {self.task_id} attempt {self.attempt}, turn {self.turn} ({self.link}): {ids}, {gaps}{verdict}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result of the check; `is_exact` sums it up."""

    num_trajectories: int
    num_turns: int
    num_tokens: int
    """Tokens that were compared: all that the step trained first, or those of one group where it trained none."""
    num_splits: int
    max_gap: float
    mean_k2: float
    k2_tolerance: float
    num_drifting_turns: int
    turns: tuple[TurnCheck, ...]
    drifts: tuple[Drift, ...]
    """The first `MAX_DRIFTS` drifts."""
    is_trained: bool = True
    """False: the step trained nothing; the tokens of one group were compared and not learned from."""
    drift: DriftReport | None = None
    """How far sampler and trainer are apart over all that the step trained, by lag; None where nothing was trained."""

    @property
    def has_same_ids(self) -> bool:
        return all(turn.has_same_ids for turn in self.turns)

    @property
    def is_exact(self) -> bool:
        return self.has_same_ids and not self.num_drifting_turns and self.mean_k2 <= self.k2_tolerance

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Certificate:
        fields = json.loads(text)
        turns = tuple(TurnCheck(**turn) for turn in fields.pop("turns"))
        drifts = tuple(Drift(**drift) for drift in fields.pop("drifts"))
        report = fields.pop("drift", None)  # certificates of older runs have none
        measured = None if report is None else DriftReport.from_json(report)
        return Certificate(**fields, turns=turns, drifts=drifts, drift=measured)

    def lines(self) -> list[str]:
        """The certificate as printable lines."""
        same = f"{sum(turn.has_same_ids for turn in self.turns)} of {self.num_turns} turns"
        gaps = f"largest gap {self.max_gap:.2e}, mean k2 {self.mean_k2:.2e} (at most {self.k2_tolerance:.0e})"
        tokens = f"{self.num_tokens} {'trained' if self.is_trained else 'compared'} tokens"
        none = "" if self.is_trained else "; the step trained none"
        lines = [
            f"token exactness: {'EXACT' if self.is_exact else 'NOT EXACT'}",
            f"  {self.num_trajectories} trajectories, {self.num_turns} turns, {tokens}{none}",
            f"  trained ids = sampled ids in {same}; {self.num_splits} turns start a datum of their own",
            f"  trainer against sampler logprobs: {gaps}",
            *(() if self.drift is None else (f"  {line}" for line in self.drift.lines())),
        ]
        for drift in self.drifts:
            trainer = "none" if drift.trainer_logprob is None else f"{drift.trainer_logprob:.4f}"
            lines.append(
                f"  drift: {drift.task_id} attempt {drift.attempt}, turn {drift.turn}, token {drift.token} "
                f"(id {drift.token_id}): sampler {drift.sampler_logprob:.4f}, trainer {trainer}; {drift.cause}"
            )
        hidden = self.num_drifting_turns - len(self.drifts)
        return [*lines, f"  and {hidden} more drifting turns"] if hidden > 0 else lines

    def turn_lines(self) -> list[str]:
        """One line per turn, for printing."""
        return [turn.line() for turn in self.turns]


def certify(
    trajectories: Sequence[Trajectory],
    trainer_logprobs: TrainerLogprobs,
    *,
    datums: Sequence[Sequence[Datum]] | None = None,
    trainer_version: int | None = None,
    only_version: int | None = None,
    k2_tolerance: float = tolerances.K2["float32"],
) -> Certificate:
    """Check every turn of `trajectories`. None of them may be a failed attempt.

    Args:
        datums: what was trained for each trajectory; by default, what `trajectory_to_datums` makes of it.
        trainer_version: the policy version of the trainer's weights, if it is known.
        only_version: compare logprobs only of turns that this version sampled, because other weights give other
            logprobs. Ids of all turns are compared.
    """
    if datums is None:
        datums = [trajectory_to_datums(t, [0.0] * len(t.turns)) for t in trajectories]
    if len(datums) != len(trajectories):
        raise DataError(f"datums of {len(datums)} trajectories, and {len(trajectories)} trajectories")
    flat = [datum for own in datums for datum in own]
    answers = iter(trainer_logprobs(flat) if flat else [])
    checker = _Checker(k2_tolerance, trainer_version, only_version)
    checks: list[_Checked] = []
    for trajectory, own in zip(trajectories, datums, strict=True):
        checks += checker.check_trajectory(trajectory, [_ReplayedSequence.of(datum, next(answers)) for datum in own])
    return _to_certificate(len(trajectories), checks, k2_tolerance)


@dataclass(frozen=True, slots=True)
class _ReplayedSequence:
    """One datum, unshifted, with the trainer's logprobs (`logprobs[i]` is of `ids[i + 1]`)."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: Sequence[float]

    @classmethod
    def of(cls, datum: Datum, logprobs: Sequence[float]) -> _ReplayedSequence:
        targets = datum.loss_fn_inputs["target_tokens"].tolist()
        if len(logprobs) != len(targets):
            raise DataError(f"{len(logprobs)} logprobs came for a datum of {len(targets)} targets")
        inputs = datum.model_input.to_ints()
        is_shifted = inputs[1:] == targets[:-1]  # else position i does not predict token i + 1, and no turn is found
        mask = tuple(bool(value) for value in datum.loss_fn_inputs["mask"].tolist())
        return cls((*inputs[:1], *targets) if is_shifted else (), mask, logprobs)

    def holds(self, turn: Turn) -> bool:
        """Whether this sequence begins with the turn's prompt and sampled ids."""
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids)
        return self.ids[:start] == turn.prompt_ids and self.ids[start:end] == turn.sampled_ids

    def span(self, turn: Turn) -> slice:
        """The positions of the turn's tokens among the targets."""
        return slice(len(turn.prompt_ids) - 1, len(turn.prompt_ids) - 1 + len(turn.sampled_ids))


@dataclass(frozen=True, slots=True)
class _Checked:
    check: TurnCheck
    gaps: tuple[float, ...]
    drift: Drift | None


@dataclass(frozen=True, slots=True)
class _TurnInDatum:
    """The datum that holds a turn, and how the turn follows the one before."""

    sequence: _ReplayedSequence | None
    link: Link
    has_extra: bool
    """Whether the datum also trains tokens that none of its turns sampled."""


class _Checker:
    def __init__(self, tolerance: float, trainer_version: int | None, only_version: int | None) -> None:
        self._tolerance = tolerance
        self._trainer_version = trainer_version
        self._only_version = only_version

    def check_trajectory(self, trajectory: Trajectory, sequences: Sequence[_ReplayedSequence]) -> list[_Checked]:
        checked: list[_Checked] = []
        for index, found in enumerate(_turns_in_datums(trajectory, sequences)):
            is_first_off = not any(one.check.is_drifting for one in checked)
            checked.append(self._check_turn(trajectory, index, found, is_first_off))
        return checked

    def _check_turn(self, trajectory: Trajectory, index: int, found: _TurnInDatum, is_first_off: bool) -> _Checked:
        turn = trajectory.turns[index]
        trainer: Sequence[float] = ()
        has_same_ids = found.link != "lost" and not found.has_extra
        if found.sequence is not None:
            span = found.sequence.span(turn)
            has_same_ids &= all(is_trained == turn.is_trained for is_trained in found.sequence.mask[span])
            is_comparable = self._only_version is None or set(turn.versions) == {self._only_version}
            trainer = found.sequence.logprobs[span] if turn.is_trained and is_comparable else ()
        gaps = [ours - theirs for ours, theirs in zip(trainer, turn.sampler_logprobs, strict=False)]
        finite = tuple(gap for gap in gaps if math.isfinite(gap))
        mean_k2 = sum(gap * gap for gap in finite) / 2 / max(len(finite), 1)
        at = _drift_begins(gaps, mean_k2, self._tolerance) if has_same_ids else 0
        check = TurnCheck(
            task_id=trajectory.task_id,
            attempt=trajectory.attempt,
            turn=index,
            num_tokens=len(gaps),
            is_trained=turn.is_trained,
            has_same_ids=has_same_ids,
            link=found.link,
            max_gap=max((abs(gap) for gap in finite), default=0.0),
            mean_k2=mean_k2,
            is_drifting=at is not None,
        )
        if at is None:
            return _Checked(check, finite, None)
        drift = Drift(
            task_id=trajectory.task_id,
            attempt=trajectory.attempt,
            turn=index,
            token=at,
            token_id=turn.sampled_ids[at],
            sampler_logprob=turn.sampler_logprobs[at],
            trainer_logprob=trainer[at] if at < len(trainer) and math.isfinite(trainer[at]) else None,
            cause=self._likely_cause(turn, gaps, check, is_first_off),
        )
        return _Checked(check, finite, drift)

    def _likely_cause(self, turn: Turn, gaps: Sequence[float], check: TurnCheck, is_first_off: bool) -> str:
        if not check.has_same_ids:
            return "the trained ids are not the sampled ids: was the text encoded again, or the mask moved?"
        if not all(math.isfinite(gap) for gap in gaps):
            return "the trainer computed no logprob there"
        version = self._trainer_version
        if version is not None and set(turn.versions) != {version}:
            came = " and ".join(str(one) for one in sorted(set(turn.versions)))
            return f"sampled by version {came} and checked with version {version} of the weights"
        is_off = [gap * gap / 2 > self._tolerance for gap in gaps]
        if len(gaps) > 1 and is_off[-1] and not any(is_off[:-1]):
            return "only the last token differs: the stop is treated differently"
        if len(gaps) > 1 and is_off[0] and not any(is_off[1:]):
            return "only the first token differs: the prompt ends differently"
        if turn.temperature != 1 and sum(is_off) * 2 > len(gaps):
            return f"most tokens differ: does the trainer use temperature {turn.temperature:g}?"
        if check.max_gap < SMALL_GAP:
            return "small gaps on many tokens: numbers are rounded differently (dtype, kernel)"
        if check.turn > 0 and is_first_off:
            return "the turns before are exact: the text between them and this one is not what the sampler saw"
        return "all turns differ: the trainer has other weights or another context than the sampler"


def _turns_in_datums(trajectory: Trajectory, sequences: Sequence[_ReplayedSequence]) -> list[_TurnInDatum]:
    """Find each turn in the datum of the turn before, after that turn, or in a later datum.

    A rewritten prompt may be the same as an earlier one, so a datum that begins with the turn may be that of another.
    """
    found: list[int | None] = []
    links: list[Link] = []
    num_sampled, ends = [0] * len(sequences), [0] * len(sequences)
    current = 0
    for index, turn in enumerate(trajectory.turns):
        free = (i for i in range(current, len(sequences)) if len(turn.prompt_ids) >= ends[i])
        place = next((i for i in free if sequences[i].holds(turn)), None)
        is_extension = index > 0 and place is not None and place == found[-1]
        if place is None:
            links.append("lost" if turn.is_trained else "left out")
        else:
            links.append("first" if index == 0 else "extends" if is_extension else "splits")
            num_sampled[place] += len(turn.sampled_ids) * turn.is_trained
            ends[place] = len(turn.prompt_ids) + len(turn.sampled_ids)
            current = place
        found.append(place)
    # Tokens that a lost turn left in a datum count against that turn only.
    is_whole = "lost" not in links
    has_extra = [is_whole and sum(own.mask) > count for own, count in zip(sequences, num_sampled, strict=True)]
    return [
        _TurnInDatum(None, link, False) if place is None else _TurnInDatum(sequences[place], link, has_extra[place])
        for place, link in zip(found, links, strict=True)
    ]


def _drift_begins(gaps: Sequence[float], mean_k2: float, tolerance: float) -> int | None:
    """The first token that drifts; None if the turn is exact."""
    spikes = [i for i, gap in enumerate(gaps) if not gap * gap / 2 <= SPIKE * tolerance]  # nan counts as drift too
    if spikes:
        return spikes[0]
    # Rounding in bfloat16 is noise of up to half a nat on single tokens: the mean of a short turn may be far above that
    # of the step. So a short turn is allowed what one token is. In float32 gaps are far below the tolerance anyway.
    room = SPIKE / max(len(gaps), 1) if tolerance > tolerances.K2["float32"] else 0.0
    if not gaps or mean_k2 <= tolerance * (1 + room):
        return None
    return max(range(len(gaps)), key=lambda i: abs(gaps[i]))


def _to_certificate(num_trajectories: int, checks: Sequence[_Checked], tolerance: float) -> Certificate:
    gaps = [gap for one in checks for gap in one.gaps]
    drifts = [one.drift for one in checks if one.drift is not None]
    return Certificate(
        num_trajectories=num_trajectories,
        num_turns=len(checks),
        num_tokens=len(gaps),
        num_splits=sum(one.check.link == "splits" for one in checks),
        max_gap=max((abs(gap) for gap in gaps), default=0.0),
        mean_k2=sum(gap * gap for gap in gaps) / 2 / max(len(gaps), 1),
        k2_tolerance=tolerance,
        num_drifting_turns=len(drifts),
        turns=tuple(one.check for one in checks),
        drifts=tuple(drifts[:MAX_DRIFTS]),
    )
