"""docs/metrics.md is made from the catalogue, and every metric that a page names is in it."""

from __future__ import annotations

import re
from pathlib import Path

from turnwise.watch.catalogue import CATALOGUE, find_metric, metrics_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = "|".join(sorted({metric.name.partition("/")[0] for metric in CATALOGUE}))
NAMED = re.compile(rf"`((?:{ROOMS})/[a-z][a-z0-9_]*[a-z0-9])`")


def test_the_metrics_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == metrics_page(), "run: python -m turnwise.watch.catalogue > docs/metrics.md"


def test_every_metric_that_a_page_names_is_in_the_catalogue() -> None:
    named = {(page.name, name) for page in PAGES for name in NAMED.findall(page.read_text(encoding="utf-8"))}
    assert {(page, name) for page, name in named if find_metric(name) is None} == set()
    assert len(named) > 20
