"""`pytest --random-order SEED`: another order, the same tests, and the same order again for the same seed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

from ordering import shuffled

ROOT = Path(__file__).parents[2]


def test_groups_stay_together_while_they_and_their_items_change_places() -> None:
    items = [(group, number) for group in range(20) for number in range(20)]
    orders = [shuffled(items, lambda item: item[0], seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert sorted(order) == items
        groups = [group for group, _ in order]
        assert sum(one != other for one, other in itertools.pairwise(groups)) == 19
        assert groups != sorted(groups)
        assert [number for group, number in order if group == 0] != list(range(20))


def test_the_option_shuffles_what_is_collected() -> None:
    def collect(*options: str) -> list[str]:
        place = "tests/unit/envs/test_schema.py"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, place]
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [line for line in out.splitlines() if line.startswith(place)]

    plain, other = collect(), collect("--random-order", "3")
    assert len(plain) > 10
    assert sorted(other) == sorted(plain)
    assert other != plain
