"""Learning curves as SVG pictures, written without a library: any browser shows them.

The picture of one run shows held-out success with its 95 % interval, and the mean reward of each training batch, over
steps. The picture of several runs shows their held-out success.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import EvaluationRow
from turnwise.watch.intervals import Interval

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 56, 40, 44
SUCCESS_COLOR, REWARD_COLOR, GRID_COLOR, TEXT_COLOR = "#1f6feb", "#d97706", "#d0d7de", "#57606a"
RUN_COLORS = ("#1f6feb", "#d97706", "#1a7f37", "#cf222e", "#8250df", "#0a7ea4")
LEGEND_HEIGHT = 18
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)
CURVE_FILE = "curve.svg"

Points = Sequence[tuple[float, float]]


class SvgPicture(str):
    """The text of an SVG file, which a notebook shows as a picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def write_curve(run: RunReader, title: str, best: EvaluationRow | None) -> Path:
    """Draw what the run has so far into its directory; `best` is the evaluation of the best checkpoint."""
    path = run.directory / CURVE_FILE
    path.write_text(run_svg(run, title, best), encoding="utf-8")
    return path


def run_svg(run: RunReader, title: str, best: EvaluationRow | None) -> str:
    """The curves of one run so far."""
    rewards = [(float(step), value) for step, value in run.metric("rollout/reward_mean") if math.isfinite(value)]
    rates = [(float(step), value) for step, value in run.metric("train/learning_rate") if math.isfinite(value)]
    return curve_svg(title, run.evaluations(), rewards, rates, best)


def curve_svg(
    title: str,
    evaluations: Sequence[EvaluationRow],
    rewards: Points,
    rates: Points = (),
    best: EvaluationRow | None = None,
) -> str:
    """Draw success and reward over steps, the learning rate if it changed, and a ring around the best checkpoint."""
    measured = [e for e in evaluations if math.isfinite(e.success)]
    axes = _Axes(max([1.0, *(float(e.step) for e in measured), *(step for step, _ in rewards)]))
    low, high = _range([value for _, value in rewards])
    parts = [*_frame(title, HEIGHT), *axes.grid(SUCCESS_COLOR)]
    for share in TICKS:
        reward = f"{low + share * (high - low):.3g}"
        parts.append(_text(WIDTH - RIGHT + 8, axes.y(share) + 4, reward, "start", REWARD_COLOR))
    parts.append(_line([(axes.x(s), axes.y((v - low) / (high - low))) for s, v in rewards], REWARD_COLOR, 1.5))
    parts += _rate_line(axes, rates)
    parts += axes.success_line(measured, SUCCESS_COLOR, 0.15)
    if best is not None and math.isfinite(best.success):
        at = f'cx="{axes.x(best.step):.1f}" cy="{axes.y(best.success):.1f}"'
        parts.append(f'<circle {at} r="7" fill="none" stroke="{SUCCESS_COLOR}" stroke-width="1.5"/>')
        label, is_right = f"best kept: {best.success:.0%}", best.step > 0.8 * axes.last_step
        anchor = "end" if is_right else "middle"
        parts.append(_text(axes.x(best.step), axes.y(best.success) + 22, label, anchor, SUCCESS_COLOR))
    parts.append(_text(LEFT, TOP - 6, "held-out success, 95 % interval", "start", SUCCESS_COLOR))
    parts.append(_text(WIDTH - RIGHT, TOP - 6, "mean reward in training", "end", REWARD_COLOR))
    return "\n".join([*parts, "</svg>", ""])


def _rate_line(axes: _Axes, rates: Points) -> list[str]:
    """The learning rate as a share of its maximum, dashed; nothing if it stayed constant."""
    most = max((rate for _, rate in rates), default=0.0)
    if most == min((rate for _, rate in rates), default=0.0):
        return []
    points = _points([(axes.x(step), axes.y(rate / most)) for step, rate in rates])
    line = f'<polyline points="{points}" fill="none" stroke="{TEXT_COLOR}" stroke-dasharray="3 4"/>'
    return [line, _text(LEFT, HEIGHT - 8, f"dashed: learning rate up to {most:.2g}", "start", TEXT_COLOR)]


def runs_svg(title: str, runs: Mapping[str, Sequence[EvaluationRow]]) -> str:
    """Draw the held-out success of several runs over steps; if a step has several evaluations, the last one counts."""
    axes = _Axes(max([1.0, *(float(row.step) for rows in runs.values() for row in rows)]))
    parts = [*_frame(title, HEIGHT + LEGEND_HEIGHT * len(runs)), *axes.grid(TEXT_COLOR)]
    parts.append(_text(LEFT, TOP - 6, "held-out success, 95 % intervals", "start", TEXT_COLOR))
    for index, (name, rows) in enumerate(runs.items()):
        color = RUN_COLORS[index % len(RUN_COLORS)]
        latest = {row.step: row for row in rows if math.isfinite(row.success)}
        parts += axes.success_line([latest[step] for step in sorted(latest)], color, 0.08)
        parts += _legend(index, name, color)
    return "\n".join([*parts, "</svg>", ""])


