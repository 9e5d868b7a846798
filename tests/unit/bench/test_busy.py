"""`bench busy`: its load ends with it, and its ratios compare what they say."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import processes_below
from turnwise.bench.busy import Figure, busy_cores, summarize


def test_ratios_compare_the_default_with_the_better_of_the_others_by_work_and_load() -> None:
    rates = {"default": [90.0, 99.0, 100.0], "one_thread": [110.0], "passive": [60.0], "spinning": [33.0]}
    figures = [
        Figure(work=work, side=side, num_beside=beside, tokens_per_s=rate * (1 + beside))
        for work in ("sample", "train")
        for beside in (0, 2)
        for side, several in {**rates, "transformers": [50.0]}.items()
        for rate in several
    ]
    result = summarize(figures)
    assert result["sample_quiet_default_tokens_per_s"] == 99.0
    assert result["train_busy_2_one_thread_tokens_per_s"] == 330.0
    for name in ("sample_quiet", "sample_busy_2", "train_quiet", "train_busy_2"):
        assert result[f"{name}_of_best"] == pytest.approx(0.9)
        assert result[f"{name}_of_spinning"] == pytest.approx(3.0)
        assert result[f"{name}_speedup"] == pytest.approx(1.98)


_START = """
import time
from turnwise.bench.busy import busy_cores
with busy_cores(1):
    print(1, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")
def test_busy_processes_end_with_the_block_and_with_a_parent_that_is_killed() -> None:
    before = processes_below(os.getpid())
    with busy_cores(2):
        assert len(processes_below(os.getpid()) - before) == 2
    assert processes_below(os.getpid()) <= before
    with subprocess.Popen([sys.executable, "-c", _START], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (child,) = processes_below(parent.pid)
        parent.kill()
    until_s = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < until_s, "nobody is there to end it"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
