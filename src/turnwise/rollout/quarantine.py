"""What keeps failing is left alone, and counted.

A task whose groups end, time after time, without a single attempt left is not played again. A world in which try after
try fails, whatever the task, is not played at all any more. Only failures of envs, tools and judges count: a sampler
that is down says nothing about a task. One `Quarantine` lives as long as a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from turnwise.errors import Party
from turnwise.trajectory import Failure

_BLAMED = (Party.ENV, Party.TOOL, Party.JUDGE)


class QuarantineState(TypedDict):
    """What a `Quarantine` knows, ready for JSON."""

    lost_groups: dict[str, int]
    failed_tries: int
    tasks: dict[str, str]
    world: str | None


class Quarantine:
    """Counts failures in a row, by task and over all tasks of one world."""

    def __init__(self, *, task_after: int = 2, world_after: int = 200) -> None:
        self._task_after = task_after
        self._world_after = world_after
        self._num_lost_groups: dict[str, int] = {}
        self._num_failed_tries = 0
        self._tasks: dict[str, str] = {}
        self._world: str | None = None

    @property
    def tasks(self) -> Mapping[str, str]:
        """Quarantined tasks, with the failure that was the last straw."""
        return self._tasks

    @property
    def world(self) -> str | None:
        """The failure that closed the whole world; None while it is open."""
        return self._world

    def to_state(self) -> QuarantineState:
        """Everything that it has counted, to go on from later."""
        return QuarantineState(
            lost_groups=dict(self._num_lost_groups),
            failed_tries=self._num_failed_tries,
            tasks=dict(self._tasks),
            world=self._world,
        )

    def restore(self, state: QuarantineState) -> None:
        """Go on from what another one had counted."""
        self._num_lost_groups, self._num_failed_tries = dict(state["lost_groups"]), state["failed_tries"]
        self._tasks, self._world = dict(state["tasks"]), state["world"]

    def reason(self, task_id: str) -> str | None:
        """Why this task must not be played; None when it may be."""
        return self._world if self._world is not None else self._tasks.get(task_id)

    def record_try(self, failure: Failure | None) -> None:
        """One try at any task ended, well or not."""
        if failure is None:
            self._num_failed_tries = 0
        elif failure.party in _BLAMED:
            self._num_failed_tries += 1
            if self._num_failed_tries >= self._world_after and self._world is None:
                self._world = f"{self._num_failed_tries} tries in a row failed; the last: {failure.detail}"

    def record_group(self, task_id: str, failures: list[Failure], num_left: int) -> bool:
        """A group ended with `num_left` attempts to learn from; True when that was the last straw."""
        blamed = [failure for failure in failures if failure.party in _BLAMED]
        if num_left:
            self._num_lost_groups.pop(task_id, None)
        if num_left or not blamed:
            return False
        count = self._num_lost_groups[task_id] = self._num_lost_groups.get(task_id, 0) + 1
        if count < self._task_after or task_id in self._tasks:
            return False
        self._tasks[task_id] = f"{count} groups in a row were lost; the last: {blamed[-1].detail}"
        return True