def metric_svg(title: str, name: str, runs: Mapping[str, Points]) -> str:
    """Draw one metric of several runs over steps, from its smallest to its largest value."""
    axes = _Axes(max([1.0, *(step for points in runs.values() for step, _ in points)]))
    values = [value for points in runs.values() for _, value in points]
    low, high = min(values, default=0.0), max(values, default=1.0)
    high = high if high > low else low + 1.0
    parts = [*_frame(title, HEIGHT + LEGEND_HEIGHT * len(runs)), *axes.grid("none")]
    marks = [(axes.y(share) + 4, f"{low + share * (high - low):.3g}") for share in TICKS]
    parts += [_text(LEFT - 8, at, mark, "end", TEXT_COLOR) for at, mark in marks]
    parts.append(_text(LEFT, TOP - 6, name, "start", TEXT_COLOR))
    for index, (run, points) in enumerate(runs.items()):
        color = RUN_COLORS[index % len(RUN_COLORS)]
        parts.append(_line([(axes.x(s), axes.y((v - low) / (high - low))) for s, v in points], color, 1.5))
        parts += _legend(index, run, color)
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """Success over budgets, for one line of `budgets_svg`."""

    name: str
    points: Sequence[tuple[int, Interval]]
    """(budget, success)"""


def budgets_svg(title: str, panels: Mapping[str, Sequence[BudgetLine]]) -> str:
    """Draw success over budgets, each doubling as wide as the one before: one panel per kind of budget."""
    most = max((len(lines) for lines in panels.values()), default=0)
    height = HEIGHT + LEGEND_HEIGHT * most
    parts = _frame(title, height * len(panels))
    for number, (kind, lines) in enumerate(panels.items()):
        parts += [f'<g transform="translate(0 {number * height})">', *_panel(kind, lines), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(kind: str, lines: Sequence[BudgetLine]) -> list[str]:
    budgets = sorted({budget for line in lines for budget, _ in line.points})
    axes = _Axes(max(1.0, *(math.log2(budget) for budget in budgets)))
    parts = axes.shares(TEXT_COLOR)
    parts += [
        _text(axes.x(math.log2(budget)), HEIGHT - BOTTOM + 18, str(budget), "middle", TEXT_COLOR)
        for budget in budgets
        if budget & (budget - 1) == 0  # the largest budget may stand close to a power of 2
    ]
    parts.append(_text(WIDTH / 2, HEIGHT - 8, kind, "middle", TEXT_COLOR))
    parts.append(_text(LEFT, TOP - 6, "success, 95 % intervals over tasks", "start", TEXT_COLOR))
    for index, line in enumerate(lines):
        color = RUN_COLORS[index % len(RUN_COLORS)]
        measured = [(math.log2(budget), one) for budget, one in line.points if math.isfinite(one.value)]
        parts += axes.interval_line(measured, color, 0.08)
        parts += _legend(index, line.name, color)
    return parts


def _legend(index: int, name: str, color: str) -> list[str]:
    at = HEIGHT + LEGEND_HEIGHT * index
    mark = f'<rect x="{LEFT}" y="{at - 2}" width="18" height="4" fill="{color}"/>'
    return [mark, _text(LEFT + 26, at + 4, name, "start", TEXT_COLOR)]


@dataclass(frozen=True, slots=True)
class _Axes:
    """Steps from left to right, a share of 0 to 1 from bottom to top."""

    last_step: float

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last_step

    def y(self, share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def grid(self, share_color: str) -> list[str]:
        steps = [round(share * self.last_step) for share in TICKS]
        marks = [_text(self.x(step), HEIGHT - BOTTOM + 18, str(step), "middle", TEXT_COLOR) for step in steps]
        return [*self.shares(share_color), *marks, _text(WIDTH / 2, HEIGHT - 8, "step", "middle", TEXT_COLOR)]

    def shares(self, share_color: str) -> list[str]:
        """The lines of the shares, with their numbers at the left."""
        parts: list[str] = []
        for share in TICKS:
            parts += [
                _line([(LEFT, self.y(share)), (WIDTH - RIGHT, self.y(share))], GRID_COLOR, 1),
                _text(LEFT - 8, self.y(share) + 4, f"{share:.0%}", "end", share_color),
            ]
        return parts

    def success_line(self, rows: Sequence[EvaluationRow], color: str, opacity: float) -> list[str]:
        """Success at every evaluation, drawn over the band of its interval."""
        found = [(float(row.step), Interval(row.success, row.success_low, row.success_high)) for row in rows]
        return self.interval_line(found, color, opacity)

    def interval_line(self, found: Sequence[tuple[float, Interval]], color: str, opacity: float) -> list[str]:
        """Shares from left to right, drawn over the band of their intervals."""
        band = [(self.x(at), self.y(one.high)) for at, one in found]
        band += [(self.x(at), self.y(one.low)) for at, one in found[::-1]]
        points = [(self.x(at), self.y(one.value)) for at, one in found]
        return [
            f'<polygon points="{_points(band)}" fill="{color}" fill-opacity="{opacity}"/>',
            _line(points, color, 2),
            *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points),
        ]


def _frame(title: str, height: int) -> list[str]:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="22" text-anchor="middle" font-size="14">{escape(title)}</text>',
    ]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min([0.0, *values]), max(values, default=1.0)
    return (low, high) if high > low else (low, low + 1.0)


def _points(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _line(points: Points, color: str, width: float) -> str:
    return f'<polyline points="{_points(points)}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, color: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
