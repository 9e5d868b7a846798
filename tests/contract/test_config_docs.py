"""docs/config.md is made from the config's fields."""

from __future__ import annotations

from pathlib import Path

from turnwise.config.files import option_paths
from turnwise.config.reference import help_text, reference_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def test_the_options_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference_page(), (
        "run: python -m turnwise.config.reference > docs/config.md"
    )


def test_the_help_names_every_option() -> None:
    text = help_text()
    assert all(f"  {path}=" in text for path in option_paths())
