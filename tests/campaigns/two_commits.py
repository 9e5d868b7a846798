"""Every figure of `turnwise bench` on a CPU, on two commits by turns.

    make campaign NAME=two_commits ARGS="--before REV"                           # beside the files as they are here
    make campaign NAME=two_commits ARGS="--before REV --after REV --only sample train"
    make campaign NAME=two_commits ARGS="--before HEAD --tiny --rounds 2"        # does it run?

A side is a revision, or a folder that holds `src`. A round runs a command once on both sides, and the next round in the
other order, so that what else the machine does hits both. A figure's ratio is after / before within a round. Its
interval goes from the lowest to the highest ratio: it holds the median with a probability of 1 - 2^(1 - rounds), 97 %
for six rounds. A figure has moved if the interval leaves out 1 and the median is more than `--noise` away from 1. Among
so many figures one moves by chance, so commands with such figures are measured once more; what has moved in the same
direction both times is a finding. Numbers that are equal in all runs, or not above 0, have no ratio.

The machine should have nothing else to do: the report has the highest load at the start of a command. If other programs
run too, only `cpu_s` says something: the CPU-seconds of a whole command and of the processes that it started. Run it
with OMP_NUM_THREADS=1 then, so that no thread spins while it waits for another.

The report is JSON on stdout. The exit status is 1 if there is a finding or a command that failed. A bench that one side
does not have is left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

ROOT = Path(__file__).parents[2]
RUN_S = 3600.0
"""How long one command may take; a slower one has failed."""
SHOWN_CHARACTERS = 500
CPU = "cpu_s"
"""The figure that the campaign itself adds to those of a bench."""
MODEL = "--model smollm2 --device cpu --repeats 1"  # the rounds repeat
ALONE = f"{MODEL} --peer none"  # the peer is the same on both sides
COMMANDS = {
    "sample": f"{ALONE} --prompts 32 --new-tokens 64 --dialogues 16 --turns 6",
    "tenants": f"{MODEL} --tenants 8 --requests 2 --new-tokens 32",
    "train": f"{ALONE} --sequences 4 --tokens 256",
    "tree": f"{MODEL} --group-size 8 --prefix 400 --branch 100",
    "branch": f"{MODEL} --group-size 8 --turns 3",
    "both": f"{MODEL} --prompts 4 --group-size 4",
    "step": f"{MODEL} --prompts 2 --group-size 4 --turns 3 --new-tokens 16",
    "agreement": f"{MODEL} --batches 1 32 --dialogues 4",
    "rollout": f"{MODEL} --conversations 32 --turns 4 --reply 32 --latency-ms 100",
    "sandbox": "--executions 30 --parallel 2",
    "service": f"{MODEL} --requests 32 --waves 4 --new-tokens 32",
    "async": "--model tiny --device cpu --seeds 1 --steps 20",
    "busy": f"{ALONE} --beside 2",
    "learners": f"{MODEL} --sequences 4 --tokens 128",
    "env-workers": "--workers 1,2,4",
    "simulation": "--model tiny --device cpu",
    "speculation": f"{MODEL} --tasks 2 --attempts 4 --reply 32",
}
"""The commands and their options. `families` and `worlds` are left out: they measure agreement and success."""
TINY = "--model tiny --device cpu --repeats 1"
TINY_COMMANDS = {
    "sample": f"{TINY} --peer none --prompts 4 --new-tokens 8 --dialogues 2 --turns 2",
    "train": f"{TINY} --peer none --sequences 2 --tokens 32",
    "tree": f"{TINY} --group-size 2 --prefix 32 --branch 16",
    "both": f"{TINY} --prompts 2 --group-size 2",
}
"""Enough to see that the campaign runs."""

Name = Literal["before", "after"]
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A figure after / before."""

    before: float
    after: float
    """Medians over the rounds."""
    median: float
    low: float
    high: float
    """The ratio within a round: its median, lowest and highest value."""

    def moved(self, noise: float) -> int:
        """1: higher than before, -1: lower, 0: within noise."""
        if self.low <= 1 <= self.high or abs(self.median - 1) <= noise:
            return 0
        return 1 if self.median > 1 else -1


@dataclass(slots=True, kw_only=True)
class CommitsReport:
    """What the campaign found."""

    rounds: int
    noise: float
    ratios: dict[str, dict[str, Ratio]] = field(default_factory=dict[str, dict[str, Ratio]])
    """By bench and figure; of the second measurement where there was one."""
    findings: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    left_out: list[str] = field(default_factory=list[str])
    highest_load: float = 0.0
    """Of the last minute, when a round began."""


