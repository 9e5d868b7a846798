"""Every option that a page of the docs names is one, and every command that a page prints is taken by the config."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from turnwise import Run
from turnwise.bench.cli import build_parser as bench_parser
from turnwise.cli import build_parser
from turnwise.compare.compare import parse_request
from turnwise.config.config import Config
from turnwise.config.files import option_paths
from turnwise.config.spellings import ONLY_OFF, SKYRL_SECTION, canonical_option
from turnwise.envs.config import MixedWorld
from turnwise.training.setup import read_config

ROOT = Path(__file__).resolve().parents[2]
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "cli.md"]  # the help, with more commands
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
SECTIONS = "|".join((*Config.model_fields, SKYRL_SECTION))
NAMED = re.compile(rf"`((?:{SECTIONS})\.[a-z_]+(?:\.[a-z_]+)*)(?=[`=])|(?:^|[\s\['\"`;,])((?:{SECTIONS})\.[a-z_.]+)=")
"""`train.steps` in backticks, or train.steps=5 anywhere."""
COMMAND = re.compile(
    r"^\s*(?:\$ )?turnwise (train|compare) ((?:.*\\\n)*.*)$|`turnwise (train|compare) ([^`]+)`", re.MULTILINE
)
NOT_OPTIONS = {"run.db", "train.jsonl", *(f"run.{name}" for name in dir(Run))}
"""Files, and what a run is asked in Python: `run.metrics`."""
MODULE = re.compile(r"[a-z]+\.py")
"""A file of code that has a section's name: `critic.py`."""
PRINTED = re.compile(r"^\s*(?:\$ )?turnwise ((?!train |compare )[a-z](?:.*\\\n)*.*)$", re.MULTILINE)
"""Any other command, on a line of its own."""
MENTIONED = re.compile(r"`turnwise ((?!train|compare)[a-z-]+(?: [a-z][a-z-]*)?)[ `]")
"""A command with its action, in a sentence."""
BLANKS = re.compile(r"\b[A-Z]{3,}\b|=[A-Z]$|\.\.\.|section\.key")
"""Words that stand for others: such a line is no command."""


def _named_options(text: str) -> set[str]:
    found = {_of_any_member(first or second) for first, second in NAMED.findall(text)}
    return {
        name
        for name in found
        if not name.startswith(("env.options.", "method.loss_options."))
        and name not in NOT_OPTIONS
        and not MODULE.fullmatch(name)
    }


def _of_any_member(name: str) -> str:
    """`env.mix.doors.share` as `env.mix`, if members of a mix have such an option."""
    member = re.fullmatch(r"env\.mix\.\w+\.(\w+)(\.\w+)*", name)
    return "env.mix" if member and member[1] in MixedWorld.model_fields else name


def _commands(text: str) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for in_block, block, in_line, line in COMMAND.findall(text):
        words = shlex.split((block or line).replace("\\\n", " "), comments=True)
        named = [word for word in words if not word.startswith("--")]
        if named and not any(BLANKS.search(word) for word in words) and "--resume" not in words:
            found.append((in_block or in_line, named))
    return found


def test_every_option_that_a_page_names_is_one() -> None:
    known = {*option_paths(), *ONLY_OFF, *(path.rpartition(".")[0] for path in option_paths()), "env.options"}
    unknown = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in _named_options(page.read_text(encoding="utf-8"))
        if canonical_option(name) not in known
    }
    assert unknown == set()
    assert len({name for page in PAGES for name in _named_options(page.read_text(encoding="utf-8"))}) > 50
    stale = "An env gets them with `rollout.sampling_params.stop='[\"</search>\"]'`."
    assert _named_options(stale) == {"rollout.sampling_params.stop"}


def test_every_command_that_a_page_prints_is_taken() -> None:
    num_commands = 0
    for page in PAGES:
        for command, words in _commands(page.read_text(encoding="utf-8")):
            num_commands += 1
            if command == "train":
                named = [word for word in words if "=" not in word]
                worlds = [word.partition("=")[2] for word in words if word.startswith("env=")]
                read_config((named or worlds)[0], [word for word in words if "=" in word])
                continue
            request = parse_request(words)
            for world in request.worlds:
                for variant in request.variants:
                    request.config(world, variant, seed=0)
    assert num_commands > 40


def test_every_other_command_that_a_page_prints_is_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        (page, shlex.split(text.replace("\\\n", " "), comments=True))
        for page in PAGES
        for text in PRINTED.findall(_blocks(page.read_text(encoding="utf-8")))
    ]
    whole = [(page, words) for page, words in found if not any(BLANKS.search(word) for word in words)]
    assert len(whole) > 40
    refused = [f"{page.relative_to(ROOT)}: {' '.join(words)}" for page, words in whole if _exit_code(words) != 0]
    assert refused == [], capsys.readouterr().err


def test_every_command_that_a_sentence_names_is_one() -> None:
    named = {words for page in PAGES for words in MENTIONED.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 20
    assert sorted(words for words in named if _exit_code([*words.split(), "--help"]) != 0) == []
    assert _exit_code(["model", "merge", "--help"]) != 0


def _blocks(text: str) -> str:
    return "\n".join(re.findall(r"^```[a-z]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def _exit_code(words: list[str]) -> int | str | None:
    """0 if the command line is taken, or prints its help; what is wrong goes to stderr."""
    try:
        if words[0] == "bench" and len(words) > 1:
            bench_parser().parse_args(words[1:])
            return 0
        _, rest = build_parser().parse_known_args(words)
    except SystemExit as end:
        return end.code
    return 0 if all("=" in word for word in rest) else f"unknown: {rest}"
