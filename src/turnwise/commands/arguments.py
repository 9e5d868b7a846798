"""The commands around training, for the command line: their options, and who runs them. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

COMMANDS = (
    *("train", "status", "stop", "steer", "eval", "sample", "export", "certify", "replay", "curve", "pairs", "compare"),
)

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
    _add_steering(commands)
    _add_eval(commands)
    _add_sample(commands)
    _add_export(commands)
    _add_pairs(commands)
    _add_compare(commands)
    certify = commands.add_parser("certify", help="show that a run trained on exactly the sampled tokens")
    certify.add_argument("run", metavar="RUN", help="a run directory")
    certify.add_argument("--turns", action="store_true", help="also a line for every turn")
    replay = commands.add_parser("replay", help="play one stored attempt of a run again, and compare")
    replay.add_argument("run", metavar="RUN", help="a run directory")
    replay.add_argument("--attempt", type=int, metavar="ID", help="which attempt; without it, the latest are listed")
    curve = commands.add_parser("curve", help="draw the held-out success of runs, seeds say, in one picture")
    curve.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    curve.add_argument("--out", default="curves.svg", metavar="FILE", help="the picture (default: %(default)s)")
    curve.add_argument("--title", default="", help="what stands above it (default: the world and the model)")


def run_command(options: argparse.Namespace) -> int:
    """Run what was parsed; returns the exit code."""
    if options.command == "train":
        from turnwise.commands.train import run_train

        name, overrides = options.name, list(options.overrides)
        if name is not None and "=" in name:
            name, overrides = None, [name, *overrides]
        return run_train(name, overrides, only_plan=options.plan, resume=options.resume)
    if options.command in ("status", "stop", "steer"):
        return _run_steering(options)
    if options.command == "eval":
        from turnwise.commands.play import run_eval

        return run_eval(options.target, options.env, options.step, options.overrides, as_json=options.json)
    if options.command == "sample":
        from turnwise.commands.play import run_sample

        return run_sample(
            options.target,
            options.step,
            system_text=options.system,
            temperature=options.temperature,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
    if options.command == "export":
        from turnwise.commands.export import run_export

        return run_export(options.target, options.out, step=options.step, is_merged=options.merged)
    if options.command == "pairs":
        return _run_pairs(options)
    if options.command == "compare":
        from turnwise.compare.compare import run_compare

        return run_compare(options.overrides, out=options.out)
    from turnwise.commands import inspect as inspect_commands

    if options.command == "certify":
        return inspect_commands.run_certify(options.run, with_turns=options.turns)
    if options.command == "curve":
        return inspect_commands.run_curve(options.runs, options.out, options.title)
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
        from turnwise.config.files import preset_names
        from turnwise.config.reference import help_text

        presets = f"presets: {', '.join(preset_names())}"
        return "\n".join([plain_help(), presets, "", "options, with their defaults:", help_text(), "", _TRAIN_EXAMPLES])

    parser.format_help = full_help  # the list of options takes pydantic, so it is made when somebody asks


def _add_steering(commands: Any) -> None:
    status = commands.add_parser(
        "status",
        help="what a run is doing at this moment",
        description="Show how far a run is, what it waits for and since when, its pool, its alarms and its numbers.",
    )
    status.add_argument("run", metavar="RUN", help="a run directory")
    status.add_argument("--watch", action="store_true", help="again every second, until it ends")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    stop = commands.add_parser(
        "stop",
        help="end a run that is going on; it can be resumed",
        description="End a run after the step it is learning, saved so that it goes on as if it had not stopped.",
    )
    stop.add_argument("run", metavar="RUN", help="a run directory")
    stop.add_argument("--now", action="store_true", help="at once; what came after the last checkpoint is done again")
    steer = commands.add_parser(
        "steer",
        help="change a setting of a run that is going on",
        description="Change train.learning_rate or train.steps of a run that is going on, from its next step on.",
    )
    steer.add_argument("run", metavar="RUN", help="a run directory")
    steer.add_argument("overrides", nargs="+", metavar="train.key=value", help="such as train.learning_rate=1e-5")


def _run_steering(options: argparse.Namespace) -> int:
    from turnwise.commands import status as status_commands

    if options.command == "status":
        return status_commands.run_status(options.run, as_json=options.json, watch=options.watch)
    if options.command == "stop":
        return status_commands.run_stop(options.run, is_hard=options.now)
    return status_commands.run_steer(options.run, list(options.overrides))


_COMPARE_EXAMPLES = """\
examples:
  turnwise compare methods=grpo,la_grpo,ppo worlds=guess_number_tiny seeds=3
  turnwise compare 'methods=grpo,grpo[credit=reward_to_go;gamma=0.9]' env=guess_number model=tiny
  turnwise compare 'methods=ppo,ppo[critic.pretrain_steps=0]' env=key_door model=tiny tokens=50000 --out runs/ppo
  turnwise compare methods=grpo,rloo 'worlds=key_door[tokens=50000],bargain' model=tiny seeds=10 jobs=8 dir=runs/study

