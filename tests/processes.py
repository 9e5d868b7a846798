"""Processes of the machine, for tests that look for what was left behind."""

from __future__ import annotations

from pathlib import Path


def processes_below(pid: int) -> set[int]:
    """Every process whose chain of parents leads to `pid`; zombies count."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            stat = (place / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        parents[int(place.name)] = int(stat.rpartition(")")[2].split()[1])
    found: set[int] = set()
    for candidate in parents:
        ancestor: int | None = candidate
        while ancestor is not None and ancestor != pid:
            ancestor = parents.get(ancestor)
        if ancestor == pid and candidate != pid:
            found.add(candidate)
    return found


def marked_processes(mark: str) -> list[str]:
    """Command lines, anywhere on the machine, that hold the mark."""
    found: list[str] = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found += [line] if mark in line else []
    return found