def numbers_in(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a bench's JSON with the way to it."""
    if isinstance(value, dict):
        for key, inner in cast(dict[str, object], value).items():
            yield from numbers_in(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, inner in enumerate(cast(list[object], value)):
            yield from numbers_in(inner, f"{path}.{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def compare(before: Sequence[Figures], after: Sequence[Figures]) -> dict[str, Ratio]:
    """The ratios of all figures that both sides have in every round."""
    runs = [*before, *after]
    shared = [name for name in before[0] if all(name in run for run in runs)]
    ratios: dict[str, Ratio] = {}
    for name in shared:
        old, new = [run[name] for run in before], [run[name] for run in after]
        if len({*old, *new}) == 1 or min(*old, *new) <= 0:
            continue
        own = [y / x for x, y in zip(old, new, strict=True)]
        ratios[name] = Ratio(
            before=statistics.median(old),
            after=statistics.median(new),
            median=statistics.median(own),
            low=min(own),
            high=max(own),
        )
    return ratios


class BenchFailedError(Exception):
    """A command did not give figures."""


class BenchNotThereError(Exception):
    """A side does not have this bench."""


def run_bench(bench: str, options: str, folder: Path) -> Figures:
    """Run a bench with the package of one side."""
    command = [sys.executable, "-m", "turnwise.cli", "bench", bench, "--json", *options.split()]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    before_s = cpu_seconds_of_children()
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
        )
    except subprocess.TimeoutExpired as cause:
        raise BenchFailedError(f"not over after {RUN_S:.0f} s") from cause
    if "invalid choice" in done.stderr:
        raise BenchNotThereError(bench)
    try:
        found: Any = json.loads(done.stdout)
    except ValueError as cause:
        raise BenchFailedError(f"ended with {done.returncode}: {done.stderr[-SHOWN_CHARACTERS:]}") from cause
    return {**dict(numbers_in(found)), CPU: cpu_seconds_of_children() - before_s}


def cpu_seconds_of_children() -> float:
    """User and system time of every process that this one has started and that has ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_rounds(bench: str, options: str, folders: Mapping[Name, Path], report: CommitsReport) -> dict[str, Ratio]:
    """Run one bench on both sides, round by round."""
    found: dict[Name, list[Figures]] = {"before": [], "after": []}
    for number in range(report.rounds):
        report.highest_load = max(report.highest_load, os.getloadavg()[0] if number == 0 else 0.0)
        order: tuple[Name, Name] = ("before", "after") if number % 2 == 0 else ("after", "before")
        for side in order:
            found[side].append(run_bench(bench, options, folders[side]))
        print(f"{bench}: round {number + 1} of {report.rounds}", file=sys.stderr, flush=True)
    return compare(found["before"], found["after"])


def measure(commands: Mapping[str, str], folders: Mapping[Name, Path], *, rounds: int, noise: float) -> CommitsReport:
    """Run all commands, and those with figures that moved once more."""
    report = CommitsReport(rounds=rounds, noise=noise)
    for bench, options in commands.items():
        try:
            first = run_rounds(bench, options, folders, report)
            moved = {name: ratio.moved(noise) for name, ratio in first.items() if ratio.moved(noise)}
            last = run_rounds(bench, options, folders, report) if moved else first
        except BenchNotThereError:
            report.left_out.append(bench)
            continue
        except BenchFailedError as error:
            report.problems.append(f"{bench} {options}: {error}")
            continue
        report.ratios[bench] = last
        for name, ratio in last.items():  # said at once: the campaign takes hours, and may be stopped
            print(
                f"{bench}: {name} {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]", file=sys.stderr, flush=True
            )
        for name, direction in moved.items():
            ratio = last.get(name)
            if ratio is not None and ratio.moved(noise) == direction:
                report.findings.append(f"{bench}: {name} {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]")
    return report


def unpack(side: str, place: Path) -> Path:
    """A folder that holds the side's `src`."""
    if (Path(side) / "src" / "turnwise").is_dir():
        return Path(side).resolve()
    place.mkdir()
    archive = subprocess.run(["git", "archive", side, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x"], cwd=place, input=archive, check=True)
    return place


def main() -> int:
    parser = argparse.ArgumentParser(description="compare the CPU figures of two commits")
    parser.add_argument("--before", required=True, help="a revision, or a folder that holds src")
    parser.add_argument("--after", default=str(ROOT), help="the same; default: the files as they are here")
    parser.add_argument("--rounds", type=int, default=6, help="how often each command runs on each side (default 6)")
    parser.add_argument("--noise", type=float, default=0.03, help="how far from 1 a ratio may be (default 0.03)")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=list(COMMANDS), help="benches; the others are left out"
    )
    parser.add_argument("--tiny", action="store_true", help="four benches on a toy model: does it run?")
    arguments = parser.parse_args()
    commands = TINY_COMMANDS if arguments.tiny else COMMANDS
    chosen = {name: options for name, options in commands.items() if not arguments.only or name in arguments.only}
    with tempfile.TemporaryDirectory(prefix="turnwise-commits-") as folder:
        sides: dict[Name, Path] = {
            "before": unpack(arguments.before, Path(folder) / "before"),
            "after": unpack(arguments.after, Path(folder) / "after"),
        }
        report = measure(chosen, sides, rounds=arguments.rounds, noise=arguments.noise)
    print(json.dumps(asdict(report), indent=2))
    return 1 if report.findings or report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
