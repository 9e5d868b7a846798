"""Every command on the adapters' pages is one that the command line takes, with options that are there."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from turnwise.config.files import load_config
from turnwise.envs.registry import ADAPTERS, world_options

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "adapters").glob("*.md"))
COMMAND = re.compile(r"turnwise train env=[^\n`]*")
COMMANDS = [found for page in PAGES for found in COMMAND.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_a_page_names_an_adapter_and_options_that_exist(command: str) -> None:
    _, _, env, *overrides = shlex.split(command)
    name = env.removeprefix("env=")
    config = load_config(name, [env, *overrides])
    assert config.env.name == name
    assert name.partition(":")[0] in ADAPTERS
    assert set(config.env.options) <= {option.name for option in world_options(name)}


@pytest.mark.parametrize("prefix", ADAPTERS)
def test_every_adapter_has_a_page_with_its_command_its_extra_and_its_options(prefix: str) -> None:
    text = (ROOT / "docs" / "adapters" / f"{prefix}.md").read_text(encoding="utf-8")
    extra = prefix.replace("_", "-")
    assert f"turnwise train env={prefix}:" in text
    assert f"pip install 'turnwise[{extra}]'" in text
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extra in extras
    missing = [option.name for option in world_options(f"{prefix}:x") if f"`{option.name}`" not in text]
    assert not missing
    assert f"({prefix}.md)" in (ROOT / "docs" / "adapters" / "index.md").read_text(encoding="utf-8")
