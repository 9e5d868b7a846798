"""How good the scores of an outcome model are: accuracy, F1, Brier score, calibration, overall and by world."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

NUM_BINS = 10
THRESHOLD = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """The attempts whose score lies in one tenth of the scale."""

    low: float
    count: int
    mean_score: float
    success: float
    """Share of them that succeeded; equal to `mean_score` if the model is calibrated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What is known of a set of scores."""

    count: int
    success: float
    """Share of successes. A model that always gives the same answer has this accuracy, or 1 minus it."""
    accuracy: float
    f1: float
    """The F1 of successes; 0 if none was found."""
    brier: float
    calibration_error: float
    """Mean gap between score and success over the bins, by their counts (ECE)."""
    bins: tuple[Bin, ...] = ()
    by_world: dict[str, Quality] = field(default_factory=dict[str, "Quality"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(scores: Sequence[float], labels: Sequence[bool], worlds: Sequence[str] = ()) -> Quality:
    """Measure scores from 0 to 1 against labels."""
    pairs = list(zip(scores, labels, strict=True))
    said = [score >= THRESHOLD for score in scores]
    hits = sum(one and label for one, label in zip(said, labels, strict=True))
    wrong = sum(one != label for one, label in zip(said, labels, strict=True))
    bins = _bins(pairs)
    own: dict[str, tuple[list[float], list[bool]]] = defaultdict(lambda: ([], []))
    for world, score, label in zip(worlds, scores, labels, strict=bool(worlds)):
        own[world][0].append(score)
        own[world][1].append(label)
    return Quality(
        count=len(pairs),
        success=sum(labels) / len(labels),
        accuracy=1 - wrong / len(pairs),
        f1=2 * hits / (2 * hits + wrong) if hits else 0.0,
        brier=sum((score - label) ** 2 for score, label in pairs) / len(pairs),
        calibration_error=sum(one.count * abs(one.mean_score - one.success) for one in bins) / len(pairs),
        bins=bins,
        by_world={world: measure(*both) for world, both in sorted(own.items())},
    )


def _bins(pairs: Sequence[tuple[float, bool]]) -> tuple[Bin, ...]:
    inside: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for score, label in pairs:
        inside[min(int(score * NUM_BINS), NUM_BINS - 1)].append((score, label))
    return tuple(
        Bin(
            low=index / NUM_BINS,
            count=len(own),
            mean_score=sum(score for score, _ in own) / len(own),
            success=sum(label for _, label in own) / len(own),
        )
        for index, own in sorted(inside.items())
    )


def calibration_svg(quality: Quality, title: str) -> str:
    """The calibration curve: for each bin, how many succeeded against what was said. The diagonal is perfect."""
    size, edge = 300, 40
    most = max((one.count for one in quality.bins), default=1)

    def at(x: float, y: float) -> str:
        return f"{edge + x * size:.1f},{edge + (1 - y) * size:.1f}"

    points = " ".join(at(one.mean_score, one.success) for one in quality.bins)
    dots = "".join(
        f'<circle cx="{at(one.mean_score, one.success).split(",")[0]}" '
        f'cy="{at(one.mean_score, one.success).split(",")[1]}" r="{3 + 6 * (one.count / most) ** 0.5:.1f}" '
        f'fill="#1f77b4" fill-opacity="0.7"><title>{one.count} attempts</title></circle>'
        for one in quality.bins
    )
    words = f"accuracy {quality.accuracy:.1%}, F1 {quality.f1:.2f}, ECE {quality.calibration_error:.3f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size + 2 * edge}" height="{size + 2 * edge}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/><text x="{edge}" y="16">{title}</text>'
        f'<text x="{edge}" y="32" fill="#555">{words}; {quality.count} held-out attempts</text>'
        f'<rect x="{edge}" y="{edge}" width="{size}" height="{size}" fill="none" stroke="#999"/>'
        f'<polyline points="{at(0, 0)} {at(1, 1)}" fill="none" stroke="#bbb" stroke-dasharray="4"/>'
        f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="2"/>{dots}'
        f'<text x="{edge + size / 2 - 20}" y="{size + edge + 28}">score</text>'
        f'<text x="14" y="{edge + size / 2}" transform="rotate(-90 14 {edge + size / 2})">success</text></svg>\n'
    )