options of its own, beside section.key=value of `turnwise train` for every run:
  methods=A,B   methods, each with options of its own in brackets; the first is what the others are compared with
  worlds=A,B    presets, files or worlds, likewise (env=A is the same); tokens=N in brackets is for that world
  seeds=3       runs of every method in every world
  tokens=N      sampled tokens of a run (default: the preset's train.max_sampled_tokens, or what the first run samples
                in its train.steps)
  jobs=1        runs at once; each has its share of the cores and of the GPU's memory
  dir=DIR       the same as --out

A comparison that was broken off goes on where it stopped: the same command skips the runs that are done.
"""


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="train with several methods at equal sampled tokens, and compare",
        description="Train with several methods, in several worlds and over several seeds, at equal sampled tokens; a "
        "table with paired intervals and a figure of learning curves come out.",
        epilog=_COMPARE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides",
        nargs="+",
        metavar="option=value",
        help="methods=A,B and worlds=A,B; also seeds, tokens, jobs, dir, and any section.key=value of `turnwise train`",
    )
    parser.add_argument("--out", metavar="DIR", help="where the runs and the results go (default runs/compare-WORLD)")


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step", metavar="STEP", help="of a run: the checkpoint of a step, `best` (the default) or `last`"
    )


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write what a run trained as files that other programs load",
        description="Write a checkpoint as a PEFT adapter, or with --merged as a whole Hugging Face model.",
    )
    parser.add_argument("target", metavar="RUN|CHECKPOINT")
    parser.add_argument("out", metavar="DIR", help="a directory that is not there yet")
    parser.add_argument("--merged", action="store_true", help="the adapter added to the base model's weights")
    _add_step(parser)


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure a run, a checkpoint or a model on held-out tasks",
        description="Play held-out tasks and print success and reward with 95 % intervals.",
    )
    parser.add_argument("target", metavar="RUN|CHECKPOINT|MODEL")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as eval.tasks=200")
    parser.add_argument("--env", metavar="NAME", help="the world; a run has one already")
    _add_step(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_sample(commands: Any) -> None:
    parser = commands.add_parser(
        "sample",
        help="chat with a run, a checkpoint or a model",
        description="Chat in the terminal until Ctrl-D; from a pipe, every line is a message and every reply a line.",
    )
    parser.add_argument("target", metavar="RUN|CHECKPOINT|MODEL")
    parser.add_argument("--system", metavar="TEXT", help="a system message to start with")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default 0.7)")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens of one reply (default 256)")
    parser.add_argument("--seed", type=int, help="same seed, same replies")
    _add_step(parser)


_PAIRS_EXAMPLES = """\
examples:
  turnwise pairs smollm2 --env key_door --out pairs.parquet          8 dialogues per task, best against worst
  turnwise pairs runs/a --kind refuel --out pairs.parquet            two continuations of one dialogue
  turnwise pairs runs/a runs/b --stored --out pairs.parquet          from what these runs played
  turnwise train key_door method=dpo data.pairs=pairs.parquet        and then learn from them
"""


def _add_pairs(commands: Any) -> None:
    parser = commands.add_parser(
        "pairs",
        help="make preference pairs, for dpo and refuel",
        description="Play tasks, or read stored runs, and write pairs of a better and a worse dialogue as Parquet.",
        epilog=_PAIRS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("targets", nargs="+", metavar="RUN|CHECKPOINT|MODEL", help="the policy; --stored: runs")
    parser.add_argument("--out", required=True, metavar="FILE", help="the Parquet file to write")
    parser.add_argument(
        "--kind",
        choices=("dpo", "refuel"),
        default="dpo",
        help="dpo: the best against the worst of some dialogues; refuel: continuations of one, by lot (default dpo)",
    )
    parser.add_argument("--env", metavar="NAME", help="the world; a run has one already")
    parser.add_argument("--tasks", type=int, default=64, metavar="N", help="train tasks to play (default 64)")
    parser.add_argument("--samples", type=int, metavar="N", help="dialogues per task (dpo 8, refuel 2)")
    parser.add_argument(
        "--turn", choices=("uniform", "geometric"), default="uniform", help="refuel: how the turn is drawn"
    )
    parser.add_argument("--stored", action="store_true", help="play nothing: pair the attempts that runs have stored")
    parser.add_argument(
        "--across-seeds",
        action="store_true",
        help="--stored, dpo: also pair attempts at a task that met different env seeds",
    )
    _add_step(parser)
    parser.set_defaults(overrides=[])


def _run_pairs(options: argparse.Namespace) -> int:
    from pathlib import Path

    from turnwise.commands.pairs import PairOptions, run_pairs
    from turnwise.errors import ConfigError

    for name, least in (("tasks", 1), ("samples", 2)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}; expected at least {least}")
    if options.across_seeds and not options.stored:
        raise ConfigError("--across-seeds is for --stored; what is played for pairs shares its env seed")
    if options.across_seeds and options.kind == "refuel":
        raise ConfigError("--across-seeds is for --kind dpo; continuations of one dialogue share its env seed")
    overrides = [text for text in options.targets if "=" in text]
    return run_pairs(
        [text for text in options.targets if "=" not in text],
        [*overrides, *options.overrides],
        PairOptions(
            kind=options.kind,
            out=Path(options.out).expanduser(),
            env=options.env,
            num_tasks=options.tasks,
            samples=options.samples,
            turn=options.turn,
            is_stored=options.stored,
            across_seeds=options.across_seeds,
            step=options.step,
        ),
    )
