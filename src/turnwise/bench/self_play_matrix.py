"""Self-play with a pool against self-play without: the mean of one tournament for each seed.

    python -m turnwise.bench.self_play_matrix runs/matrix-0.json runs/matrix-1.json ... --out matrix.svg

Each file is the JSON of `turnwise tournament`, whose players are a start, two runs from it (the arms) by their
checkpoints, and strangers. Runs are named ARM-SEED, so `pool-0` and `pool-1` are one arm. Intervals are Student's
between the seeds. What a policy has forgotten is what the last checkpoint of an arm gets from the policies that it was
early on, less what the middle one got from them: below 0 it plays them worse than it once did.

The Markdown goes to stdout, and the matrix to `--out` as a picture.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.opponents.matrix_figure import matrix_svg, short_labels
from turnwise.opponents.tournament import Estimate, Standings
from turnwise.watch.intervals import mean_interval

Matrix = Mapping[tuple[str, str], Sequence[float]]
"""(player, opponent) to the player's reward in the tournament of each seed."""
NUM_EARLY = 3
"""Policies of an arm that are early: its start and its first checkpoints."""


def read_players(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The players of each file, by names that all files share."""
    found: list[dict[str, Any]] = []
    for file in files:
        players = json.loads(file.read_text(encoding="utf-8"))["players"]
        names = {name: shared_name(label) for name, label in short_labels(list(players), 200).items()}
        found.append(
            {
                names[name]: told | {"against": {names[other]: cell for other, cell in told["against"].items()}}
                for name, told in players.items()
            }
        )
    named = [set(one) for one in found]
    missing = set.union(*named) - set.intersection(*named)
    if missing:
        raise SystemExit(f"not in every tournament: {', '.join(sorted(missing))}; expected the same players in all")
    return found


def shared_name(label: str) -> str:
    """`pool-3/step-000010` as `pool 10`, and `warm-3` as `warm`: without the seed."""
    run, _, step = label.partition("/")
    run = re.sub(r"-\d+$", "", run)
    return f"{run} {int(step.rpartition('-')[2])}" if step else run


def mean(values: Sequence[float]) -> Estimate:
    found = mean_interval([[value] for value in values])
    return Estimate(value=found.value, low=found.low, high=found.high)


def to_matrix(seeds: Sequence[Mapping[str, Any]]) -> Matrix:
    return {
        (own, other): [seed[own]["against"][other]["value"] for seed in seeds]
        for own in seeds[0]
        for other in seeds[0][own]["against"]
    }


def to_standings(seeds: Sequence[Mapping[str, Any]]) -> Standings:
    """The means over seeds, with intervals between them."""
    names = tuple(seeds[0])

    def told(key: str) -> dict[str, Estimate]:
        return {name: mean([seed[name][key]["value"] for seed in seeds]) for name in names}

    return Standings(
        names=names,
        ratings=told("elo"),
        payoffs=told("reward"),
        by_seat={name: (float("nan"), float("nan")) for name in names},
        agreement=told("agreement"),
        joint=told("joint"),
        efficient=told("efficient"),
        matrix={pair: mean(values) for pair, values in to_matrix(seeds).items()},
        num_failed=0,
    )


def policies_of(names: Sequence[str], arm: str, start: str) -> list[str]:
    """The start and the checkpoints of an arm, the oldest first."""
    own = [name for name in names if name.partition(" ")[0] == arm]
    return [start, *sorted(own, key=lambda name: int(name.rpartition(" ")[2]))]


def forgotten(matrix: Matrix, policies: Sequence[str]) -> list[float]:
    """For each seed, the last policy's reward against the early ones, minus that of the policy in the middle."""
    if len(policies) < NUM_EARLY + 2:
        raise SystemExit(f"{', '.join(policies)}: expected {NUM_EARLY + 2} policies of an arm or more, start included")
    early, middle, last = policies[:NUM_EARLY], policies[(len(policies) + 1) // 2], policies[-1]
    by_early = [
        [after - before for after, before in zip(matrix[last, one], matrix[middle, one], strict=True)] for one in early
    ]
    return [sum(column) / len(early) for column in zip(*by_early, strict=True)]


def gained(matrix: Matrix, last: str, start: str, strangers: Sequence[str]) -> list[float]:
    """By seed: the last policy's mean reward against players that its run does not play, less the start's."""
    by_one = [
        [after - before for after, before in zip(matrix[last, one], matrix[start, one], strict=True)]
        for one in strangers
    ]
    return [sum(column) / len(strangers) for column in zip(*by_one, strict=True)]


def report(seeds: Sequence[Mapping[str, Any]], arms: tuple[str, str], start: str) -> list[str]:
    """The differences that the study is about, as lines of Markdown."""
    matrix, names = to_matrix(seeds), list(seeds[0])
    lasts = [policies_of(names, arm, start)[-1] for arm in arms]
    strangers = [name for name in names if name != start and name.partition(" ")[0] not in arms]
    losses = [forgotten(matrix, policies_of(names, arm, start)) for arm in arms]
    lines = [f"| | {arms[0]} | {arms[1]} | {arms[0]} less {arms[1]} |", "|---|---:|---:|---:|"]

    def row(head: str, first: Sequence[float], second: Sequence[float]) -> None:
        apart = mean([one - other for one, other in zip(first, second, strict=True)])
        cells = [mean(first).number(), mean(second).number(), apart.number(3)]
        lines.append(f"| {head} | {' | '.join(cells)} |")

    row("early opponents: last less middle policy", *losses)
    row("strangers: last policy less the start", *(gained(matrix, last, start, strangers) for last in lasts))
    for one in (start, *strangers):
        row(f"last policy against {one}", matrix[lasts[0], one], matrix[lasts[1], one])
    row("last policy against that of the other arm", matrix[lasts[0], lasts[1]], matrix[lasts[1], lasts[0]])
    row("deals of the last policy", *([seed[last]["agreement"]["value"] for seed in seeds] for last in lasts))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m turnwise.bench.self_play_matrix", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="the JSON of a tournament, one for a seed")
    parser.add_argument("--arms", nargs=2, default=("pool", "self"), metavar="ARM", help="default: pool self")
    parser.add_argument("--start", default="warm", help="the runs that both arms began with (default: warm)")
    parser.add_argument("--out", type=Path, help="where the picture goes")
    options = parser.parse_args()
    seeds = read_players(options.files)
    print("\n".join(report(seeds, tuple(options.arms), options.start)))
    if options.out is not None:
        title = f"mean reward of the row against the column, {len(seeds)} seeds, interval between seeds"
        options.out.write_text(matrix_svg(to_standings(seeds), title), encoding="utf-8")


if __name__ == "__main__":
    main()
