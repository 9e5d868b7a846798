"""The Python that runs a server: whether it can import the server, and which arguments that takes."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.models.directories import home
from turnwise.rollout.config import RolloutConfig
from turnwise.runtime.suggest import did_you_mean

FIND = "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); print(s.origin if s else '')"
SAY = """
def values(nargs):
    return {None: 1, "?": 1}.get(nargs, nargs if isinstance(nargs, int) else -1)

found = {}
for action in parser._actions:
    for name in action.option_strings:
        found[name] = {"names": action.option_strings, "values": values(action.nargs)}
print("ARGUMENTS " + json.dumps(found))
"""
"""Prints what a parser takes: all names of an argument, and how many values follow it (-1: any number)."""
LIST_VLLM = """
import json
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
parser = make_arg_parser(FlexibleArgumentParser())
"""
"""Makes a server's parser; run by the server's own Python."""
LIST_SGLANG = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
"""
LISTS = {"vllm": LIST_VLLM + SAY, "sglang": LIST_SGLANG + SAY}
LEVEL = re.compile(r"-O[0-9]?")
"""vLLM's optimization level, which its parser rewrites before it reads anything."""
INSTEAD = {"--tensor-parallel-size": "rollout.tensor_parallel_size", "--tp-size": "rollout.tensor_parallel_size"}
"""Options that set arguments which are the run's own."""


@dataclass(frozen=True, slots=True)
class KnownArgument:
    """One argument of a server."""

    names: tuple[str, ...]
    num_values: int
    """How many values follow it; -1: any number."""


FIND_S, LIST_S = 60.0, 300.0


def server_python(rollout: RolloutConfig) -> str:
    """The Python that runs a server of our own."""
    return rollout.server_python or sys.executable


def size_arguments(rollout: RolloutConfig, names: Mapping[str, str]) -> list[str]:
    """The server's arguments (`names`, by option of the section `rollout`) for the options that were set."""
    found: list[str] = []
    for option, argument in names.items():
        value = getattr(rollout, option)
        if value != RolloutConfig.model_fields[option].default:
            found += [argument, str(value)]
    return found


def given_value(arguments: Sequence[str], name: str) -> str | None:
    """The value of an argument that the user gave the server, as `--name value` or `--name=value`."""
    for given, following in zip_longest(arguments, arguments[1:]):
        if given == name:
            return following
        if given.startswith(f"{name}="):
            return given.partition("=")[2]
    return None


def check_module(python: str, module: str) -> str:
    """Refuse a Python that cannot import the server; returns the place of the server's package."""
    if shutil.which(python) is None:
        raise ConfigError(f"rollout.server_python={python} is no program; expected the path of a Python")
    place = _find(python, module)
    if not place:
        raise ConfigError(
            f"{python} cannot import {module}; install it there, or name a Python that has it: "
            f"rollout.server_python=/path/to/venv/bin/python; or use servers that run: rollout.url=http://host:port "
            "(docs/backends.md)"
        )
    return place


def check_own_server(rollout: RolloutConfig, module: str, own: Sequence[str]) -> None:
    """Refuse a server that the run cannot start, before any work. Servers with an address are not ours to start."""
    if rollout.url:
        return
    python = server_python(rollout)
    check_module(python, module)
    check_arguments(python, module, rollout.server_args, own=own)


def check_arguments(python: str, module: str, given: Sequence[str], own: Sequence[str]) -> None:
    """Refuse arguments that the server does not take, and those that are the run's own, by name."""
    if not given:
        return
    known = known_arguments(python, module)
    num_left = 0
    for one in given:
        if not _is_name(one, known):
            if not num_left:
                raise ConfigError(
                    f"rollout.server_args has {one!r}, which belongs to no argument; expected arguments such as "
                    "--max-logprobs 5"
                )
            num_left -= 1
            continue
        name, is_set, _ = one.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if LEVEL.fullmatch(name):
            num_left = 1 - len(name[2:])
            continue
        # "--compilation-config.mode 3" sets one key of an argument that is a mapping
        found = known.get(name.partition(".")[0])
        taken = {name, *(found.names if found else ())} & set(own)
        if taken:
            instead = next((f"; set {INSTEAD[one]}" for one in taken if one in INSTEAD), "; leave it out")
            raise ConfigError(f"rollout.server_args has {name}, which the run sets itself{instead}")
        if found is None:
            near = did_you_mean(name, sorted(known))
            raise ConfigError(f"rollout.server_args has {name}, which {module} does not take{near}")
        num_left = 0 if is_set else found.num_values


def _is_name(one: str, known: Mapping[str, KnownArgument]) -> bool:
    """Whether a part of the command line names an argument; a negative number is a value, unless it names one."""
    if not one.startswith("-") or one == "-":
        return False
    return one in known or re.fullmatch(r"-[0-9.]+(e-?[0-9]+)?", one) is None


def known_arguments(python: str, module: str) -> Mapping[str, KnownArgument]:
    """All arguments that the server takes, by name. Asking takes seconds, so the answer is kept in a file."""
    place = check_module(python, module)
    stamp = f"{place} {Path(place).stat().st_mtime_ns} {_version(place)} {LISTS[module]}"
    file = home() / "servers" / f"{module}-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}.json"
    if not file.is_file():
        told = _run(python, ["-c", LISTS[module]], LIST_S)
        found = [line for line in told.stdout.splitlines() if line.startswith("ARGUMENTS ")]
        if not found:
            raise ConfigError(f"{python} cannot list the arguments of {module}: {told.stderr.strip()[-400:]}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found[-1].removeprefix("ARGUMENTS "), encoding="utf-8")
    said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {name: KnownArgument(tuple(one["names"]), int(one["values"])) for name, one in said.items()}


@functools.cache
def _find(python: str, module: str) -> str:
    return _run(python, ["-c", FIND, module], FIND_S).stdout.strip()


def _version(place: str) -> str:
    """The name of the package's own metadata, which has its version in it."""
    package = Path(place).parent
    return ",".join(sorted(path.name for path in package.parent.glob(f"{package.name}*.dist-info")))


def _run(python: str, arguments: Sequence[str], deadline_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [python, "-I", *arguments], capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise ConfigError(f"{python} cannot be run: {cause}") from cause
