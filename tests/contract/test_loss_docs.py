"""docs/training_api.md states the table of losses: every loss, and every option with its default."""

from __future__ import annotations

import re
from pathlib import Path

from turnwise.losses.table import CORRECTION_BOUNDS, LOSSES, PolicyOptions

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "training_api.md").read_text(encoding="utf-8")
LOSS_ROW = re.compile(r"^\| `(\w+)` \| [^\n]* \|([^|\n]*)\|$", re.MULTILINE)
OPTION = re.compile(r"`(\w+)` ([\w.]+)")


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(int(value) if isinstance(value, bool) else value)


def test_the_page_has_every_loss_and_its_own_options_with_their_defaults() -> None:
    section = PAGE.split("## Losses")[1].split("|---|---|---|")[1].split("Thresholds are bounds")[0]
    rows = {name: dict(OPTION.findall(options)) for name, options in LOSS_ROW.findall(section)}
    assert rows == {
        name: {option: _shown(info.options.model_fields[option].default) for option in info.own_options}
        for name, info in LOSSES.items()
    }


def test_the_page_has_the_options_that_losses_over_policies_share() -> None:
    section = PAGE.split("also take:")[1].split("`forward` with")[0]
    for name, field in PolicyOptions.model_fields.items():
        if field.default is None:
            assert f"`{name}`" in section
        else:
            assert re.search(rf"`{name}` \| `?{re.escape(_shown(field.default))}`? \|", section), name


def test_the_page_has_the_bounds_of_every_correction() -> None:
    section = PAGE.split("### Off-policy corrections")[1].split("Without an old policy")[0]
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \|[^|]*\| (\S*) ?\| (\S*) ?\|$", section, re.MULTILINE)}
    for name, (low, high) in CORRECTION_BOUNDS.items():
        expected = (f"{low:g}" if name.endswith("mask") else "", "" if name == "none" else f"{high:g}")
        assert rows[name] == expected, name
