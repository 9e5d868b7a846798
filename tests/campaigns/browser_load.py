"""Many attempts at once in real browsers, through the rollout, while Chromium is killed at random moments.

    make campaign NAME=browser_load ARGS="--attempts 1000 --at-once 64 --kills 20"

needs an interpreter that has Playwright. It prints a row per hundred attempts: processes, memory and temporary files,
which must stay flat; and at the end what was blamed, tried again and scored. A killed browser must cost no score: the
expert plays, so every attempt that is scored is a success.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from turnwise.client.fake import ScriptedSampler
from turnwise.envs.base import Env, Split, Task, user
from turnwise.envs.browser.expert import plan_player
from turnwise.envs.browser.pool import FOLDER, close_pools
from turnwise.envs.library.browser import SITES, BrowserWorld
from turnwise.models.store import fetch_model
from turnwise.renderers import get_renderer
from turnwise.renderers.base import Renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.group import Rollout, RolloutEvent
from turnwise.trajectory import Message, Trajectory

TEMPORARY = ("tw-chromium-*", "playwright*", ".org.chromium*", "com.google.Chrome*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What this process holds of the machine, with all processes below it."""

    processes: int
    memory_mb: int
    """Of all of them; a page that several share counts once."""
    own_memory_mb: int
    """Of this process alone."""
    temporary: int
    """Files and folders that browsers leave in the folder for temporary files."""


