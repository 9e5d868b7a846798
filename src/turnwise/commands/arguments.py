"""The options of the training commands, and the functions that run them. This module imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from turnwise.commands import flywheel_options, merge_options, orm_options, scale_options

COMMANDS = (
    "train",
    "status",
    "stop",
    "steer",
    "eval",
    "sample",
    "export",
    "certify",
    "replay",
    "doctor",
    "curve",
    "pairs",
    "tournament",
    "compare",
    "flywheel",
    "pools",
    "orm",
    "merge",
    "scale",
)

_ELSEWHERE = {
    **dict.fromkeys(flywheel_options.COMMANDS, flywheel_options.run_command),
    "orm": orm_options.run_command,
    "merge": merge_options.run_command,
    "scale": scale_options.run_command,
}
"""Commands whose options are in files of their own."""
OPTIONS_HEADING = "options, with their defaults:"
"""The line in the help of `turnwise train` after which the options of a run are listed."""
_TRAIN_EXAMPLES = """\
examples:
  turnwise train guess_number model=tiny                  train a preset with another model
  turnwise train my.yaml train.steps=100 run.dir=runs/a   train a config file with changed options
  turnwise train my_envs.py:MyWorld --plan                print the cost and train nothing
  turnwise train mix env.mix=guess_number=2,key_door=1    train in several worlds, with shares
  turnwise train --resume runs/a                          continue a run that stopped
"""


def add_commands(commands: Any) -> None:
    """Add every command's parser."""
    _add_train(commands)
    _add_steering(commands)
    _add_eval(commands)
    _add_sample(commands)
    _add_export(commands)
    _add_pairs(commands)
    _add_tournament(commands)
    _add_compare(commands)
    flywheel_options.add_commands(commands)
    orm_options.add_commands(commands)
    merge_options.add_commands(commands)
    scale_options.add_commands(commands)
    certify = commands.add_parser(
        "certify",
        help="check that a run trained on exactly the sampled tokens",
        description="Check that a run trained on exactly the tokens that it sampled, and print the result.",
    )
    certify.add_argument("run", metavar="RUN", help="a run directory")
    certify.add_argument("--turns", action="store_true", help="also print a line for every turn")
    replay = commands.add_parser(
        "replay",
        help="play one stored attempt of a run again, and compare",
        description="Play one stored attempt of a run again, and compare it with the stored one.",
    )
    replay.add_argument("run", metavar="RUN", help="a run directory")
    replay.add_argument("--attempt", type=int, metavar="ID", help="the attempt; without it, list the latest attempts")
    doctor = commands.add_parser(
        "doctor",
        help="say why a run does not learn, and what to change",
        description="Say why a run does not learn: what is seen, why it matters, and which option to change. It works "
        "while the run trains, too. The exit code is 1 if something is found.",
    )
    doctor.add_argument("run", metavar="RUN", help="a run directory")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    curve = commands.add_parser(
        "curve",
        help="draw the learning curves of several runs in one picture",
        description="Draw the held-out success of several runs, for example several seeds, in one picture.",
    )
    curve.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    curve.add_argument(
        "--out", default="curves.svg", metavar="FILE", help="the SVG file to write (default: %(default)s)"
    )
    curve.add_argument(
        "--metric",
        default="",
        metavar="NAME",
        help="draw this metric instead, such as rollout/entropy_estimate (docs/metrics.md)",
    )
    curve.add_argument("--title", default="", help="title of the picture (default: the world and the model)")


