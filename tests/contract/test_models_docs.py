"""`docs/models.md` lists the families that the code supports and refuses; `turnwise bench families` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from turnwise.bench.family_page import COLUMNS, ON_CPU, ON_GPU, REFUSALS, read_table, refusal_table
from turnwise.bench.family_samples import family_samples
from turnwise.runtime import tolerances

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HINT = "run `turnwise bench families --device cpu --write docs/models.md`"


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_page_lists_every_family_with_small_differences() -> None:
    families = read_table(page(), ON_CPU)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in families.splitlines()[2:]]
    assert [row[0].strip("`") for row in rows] == [sample.name for sample in family_samples()], HINT
    for name, _layers, _adapted, *numbers in rows:
        assert len(numbers) == len(COLUMNS), name
        assert max(float(number) for number in numbers) < tolerances.LOGPROBS, name  # 1e-04 may have been more


def test_the_page_lists_every_refusal() -> None:
    assert read_table(page(), REFUSALS) == refusal_table(), HINT


def test_the_page_says_how_its_tables_are_made() -> None:
    assert re.search(r"turnwise bench families .*--write docs/models\.md", page())


def test_the_page_says_what_ran_on_a_gpu() -> None:
    """Either that nothing did, or on which card."""
    assert re.match(r"Not yet run on a GPU\b|Measured on one NVIDIA ", read_table(page(), ON_GPU))