def processes_below(root: int) -> dict[int, str]:
    """All descendants of a process, with their command lines."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                below.setdefault(parent, []).append(int(entry.name))
    found: dict[int, str] = {}
    left = [root]
    while left:
        for child in below.get(left.pop(), []):
            with contextlib.suppress(OSError):
                found[child] = (Path("/proc") / str(child) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            left.append(child)
    return found


def browser_ids() -> list[int]:
    """The main processes of the browsers that this process started."""
    below = processes_below(os.getpid())
    return [pid for pid, line in below.items() if "--remote-debugging" in line and "--type=" not in line]


def footprint() -> Footprint:
    below = {**processes_below(os.getpid()), **lost_browsers()}
    temporary = [entry for pattern in TEMPORARY for entry in Path(tempfile.gettempdir()).glob(pattern)]
    own = _memory_mb(os.getpid())
    return Footprint(
        processes=len(below),
        memory_mb=own + sum(map(_memory_mb, below)),
        own_memory_mb=own,
        temporary=len(temporary),
    )


def lost_browsers() -> dict[int, str]:
    """Processes of browsers that this process started, wherever they hang now: a leak would look like this."""
    mark = f"TMPDIR={tempfile.gettempdir()}/{FOLDER}{os.getpid()}-".encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def _memory_mb(pid: int) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) // 1024
    return 0


class MixedSites:
    """The world of the campaign: all of our sites, a level each attempt."""

    name = "mixed_sites"
    max_tokens = 64

    def __init__(self, levels: Sequence[int], step_s: list[float], start_s: list[float]) -> None:
        self._worlds = [BrowserWorld(site=site, level=level) for site in SITES for level in levels]  # type: ignore[arg-type]
        self.max_turns = max(world.max_turns for world in self._worlds)
        self._times = (start_s, step_s)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Tasks that differ in their goals, because the expert knows them by their goals."""
        share = -(-2 * count // len(self._worlds))
        rounds = zip(*(world.tasks(split, share, seed) for world in self._worlds), strict=True)
        by_goal: dict[str, Task] = {}
        for task in (task for tasks in rounds for task in tasks):
            by_goal.setdefault(SITES[task.data["site"]].draw_task(task.data["seed"], task.data["level"]).goal, task)
        if len(by_goal) < count:
            raise ValueError(f"{len(by_goal)} different goals for {count} attempts; add levels")
        return list(by_goal.values())[:count]

    def make_env(self, task: Task, seed: int) -> Env:
        fitting = (w for w in self._worlds if (w.site, w.level) == (task.data["site"], task.data["level"]))
        return _TimedEnv(next(fitting).make_env(task, seed), *self._times)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:  # noqa: ARG002
        return []


class _TimedEnv:
    def __init__(self, env: Env, start_s: list[float], step_s: list[float]) -> None:
        self._env, self._start_s, self._step_s = env, start_s, step_s

    async def start(self) -> Sequence[Message]:
        return await self._timed(self._env.start, self._start_s)

    async def step(self, reply: Message) -> Any:
        return await self._timed(lambda: self._env.step(reply), self._step_s)

    async def close(self) -> None:
        await self._env.close()

    async def _timed(self, call: Callable[[], Any], times: list[float]) -> Any:
        begun = time.monotonic()
        answer = await call()
        times.append(time.monotonic() - begun)
        return answer


def expert_sampler(tasks: Sequence[Task], tokenizer: Any, renderer: Renderer) -> ScriptedSampler:
    """A sampler that plays as the experts of these tasks, from nothing but the prompt."""
    known = [SITES[task.data["site"]].draw_task(task.data["seed"], task.data["level"]) for task in tasks]
    plans = {task.goal: task.plan for task in known}
    assert all(plans[task.goal] == task.plan for task in known), "two tasks with one goal and two plans"

    def reply(prompt_ids: list[int]) -> list[int]:
        said = tokenizer.decode(prompt_ids, skip_special_tokens=False)
        goal = said.partition("Task: ")[2].partition("\npage: ")[0]
        screens = said.split("\npage: ") if "\npage: " in said else [said]
        seen = f"page: {screens[-1].partition('<|im_end|>')[0]}"
        done = said.count("<|im_start|>assistant") - 1 - said.count("assistant\nscroll ")
        content = plan_player(plans[goal][done:])([user(seen)])
        return renderer.encode_reply(Message(role="assistant", content=content))

    return ScriptedSampler(reply, tokenizer=tokenizer)


@dataclass(kw_only=True)
class LoadReport:
    """What a campaign saw."""

    attempts: int = 0
    """Attempts that were scored."""
    successes: int = 0
    failed_tries: int = 0
    """Tries that were blamed on the env, and tried again."""
    lost: int = 0
    """Attempts that failed in every try; they have no score."""
    kills: int = 0
    wall_s: float = 0.0
    start_ms: float = 0.0
    step_ms: float = 0.0
    blamed: set[str] = field(default_factory=set[str])
    rows: list[tuple[int, Footprint]] = field(default_factory=list[tuple[int, Footprint]])
    at_end: Footprint | None = None
    """After everything was closed."""


async def play_under_load(attempts: int, at_once: int, *, kills: int, levels: Sequence[int] = (1, 2)) -> LoadReport:
    """Play attempts at all sites; kill a browser `kills` times, spread over the attempts."""
    report, step_s, start_s = LoadReport(), [], []
    world = MixedSites(levels, step_s, start_s)
    tokenizer = AutoTokenizer.from_pretrained(fetch_model("tiny").directory)
    renderer = get_renderer(tokenizer)
    tasks = world.tasks("train", attempts, seed=0)
    config = RolloutConfig(
        group_size=1, min_group_size=1, max_concurrency=at_once, max_retries=5, max_trajectory_tokens=200_000
    )
    rollout = Rollout(world, expert_sampler(tasks, tokenizer, renderer), renderer, config)
    kill_at = sorted(random.Random(attempts).sample(range(1, attempts), kills))

    def see(event: RolloutEvent) -> None:
        if event.kind == "attempt_done":
            _count(report, event.trajectory)
            if report.attempts % 100 == 0 or report.attempts == at_once:
                report.rows.append((report.attempts, footprint()))
                print(json.dumps({"attempts": report.attempts, **_row(report.rows[-1][1])}), flush=True)
        elif event.trajectory is not None and event.trajectory.failure is not None:
            report.failed_tries += event.kind == "attempt_retried"
            report.lost += event.kind == "attempt_failed"
            report.blamed.add(str(event.trajectory.failure.party))
        while kill_at and report.attempts >= kill_at[0] and (running := browser_ids()):
            os.kill(random.Random(kill_at.pop(0)).choice(running), signal.SIGKILL)
            report.kills += 1

    rollout.on_event = see
    begun = time.monotonic()
    await rollout.play(tasks, seed=0)
    report.wall_s = time.monotonic() - begun
    report.start_ms, report.step_ms = (1000 * median(times or [0.0]) for times in (start_s, step_s))
    return report


def _count(report: LoadReport, trajectory: Trajectory | None) -> None:
    assert trajectory is not None
    report.attempts += 1
    report.successes += bool(trajectory.is_success)


def _row(seen: Footprint) -> dict[str, int]:
    return {name: getattr(seen, name) for name in ("processes", "memory_mb", "own_memory_mb", "temporary")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    before = footprint()
    report = asyncio.run(play_under_load(given.attempts, given.at_once, kills=given.kills, levels=given.levels))
    close_pools()
    report.at_end = footprint()
    print(f"scored {report.attempts} of {given.attempts}, successes {report.successes}, lost {report.lost}")
    print(f"kills {report.kills}, tries blamed and played again {report.failed_tries}, blamed: {sorted(report.blamed)}")
    per_minute = 60 * report.attempts / report.wall_s
    print(f"{per_minute:.0f} attempts/min, reset {report.start_ms:.0f} ms, step {report.step_ms:.0f} ms")
    print(f"before {_row(before)}\nat end {_row(report.at_end)}")


if __name__ == "__main__":
    main()
