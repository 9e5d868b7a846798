"""Play the expert and a random policy in every shipped world: success, turns, the env's time, attempts per minute.

The expert is what a world demonstrates. The random policy is the world's own random player, which does anything that
can be done at that moment. Where a world has none, it says, at each turn, a reply that the expert gave at some moment
of another task: always well formed, never to the point. A row `preset NAME` has the options of that preset, so that
what was trained with it stands beside the same tasks. `--trained FILE` adds what was trained,
from a file of results. `--markdown docs/worlds/README.md` writes the rows into the table of that page; a row that
cannot be played here stays as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.config.files import load_config
from turnwise.envs.base import Task, World, assistant
from turnwise.envs.registry import get_world, world_names, world_options
from turnwise.envs.sandbox.members import descendants
from turnwise.envs.scripted import ScriptedPlayer
from turnwise.envs.sync import as_env
from turnwise.errors import ConfigError
from turnwise.runtime.blocking import run_to_end
from turnwise.trajectory import Message

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("browser", {"level": 0, "by_name": True, "engine": "chromium"}),
    *(("browser", {"site": site}) for site in ("forum", "mail", "office", "miniwob")),
    ("code", {"shell": True}),
    *(("workspace", {"interface": interface, "reports_only": True}) for interface in ("shell", "screen", "both")),
    *(
        ("workspace", {"interface": interface, "reports_only": True, "browser": True})
        for interface in ("screen", "both")
    ),
)
"""Rows beside the worlds with their default options."""
PRESETS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("browser_shop", ()),
    ("browser_shop", ("level=1",)),
    *((name, ()) for name in ("browser_miniwob", "phone_tiny", "customer_service", "repository")),
    *(("workspace_tiny", (f"interface={interface}",)) for interface in ("shell", "screen", "both")),
    *((name, ()) for name in ("code", "negotiate", "search", "swe", "study_tool", "twenty_questions")),
    ("gsm8k_multi_turn", ("max_steps=2",)),
)
"""Rows with the options of a preset, and options beside them: what was trained, where that is not the default."""
PRESET = "preset "
TRAINED = ("base", "warm_up", "trained")
PLAIN_SKILL = "demonstration_skill"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--attempts", type=int, default=16, help="attempts of each player at each world")
    parser.add_argument("--at-once", type=int, default=4, help="attempts at the same time")
    parser.add_argument("--only", nargs="+", default=[], help="names of worlds, also of packages; without it, all ours")
    parser.add_argument("--trained", type=Path, default=None, help="a JSON file of trained results by row")
    parser.add_argument(
        "--markdown",
        type=Path,
        default=None,
        help="write the rows into the table of this page (trained.json beside it)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The results of one player's attempts."""

    successes: float
    """Share of all attempts."""
    turns: float
    """Mean of an attempt."""
    step_ms: float
    """Time in the env for one reply, the attempt's start and end included; mean."""
    cpu_ms: float
    """CPU time for one reply, of this process, its sandboxes and browsers; mean. Other programs hardly change it."""
    per_minute: float
    """Attempts, `at_once` at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    is_success: bool
    turns: int
    env_s: float


def run(args: argparse.Namespace) -> dict[str, Any]:
    foreign = [name for name in args.only if ":" in name]
    presets = {preset for preset, _ in PRESETS}
    unknown = sorted(set(args.only) - set(world_names()) - set(foreign) - presets)
    if unknown:
        raise ConfigError(
            f"--only {' '.join(unknown)}: no such world; the shipped ones are {', '.join(world_names())}, "
            f"and rows of presets are {', '.join(sorted(presets))}"
        )
    trained = _read_trained(args.trained or (args.markdown.with_name("trained.json") if args.markdown else None))
    result: dict[str, Any] = {"bench": "worlds", "model": "expert and random", "machine": f"{os.cpu_count()} CPU cores"}
    result["load_average"] = f"{os.getloadavg()[0]:.1f}"
    lines: dict[str, str] = {}
    begun = time.perf_counter()
    for label, name, options in all_rows(foreign):
        if args.only and not {name, label.removeprefix(PRESET).split()[0]} & set(args.only):
            continue
        print(f"playing {label} ...", file=sys.stderr, flush=True)
        measured = measure_world(name, options, args.attempts, args.at_once)
        result[label] = measured if isinstance(measured, str) else {who: _to_json(one) for who, one in measured.items()}
        lines[label] = table_row(label, measured, trained.get(label, {}))
    result["seconds"] = round(time.perf_counter() - begun)
    if args.markdown is not None:
        played = {label: line for label, line in lines.items() if label in _played(result)}
        told = write_rows(args.markdown, played, trained)
        left = [label for label in lines if label not in _played(result)]
        print(f"{told}; not played here: {', '.join(left) or 'none'}", file=sys.stderr)
    return {**result, "table": [*TABLE_HEAD, *lines.values()]}


def all_rows(foreign: Sequence[str] = ()) -> list[tuple[str, str, dict[str, Any]]]:
    """Label, world and options of each row."""
    plain = [(name, {}) for name in (*world_names(), *foreign)] + list(VARIANTS)
    rows = [(row_label(name, options), name, options) for name, options in plain]
    for preset, overrides in PRESETS:
        env = load_config(preset, [f"env.options.{one}" for one in overrides]).env
        rows.append((" ".join([f"{PRESET}{preset}", *overrides]), env.name, dict(env.options)))
    return rows


def _played(result: dict[str, Any]) -> list[str]:
    return [label for label, value in result.items() if isinstance(value, dict)]


def write_rows(page: Path, rows: dict[str, str], trained: dict[str, dict[str, str]]) -> str:
    """Replace rows of the page's table by label, and add those that are new. Return what was done.

    The rows that stay get what `trained` says today, too.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    if TABLE_HEAD[0] not in lines:
        raise ConfigError(f"--markdown {page}: the page has no table of worlds; expected the line {TABLE_HEAD[0]}")
    begin = lines.index(TABLE_HEAD[0]) + len(TABLE_HEAD)
    end = next((number for number in range(begin, len(lines)) if not lines[number].startswith("|")), len(lines))
    old = {line.split("`")[1]: line for line in lines[begin:end]}
    old = {label: _with_trained(line, trained.get(label, {})) for label, line in old.items()}
    lines[begin:end] = {**old, **rows}.values()
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"wrote {len(rows)} rows into {page}, of which {len(set(rows) - set(old))} are new"


