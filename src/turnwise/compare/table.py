"""A comparison as a table for the terminal, as Markdown for a page, and as JSON with every number."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from turnwise.compare.request import CompareRequest
from turnwise.compare.results import Difference, Result, Summary, summarize
from turnwise.watch.intervals import Interval
from turnwise.watch.terminal import format_duration

HEADER = (
    *("world", "method", "held-out success", "points more", "best", "mean over tokens", "points more", "before"),
    *("reward", "sampled", "trained", "steps", "time"),
)
STARTS_DIFFER = "†"
NUM_LEFT = 2
"""Number of text columns at the left; the others are numbers."""


def table_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row per world and method."""
    rows: list[tuple[str, ...]] = []
    last_world = None
    for one in summarize(results):
        rows.append(
            (
                "" if one.world == last_world else one.world,
                one.label,
                _percent(one.success),
                _points(one.more_success),
                _share(one.best_success),
                _percent(one.area),
                _points(one.more_area),
                _share(one.start_success),
                "" if math.isnan(one.reward) else f"{one.reward:.3f}",
                f"{one.sampled_tokens:,.0f}",
                f"{one.trained_tokens:,.0f}",
                f"{one.steps:.0f}",
                format_duration(one.duration_s),
            )
        )
        last_world = one.world
    return rows


def table_lines(results: Sequence[Result]) -> list[str]:
    """The table for a terminal."""
    rows = [HEADER, *table_rows(results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, f"({note(results)})", *start_lines(results), *branch_lines(results)]


def start_lines(results: Sequence[Result]) -> list[str]:
    """The pairs that do not compare the methods alone, because their runs started from different weights."""
    against = results[0].label if results else ""
    return [
        f"{STARTS_DIFFER} {one.world}, {one.label}: with seeds {', '.join(map(str, one.more_success.other_starts))} it "
        f"started from other weights than {against}; run the pairs again in another folder to compare the methods alone"
        for one in summarize(results)
        if one.more_success is not None and one.more_success.other_starts
    ]


def branch_lines(results: Sequence[Result]) -> list[str]:
    """How much of the variance of returns is left after the branch, for each method that branches."""
    known = [one for one in summarize(results) if math.isfinite(one.branch_share)]
    if not known:
        return []
    shares = ", ".join(f"{one.branch_share:.2f} ({one.label}, {one.world})" for one in known)
    return [f"Var(R | prefix) / Var(R): {shares}; branching pays below about 0.25"]


def markdown(results: Sequence[Result], request: CompareRequest, command: str) -> str:
    """The comparison as a Markdown page."""
    names = [name[0].upper() + name[1:] for name in HEADER]
    rule = ["---"] * NUM_LEFT + ["---:"] * (len(HEADER) - NUM_LEFT)
    rows = [tuple(f"`{cell}`" if cell and at < NUM_LEFT else cell for at, cell in enumerate(row))
            for row in table_rows(results)]  # fmt: skip
    lines = ["| " + " | ".join(row) + " |" for row in (names, rule, *rows)]
    text = note(results)
    return "\n".join(
        [
            f"```console\n$ {command}\n```\n",
            *lines,
            "",
            f"{text[0].upper()}{text[1:]}. {len(results)} of {_num_runs(request)} runs.",
            *(f"\n{line}." for line in (*start_lines(results), *branch_lines(results))),
            *critic_markdown(results),
            "",
        ]
    )


def critic_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Errors of critics on held-out attempts before the policy's first step and at the end: means over seeds."""
    rows: list[tuple[str, ...]] = []
    for world, label in dict.fromkeys((result.world, result.label) for result in results if result.critic):
        own = [result.critic for result in results if (result.world, result.label) == (world, label)]
        for when, at in (("first", 0), ("last", -1)):
            errors = np.array([critic[at][1] for critic in own])
            explained = np.array([critic[at][2] for critic in own])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # nan if no seed measured this part
                means = zip(np.nanmean(errors, axis=0), np.nanmean(explained, axis=0), strict=True)
                cells = [f"{error:.3f} ({share:+.0%})" for error, share in means]
            rows.append((world, label, when, *cells))
    return rows


def critic_markdown(results: Sequence[Result]) -> list[str]:
    rows = critic_rows(results)
    if not rows:
        return []
    header = ("World", "Method", "Evaluation", *(f"Fifth {part}" for part in range(1, len(rows[0]) - 2)))
    lines = ["| " + " | ".join(row) + " |" for row in (header, ("---",) * len(header), *rows)]
    text = "The critic on held-out attempts, by fifth of the attempt: root mean square error (explained variance)."
    return ["", text, "", *lines]


def _num_runs(request: CompareRequest) -> int:
    return len(request.worlds) * len(request.variants) * request.seeds


def note(results: Sequence[Result]) -> str:
    """The meaning of the numbers."""
    num_seeds = len({result.seed for result in results})
    labels = list(dict.fromkeys(result.label for result in results))
    kind = (
        f"means over {num_seeds} seeds, Student's 95 % interval between seeds"
        if num_seeds > 1
        else "one seed, Wilson's 95 % interval over its held-out tasks"
    )
    more = f"points more than {labels[0]}, seed by seed" if len(labels) > 1 else ""
    stars = "* the interval excludes 0, ** also after Holm's correction for the methods of that world"
    parts = [kind, *([more, stars] if more and num_seeds > 1 else [more] if more else [])]
    return "; ".join([*parts, "mean over tokens is the mean of the learning curve; sampled and trained are tokens"])


def to_json(request: CompareRequest, results: Sequence[Result], failures: Sequence[str]) -> str:
    content = {
        "request": {**asdict(request), "directory": str(request.directory)},
        "summary": [_summary_tree(one) for one in summarize(results)],
        "results": [asdict(result) for result in results],
        "failures": list(failures),
    }
    return json.dumps(_without_nan(content), indent=1, allow_nan=False) + "\n"


def _summary_tree(one: Summary) -> dict[str, Any]:
    tree = asdict(one)
    for key in ("more_success", "more_area"):
        found: Difference | None = getattr(one, key)
        if found is not None:
            tree[key] |= {"is_told": found.is_told, "is_told_by_holm": found.is_told_by_holm}
    return tree


def _without_nan(value: Any) -> Any:
    """Replace nan and infinity by null, because JSON has neither."""
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _percent(interval: Interval) -> str:
    return interval.percent() if math.isfinite(interval.low) else _share(interval.value)


def _share(value: float) -> str:
    return "not measured" if math.isnan(value) else f"{value:.1%}"


def _points(difference: Difference | None) -> str:
    """A difference in percentage points."""
    if difference is None:
        return ""
    interval = difference.interval
    if math.isnan(interval.value):
        return "not measured"
    value, low, high = (100 * number for number in (interval.value, interval.low, interval.high))
    stars = "**" if difference.is_told_by_holm else "*" if difference.is_told else ""
    stars += STARTS_DIFFER if difference.other_starts else ""
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]{stars}" if math.isfinite(low) else f"{value:+.1f}"