def run_command(options: argparse.Namespace) -> int:
    """Run the parsed command and return the exit code."""
    if options.command == "train":
        from turnwise.commands.train import run_train

        name, overrides = options.name, list(options.overrides)
        if name is not None and "=" in name:
            name, overrides = None, [name, *overrides]
        return run_train(name, overrides, only_plan=options.plan, resume=options.resume, with_time=not options.no_time)
    if options.command in ("status", "stop", "steer"):
        return _run_steering(options)
    if options.command == "eval":
        from turnwise.commands.play import run_eval

        return run_eval(options.target, options.env, options.step, options.overrides, as_json=options.json)
    if options.command == "sample":
        from turnwise.commands.play import ChatOptions, run_sample

        chat = ChatOptions(
            system_text=options.system,
            temperature=options.temperature,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
        return run_sample(options.target, options.step, options.overrides, chat)
    if options.command == "export":
        from turnwise.commands.export import run_export
        from turnwise.training.export import ExportPlaces

        places = ExportPlaces(peft=options.peft, merged=options.merged, gguf=options.gguf)
        return run_export(options.target, places, step=options.step)
    if options.command == "pairs":
        return _run_pairs(options)
    if options.command == "tournament":
        return _run_tournament(options)
    if options.command == "compare":
        from turnwise.compare.compare import run_compare

        return run_compare(options.overrides, out=options.out)
    if options.command in _ELSEWHERE:
        return _ELSEWHERE[options.command](options)
    if options.command == "doctor":
        from turnwise.commands.doctor import run_doctor

        return run_doctor(options.run, as_json=options.json)
    from turnwise.commands import inspect as inspect_commands

    if options.command == "certify":
        return inspect_commands.run_certify(options.run, with_turns=options.turns)
    if options.command == "curve":
        return inspect_commands.run_curve(options.runs, options.out, options.title, options.metric)
    return inspect_commands.run_replay(options.run, options.attempt)


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model on a world",
        description="Train a model on a world. The plan, with its cost, is printed first.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME|FILE", help="a preset, a YAML file or a world")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="options, with YAML values; model=, method= and env= are short for model.name= and so on",
    )
    parser.add_argument("--plan", action="store_true", help="print the plan and train nothing")
    parser.add_argument(
        "--no-time", action="store_true", help="with --plan: do not measure how long the run will take on this machine"
    )
    parser.add_argument("--resume", metavar="RUN", help="continue a run from its latest checkpoint")
    plain_help = parser.format_help

    def full_help() -> str:
        from turnwise.config.files import preset_names
        from turnwise.config.reference import help_text

        presets = f"presets: {', '.join(preset_names())}"
        return "\n".join([plain_help(), presets, "", OPTIONS_HEADING, help_text(), "", _TRAIN_EXAMPLES])

    parser.format_help = full_help  # the list of options needs pydantic, so it is made only when somebody asks for help


def _add_steering(commands: Any) -> None:
    status = commands.add_parser(
        "status",
        help="show what a run is doing now",
        description="Show the progress of a run, what it is waiting for and since when, its pool, alarms and metrics.",
    )
    status.add_argument("run", metavar="RUN", help="a run directory")
    status.add_argument("--watch", action="store_true", help="refresh every second until the run ends")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    stop = commands.add_parser(
        "stop",
        help="stop a run; it can be resumed",
        description="Stop a run after its current step. The run saves a checkpoint, so it can be resumed without loss.",
    )
    stop.add_argument("run", metavar="RUN", help="a run directory")
    stop.add_argument(
        "--now", action="store_true", help="stop at once; a resume repeats the work after the last checkpoint"
    )
    steer = commands.add_parser(
        "steer",
        help="change a setting of a run while it trains",
        description="Change settings of a run while it trains, from its next step on: eval.every, and of train: "
        "learning_rate, steps, max_sampled_tokens, grad_clip_norm, weight_decay, save_every.",
    )
    steer.add_argument("run", metavar="RUN", help="a run directory")
    steer.add_argument(
        "overrides", nargs="+", metavar="section.key=value", help="the new value, such as train.learning_rate=1e-5"
    )


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

