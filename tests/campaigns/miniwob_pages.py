"""Load every page of MiniWoB++ twice with the same seed, do the same random actions, and compare what is seen.

    make campaign NAME=miniwob_pages ARGS="--actions 3 --seed 0"

needs an interpreter that has Playwright and miniwob. It names the pages that show something else the second time, and
those that fail. The exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from turnwise.envs.base import Task, assistant
from turnwise.envs.browser.miniwob import miniwob_pages
from turnwise.envs.browser.pool import close_pools
from turnwise.envs.library.browser import BrowserWorld
from turnwise.errors import AttemptFailed

AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReport:
    """What became of a page."""

    page: str
    num_seen: int = 0
    """Observations that were compared, the first one with the goal included."""
    problem: str = ""


async def look(task: Task, actions: int) -> list[str]:
    """The goal, the first observation, and what follows a random player's actions."""
    world = BrowserWorld(site="miniwob", pages=[task.data["page"]])
    env, player = world.make_env(task, 0), world.random_player(task, 0)
    try:
        dialogue = list(await env.start())
        seen = [dialogue[-1].content]
        for _ in range(actions):
            dialogue.append(assistant(player(dialogue)))
            step = await env.step(dialogue[-1])
            seen += [f"{message.content} {step.reward}" for message in step.messages]
            dialogue += step.messages
            if step.is_over:
                break
        return seen
    finally:
        await env.close()


async def compare_pages(pages: Sequence[str], seed: int, actions: int) -> list[PageReport]:
    """Load each page twice."""
    free = asyncio.Semaphore(AT_ONCE)

    async def compare(page: str) -> PageReport:
        task = Task(id=f"{page}-{seed}", data={"site": "miniwob", "page": page, "seed": seed})
        async with free:
            try:
                first, second = await look(task, actions), await look(task, actions)
            except AttemptFailed as error:
                return PageReport(page=page, problem=str(error).splitlines()[0])
        if first == second:
            return PageReport(page=page, num_seen=len(first))
        for place, (one, two) in enumerate(zip(first, second, strict=False)):
            lines = zip_longest(one.split("\n"), two.split("\n"), fillvalue="")
            for before, after in lines:
                if before != after:
                    return PageReport(page=page, problem=f"observation {place}: {before!r:.200}, then {after!r:.200}")
        return PageReport(page=page, problem=f"{len(first)} observations, then {len(second)}")

    return list(await asyncio.gather(*(compare(page) for page in pages)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actions", type=int, default=3, help="random actions at each page")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    reports = asyncio.run(compare_pages(miniwob_pages(), options.seed, options.actions))
    close_pools()
    bad = [report for report in reports if report.problem]
    for report in bad:
        print(f"{report.page}: {report.problem}")
    seen = sum(report.num_seen for report in reports)
    print(f"{len(reports) - len(bad)} of {len(reports)} pages are the same twice, {seen} observations compared")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
