"""Finds the packages that a sandbox may import: the named ones and their requirements, not everything installed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from turnwise.errors import ConfigError

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")


def find_packages(names: Sequence[str]) -> dict[str, Path]:
    """The top-level modules and folders of the named distributions and of their unconditional requirements."""
    found: dict[str, Path] = {}
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        key = name.lower().replace("_", "-")
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError as cause:
            if name in names:
                raise ConfigError(f"package {name!r} is not installed here; `pip install {name}`") from cause
            continue  # a requirement with a condition that is not met here
        for file in distribution.files or ():
            top = file.parts[0]
            if top in ("..", "__pycache__") or top.endswith(".pth"):
                continue
            found[top] = Path(str(distribution.locate_file(top)))
        waiting += [_requirement_name(text) for text in distribution.requires or () if "extra ==" not in text]
    return {name: place for name, place in found.items() if place.exists()}


def _requirement_name(text: str) -> str:
    match = _NAME.match(text)
    assert match is not None, text
    return match[0]