def _with_trained(line: str, trained: dict[str, str]) -> str:
    cells = line.split("|")
    if len(cells) == len(COLUMNS) + 2:  # a row that says why it was not played has no such cells
        cells[3:6] = [f" {trained.get(key, '')} " for key in TRAINED]
    return "|".join(cells)


def show(result: dict[str, Any], *, as_json: bool) -> None:
    """Print the table as Markdown, and the load beside it."""
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print("\n".join(result["table"]))
    print(f"load average {result['load_average']} at the start, {os.getloadavg()[0]:.1f} now; {result['seconds']} s")


def row_label(name: str, options: dict[str, Any]) -> str:
    """The world and its options, as `turnwise check-env` takes them."""
    return " ".join([name, *(f"{key}={str(value).lower()}" for key, value in options.items())])


def measure_world(name: str, options: dict[str, Any], attempts: int, at_once: int) -> dict[str, Played] | str:
    """Play the expert and the random policy. A text says why the world cannot be played here."""
    skilled = {PLAIN_SKILL: 1.0} if any(one.name == PLAIN_SKILL for one in world_options(name)) else {}
    try:
        world = get_world(name, **{**options, **skilled})
        shown = world.demonstrations(attempts, 0)
    except ConfigError as error:
        return str(error)
    tasks = world.tasks("train", attempts, 0)
    if len(shown) != len(tasks):  # a world may leave out what it cannot demonstrate
        openings = run_to_end(_openings(world, tasks))
        tasks = [
            task for task in tasks if any(dialogue[: len(openings[task.id])] == openings[task.id] for dialogue in shown)
        ]
    if len(shown) < 2 or len(shown) != len(tasks):
        return f"{len(shown)} demonstrations of {len(tasks)} tasks; at least two that can be told apart are needed"
    said = [[message.content for message in dialogue if message.role == "assistant"] for dialogue in shown]

    own: Any = getattr(world, "random_player", None)

    def expert(number: int) -> ScriptedPlayer:
        return lambda dialogue: said[number][min(_turn(dialogue), len(said[number]) - 1)]

    def anything(number: int) -> ScriptedPlayer:
        if own is not None:
            return own(tasks[number], number)
        rng = random.Random(number)
        others = [reply for place, replies in enumerate(said) if place != number for reply in replies]
        return lambda _: rng.choice(others)

    return {
        who: run_to_end(_play_all(world, tasks, player, at_once))
        for who, player in (("expert", expert), ("random", anything))
    }


