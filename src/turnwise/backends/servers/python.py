"""The Python that runs a server: whether it can import the server, and which arguments that takes."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from turnwise.errors import ConfigError
from turnwise.models.directories import home
from turnwise.rollout.config import RolloutConfig
from turnwise.runtime.suggest import did_you_mean

FIND = "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); print(s.origin if s else '')"
LIST_VLLM = """
import json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
parser = make_arg_parser(FlexibleArgumentParser())
print("ARGUMENTS " + json.dumps(sorted(name for action in parser._actions for name in action.option_strings)))
"""
"""Prints the arguments of a server; run by the server's own Python."""
LIST_SGLANG = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print("ARGUMENTS " + json.dumps(sorted(name for action in parser._actions for name in action.option_strings)))
"""
LISTS = {"vllm": LIST_VLLM, "sglang": LIST_SGLANG}
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
    names = [one.partition("=")[0].replace("_", "-") for one in given if one.startswith("--")]
    for name in names:
        if name in own:
            raise ConfigError(f"rollout.server_args has {name}, which the run sets itself; leave it out")
    if not names:
        if given:
            raise ConfigError(f"rollout.server_args={given[0]!r}; expected arguments such as --max-logprobs 5")
        return
    known = known_arguments(python, module)
    for name in names:
        # "--compilation-config.mode 3" sets one key of an argument that is a mapping
        if name.partition(".")[0] not in known:
            near = did_you_mean(name, sorted(known))
            raise ConfigError(f"rollout.server_args has {name}, which {module} does not take{near}")


def known_arguments(python: str, module: str) -> frozenset[str]:
    """The names of all arguments that the server takes. Asking takes seconds, so the answer is kept in a file."""
    place = check_module(python, module)
    stamp = f"{place} {Path(place).stat().st_mtime_ns} {_version(place)}"
    file = home() / "servers" / f"{module}-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}.json"
    if not file.is_file():
        said = _run(python, ["-c", LISTS[module]], LIST_S)
        found = [line for line in said.stdout.splitlines() if line.startswith("ARGUMENTS ")]
        if not found:
            raise ConfigError(f"{python} cannot list the arguments of {module}: {said.stderr.strip()[-400:]}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found[-1].removeprefix("ARGUMENTS "), encoding="utf-8")
    return frozenset(json.loads(file.read_text(encoding="utf-8")))


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
