"""The cross-play matrix of a tournament as an SVG picture: rows are players, columns are their opponents.

Beside the matrix stand each player's mean reward, its share of games with a deal, its joint surplus and its share of
efficient deals, so that one who wins by being unreasonable is seen at once: dark cells, and a small joint surplus.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from turnwise.opponents.tournament import Estimate, Standings

CELL, HEIGHT, TOP, LETTER = 104, 56, 92, 7.4
"""Pixels: a cell's width and height, what stands above the matrix, and a letter of the labels."""
FONT = "font-family='sans-serif' font-size='13'"


def matrix_svg(table: Standings, title: str) -> str:
    """Each cell is the row's mean reward against the column, with its interval; darker is more."""
    names = sorted(table.names, key=lambda name: -table.ratings[name].value)
    labels = short_labels(names)
    rows = {name: f"{labels[name]} ({round(table.ratings[name].value):+d} Elo)" for name in names}
    left = 24 + LETTER * max(len(text) for text in rows.values())
    beside = _columns_beside(table)
    size = CELL * (len(names) + len(beside)) + (12 if beside else 0)
    width = max(left + size + 16, 20 + LETTER * max(len(title), len(_READ)))
    height = TOP + HEIGHT * len(names) + 16
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height}' {FONT}>",
        "<rect width='100%' height='100%' fill='white'/>",
        f"<text x='10' y='22' font-weight='bold'>{escape(title)}</text>",
        _text(10, 42, _READ, "start", 11),
    ]
    known = [one.value for one in table.matrix.values() if math.isfinite(one.value)]
    for row, own in enumerate(names):
        y = TOP + HEIGHT * row
        parts.append(_text(left - 10, y + HEIGHT / 2 + 4, rows[own], "end"))
        parts.append(_text(left + CELL * (row + 0.5), TOP - 10, labels[own], "middle", _fitting(labels[own])))
        for column, other in enumerate(names):
            parts += _cell(left + CELL * column, y, table.matrix.get((own, other)), known)
        for column, (_, values) in enumerate(beside):
            x = left + CELL * (len(names) + column + 0.5) + 12
            parts += _number(x, y, values[own])
    for column, (head, _) in enumerate(beside):
        parts.append(_text(left + CELL * (len(names) + column + 0.5) + 12, TOP - 10, head, "middle"))
    return "\n".join([*parts, "</svg>", ""])


_READ = (
    "rows by rating, the best first; a cell: the row's reward against the column; below each number its 95 % interval"
)


def short_labels(names: Sequence[str], length: int = 24) -> dict[str, str]:
    """The last part of each path, and as many parts before it as tell it from the others. A checkpoint in a run's
    directory is told by the run and the step."""
    parts = {name: _label_parts(name) for name in names}

    def label(name: str) -> str:
        own, least = parts[name], 2 if _is_in_run(name) else 1
        for count in range(least, len(own)):
            if sum(other[-count:] == own[-count:] for other in parts.values()) == 1:
                return "/".join(own[-count:])
        return "/".join(own)

    found = {name: label(name) for name in names}
    return {name: text if len(text) <= length else f"…{text[1 - length :]}" for name, text in found.items()}


def _label_parts(name: str) -> list[str]:
    parts = name.rstrip("/").split("/")
    return [*parts[:-4], parts[-1]] if _is_in_run(name) else parts


def _is_in_run(name: str) -> bool:
    """Whether a path is RUN/checkpoints/ID/weights/step-N, of which RUN and step-N say who it is."""
    parts = name.rstrip("/").split("/")
    return len(parts) > 4 and parts[-4] == "checkpoints"


def _columns_beside(table: Standings) -> list[tuple[str, Mapping[str, Estimate]]]:
    """What is said of a player over all its games, where the world says it."""
    columns: list[tuple[str, Mapping[str, Estimate]]] = [
        ("all games", table.payoffs),
        ("agreement", table.agreement),
        ("joint surplus", table.joint),
        ("efficient", table.efficient),
    ]
    return [(head, found) for head, found in columns if any(math.isfinite(one.value) for one in found.values())]


def _cell(x: float, y: float, cell: Estimate | None, known: Sequence[float]) -> list[str]:
    """One square: a player does not meet itself, and games that all failed have no reward."""
    if cell is None or not math.isfinite(cell.value):
        square = _square(x, y, "#eeeeee")
        return [square] if cell is None else [square, _text(x + CELL / 2, y + HEIGHT / 2 + 4, "no game", "middle", 11)]
    shade = (cell.value - min(known)) / max(max(known) - min(known), 1e-9)
    square = _square(x, y, f"rgb({255 - round(180 * shade)},{255 - round(110 * shade)},255)")
    return [square, *_number(x + CELL / 2, y, cell)]


def _square(x: float, y: float, fill: str) -> str:
    return f"<rect x='{x:g}' y='{y:g}' width='{CELL}' height='{HEIGHT}' fill='{fill}' stroke='white'/>"


def _number(x: float, y: float, found: Estimate) -> list[str]:
    """A number with its interval below."""
    if not math.isfinite(found.value):
        return [_text(x, y + HEIGHT / 2 + 4, "–", "middle")]
    return [
        _text(x, y + HEIGHT / 2 - 2, f"{found.value:.2f}", "middle"),
        _text(x, y + HEIGHT / 2 + 15, f"{found.low:.2f} to {found.high:.2f}", "middle", 11),
    ]


def _fitting(label: str) -> int:
    """The size of letters with which a label stands above its column."""
    return 13 if len(label) <= 13 else max(8, 13 * 13 // len(label))


def _text(x: float, y: float, text: str, anchor: str, size: int = 13) -> str:
    return f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' font-size='{size}'>{escape(text)}</text>"
