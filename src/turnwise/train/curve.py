"""The learning curve as an SVG picture, written by hand: any browser shows it, and nothing has to be installed.

Held-out success with its 95 % interval, and the mean reward of each training batch, over steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import EvaluationRow

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 56, 40, 44
SUCCESS_COLOR, REWARD_COLOR, GRID_COLOR = "#1f6feb", "#d97706", "#d0d7de"
NUM_TICKS = 5
CURVE_FILE = "curve.svg"

Points = Sequence[tuple[float, float]]


def write_curve(run: RunReader, title: str) -> Path:
    """Draw what the run has so far into its directory."""
    path = run.directory / CURVE_FILE
    rewards = [(float(step), value) for step, value in run.metric("rollout/reward_mean") if math.isfinite(value)]
    path.write_text(curve_svg(title, run.evaluations(), rewards), encoding="utf-8")
    return path


def curve_svg(title: str, evaluations: Sequence[EvaluationRow], rewards: Points) -> str:
    measured = [e for e in evaluations if math.isfinite(e.success)]
    last_step = max([1.0, *(float(e.step) for e in measured), *(step for step, _ in rewards)])
    low, high = _range([value for _, value in rewards])

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last_step

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="22" text-anchor="middle" font-size="14">{escape(title)}</text>',
    ]
    for tick in range(NUM_TICKS):
        share = tick / (NUM_TICKS - 1)
        step, reward = round(share * last_step), low + share * (high - low)
        parts += [
            _line([(LEFT, y(share)), (WIDTH - RIGHT, y(share))], GRID_COLOR, 1),
            _text(LEFT - 8, y(share) + 4, f"{share:.0%}", "end", SUCCESS_COLOR),
            _text(WIDTH - RIGHT + 8, y(share) + 4, f"{reward:.3g}", "start", REWARD_COLOR),
            _text(x(step), HEIGHT - BOTTOM + 18, str(step), "middle", "#57606a"),
        ]
    parts.append(_text(WIDTH / 2, HEIGHT - 8, "step", "middle", "#57606a"))
    parts.append(_line([(x(s), y((v - low) / (high - low))) for s, v in rewards], REWARD_COLOR, 1.5))
    band = [(x(e.step), y(e.success_high)) for e in measured] + [(x(e.step), y(e.success_low)) for e in measured[::-1]]
    parts.append(f'<polygon points="{_points(band)}" fill="{SUCCESS_COLOR}" fill-opacity="0.15"/>')
    parts.append(_line([(x(e.step), y(e.success)) for e in measured], SUCCESS_COLOR, 2))
    parts += [f'<circle cx="{x(e.step):.1f}" cy="{y(e.success):.1f}" r="3" fill="{SUCCESS_COLOR}"/>' for e in measured]
    parts.append(_text(LEFT, TOP - 6, "held-out success, 95 % interval", "start", SUCCESS_COLOR))
    parts.append(_text(WIDTH - RIGHT, TOP - 6, "mean reward in training", "end", REWARD_COLOR))
    return "\n".join([*parts, "</svg>", ""])


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min([0.0, *values]), max(values, default=1.0)
    return (low, high) if high > low else (low, low + 1.0)


def _points(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _line(points: Points, color: str, width: float) -> str:
    return f'<polyline points="{_points(points)}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, color: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
