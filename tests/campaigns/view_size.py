"""`turnwise view` over a run of 100,000 attempts: how soon its pages are there, in a real Chromium.

    make campaign NAME=view_size ARGS="--attempts 100000"

The first thousand attempts are written by the real writer; the others are copies of their rows in later steps. The side
index is made anew, so the first visit is one without it. The campaign fails if a first paint takes a second or more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sqlite3
import sys
import tempfile
from pathlib import Path

from turnwise.runlog.schema import DATABASE
from turnwise.trajectory import EndReason
from view_runs import Play, WrittenRun
from viewer_process import BROWSER_SCRIPTS, find_chromium, in_browser, viewer

WRITTEN = 1000
LIMIT_MS = 1000
VISITS = 2
SENTENCE = "the agent looks for a flight from Paris to Rome and asks for the price before it books the cheapest"
ADDRESSES = (
    "#/",
    "#/run/big",
    "#/attempts?run=big",
    "#/attempts?run=big&stop_reason=max_turns&reward_from=0.5",
    "#/attempts?run=big&order=best&first=60000",
    "#/attempts?run=big&view=groups",
    "#/attempts?run=big&text=paris+cheapest",
    "#/attempt/big/500",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make campaign NAME=view_size", description=__doc__)
    parser.add_argument("--attempts", type=int, default=100_000)
    options = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        parser.error("no Chromium on this machine; make browser installs it")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ["TURNWISE_HOME"] = str(place / "home")
        make_run(place / "runs" / "big", options.attempts)
        size = (place / "runs" / "big" / DATABASE).stat().st_size
        print(f"{options.attempts:,} attempts, run.db has {size / 1e6:.0f} MB", flush=True)
        with viewer(place / "runs") as url:
            script = BROWSER_SCRIPTS / "view_paint.py"
            found = json.loads(in_browser(script, chromium, *(VISITS * ADDRESSES), url=url).splitlines()[-1])
    for visit in found:
        print(f"{visit['address']:<60} paint {visit['first_paint_ms']:>5} ms  content {visit['content_ms']:>5} ms")
    return int(any(visit["first_paint_ms"] >= LIMIT_MS for visit in found))


def make_run(directory: Path, count: int) -> None:
    random.seed(0)
    words = SENTENCE.split()
    ends = [*[EndReason.TERMINATED] * 4, EndReason.MAX_TURNS, EndReason.MAX_TOKENS]
    plays: list[Play] = []
    for index in range(WRITTEN):
        replies = [" ".join(random.choices(words, k=14)) for _ in range(random.randint(2, 4))]
        reward, end = random.choice([0.0, 0.0, 0.5, 1.0]), random.choice(ends)
        answer = " ".join(random.choices(words, k=40))
        task = f"travel-{index // 8}"
        plays.append(
            Play(task_id=task, attempt=index % 8, replies=replies, reward=reward, answers=answer, end_reason=end)
        )
    WrittenRun(plays=plays).write(directory)
    with sqlite3.connect(directory / DATABASE) as database:
        for copy in range(1, count // WRITTEN):
            shift = copy * WRITTEN
            for table, key in (("trajectories", "id"), ("turns", "trajectory_id")):
                names = [str(row[1]) for row in database.execute(f"PRAGMA table_info({table})")]
                moved = {key: f"{key} + {shift}", "step": f"step + {copy}", "time": f"time + {copy}"}
                columns = ", ".join(moved.get(name, name) for name in names)
                database.execute(f"INSERT INTO {table} SELECT {columns} FROM {table} WHERE {key} <= {WRITTEN}")
    database.close()


if __name__ == "__main__":
    sys.exit(main())
