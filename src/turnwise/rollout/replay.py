"""Play one stored attempt again and check that the same things happen.

The recorded ids replace the sampler. A new env is made from the task and the recorded seed, and the prompts are
rendered again. The result must equal what was stored; the first difference is reported with its turn. A difference
means that the env depends on something other than its seed, or that the env, the renderer or the config changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from turnwise.client.fake import ScriptedSampler
from turnwise.envs.base import Task, World
from turnwise.errors import DataError
from turnwise.renderers.base import Renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.play import Attempt, play
from turnwise.rollout.stats import RolloutStats
from turnwise.trajectory import Trajectory, Turn
from turnwise.types import SampledSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDifference:
    """The first thing that differs."""

    turn: int | None
    """The turn, from 0; None if the difference belongs to no turn."""
    what: str
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of playing an attempt again."""

    recorded: Trajectory
    replayed: Trajectory
    difference: ReplayDifference | None

    @property
    def is_exact(self) -> bool:
        return self.difference is None

    def lines(self) -> list[str]:
        """The result as printable lines."""
        name = f"attempt {self.recorded.attempt} at {self.recorded.task_id} (seed {self.recorded.seed})"
        if self.difference is None:
            turns = len(self.recorded.turns)
            return [f"{name}: {turns} turns replayed exactly, end reason {self.recorded.end_reason}"]
        place = "before any turn" if self.difference.turn is None else f"at turn {self.difference.turn}"
        return [
            f"{name}: {self.difference.what} differs {place}",
            f"  recorded: {self.difference.recorded}",
            f"  replayed: {self.difference.replayed}",
        ]


async def replay(
    world: World,
    task: Task,
    recorded: Trajectory,
    renderer: Renderer,
    config: RolloutConfig,
    *,
    altered: Collection[Literal["rewards", "mask"]] = (),
) -> Replay:
    """Replay `recorded`, an attempt at `task`, under the config that it was played with.

    Args:
        altered: the parts of the record that were changed after playing; they are not compared.
    """
    if task.id != recorded.task_id:
        raise DataError(f"an attempt at {recorded.task_id} cannot be replayed on task {task.id}")
    attempt = Attempt(
        task_id=task.id,
        index=recorded.attempt,
        seed=recorded.seed,
        make_env=lambda: world.make_env(task, recorded.seed),
        branch=recorded.branch,
    )
    sampler = ScriptedSampler([_to_sequence(turn) for turn in recorded.turns])
    replayed = await play(attempt, sampler, renderer, config.for_world(world), RolloutStats())
    found = _differences(recorded, replayed, altered)
    return Replay(recorded=recorded, replayed=replayed, difference=next(found, None))


def _to_sequence(turn: Turn) -> SampledSequence:
    return SampledSequence("length" if turn.is_cut else "stop", list(turn.sampled_ids), list(turn.sampler_logprobs))


def _differences(recorded: Trajectory, replayed: Trajectory, altered: Collection[str]) -> Iterator[ReplayDifference]:
    yield from _compare_items(None, "first messages", recorded.start, replayed.start)
    for index, (old, new) in enumerate(zip(recorded.turns, replayed.turns, strict=False)):
        yield from _compare_items(index, "prompt ids", old.prompt_ids, new.prompt_ids)
        yield from _compare(index, "env state", old.env_state, new.env_state)
        yield from _compare_items(index, "sampled ids", old.sampled_ids, new.sampled_ids)
        yield from _compare(index, "reply", old.reply, new.reply)
        yield from _compare_items(index, "observation", old.observation, new.observation)
        if "rewards" not in altered:
            yield from _compare(index, "reward", dict(old.reward_parts), dict(new.reward_parts))
        if "mask" not in altered:
            yield from _compare(index, "is_trained", old.is_trained, new.is_trained)
    if len(replayed.turns) < len(recorded.turns):
        failure = replayed.failure.detail if replayed.failure is not None else str(replayed.end_reason)
        yield ReplayDifference(
            turn=len(replayed.turns), what="the end", recorded="the attempt went on", replayed=f"it ended: {failure}"
        )
    if recorded.end_reason.is_repeatable:  # with other end reasons, only the turns before the end are compared
        last = len(recorded.turns) - 1
        yield from _compare(last, "end reason", str(recorded.end_reason), str(replayed.end_reason))
        yield from _compare(last, "is_success", recorded.is_success, replayed.is_success)


def _compare(turn: int | None, what: str, old: object, new: object) -> Iterator[ReplayDifference]:
    if old != new:
        yield ReplayDifference(turn=turn, what=what, recorded=_shown(old), replayed=_shown(new))


def _compare_items(
    turn: int | None, what: str, old: tuple[object, ...], new: tuple[object, ...]
) -> Iterator[ReplayDifference]:
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    yield from _compare(turn, f"{what} (from item {at} of {len(old)} on)", old[at : at + 5], new[at : at + 5])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."
