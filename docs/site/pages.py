"""Writes the reference pages that are made from the code: `docs/cli.md`, `docs/api.md` and `docs/support.md`.

python docs/site/pages.py            # write them
python docs/site/pages.py --check    # exit 1 if one of them is not up to date
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import turnwise
from turnwise.backends import backend_names, find_publisher
from turnwise.bench.cli import build_parser as bench_parser
from turnwise.cli import build_parser
from turnwise.commands.arguments import OPTIONS_HEADING
from turnwise.engine.ops.facts import DEVICES, GIB, DeviceFacts
from turnwise.envs.registry import ADAPTERS, SHIPPED_WORLDS, get_world, load_target
from turnwise.methods.lookup import SHIPPED
from turnwise.methods.options import FreeLoss, MethodOptions, PolicyTerms
from turnwise.models.families import supported_types

DOCS = Path(__file__).resolve().parents[1]
COMMAND = "python docs/site/pages.py"
WIDTH = "100"
"""Columns of the printed help."""


def cli_page() -> str:
    """Every command with its help, as the terminal prints it."""
    os.environ["COLUMNS"] = WIDTH
    lines = [
        "# Commands",
        "",
        "Every command with its options, as `turnwise COMMAND --help` prints them. The options of a run,",
        "`section.key=value`, are on [their own page](config.md).",
        "",
        f"This page is generated from the code (`{COMMAND}`).",
    ]
    for name, parser in [*_commands(build_parser()), *_commands(bench_parser())]:
        lines += ["", f"## {name}", "", "```text", _help_of(parser), "```"]
    return "\n".join(lines) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parsers of commands that have no commands below them."""
    for action in parser._actions:  # argparse has no public way to list its commands
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                below = list(_commands(command))
                yield from below or [(command.prog, command)]


def _help_of(parser: argparse.ArgumentParser) -> str:
    text = parser.format_help().strip()
    before, listed, after = text.partition(f"\n{OPTIONS_HEADING}\n")
    examples = after.partition("\nexamples:\n")[2]
    return f"{before.rstrip()}\n\n{OPTIONS_HEADING} see docs/config.md\n\nexamples:\n{examples}" if listed else text


def api_page() -> str:
    """Every public name with its signature and docstring."""
    lines = [
        "# The Python API",
        "",
        "The names of `import turnwise as tw`. [How to train from Python](python_api.md) shows them at work; the",
        "examples below run in tests. A member that ends in `_async` does the same in a coroutine and is not listed.",
        "",
        f"This page is generated from the code (`{COMMAND}`).",
    ]
    for name in turnwise.__all__:
        value = getattr(turnwise, name)
        lines += ["", f"## tw.{name}", ""]
        lines += _module_lines(value) if inspect.ismodule(value) else _name_lines(name, value)
    return "\n".join(lines) + "\n"


def _module_lines(module: Any) -> list[str]:
    first = (inspect.getdoc(module) or "").splitlines()[0]
    names = [name for name in vars(module) if not name.startswith("_") and inspect.isclass(getattr(module, name))]
    own = [name for name in names if getattr(module, name).__module__.startswith(module.__name__)]
    return [first, "", " ".join(f"`{name}`" for name in sorted(own))]


def _name_lines(name: str, value: Any) -> list[str]:
    is_section = inspect.isclass(value) and issubclass(value, BaseModel)
    is_protocol = getattr(value, "_is_protocol", False)
    lines = [] if is_section or is_protocol else ["```text", f"tw.{name}{_signature(value)}", "```", ""]
    lines += [_as_markdown(inspect.getdoc(value) or "")]
    if inspect.isclass(value):
        lines += _member_lines(value)
    return lines


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    shown = [_parameter(parameter) for parameter in signature.parameters.values()]
    one_line = f"({', '.join(shown)})"
    return one_line if len(one_line) <= int(WIDTH) - 20 else "(\n    " + ",\n    ".join(shown) + ",\n)"