async def _openings(world: World, tasks: Sequence[Task]) -> dict[str, list[Message]]:
    """The first messages of each task, by its id."""
    found: dict[str, list[Message]] = {}
    for task in tasks:
        env = as_env(world.make_env(task, 0))
        try:
            found[task.id] = list(await env.start())
        finally:
            await env.close()
    return found


async def _play_all(
    world: World, tasks: Sequence[Task], player: Callable[[int], ScriptedPlayer], at_once: int
) -> Played:
    free = asyncio.Semaphore(at_once)

    async def one(number: int, task: Task) -> _Attempt:
        async with free:
            return await _play(world, task, player(number))

    begun, cpu_s = time.perf_counter(), _cpu_s()
    done = await asyncio.gather(*(one(number, task) for number, task in enumerate(tasks)))
    wall_s, cpu_s = time.perf_counter() - begun, _cpu_s() - cpu_s
    turns = sum(attempt.turns for attempt in done)
    return Played(
        successes=sum(attempt.is_success for attempt in done) / len(done),
        turns=turns / len(done),
        step_ms=1000 * sum(attempt.env_s for attempt in done) / max(1, turns),
        cpu_ms=1000 * cpu_s / max(1, turns),
        per_minute=60 * len(done) / wall_s,
    )


def _cpu_s() -> float:
    """CPU time of this process and of all below it so far, with those that have ended and were waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    below = sum(_ticks(pid) for pid in descendants(os.getpid())) / os.sysconf("SC_CLK_TCK")
    return time.process_time() + ended.ru_utime + ended.ru_stime + below


def _ticks(pid: int) -> int:
    """Clock ticks of a process and of its children that have ended. 0 if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return sum(map(int, stat.rpartition(")")[2].split()[11:15]))


def _turn(dialogue: Sequence[Message]) -> int:
    return sum(message.role == "assistant" for message in dialogue)


async def _play(world: World, task: Task, reply: ScriptedPlayer) -> _Attempt:
    """One attempt; the env gets the seed that demonstrations have."""
    env = as_env(world.make_env(task, 0))
    begun = time.perf_counter()
    turn, is_success = 0, False
    try:
        dialogue = list(await env.start())
        while turn < world.max_turns:
            dialogue.append(assistant(reply(dialogue)))
            step = await env.step(dialogue[-1])
            dialogue += step.messages
            turn += 1
            if step.is_over:
                is_success = bool(step.is_success)
                break
    finally:
        await env.close()
    return _Attempt(is_success=is_success, turns=turn, env_s=time.perf_counter() - begun)


COLUMNS = (
    *("World", "random", "base model", "after warm-up", "after RL", "expert"),
    *("turns", "env ms/step", "CPU ms/step", "attempts/min"),
)
TABLE_HEAD = (f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|")


def table_row(label: str, measured: dict[str, Played] | str, trained: dict[str, str]) -> str:
    """A line of the table."""
    if isinstance(measured, str):
        return f"| `{label}` | not played: {measured.splitlines()[0]} |" + " |" * (len(COLUMNS) - 2)
    expert, anything = measured["expert"], measured["random"]
    learned = [trained.get(key, "") for key in TRAINED]
    times = [f"{ms:.2g}" if ms < 10 else f"{ms:.0f}" for ms in (expert.step_ms, expert.cpu_ms)]
    figures = [f"{expert.turns:.1f}", *times, f"{expert.per_minute:,.0f}"]
    cells = [f"`{label}`", f"{anything.successes:.0%}", *learned, f"{expert.successes:.0%}", *figures]
    return f"| {' | '.join(cells)} |"


def _read_trained(path: Path | None) -> dict[str, dict[str, str]]:
    if path is None:
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--trained {path}: {error}; expected a JSON file of results by row") from error


def _to_json(played: Played) -> dict[str, float]:
    return {name: getattr(played, name) for name in ("successes", "turns", "step_ms", "per_minute")}
