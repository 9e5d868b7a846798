"""Attempts that failed through no fault of the policy, and attempts that a limit ended."""

from __future__ import annotations

from turnwise.doctor.finding import Finding, Fix, shortened
from turnwise.doctor.history import RunHistory
from turnwise.errors import Party

FAILED_SHARE = 0.05
"""Share of plays that fail from which on it matters: some envs lose a play now and then."""
ENDED_SHARE = 0.2
"""Share of attempts that a limit ends from which on it matters."""

_WHO = {
    Party.ENV: "the env",
    Party.TOOL: "a tool",
    Party.JUDGE: "the judge",
    Party.REWARD: "the reward function",
    Party.SAMPLER: "the sampler",
    Party.RENDERER: "the renderer",
}
_FIXES = {
    Party.ENV: Fix(text="mend the env; turnwise check-env plays it alone and finds most mistakes in seconds"),
    Party.TOOL: Fix(text="mend the tool; raise turnwise.ToolError for what the policy did wrong"),
    Party.JUDGE: Fix(text="see whether the judge answers, and whether its limits fit (docs/judges.md)"),
    Party.REWARD: Fix(text="mend the reward function; it must return a finite number for every attempt"),
    Party.SAMPLER: Fix(option="rollout.sample_deadline_s=600", text="if the sampler is slow; else see its own log"),
    Party.RENDERER: Fix(option="rollout.renderer=template", text="use the model's own chat template"),
}


def parties_fail(run: RunHistory) -> list[Finding]:
    """Env, tool, judge, reward, sampler or renderer fail many plays; one finding for each of them."""
    found: list[Finding] = []
    for party, who in _WHO.items():
        share, count = _failed_share(run, party)
        if share < FAILED_SHARE:
            continue
        first = run.first_failure(party)
        place = first.facts.get("place") if first is not None else None
        found.append(
            Finding(
                name=f"{party}_fails",
                seen=f"{who} failed {share:.0%} of the plays ({count:.0f})"
                + (f", the first time at {place}" if place else ""),
                why="a play that fails is not scored and teaches nothing; if many fail, the tasks that are left are no "
                "fair sample",
                fixes=(_FIXES[party],),
                evidence="" if first is None else shortened(first.traceback or first.detail),
                numbers={"share": share, "count": count},
            )
        )
    return found


def prompt_too_long(run: RunHistory) -> Finding | None:
    """The first prompt leaves no room for a reply."""
    share, count = _failed_share(run, Party.CONTEXT)
    failure = run.first_failure(Party.CONTEXT)
    if failure is None or share < FAILED_SHARE or "needed_tokens" not in failure.facts:
        return None
    needed, limit = int(failure.facts["needed_tokens"]), int(failure.facts["limit_tokens"])
    value = 2 ** (needed + run.config.rollout.max_tokens_per_turn).bit_length()
    return Finding(
        name="prompt_too_long",
        seen=f"the first prompt of {share:.0%} of the plays does not fit: it needs {needed} tokens, the limit is "
        f"{limit}",
        why="the policy is never asked anything; the env did nothing wrong",
        fixes=(
            Fix(option=f"rollout.max_trajectory_tokens={value}", text="if the model's context is that long"),
            Fix(text="say less in the first messages, or choose a model with a longer context"),
        ),
        evidence=failure.detail,
        numbers={"share": share, "count": count, "needed": needed, "limit": limit},
    )


def context_full(run: RunHistory) -> Finding | None:
    """Attempts end because they have no tokens left."""
    share = run.recent("rollout/stop_max_tokens_share") or 0.0
    if share < ENDED_SHARE or run.is_solving:
        return None
    longest = run.recent("rollout/prompt_tokens_max") or 0.0
    turns = run.recent("rollout/turns_mean") or 1.0
    return Finding(
        name="context_full",
        seen=f"{share:.0%} of the attempts used up their tokens after {turns:.1f} turns; prompts grew to {longest:.0f} "
        "tokens",
        why="these attempts end before the task does, and earn what they earn by then",
        fixes=(
            Fix(option=f"rollout.max_trajectory_tokens={_doubled(longest)}", text="if the model's context is longer"),
            Fix(option="rollout.max_turns=" + str(max(1, int(turns))), text="let attempts end by turns instead"),
            Fix(text="let the env say less in each turn"),
        ),
        numbers={"share": share, "prompt_tokens": longest},
    )


def out_of_time(run: RunHistory) -> Finding | None:
    """Attempts end because their time is up."""
    share = run.recent("rollout/stop_time_limit_share") or 0.0
    if share < ENDED_SHARE:
        return None
    env, sampler = run.recent_sum("rollout/env_wait_s"), run.recent_sum("rollout/sampler_wait_s")
    waited = env / max(1e-9, env + sampler)
    deadline = run.config.rollout.attempt_deadline_s
    slow = "the env" if waited > 0.5 else "the sampler"
    return Finding(
        name="out_of_time",
        seen=f"{share:.0%} of the attempts ran out of their {deadline:g} s; {waited:.0%} of the waiting is for the env",
        why="slow dialogues are cut short whatever they say, so the policy learns to be quick, not to be good",
        fixes=(
            Fix(option=f"rollout.attempt_deadline_s={2 * deadline:g}", text=f"{slow} takes most of the time"),
            Fix(
                option=f"rollout.max_concurrency={max(1, run.config.rollout.max_concurrency // 2)}",
                text="fewer attempts at the same time are faster each",
            ),
        ),
        numbers={"share": share, "deadline_s": deadline, "env_share": waited},
    )


def out_of_turns(run: RunHistory) -> Finding | None:
    """Nearly every attempt reaches the turn limit, and hardly any succeeds."""
    share = run.recent("rollout/stop_max_turns_share") or 0.0
    if share < 0.9 or (run.success or 0.0) > 0.05:
        return None
    turns = max(len(one.turns) for one in run.trajectories) if run.trajectories else 1
    return Finding(
        name="out_of_turns",
        seen=f"{share:.0%} of the attempts reach their limit of {turns} turns, and hardly any succeeds",
        why="the attempts end before the env judges them, so nothing tells good ones from bad ones",
        fixes=(
            Fix(option=f"rollout.max_turns={2 * turns}", text="let attempts go on until the env ends them"),
            Fix(text="let the env give a reward on the way (shaping, reward.potential)"),
        ),
        numbers={"share": share, "turns": turns},
    )


def _failed_share(run: RunHistory, party: Party) -> tuple[float, float]:
    """Share and number of the plays of the last steps that a party failed; of an evaluation where no step is."""
    count, tries = run.recent_sum(f"rollout/failures_{party}"), run.recent_sum("rollout/tries")
    if tries:
        return count / tries, count
    rows = [row for row in run.evaluations if row.num_attempts + row.num_failed]
    first = run.first_failure(party) if rows and rows[-1].num_failed else None
    if first is None:
        return 0.0, 0.0
    last = rows[-1]
    return last.num_failed / (last.num_attempts + last.num_failed), float(last.num_failed)


def _doubled(count: float) -> int:
    return 2 ** max(1, int(count)).bit_length() * 2