def _parameter(parameter: inspect.Parameter) -> str:
    """One parameter as it is written; annotations that are strings lose their quotes."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        bare = parameter.replace(annotation=inspect.Parameter.empty)
        name, equals, default = str(bare).partition("=")
        return f"{name}: {annotation}" + (f" = {default}" if equals else "")
    return str(parameter)


def _member_lines(value: type) -> list[str]:
    rows: list[str] = []
    for name, member in inspect.getmembers(value):
        is_twin = hasattr(value, name.removesuffix("_async")) and name.endswith("_async")
        if is_twin or name.startswith(("_", "model_")) or not _is_ours(member):
            continue
        first = (inspect.getdoc(member) or "").partition("\n\n")[0].replace("\n", " ")
        if first:
            rows.append(f"| `{name}` | {first.replace('|', chr(92) + '|')} |")
    return ["", "| Member | |", "|---|---|", *rows] if rows else []


def _is_ours(member: Any) -> bool:
    function = member.fget if isinstance(member, property) else member
    return str(getattr(function, "__module__", "")).startswith("turnwise") and (
        isinstance(member, property) or inspect.isroutine(member)
    )


def _as_markdown(doc: str) -> str:
    """A docstring as Markdown: sections in bold, examples and listings in code blocks."""
    parts: list[str] = []
    for block in re.split(r"\n\n+", doc):
        heading = re.match(r"(Args|Raises|Returns|Attributes):\n", block)
        if heading:
            items = re.sub(r"\n        +", " ", block[heading.end() :])
            rows = [item.strip().partition(": ") for item in items.splitlines()]
            parts += [f"**{heading[1]}**", "\n".join(f"- `{name}`: {text}" for name, _, text in rows)]
        elif block.startswith((">>>", "    ")):
            parts.append(f"```text\n{inspect.cleandoc(block)}\n```")
        else:
            parts.append(block)
    return "\n\n".join(parts)


def support_page() -> str:
    """What works with what: methods, worlds, samplers, devices, model families."""
    lines = [
        "# What works with what",
        "",
        f"This page is generated from the code (`{COMMAND}`).",
        "",
        "## Methods",
        "",
        "| Method | Learns from | Critic | One attempt is enough | Loss | Others | KL, entropy, correction |",
        "|---|---|---|---|---|---|---|",
        *(_method_row(name, options) for name, options in SHIPPED.items()),
        "",
        "`method=module:Class` is [your own](algorithms/README.md).",
        "",
        "## Worlds",
        "",
        "| World | | Shows how to play | Branches | Other seat | Turns |",
        "|---|---|---|---|---|---:|",
        *(_world_row(name) for name in sorted(SHIPPED_WORLDS)),
        "",
        "Turns are those of a default attempt. *Shows how to play*: a script gives dialogues for a warm-up.",
        "*Branches*: a dialogue can be continued several times from its middle, as `la_grpo` and",
        "`refuel` do. *Other seat*: [an opponent](opponents.md) can be chosen.",
        f"Worlds of other libraries: {', '.join(f'`{prefix}:...`' for prefix in ADAPTERS)}",
        "([adapters](adapters/index.md)).",
        "",
        "## Samplers",
        "",
        "| `rollout.backend` | | All weights |",
        "|---|---|---|",
        *(_backend_row(name) for name in backend_names()),
        "",
        "`rollout.backend=module:Class` is [your own](backends.md). *All weights*: it samples from runs with",
        "`model.train=full`, too.",
        "",
        "## Devices",
        "",
        "| `engine.device` | Weights | Activations | KV cache | Most tokens of a training pass |",
        "|---|---|---|---|---|",
        *(_device_row(name, facts) for name, facts in DEVICES.items()),
        "",
        "These are the defaults. `engine.dtype=bfloat16` is for a GPU, and for the weights on a CPU that has",
        "[dot products of bfloat16](cpu.md). Adapters, losses and optimizer state are float32 everywhere.",
        "[GPUs](gpu.md) says which kernels each has.",
        "",
        "## Model families",
        "",
        f"{len(supported_types())} values of `model_type`: {' '.join(f'`{name}`' for name in supported_types())}.",
        "[Models](models.md) says what is adapted in each, and which models are refused.",
    ]
    return "\n".join(lines) + "\n"


def _method_row(name: str, options: type[MethodOptions]) -> str:
    if options.only_stored:
        source = "stored dialogues"
    elif "pairs" in options.data_options:
        source = "pairs, played or stored"
    else:
        source = "branches of a dialogue" if options.branches else "attempts at a task"
    one = "yes" if options.learns_from_one.fget(options()) else "no"  # type: ignore[attr-defined]
    free = "yes" if issubclass(options, FreeLoss) else "no"
    terms = "yes" if issubclass(options, PolicyTerms) else "no"
    critic = "yes" if options.needs_critic else "no"
    return f"| `{name}` | {source} | {critic} | {one} | `{options.default_loss}` | {free} | {terms} |"


def _world_row(name: str) -> str:
    target = load_target(name)
    module = import_module(target.__module__)
    envs = [value for value in vars(module).values() if inspect.isclass(value) and hasattr(value, "step")]
    shows = hasattr(target, "demonstrations") or hasattr(target, "demonstrate")
    branches = any(hasattr(env, "fork") for env in envs)
    seat = "opponent" in inspect.signature(target).parameters
    first = (module.__doc__ or "").partition("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip(".")
    marks = ["yes" if mark else "no" for mark in (shows, branches, seat)]
    return f"| `{name}` | {first} | {' | '.join(marks)} | {get_world(name).max_turns} |"


def _backend_row(name: str) -> str:
    publisher = find_publisher(name)
    what = (inspect.getdoc(publisher) or "").partition("\n\n")[0].replace("\n", " ")
    return f"| `{name}` | {what} | {'yes' if publisher.takes_full_weights else 'no'} |"


def _device_row(name: str, facts: DeviceFacts) -> str:
    activations = "float32" if facts.has_wide_activations else "as the weights"
    cache = "half of what the weights leave" if facts.kv_cache_bytes is None else f"{facts.kv_cache_bytes / GIB:g} GiB"
    alone, shared = (f"{count:,}" for count in facts.pass_tokens) if facts.pass_tokens else ("", "")
    tokens = f"{alone}; {shared} where dialogues begin alike" if alone else "as many as the memory holds"
    return f"| `{name}` | {facts.default_dtype} | {activations} | {cache} | {tokens} |"


PAGES = {"cli.md": cli_page, "api.md": api_page, "support.md": support_page}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    options = parser.parse_args()
    stale: list[str] = []
    for name, make in PAGES.items():
        text = make()
        if not (DOCS / name).is_file() or (DOCS / name).read_text(encoding="utf-8") != text:
            stale.append(name)
            if not options.check:
                (DOCS / name).write_text(text, encoding="utf-8")
    if options.check and stale:
        print(f"not up to date: {', '.join(stale)}; run: {COMMAND}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
