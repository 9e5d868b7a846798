"""What can be known before the first step: demonstrations that do not fit, a world in which nothing is earned."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.doctor import Finding, Fix
from turnwise.envs.base import World
from turnwise.errors import Party
from turnwise.memory.dialogue import answers_request
from turnwise.renderers.base import Renderer
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.rollout.group import RolloutResult
from turnwise.rollout.limits import RolloutLimits
from turnwise.rollout.stats import FirstFailures
from turnwise.training.progress import NothingToLearnError

NUM_DEMONSTRATIONS = 16
"""Scripted dialogues that are looked at."""
MIN_ATTEMPTS = 8
"""Attempts that have to earn nothing before that is worth a word."""
UNFIT_SHARE = 0.1


class AllFailedError(NothingToLearnError):
    """Every attempt that was played first failed through no fault of the policy."""


def check_demonstrations(world: World, renderer: Renderer, limits: RolloutLimits, seed: int) -> Finding | None:
    """Find replies of the world's scripted dialogues that the policy could never give under its limits."""
    written = world.demonstrations(NUM_DEMONSTRATIONS, seed)
    dialogues = [dialogue_to_turns(renderer, one) for one in written]
    replies = [
        (turn, is_asked)
        for one, dialogue in zip(written, dialogues, strict=True)
        for turn, is_asked in zip(dialogue, answers_request(one), strict=True)
    ]
    if not replies:
        return None
    # A reply whose end of turn is cut has said everything; a summary has a limit of its own.
    lengths = [len(turn.reply_ids) - 1 for turn, asked in replies if not asked]
    unfit = sum(length > limits.max_tokens_per_turn for length in lengths)
    whole = max(len(turn.prompt_ids) + len(turn.reply_ids) for turn, _ in replies)
    num_turns = max(len(dialogue) for dialogue in dialogues)
    fixes: list[Fix] = []
    seen: list[str] = []
    if unfit >= UNFIT_SHARE * len(replies):
        seen.append(
            f"{unfit} of {len(replies)} replies in the world's demonstrations are longer than the limit of "
            f"{limits.max_tokens_per_turn} tokens; the longest has {max(lengths)}"
        )
        fixes.append(Fix(option=f"rollout.max_tokens_per_turn={max(lengths)}", text="the longest of them fits"))
    if whole > limits.max_trajectory_tokens:
        seen.append(f"a demonstration needs {whole} tokens, an attempt has {limits.max_trajectory_tokens}")
        fixes.append(Fix(option=f"rollout.max_trajectory_tokens={whole}", text="if the model's context is that long"))
        fixes.append(Fix(option="memory.window=8", text="let a prompt show the last turns only (docs/memory.md)"))
    if num_turns > limits.max_turns:
        seen.append(f"a demonstration has {num_turns} turns, an attempt {limits.max_turns}")
        fixes.append(Fix(option=f"rollout.max_turns={num_turns}", text="let attempts be as long"))
    if not seen:
        return None
    return Finding(
        name="demonstrations_cut",
        seen="; ".join(seen),
        why="the policy cannot do what the demonstrations show: a limit ends its replies or attempts before",
        fixes=tuple(fixes),
        numbers={"unfit": unfit, "longest": max(lengths), "turns": num_turns, "tokens": whole},
    )


def check_earnings(
    played: RolloutResult, shown: Sequence[float] | None = None, *, warmup_steps: int = 0
) -> Finding | None:
    """Find a world in which no reply earned anything.

    Args:
        shown: Rewards of the world's own demonstrations; None if they cannot be played.
        warmup_steps: Steps of the warm-up that came before.
    """
    attempts = [one for group in played.groups for one in group.trajectories]
    if len(attempts) < MIN_ATTEMPTS or any(one.total_reward or one.is_success for one in attempts):
        return None
    is_broken = shown is not None and len(shown) > 0 and not any(shown)
    also = f", nor did {len(shown or ())} of the world's own demonstrations" if is_broken else ""
    why = (
        "the reward is broken: even what the world shows as right earns nothing"
        if is_broken
        else "until an attempt earns something, all of them are equally good and nothing is learned"
    )
    fixes = (
        [Fix(text="mend the reward, or the demonstrations; turnwise check-env plays the world alone")]
        if is_broken
        else [
            Fix(
                option=f"warmup.steps={4 * warmup_steps or 50}",
                text="show the policy what earns something, if the world has demonstrations",
            ),
            Fix(text="begin with easier tasks, or reward parts of a solution"),
        ]
    )
    last, when = attempts[-1], "after the warm-up" if warmup_steps else "before training"
    return Finding(
        name="reward_broken" if is_broken else "nothing_earned",
        seen=f"none of {len(attempts)} attempts {when} earned anything{also}",
        why=why,
        fixes=tuple(fixes),
        evidence=f"the last reply: {last.turns[-1].reply.content.strip()!r:.300}",
        numbers={"attempts": len(attempts)},
    )


def check_any_left(played: RolloutResult, what: str, failures: FirstFailures) -> None:
    """Stop a run whose first attempts all failed: what fails now fails later too. A sampler may come back."""
    if any(group.trajectories for group in played.groups):
        return
    failed = [one for group in (*played.groups, *played.dropped) for one in group.failed]
    if not failed or all(one.failure is not None and one.failure.party is Party.SAMPLER for one in failed):
        return
    first = next(one.failure for one in failed if one.failure is not None)
    traceback = f"\n{first.traceback}\n" if first.traceback else " "
    raise AllFailedError(
        f"all {len(failed)} attempts of {what} failed, the first by {first.party}: {first.detail}.{traceback}"
        "Mend that and start again; train.stop_if_all_fail=false goes on all the same"
    ) from failures.first
