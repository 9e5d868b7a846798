"""Options of `turnwise serve` and `turnwise keys`. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.service.config import ServeConfig
    from turnwise.service.named_policies import NamedPolicy

COMMANDS = ("serve", "keys")
FLAGS = {
    "host": "host",
    "port": "port",
    "autosave": "autosave",
    "device": "engine.device",
    "dtype": "engine.dtype",
    "kv_cache_gib": "engine.kv_cache_gib",
    "max_adapters": "max_resident_adapters",
    "max_policies": "max_resident_policies",
}
"""Flags of `turnwise serve` to the options of `ServeConfig` that they set."""

_SERVE_EXAMPLES = """\
examples:
  turnwise serve --model smollm2                     serve on http://127.0.0.1:8000, for this machine only
  turnwise serve runs/a runs/b                       two trained policies, as the models "a" and "b", and their base
  turnwise serve old:runs/a new:runs/b --step last   the same with names of your own, and the last checkpoints
  turnwise keys create alice                         print a new key; from now on every caller needs a key
  turnwise serve --model smollm2 --host 0.0.0.0      serve other machines too; this needs keys
  turnwise serve --model smollm2 engine.block_size=32 gap_s=120

KEY is any field of turnwise.service.config.ServeConfig; docs/config.md lists the fields of the section `engine`.
"""


def add_commands(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve models and trained policies to the Tinker and MinT SDKs, and to OpenAI clients",
        description="Serve base models, and the policies of runs by name, over HTTP to the Tinker and MinT SDKs and to "
        "OpenAI clients.",
        epilog=_SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument(
        "targets",
        nargs="*",
        metavar="RUN|KEY=VALUE",
        help="a run or a checkpoint, served under its folder's name or as NAME:RUN; or any other option, such as "
        "engine.block_size=32",
    )
    serve.add_argument("--model", action="append", default=[], metavar="MODEL", help="a base model; may be repeated")
    serve.add_argument("--step", help="which checkpoint of the runs: best (default), last, or a number")
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port to listen on (default 8000; 0 takes any free port)")
    _add_data_dir(serve)
    autosave = "optimizer steps between snapshots; a restarted server continues from them (default 10; 0 is off)"
    serve.add_argument("--autosave", type=int, metavar="N", help=autosave)
    serve.add_argument("--device", help="auto, cpu, cuda or cuda:N (default auto)")
    dtypes = ("auto", "float32", "bfloat16")
    serve.add_argument("--dtype", choices=dtypes, help="type of the frozen weights (default auto)")
    serve.add_argument("--kv-cache-gib", type=float, metavar="GIB", help="size of the KV cache (default: automatic)")
    serve.add_argument(
        "--max-adapters", type=int, metavar="N", help="most training adapters on the device (default 32)"
    )
    serve.add_argument(
        "--max-policies", type=int, metavar="N", help="most published weights on the device (default 64)"
    )
    resident = "device memory for adapters, and the same again for published weights (default 8)"
    serve.add_argument("--max-resident-gib", type=float, metavar="GIB", help=resident)
    _add_keys(commands)


def _add_keys(commands: Any) -> None:
    keys = commands.add_parser(
        "keys",
        help="make, list and revoke the service's API keys",
        description="Make, list and revoke the API keys of `turnwise serve`.",
    )
    keys.set_defaults(parser=keys)
    actions = keys.add_subparsers(dest="action", metavar="ACTION", title="actions")
    create = actions.add_parser(
        "create",
        help="make a key and print it",
        description="Make a key and print it, once. From the first key on, every caller needs one.",
    )
    create.add_argument("name", help="a name for the key, shown by `turnwise keys list`")
    create.add_argument(
        "--style",
        choices=("tml", "sk"),
        default="tml",
        help="prefix of the key: tml works with any SDK, sk is MinT's form (default tml)",
    )
    listed = actions.add_parser(
        "list", help="show the keys' numbers and names", description="Show the number and the name of every key."
    )
    revoke = actions.add_parser(
        "revoke", help="revoke a key; it stops working at once", description="Revoke a key. It stops working at once."
    )
    revoke.add_argument("key_id", type=int, metavar="ID", help="the number that `turnwise keys list` shows")
    for parser in (create, listed, revoke):
        _add_data_dir(parser)


def _add_data_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="directory for the service's data (default: `service` in $TURNWISE_HOME)",
    )


def run_command(options: argparse.Namespace) -> int:
    """Run the parsed command and return the exit code."""
    from turnwise.models.store import home
    from turnwise.service import commands

    if options.command == "keys" and options.action is None:
        options.parser.print_help()
        return 0
    data_dir = (options.data_dir or home() / "service").expanduser().absolute()
    if options.command == "keys":
        if options.action == "create":
            return commands.create(data_dir, options.name, options.style)
        return commands.list_all(data_dir) if options.action == "list" else commands.revoke(data_dir, options.key_id)
    runs = [target for target in options.targets if "=" not in target]
    if options.step is not None and not runs:
        raise ConfigError(f"--step {options.step} is for runs, and none is named; leave it out, or add a run: runs/a")
    policies = read_policies(runs, options.step)
    models = tuple(dict.fromkeys([*(policy.base_model for policy in policies), *options.model]))
    if not models:
        raise ConfigError("nothing to serve; name a run (turnwise serve runs/a) or a base model (--model smollm2)")
    return commands.serve(_read_config(options, models, data_dir), policies)


def read_policies(targets: Sequence[str], step: str | None) -> list[NamedPolicy]:
    """The policies that `RUN` and `NAME:RUN` mean; all of them have the same base model."""
    found = [_read_policy(target, step) for target in targets]
    if not found:
        return []
    first, base = found[0]
    for policy, directory in found:
        if directory != base:
            raise ConfigError(
                f"{first.name} was trained on {first.base_model} and {policy.name} on {policy.base_model}; policies "
                "that are served together share one base model: start a server for each, with its own --port and "
                "--data-dir"
            )
    return [replace(policy, base_model=first.base_model) for policy, _ in found]


def _read_policy(target: str, step: str | None) -> tuple[NamedPolicy, Path]:
    """The policy, and the directory of its base model."""
    from turnwise.commands.play import open_policy
    from turnwise.service.named_policies import ChatSettings, NamedPolicy
    from turnwise.training.setup import find_model

    name, colon, path = target.partition(":")
    if not colon or path.startswith("//") or Path(target).expanduser().exists():
        name, path = Path(target).expanduser().absolute().name, target
    policy = open_policy(path, None, step)
    if policy.files is None:
        raise ConfigError(f"{path} is a model, not a run; serve it as a base model: --model {path}")
    if policy.config.model.train == "full":
        raise ConfigError(
            f"{path} trained all weights, so it is a model of its own: turnwise export {path} --merged DIR, then "
            "turnwise serve --model DIR"
        )
    if not policy.files.is_dir():
        raise ConfigError(f"{policy.checkpoint} is not on this machine, so there are no files to serve")
    model, rollout = policy.config.model, policy.config.rollout
    chat = ChatSettings(
        renderer=rollout.renderer,
        multi_turn=rollout.use_conversation_multi_turn,
        strip_thinking=rollout.strip_thinking,
        stop=rollout.stop,
    )
    named = NamedPolicy(name=name, base_model=model.alias or model.name, directory=policy.files, chat=chat)
    return named, find_model(policy.config).resolve()


def _read_config(options: argparse.Namespace, models: tuple[str, ...], data_dir: Path) -> ServeConfig:
    """The service's config, from flags and `KEY=VALUE` options."""
    from turnwise.config.files import build_section
    from turnwise.service.config import ServeConfig

    flags = {option: getattr(options, flag) for flag, option in FLAGS.items()}
    if options.max_resident_gib is not None:
        flags["max_resident_bytes"] = int(options.max_resident_gib * 2**30)
    given = {"models": models, "data_dir": data_dir}
    given |= {option: value for option, value in flags.items() if value is not None}
    return build_section(ServeConfig, given, [target for target in options.targets if "=" in target])
