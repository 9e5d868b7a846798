"""The figure of a comparison, as an SVG picture: held-out success over sampled tokens, and over trained tokens.

Thin lines are seeds, thick ones their mean. Two panels, because methods that train on few of the tokens that they
sample look better in one of them, and the others in the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

PANEL_WIDTH, HEIGHT = 420, 340
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 44, 64
COLORS = ("#1f6feb", "#d97706", "#1a7f37", "#cf222e", "#8250df", "#0a7ea4", "#9a6700", "#57606a")
GRID_COLOR, TEXT_COLOR = "#d0d7de", "#57606a"
NUM_TICKS = 5
NUM_MEAN_POINTS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run: (sampled tokens, trained tokens, success) at every evaluation."""

    label: str
    points: Sequence[tuple[int, int, float]]


def comparison_svg(title: str, curves: Sequence[Curve]) -> str:
    labels = list(dict.fromkeys(curve.label for curve in curves))
    width, height = 2 * PANEL_WIDTH, HEIGHT + 18 * len(labels)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(width / 2, 20, title, "middle", "#1f2328", 14),
        *_panel(0, "sampled tokens", curves, labels, axis=0),
        *_panel(PANEL_WIDTH, "trained tokens", curves, labels, axis=1),
    ]
    for index, label in enumerate(labels):
        y = HEIGHT + 18 * index
        parts.append(f'<rect x="{LEFT}" y="{y - 8}" width="18" height="4" fill="{_color(index)}"/>')
        parts.append(_text(LEFT + 26, y - 2, label, "start", "#1f2328"))
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: float, name: str, curves: Sequence[Curve], labels: Sequence[str], *, axis: int) -> list[str]:
    last = max([1.0, *(float(point[axis]) for curve in curves for point in curve.points)])

    def place(tokens: float, success: float) -> tuple[float, float]:
        x = left + LEFT + (PANEL_WIDTH - LEFT - RIGHT) * tokens / last
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * success

    parts: list[str] = []
    for tick in range(NUM_TICKS):
        share = tick / (NUM_TICKS - 1)
        parts.append(_line([place(0, share), place(last, share)], GRID_COLOR, 1.0, 1.0))
        parts.append(_text(place(0, share)[0] - 8, place(0, share)[1] + 4, f"{share:.0%}", "end", TEXT_COLOR))
        parts.append(_text(place(share * last, 0)[0], HEIGHT - BOTTOM + 18, _short(share * last), "middle", TEXT_COLOR))
    parts.append(_text(place(last / 2, 0)[0], HEIGHT - BOTTOM + 38, name, "middle", TEXT_COLOR))
    for index, label in enumerate(labels):
        lines = [_measured(curve, axis) for curve in curves if curve.label == label]
        lines = [line for line in lines if line]
        parts += [_line([place(*point) for point in line], _color(index), 1.0, 0.35) for line in lines]
        parts.append(_line([place(*point) for point in _mean(lines)], _color(index), 2.5, 1.0))
    return parts


def _measured(curve: Curve, axis: int) -> list[tuple[float, float]]:
    return [(float(point[axis]), point[2]) for point in curve.points if math.isfinite(point[2])]


def _mean(lines: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean of lines over the stretch that all of them cover."""
    if not lines:
        return []
    grid = np.linspace(0, min(line[-1][0] for line in lines), NUM_MEAN_POINTS)
    values = np.mean([np.interp(grid, [x for x, _ in line], [y for _, y in line]) for line in lines], axis=0)
    return [(float(x), float(y)) for x, y in zip(grid, values, strict=True)]


def _short(tokens: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:.0f}"


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _line(points: Sequence[tuple[float, float]], color: str, width: float, opacity: float) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'fill="none" stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}"'
    return f'<polyline points="{joined}" {style}/>'


def _text(x: float, y: float, text: str, anchor: str, color: str, size: int = 12) -> str:
    style = f'text-anchor="{anchor}" fill="{color}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
