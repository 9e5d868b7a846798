"""The figure of a comparison, as an SVG picture: mean held-out success over tokens, with 95 % bands between seeds.

One panel per world, over sampled tokens. A single world has a second panel over trained tokens: methods that train on
few of the tokens that they sample look better in one of them, and the others in the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from turnwise.watch.intervals import mean_interval

PANEL_WIDTH, HEIGHT = 420, 340
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 56, 64
PANELS_PER_ROW = 3
COLORS = (
    *("#1f6feb", "#d97706", "#1a7f37", "#cf222e", "#8250df", "#0a7ea4", "#bf3989", "#57606a"),
    *("#9a6700", "#2da44e", "#6e40c9", "#24292f"),
)
GRID_COLOR, TEXT_COLOR, INK = "#d0d7de", "#57606a", "#1f2328"
NUM_TICKS = 5
NUM_MEAN_POINTS = 24
SAMPLED, TRAINED = 0, 1
"""Horizontal axes: the index of the number in a curve's points."""
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run: (sampled tokens, trained tokens, success) at every evaluation."""

    world: str
    label: str
    points: Sequence[tuple[int, int, float]]


def comparison_svg(title: str, curves: Sequence[Curve]) -> str:
    labels = list(dict.fromkeys(curve.label for curve in curves))
    worlds = list(dict.fromkeys(curve.world for curve in curves))
    panels = [(world, SAMPLED) for world in worlds] + ([(worlds[0], TRAINED)] if len(worlds) == 1 else [])
    num_rows = math.ceil(len(panels) / PANELS_PER_ROW)
    legend = num_rows * HEIGHT + 20
    width, height = min(len(panels), PANELS_PER_ROW) * PANEL_WIDTH, legend + 18 * len(labels)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(width / 2, 20, title, "middle", INK, 14),
    ]
    for index, (world, axis) in enumerate(panels):
        row, column = divmod(index, PANELS_PER_ROW)
        inside = [curve for curve in curves if curve.world == world]
        shift = f"translate({column * PANEL_WIDTH} {row * HEIGHT})"
        parts += [f'<g transform="{shift}">', *_panel(world, inside, labels, axis), "</g>"]
    for index, label in enumerate(labels):
        y = legend + 18 * index
        parts.append(f'<rect x="{LEFT}" y="{y - 8}" width="18" height="4" fill="{_color(index)}"/>')
        parts.append(_text(LEFT + 26, y - 2, label, "start", INK))
    return "\n".join([*parts, "</svg>", ""])


def _panel(world: str, curves: Sequence[Curve], labels: Sequence[str], axis: int) -> list[str]:
    last = max([1.0, *(float(point[axis]) for curve in curves for point in curve.points)])

    def place(tokens: float, success: float) -> tuple[float, float]:
        x = LEFT + (PANEL_WIDTH - LEFT - RIGHT) * tokens / last
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * success

    parts = [_text(place(last / 2, 0)[0], TOP - 12, world, "middle", INK)]
    for tick in range(NUM_TICKS):
        share = tick / (NUM_TICKS - 1)
        parts.append(_line([place(0, share), place(last, share)], GRID_COLOR, 1.0))
        parts.append(_text(place(0, share)[0] - 8, place(0, share)[1] + 4, f"{share:.0%}", "end", TEXT_COLOR))
        parts.append(_text(place(share * last, 0)[0], HEIGHT - BOTTOM + 18, _short(share * last), "middle", TEXT_COLOR))
    name = "sampled tokens" if axis == SAMPLED else "trained tokens"
    parts.append(_text(place(last / 2, 0)[0], HEIGHT - BOTTOM + 38, name, "middle", TEXT_COLOR))
    means: list[str] = []
    for index, label in enumerate(labels):
        lines = [_measured(curve, axis) for curve in curves if curve.label == label]
        middle, low, high = _mean_and_band([line for line in lines if line])
        if low:
            outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in [*high, *reversed(low)]))
            parts.append(f'<polygon points="{outline}" fill="{_color(index)}" fill-opacity="0.1"/>')
        if middle:
            means.append(_line([place(*point) for point in middle], _color(index), 2.0))
    return [*parts, *means]


def _measured(curve: Curve, axis: int) -> Points:
    return [(float(point[axis]), point[2]) for point in curve.points if math.isfinite(point[2])]


def _mean_and_band(lines: Sequence[Points]) -> tuple[Points, Points, Points]:
    """The mean of lines over the range that all of them cover, and its 95 % interval, which is empty for one line."""
    if not lines:
        return [], [], []
    grid = np.linspace(0, min(line[-1][0] for line in lines), NUM_MEAN_POINTS)
    values = np.array([np.interp(grid, [x for x, _ in line], [y for _, y in line]) for line in lines])
    found = [mean_interval([[float(value)] for value in values[:, at]]) for at in range(len(grid))]
    middle = [(float(x), one.value) for x, one in zip(grid, found, strict=True)]
    if len(lines) == 1:
        return middle, [], []
    low = [(float(x), max(0.0, one.low)) for x, one in zip(grid, found, strict=True)]
    high = [(float(x), min(1.0, one.high)) for x, one in zip(grid, found, strict=True)]
    return middle, low, high


def _short(tokens: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:.0f}"


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _line(points: Sequence[tuple[float, float]], color: str, width: float) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, color: str, size: int = 12) -> str:
    style = f'text-anchor="{anchor}" fill="{color}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
