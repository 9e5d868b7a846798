"""Goes through all diagnoses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from turnwise.config.config import Config
from turnwise.config.files import override_config
from turnwise.doctor import failures, groups, outcomes, replies, updates, worlds
from turnwise.doctor.finding import Finding
from turnwise.doctor.history import RunHistory
from turnwise.errors import ConfigError
from turnwise.runlog.reader import RunReader

Diagnosis = Callable[[RunHistory], Finding | Sequence[Finding] | None]

FINDING_EVENT = "finding"
"""The kind of event with which a run keeps what was found before its first step."""


def found_before_training(run: RunHistory) -> list[Finding]:
    """What was found before the first step, such as demonstrations that do not fit."""
    by_name = {event.detail["name"]: Finding.from_json(event.detail) for event in run.events(FINDING_EVENT)}
    return list(by_name.values())


DIAGNOSES: tuple[Diagnosis, ...] = (
    failures.prompt_too_long,
    failures.parties_fail,
    found_before_training,
    replies.replies_cut,
    replies.replies_unparsable,
    failures.context_full,
    failures.out_of_time,
    failures.out_of_turns,
    replies.replies_identical,
    groups.reward_is_chance,
    updates.not_finite,
    updates.not_exact,
    updates.rate_too_high,
    updates.rate_too_low,
    updates.alarms_last,
    updates.gradient_clipped,
    updates.gradient_vanishes,
    updates.tokens_left_out,
    outcomes.reward_hacked,
    outcomes.overfits,
    outcomes.warmup_hurts,
    outcomes.critic_blind,
    outcomes.penalty_rules,
    groups.all_fail,
    groups.all_succeed,
    groups.same_reward,
    worlds.idle_worlds,
)
"""In the order in which they are told: what lies deeper comes first."""


def diagnose(run: RunReader | str | Path) -> list[Finding]:
    """Why a run does not learn, the deepest reason first; empty if nothing is found.

    >>> import turnwise as tw
    >>> from turnwise.doctor import diagnose
    >>> quick = {"eval": {"tasks": 0}, "warmup": {"steps": 0}, "observer": tw.Observer()}
    >>> run = tw.train("guess_number", model="tiny", steps=1, rollout={"max_tokens_per_turn": 2}, **quick)
    >>> diagnose(run.directory)[0].name
    'replies_cut'
    """
    if not isinstance(run, RunReader):
        with RunReader(run) as reader:
            return diagnose(reader)
    history = RunHistory(run)
    found: list[Finding] = []
    for diagnosis in DIAGNOSES:
        finding = diagnosis(history)
        found += [finding] if isinstance(finding, Finding) else finding or []
    return [_without_refused_fixes(finding, history) for finding in found]


def _without_refused_fixes(finding: Finding, run: RunHistory) -> Finding:
    """Leave out options that the run's method does not take, such as a KL penalty for a regression on pairs."""
    kept = [fix for fix in finding.fixes if not fix.option.startswith("method.") or _is_taken(fix.option, run.config)]
    return finding if len(kept) == len(finding.fixes) else replace(finding, fixes=tuple(kept))


def _is_taken(option: str, config: Config) -> bool:
    try:
        override_config(config, [option])
    except ConfigError:
        return False
    return True
