"""Worlds with a session touch its files in the session's thread, so that other attempts go on meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cases import for_each
from turnwise.envs.base import assistant
from turnwise.envs.library.code import Code
from turnwise.envs.library.swe import Swe
from turnwise.envs.library.workspace import Workspace
from turnwise.envs.sandbox import Session
from turnwise.runtime.blocking import run_to_end


async def _play(world: Any, replies: Sequence[str]) -> None:
    env = world.make_env(world.tasks("train", 1, seed=3)[0], 0)
    await env.start()
    for reply in replies:
        await env.step(assistant(reply))
    await env.close()


@for_each(
    ("world", "replies"),
    [
        (Workspace(interface="both"), ["click 1", "click 3", "$ wc -l orders.csv", "done"]),
        (Code(shell=True), ["$ ls", "```python\nx = 1\n```", "submit"]),
        (Swe(), ["$ ls", "edit new.py\n+x = 1", "test", "submit"]),
    ],
)
def test_no_world_waits_in_the_event_loop_for_the_files_of_a_session(world: Any, replies: list[str]) -> None:
    waits: list[str] = []
    real: Any = Session.files

    def files(session: Session) -> Any:
        waits.append(session.id)
        return real.fget(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "files", property(files))
        run_to_end(_play(world, replies))
    assert waits == []
