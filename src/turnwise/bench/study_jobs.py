"""Jobs of a study, side by side in processes, until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.pool import Pool
from typing import Any

POLL_S = 0.5


def run_jobs(pool: Pool, jobs: Sequence[Callable[[], Any]], until_s: float, done: Callable[[Any], None]) -> bool:
    """Run the jobs until all have ended or the time is up; whether all have. One that fails is told, and no more.

    Args:
        until_s: By `time.monotonic`.
        done: Is given the value of each job that ended well.
    """
    waiting = [pool.apply_async(_attempt, (job,)) for job in jobs]
    is_well = True
    while waiting and time.monotonic() < until_s:
        time.sleep(POLL_S)
        for one in [one for one in waiting if one.ready()]:
            waiting.remove(one)
            value, failure = one.get()
            if failure:
                is_well = False
                print(f"a job failed: {failure}", flush=True)
            else:
                done(value)
    return is_well and not waiting


def _attempt(job: Callable[[], Any]) -> tuple[Any, str]:
    """The job's value, or why it failed; some errors cannot travel between processes."""
    try:
        return job(), ""
    except KeyboardInterrupt:  # the pool has ended, and the run was saved
        return None, "stopped"
    except Exception as error:  # noqa: BLE001 - whatever it was, it is told
        return None, f"{type(error).__name__}: {error}"
