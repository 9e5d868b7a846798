"""The commands around training, for the command line: their options, and who runs them. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

COMMANDS = ("train", "eval", "sample", "certify", "replay")

_TRAIN_EXAMPLES = """\
examples:
  turnwise train guess_number model=tiny                  a shipped preset, with another model
  turnwise train my.yaml train.steps=100 run.dir=runs/a   a file, with overrides
  turnwise train my_envs.py:MyWorld --plan                what it would cost, and nothing more
  turnwise train --resume runs/a                          go on where a run stopped
"""


def add_commands(commands: Any) -> None:
    """Add every command's parser."""
    _add_train(commands)
    _add_eval(commands)
    _add_sample(commands)
    certify = commands.add_parser("certify", help="show that a run trained on exactly the sampled tokens")
    certify.add_argument("run", metavar="RUN", help="a run directory")
    replay = commands.add_parser("replay", help="play one stored attempt of a run again, and compare")
    replay.add_argument("run", metavar="RUN", help="a run directory")
    replay.add_argument("--attempt", type=int, metavar="ID", help="which attempt; without it, the latest are listed")


def run_command(options: argparse.Namespace) -> int:
    """Run what was parsed; returns the exit code."""
    if options.command == "train":
        from turnwise.train.commands import train

        name, overrides = options.name, list(options.overrides)
        if name is not None and "=" in name:
            name, overrides = None, [name, *overrides]
        return train(name, overrides, only_plan=options.plan, resume=options.resume)
    if options.command == "eval":
        from turnwise.train.play_commands import run_eval

        return run_eval(options.target, options.env, options.step, options.overrides, as_json=options.json)
    if options.command == "sample":
        from turnwise.train.play_commands import run_sample

        return run_sample(
            options.target,
            options.step,
            system_text=options.system,
            temperature=options.temperature,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
    from turnwise.train import inspect_commands

    if options.command == "certify":
        return inspect_commands.run_certify(options.run)
    return inspect_commands.run_replay(options.run, options.attempt)


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model on a world",
        description="Train a model on a world; the plan is printed before anything is spent.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME|FILE", help="a preset, a YAML file, or a world")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="options, read as YAML; model=, method=, env= for short",
    )
    parser.add_argument("--plan", action="store_true", help="print the plan and stop")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run, from its latest checkpoint")
    plain_help = parser.format_help

    def full_help() -> str:
        from turnwise.train.config_files import preset_names
        from turnwise.train.config_reference import help_text

        presets = f"presets: {', '.join(preset_names())}"
        return "\n".join([plain_help(), presets, "", "options, with their defaults:", help_text(), "", _TRAIN_EXAMPLES])

    parser.format_help = full_help  # the list of options takes pydantic, so it is made when somebody asks


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure a run, a checkpoint or a model on held-out tasks",
        description="Play held-out tasks and print success and reward with 95 % intervals.",
    )
    parser.add_argument("target", metavar="RUN|CHECKPOINT|MODEL")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as eval.tasks=200")
    parser.add_argument("--env", metavar="NAME", help="the world; a run has one already")
    parser.add_argument("--step", type=int, help="of a run: the checkpoint of that step instead of the latest")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_sample(commands: Any) -> None:
    parser = commands.add_parser(
        "sample",
        help="chat with a run, a checkpoint or a model",
        description="Chat in the terminal; from a pipe, every line is a message and every reply a line.",
    )
    parser.add_argument("target", metavar="RUN|CHECKPOINT|MODEL")
    parser.add_argument("--system", metavar="TEXT", help="a system message to start with")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default 0.7)")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens of one reply (default 256)")
    parser.add_argument("--seed", type=int, help="same seed, same replies")
    parser.add_argument("--step", type=int, help="of a run: the checkpoint of that step instead of the latest")