options of compare (every section.key=value of `turnwise train` also works, for all runs):
  methods=A,B   methods; options of one method go in brackets; the others are compared with the first
  worlds=A,B    presets, files or worlds; options of one world go in brackets, also tokens=N (env=A means worlds=A)
  seeds=3       number of runs of every method in every world
  tokens=N      sampled tokens per run (default: the preset's train.max_sampled_tokens, or the tokens that the first
                run samples in its train.steps)
  jobs=1        number of runs at the same time; they share the cores and the GPU's memory
  dir=DIR       the same as --out

To continue an interrupted comparison, repeat the command: it skips the runs that are done.
"""


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare methods at the same number of sampled tokens",
        description="Train with several methods, in several worlds and with several seeds, at the same number of "
        "sampled tokens.\nWrite a table with paired intervals and a figure of learning curves.",
        epilog=_COMPARE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides",
        nargs="+",
        metavar="option=value",
        help="methods=A,B and worlds=A,B; also seeds, tokens, jobs, dir, and any section.key=value of `turnwise train`",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="directory for the runs and the results (default runs/compare-WORLD)"
    )


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step", metavar="STEP", help="which checkpoint of a run: a step number, `best` (the default) or `last`"
    )


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write the trained weights as files for other programs",
        description="Write a checkpoint as a PEFT adapter, a complete Hugging Face model or a GGUF file.",
    )
    parser.add_argument("target", metavar="RUN|CHECKPOINT", help="a run directory or a checkpoint")
    parser.add_argument("--peft", metavar="DIR", help="write the adapter to a new directory, in PEFT's format")
    parser.add_argument("--merged", metavar="DIR", help="write a whole Hugging Face model to a new directory")
    parser.add_argument("--gguf", metavar="FILE", help="write a whole model to a new GGUF file, for llama.cpp")
    _add_step(parser)


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure a run, a checkpoint or a model on held-out tasks",
        description="Play held-out tasks and print success and reward with 95 % intervals.",
    )
    parser.add_argument("target", metavar="RUN|CHECKPOINT|MODEL", help="a run directory, a checkpoint or a model")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="options, such as eval.tasks=200")
    parser.add_argument("--env", metavar="NAME", help="the world (default: the world of the run)")
    _add_step(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_sample(commands: Any) -> None:
    parser = commands.add_parser(
        "sample",
        help="chat with a run, a checkpoint or a model",
        description="Chat in the terminal; Ctrl-D ends the chat. In a pipe, every input line is a message and every "
        "reply is one line.",
    )
    parser.add_argument("target", metavar="RUN|CHECKPOINT|MODEL", help="a run directory, a checkpoint or a model")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="options, such as rollout.backend=vllm"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message to start with")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="sampling temperature; 0 is greedy (default 0.7)"
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="maximum number of tokens in a reply (default 256)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same replies")
    _add_step(parser)


_PAIRS_EXAMPLES = """\
examples:
  turnwise pairs smollm2 --env key_door --out pairs.parquet       play 8 dialogues per task; pair the best and the worst
  turnwise pairs runs/a --kind refuel --out pairs.parquet         play two continuations of each dialogue
  turnwise pairs runs/a runs/b --stored --out pairs.parquet       pair the attempts that these runs stored
  turnwise train key_door model.from=runs/a warmup.steps=0 method=dpo data.pairs=pairs.parquet    learn from the pairs
