"""docs/algorithms: a page for every method, whose links and options are real."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from turnwise.compare.request import parse_request
from turnwise.config.files import option_paths
from turnwise.methods.lookup import SHIPPED
from turnwise.methods.options import FreeLoss, PolicyTerms

PAGES = Path(__file__).resolve().parents[2] / "docs" / "algorithms"
ALL_PAGES = sorted(PAGES.glob("*.md"))
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
COMMAND = re.compile(r"^\$ turnwise compare ((?:.*\\\n)*.*)$", re.MULTILINE)
OPTION = re.compile(r"`((?:method|reward|data|critic|train|rollout|engine)\.[a-z_.]+?)(?:=[^`]*)?`")


def _index() -> dict[str, list[str]]:
    """Method to its pages, from the table of the first page."""
    rows = re.findall(r"^\| `(\w+)` \|.*\|.*\|(.*)\|$", (PAGES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {name: LINK.findall(cell) for name, cell in rows if LINK.findall(cell)}


def test_every_method_has_a_page() -> None:
    index = _index()
    assert sorted(index) == sorted(SHIPPED)
    missing = [page for pages in index.values() for page in pages if not (PAGES / page).is_file()]
    assert missing == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if not target.startswith("http")]
    assert [target for target in targets if not (PAGES / target).exists()] == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_every_option_that_a_page_names_is_one(page: Path) -> None:
    known = set(option_paths())
    assert [name for name in OPTION.findall(page.read_text(encoding="utf-8")) if name not in known] == []


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_the_page_of_a_method_tells_its_file_and_its_options(name: str) -> None:
    text = "\n".join((PAGES / page).read_text(encoding="utf-8") for page in _index()[name])
    assert "src/turnwise/methods/" in text
    shared = (PolicyTerms.model_fields | FreeLoss.model_fields).keys() - {"loss_fn"}
    own = [option for option in SHIPPED[name].model_fields if option not in shared]
    assert [option for option in own if f"method.{option}" not in text] == []


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_the_page_of_a_method_has_its_curve_and_a_command_that_is_taken(name: str) -> None:
    page = (PAGES / _index()[name][0]).read_text(encoding="utf-8")
    curves = [(PAGES / figure).read_text(encoding="utf-8") for figure in re.findall(r"\]\((figures/\w+\.svg)\)", page)]
    commands = COMMAND.findall(page)
    assert len(curves) == len(commands) > 0
    compared: set[str] = set()
    for curve, command in zip(curves, commands, strict=True):
        request = parse_request(shlex.split(command.replace("\\\n", " ")))
        for variant in request.variants:
            request.config(request.worlds[0], variant, 0)
            assert f">{variant.label}<" in curve, "the figure is of the methods that the command names"
            compared.add(variant.method)
    assert name in compared
