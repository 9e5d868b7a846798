"""`docs/models.md` lists the families that the code supports and refuses; `turnwise bench families` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from turnwise.bench.family_page import BEGIN, COLUMNS, END, refusal_table
from turnwise.bench.family_samples import family_samples
from turnwise.runtime import tolerances

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HINT = "run `turnwise bench families --device cpu --write docs/models.md`"


def listed_tables(page: str) -> list[str]:
    """The texts between the marks of a page."""
    return [part.strip() for part in re.findall(re.escape(BEGIN) + "(.*?)" + re.escape(END), page, flags=re.DOTALL)]


def test_the_page_lists_every_family_with_small_differences() -> None:
    families, _ = listed_tables(PAGE.read_text(encoding="utf-8"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in families.splitlines()[2:]]
    assert [row[0].strip("`") for row in rows] == [sample.name for sample in family_samples()], HINT
    for name, _layers, _adapted, *numbers in rows:
        assert len(numbers) == len(COLUMNS), name
        assert max(float(number) for number in numbers) <= tolerances.LOGPROBS, name


def test_the_page_lists_every_refusal() -> None:
    _, refused = listed_tables(PAGE.read_text(encoding="utf-8"))
    assert refused == refusal_table(), HINT


def test_the_page_says_how_its_tables_are_made() -> None:
    assert re.search(r"turnwise bench families .*--write docs/models\.md", PAGE.read_text(encoding="utf-8"))