"""


def _add_pairs(commands: Any) -> None:
    parser = commands.add_parser(
        "pairs",
        help="make preference pairs, for dpo and refuel",
        description="Play tasks, or read stored runs, and write pairs of a better and a worse dialogue as Parquet.",
        epilog=_PAIRS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="RUN|CHECKPOINT|MODEL",
        help="the policy that plays; with --stored, runs to read; or an option, section.key=value",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the Parquet file to write")
    parser.add_argument(
        "--kind",
        choices=("dpo", "refuel"),
        default="dpo",
        help="dpo: the best and the worst of several dialogues; refuel: random pairs of continuations (default dpo)",
    )
    parser.add_argument("--env", metavar="NAME", help="the world (default: the world of the run)")
    parser.add_argument("--tasks", type=int, default=64, metavar="N", help="number of train tasks to play (default 64)")
    parser.add_argument(
        "--tokens", type=int, default=0, metavar="N", help="stop once N tokens were sampled (default: play all tasks)"
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="dialogues per task (default: 8 for dpo, 2 for refuel)"
    )
    parser.add_argument(
        "--turn", choices=("uniform", "geometric"), default="uniform", help="refuel: how to draw the turn to branch at"
    )
    parser.add_argument("--hf-repo", metavar="NAME", help="also push the file to this data set repository of the hub")
    parser.add_argument("--stored", action="store_true", help="play nothing; pair the stored attempts of runs")
    parser.add_argument(
        "--across-seeds",
        action="store_true",
        help="with --stored and dpo: also pair attempts with different env seeds",
    )
    parser.add_argument(
        "--world",
        default="",
        metavar="NAME",
        help="with --stored: only this member of runs in several worlds (env.mix)",
    )
    _add_step(parser)
    parser.set_defaults(overrides=[])


def _run_pairs(options: argparse.Namespace) -> int:
    from pathlib import Path

    from turnwise.commands.pairs import PairOptions, run_pairs
    from turnwise.errors import ConfigError

    for name, least in (("tasks", 1), ("tokens", 0), ("samples", 2)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}; expected at least {least}")
    if options.across_seeds and not options.stored:
        raise ConfigError(
            "--across-seeds works only with --stored; dialogues that are played for pairs share their env seed"
        )
    if options.across_seeds and options.kind == "refuel":
        raise ConfigError("--across-seeds works only with --kind dpo; continuations of one dialogue share its env seed")
    overrides = [text for text in options.targets if "=" in text]
    return run_pairs(
        [text for text in options.targets if "=" not in text],
        [*overrides, *options.overrides],
        PairOptions(
            kind=options.kind,
            out=Path(options.out).expanduser(),
            env=options.env,
            num_tasks=options.tasks,
            num_tokens=options.tokens,
            samples=options.samples,
            turn=options.turn,
            is_stored=options.stored,
            across_seeds=options.across_seeds,
            world=options.world,
            step=options.step,
            hf_repo=options.hf_repo,
        ),
    )


def _add_tournament(commands: Any) -> None:
    parser = commands.add_parser(
        "tournament",
        help="let runs, checkpoints, models and scripts play each other, and rate them",
        description="Let players play each other at held-out tasks of a world with two sides, each in both seats. It "
        "prints Elo ratings, rewards, agreement, joint surplus and efficient deals with intervals, and the "
        "cross-play matrix.",
    )
    parser.add_argument(
        "players",
        nargs="+",
        metavar="PLAYER",
        help="a run, a checkpoint, base, a script of the world, a model, an address; or an option, section.key=value",
    )
    parser.add_argument("--env", metavar="NAME", help="the world (default: the world of the first run)")
    parser.add_argument("--tasks", type=int, default=32, metavar="N", help="held-out tasks (default 32)")
    parser.add_argument("--out", metavar="FILE", help="write the matrix as an SVG picture")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(overrides=[])


def _run_tournament(options: argparse.Namespace) -> int:
    from turnwise.commands.tournament import TournamentOptions, run_tournament
    from turnwise.errors import ConfigError

    if options.tasks < 2:
        raise ConfigError(f"--tasks {options.tasks}; expected at least 2: intervals are over tasks")
    is_option = [("=" in text and "://" not in text.partition("=")[0]) for text in options.players]
    return run_tournament(
        [text for text, is_one in zip(options.players, is_option, strict=True) if not is_one],
        [*(text for text, is_one in zip(options.players, is_option, strict=True) if is_one), *options.overrides],
        TournamentOptions(env=options.env, num_tasks=options.tasks, out=options.out, as_json=options.json),
    )
