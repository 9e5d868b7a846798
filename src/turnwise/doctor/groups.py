"""Why groups teach nothing: all fail, all succeed, all earn the same, or rewards are chance."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

from turnwise.doctor.finding import Finding, Fix
from turnwise.doctor.history import RunHistory
from turnwise.trajectory import Trajectory

FEW = 0.1
"""Share of groups that teach something below which a run hardly learns."""


def all_fail(run: RunHistory) -> Finding | None:
    """Hardly any group teaches something, because no attempt succeeds or earns anything."""
    share = _share_trained(run)
    if share is None or share > FEW or not _none_succeeds(run):
        return None
    group_size = run.config.rollout.group_size
    return Finding(
        name="all_fail",
        seen=f"{share:.0%} of the groups of the last steps taught something; {_earned(run)}",
        why="attempts that all fail earn the same, and their advantages are 0",
        fixes=(
            Fix(
                option=f"warmup.steps={4 * run.config.warmup.steps or 50}",
                text="begin with supervised steps on the world's demonstrations",
            ),
            Fix(text="begin with easier tasks: a curriculum, or a world with partial rewards (reward.potential)"),
            Fix(option=f"rollout.group_size={2 * group_size}", text="more attempts per task find rare successes"),
            *([Fix(option="rollout.temperature=1.0", text="more varied attempts")] if _is_cold(run) else []),
        ),
        evidence=_last_dialogue(run),
        numbers={"groups_share": share, "success": run.success or 0.0},
    )


def all_succeed(run: RunHistory) -> Finding | None:
    """The tasks were solved before training, so that nothing is left to learn."""
    share, first = _share_trained(run), run.values("rollout/success_mean")[:3]
    if share is None or share > FEW or not first or fmean(first) < 0.95 or (run.success or 0.0) < 0.95:
        return None
    return Finding(
        name="all_succeed",
        seen=f"{run.success:.0%} of the attempts succeed, as they did in the first steps ({fmean(first):.0%})",
        why="attempts that all succeed earn the same: the tasks are too easy to teach this policy anything",
        fixes=(
            Fix(text="take harder tasks: other options of the world (env.options), or a curriculum"),
            Fix(option="warmup.steps=0", text="if the warm-up has solved the tasks already"),
        ),
        numbers={"groups_share": share, "success": run.success or 0.0},
    )


def same_reward(run: RunHistory) -> Finding | None:
    """Groups are constant, although attempts neither all fail nor all succeed."""
    share = _share_trained(run)
    rewards = {one.total_reward for one in run.trajectories}
    if share is None or share > FEW or _none_succeeds(run) or run.is_solving:
        return None
    return Finding(
        name="same_reward",
        seen=f"{share:.0%} of the groups of the last steps taught something; rewards lie between {min(rewards):.3g} "
        f"and {max(rewards):.3g}",
        why="the attempts of a group earn the same whatever they say: the reward depends on the task, not on the reply",
        fixes=(
            Fix(text="reward what differs between attempts: partial success, fewer turns (reward.potential)"),
            Fix(option=f"rollout.group_size={2 * run.config.rollout.group_size}", text="more attempts per task"),
        ),
        evidence=_last_dialogue(run),
        numbers={"groups_share": share},
    )


def reward_is_chance(run: RunHistory) -> Finding | None:
    """Attempts that said the same in the same world earned different rewards."""
    if not run.config.rollout.same_start:
        return None
    pairs = [pair for group in run.groups for pair in combinations(group, 2) if _is_same_play(*pair)]
    unequal = [pair for pair in pairs if abs(pair[0].total_reward - pair[1].total_reward) > 1e-9]
    if len(unequal) < 2 or len(unequal) < len(pairs) / 5:
        return None
    one, other = unequal[0]
    return Finding(
        name="reward_is_chance",
        seen=f"{len(unequal)} of {len(pairs)} pairs of attempts that said the same, in worlds of the same seed, earned "
        "different rewards",
        why="the reward depends on something other than the seed and the replies, and that is learned as if it were "
        "earned",
        fixes=(
            Fix(text="draw every random number of the env from its seed; turnwise check-env finds what does not"),
            Fix(option=f"rollout.group_size={2 * run.config.rollout.group_size}", text="averages over more chance"),
        ),
        evidence=f"task {one.task_id}: {one.turns[0].reply.content.strip()!r:.200} earned {one.total_reward:g} and "
        f"{other.total_reward:g}",
        numbers={"pairs": len(pairs), "unequal": len(unequal)},
    )


def _share_trained(run: RunHistory) -> float | None:
    """Share of the last steps' groups that taught something; None where nothing was played."""
    if not run.steps or not run.trajectories:
        return None
    kept = run.recent_sum("rollout/groups_kept")
    if not kept:
        return None
    if not run.values("train/grad_norm", last=1) or run.recent_sum("method/groups_trained") < kept:
        return run.recent_sum("method/groups_trained") / kept
    return 0.0 if not _varies(run) else 1.0


def _varies(run: RunHistory) -> bool:
    """Whether attempts of the sample earn different rewards, for methods that keep every group."""
    return len({round(one.total_reward, 9) for one in run.trajectories}) > 1


def _none_succeeds(run: RunHistory) -> bool:
    if run.success is not None:
        return run.success <= 0.05
    rewards = [one.total_reward for one in run.trajectories]
    return bool(rewards) and max(rewards) <= 0


def _earned(run: RunHistory) -> str:
    rewards = [one.total_reward for one in run.trajectories]
    judged = "" if run.success is None else f"{run.success:.0%} of the attempts succeed, and "
    return f"{judged}the best of the last {len(rewards)} earned {max(rewards):g}"


def _is_cold(run: RunHistory) -> bool:
    return run.config.rollout.temperature < 0.9


def _is_same_play(one: Trajectory, other: Trajectory) -> bool:
    """Whether two attempts met the same world and said the same."""
    if one.seed != other.seed or (one.branch is not None and one.branch.reseeds_env):
        return False
    return [turn.sampled_ids for turn in one.turns] == [turn.sampled_ids for turn in other.turns]


def _last_dialogue(run: RunHistory) -> str:
    """The last attempt in short: what was said, and what it earned."""
    one = run.trajectories[-1]
    lines = [f"reply {number}: {turn.reply.content.strip()!r:.160}" for number, turn in enumerate(one.turns[:3], 1)]
    return "\n".join([*lines, f"reward {one.total_reward:g}, end: {one.end_reason}"])
