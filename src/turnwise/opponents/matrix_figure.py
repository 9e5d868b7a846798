"""The cross-play matrix of a tournament as an SVG picture: rows are players, columns are their opponents."""

from __future__ import annotations

from html import escape

from turnwise.opponents.tournament import Standings

CELL, LABEL, TOP, FONT = 92, 190, 70, "font-family='sans-serif' font-size='13'"


def matrix_svg(table: Standings, title: str) -> str:
    """Each cell is the row's mean reward against the column, with its interval; darker is more."""
    names = sorted(table.names, key=lambda name: -table.ratings[name].value)
    size = CELL * len(names)
    values = [one.value for one in table.matrix.values()]
    low, span = min(values), max(max(values) - min(values), 1e-9)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{LABEL + size + 20}' height='{TOP + size + 20}' {FONT}>",
        "<rect width='100%' height='100%' fill='white'/>",
        f"<text x='10' y='22' font-weight='bold'>{escape(title)}</text>",
    ]
    for index, name in enumerate(names):
        middle = CELL * index + CELL / 2
        rating = f"{table.ratings[name].value:+.0f} Elo"
        parts.append(_text(LABEL - 8, TOP + middle, f"{_short(name)} ({rating})", "end"))
        parts.append(_text(LABEL + middle, TOP - 12, _short(name, 12), "middle"))
    for row, own in enumerate(names):
        for column, other in enumerate(names):
            x, y = LABEL + CELL * column, TOP + CELL * row
            if own == other:
                parts.append(f"<rect x='{x}' y='{y}' width='{CELL}' height='{CELL}' fill='#eeeeee' stroke='white'/>")
                continue
            cell = table.matrix[own, other]
            shade = (cell.value - low) / span
            color = f"rgb({255 - round(180 * shade)},{255 - round(110 * shade)},255)"
            parts.append(f"<rect x='{x}' y='{y}' width='{CELL}' height='{CELL}' fill='{color}' stroke='white'/>")
            parts.append(_text(x + CELL / 2, y + CELL / 2, f"{cell.value:.2f}", "middle"))
            parts.append(_text(x + CELL / 2, y + CELL / 2 + 18, f"{cell.low:.2f} to {cell.high:.2f}", "middle", 10))
    return "\n".join([*parts, "</svg>", ""])


def _short(name: str, length: int = 16) -> str:
    last = name.rstrip("/").rsplit("/", 1)[-1] or name
    return last if len(last) <= length else f"{last[: length - 1]}…"


def _text(x: float, y: float, text: str, anchor: str, size: int = 13) -> str:
    return f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' font-size='{size}'>{escape(text)}</text>"
