"""Plants failures in real runs, and asks doctor; then runs that learn, in which it must find nothing.

make campaign NAME=doctor_table                     the table of docs/doctor.md
make campaign NAME=doctor_table ARGS="--only stale rate_too_high --keep runs/doctor"
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import turnwise as tw
from turnwise.doctor import Finding, diagnose
from turnwise.errors import TurnwiseError

WORLD = f"{Path(__file__).parent / 'doctor_worlds.py'}:Letters"
QUICK: Mapping[str, Any] = {
    "train.steps": 12,
    "train.tasks_per_step": 4,
    "train.learning_rate": 3e-3,
    "rollout.group_size": 8,
    "eval.tasks": 16,
    "eval.every": 0,
    "train.max_empty_steps": 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    what: str
    """What is planted, in words."""
    expected: str = ""
    """The finding; empty: none."""
    fault: str = ""
    turns: int = 1
    world: str = WORLD
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def overrides(self) -> list[str]:
        own = {"env.options.fault": self.fault, "env.options.turns": self.turns} if self.world == WORLD else {}
        chosen = {**QUICK, **own, **self.options}
        return [f"{key}={json.dumps(value)}" for key, value in chosen.items() if value is not None]


PLANTED = (
    Case(what="`rollout.max_tokens_per_turn=2`, answers are longer", expected="replies_cut", fault="long_answer",
         options={"rollout.max_tokens_per_turn": 2}),
    Case(what="the env expects another form of reply", expected="replies_unparsable", fault="form"),
    Case(what="tasks that cannot be solved", expected="all_fail", fault="hard", options={"eval.tasks": 0}),
    Case(what="tasks that everybody solves", expected="all_succeed", fault="easy",
         options={"train.steps": 4, "train.max_empty_steps": 4}),
    Case(what="the reward depends on the task alone", expected="same_reward", fault="by_task"),
    Case(what="the env raises in half of the tasks", expected="env_fails", fault="env"),
    Case(what="a tool cannot be reached in half of the tasks", expected="tool_fails", fault="tool"),
    Case(what="`rollout.max_trajectory_tokens=12`: the first prompt does not fit", expected="prompt_too_long",
         options={"rollout.max_trajectory_tokens": 12}),
    Case(what="`rollout.max_trajectory_tokens=80` for six turns", expected="context_full", turns=6,
         options={"rollout.max_trajectory_tokens": 80}),
    Case(what="an env that needs longer than `rollout.attempt_deadline_s`", expected="out_of_time", fault="slow",
         turns=4, options={"rollout.attempt_deadline_s": 0.8, "train.steps": 3, "eval.tasks": 0}),
    Case(what="`rollout.max_turns=2`, the env judges after four", expected="out_of_turns", turns=4,
         options={"rollout.max_turns": 2}),
    Case(what="`rollout.temperature=0.0001`", expected="replies_identical", fault="fragile",
         options={"rollout.temperature": 0.0001}),
    Case(what="a reward that is drawn at random", expected="reward_is_chance", fault="chance",
         options={"rollout.temperature": 0.0001}),
    Case(what="`train.learning_rate=0.3`", expected="rate_too_high", fault="fragile",
         options={"train.learning_rate": 0.3, "train.steps": 16, "eval.tasks": 32, "train.max_empty_steps": 20}),
    Case(what="`train.learning_rate=1e-8`", expected="rate_too_low", options={"train.learning_rate": 1e-8}),
    Case(what="a trap: one cheap reply earns something, success is elsewhere", expected="entropy_collapsed",
         fault="trap", options={"train.learning_rate": 3e-2, "train.steps": 16}),
    Case(what="rewards of 10,000", expected="gradient_clipped", fault="huge"),
    Case(what="rewards of 1e-6", expected="gradient_vanishes", fault="minute"),
    Case(what="four updates from one batch with a high rate", expected="weights_moved",
         options={"train.substeps": 4, "train.learning_rate": 3e-2}),
    Case(what="slow tasks with `train.max_wait=4`, `train.max_staleness=1`", expected="stale", fault="uneven",
         options={"train.max_staleness": 1, "train.max_wait": 4, "train.min_batch": 1, "eval.tasks": 0,
                  "train.tasks_per_step": 4}),
    Case(what="format is paid, success is not", expected="reward_hacked", fault="hack",
         options={"train.learning_rate": 1e-2, "train.steps": 16, "eval.tasks": 0}),
    Case(what="held-out tasks of another kind", expected="overfits", fault="split",
         options={"train.learning_rate": 1e-2, "train.steps": 16}),
    Case(what="demonstrations that show a bad reply", expected="warmup_hurts", fault="bad_demonstrations",
         options={"warmup.steps": 40, "warmup.learning_rate": 1e-2, "eval.tasks": 32, "eval.samples": 4}),
    Case(what="demonstrations longer than `max_tokens_per_turn`", expected="demonstrations_cut",
         fault="long_demonstrations"),
    Case(what="the world's own demonstrations earn nothing", expected="reward_broken", fault="hard"),
)  # fmt: skip

HEALTHY = (
    Case(what="letters, grpo", options={"train.steps": 16}),
    Case(what="letters, rloo", options={"method": "rloo", "train.steps": 16}),
    Case(what="letters, reinforce", options={"method": "reinforce_pp", "train.steps": 16}),
    Case(what="letters, gspo", options={"method": "gspo", "train.steps": 16}),
    Case(what="letters, ppo with a critic",
         options={"method": "ppo", "train.steps": 16, "critic.pretrain_steps": 5}),
    Case(what="letters, two turns, la_grpo", turns=2, options={"method": "la_grpo", "train.steps": 16}),
    Case(what="letters, a step behind", options={"train.max_staleness": 1, "train.steps": 16}),
    Case(what="letters, with a warm-up", options={"warmup.steps": 10, "train.steps": 16}),
    Case(what="letters, rejection sampling", options={"method": "rft", "train.steps": 16}),
    Case(what="guess_number after a long warm-up", world="guess_number_tiny",
         options={"warmup.steps": 200, "train.steps": 12, "train.learning_rate": 1e-3, "eval.tasks": 64,
                  "rollout.group_size": 16, "train.tasks_per_step": 8}),
)  # fmt: skip


def run_case(case: Case, directory: Path) -> tuple[list[Finding], float, str]:
    """Findings and seconds of one run, and how it ended."""
    started_s, end = time.monotonic(), "finished"
    try:
        tw.train(
            case.world, model="tiny", overrides=case.overrides(), run={"dir": str(directory)}, observer=tw.Observer()
        )
    except TurnwiseError as error:
        if not directory.exists():
            raise
        end = type(error).__name__
    return diagnose(directory), time.monotonic() - started_s, end


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], help="findings, or words of healthy runs")
    parser.add_argument("--keep", type=Path, help="keep the runs below this directory")
    options = parser.parse_args(argv)
    place = options.keep or Path(tempfile.mkdtemp(prefix="doctor-"))
    named = alarms = 0
    chosen = [
        (index, case)
        for index, case in enumerate((*PLANTED, *HEALTHY))
        if not options.only or any(word in (case.expected or case.what) for word in options.only)
    ]
    print("| Planted | Doctor's verdict, the deepest first | Named | s |\n|---|---|---|---|", flush=True)
    for index, case in chosen:
        found, took_s, end = run_case(case, place / str(index))
        names = [finding.name for finding in found]
        is_right = case.expected in names if case.expected else not names and end == "finished"
        named += bool(case.expected) and is_right
        alarms += not case.expected and not is_right
        verdict = ", ".join(f"`{name}`" for name in names) or "nothing found"
        what = case.what if case.expected else f"healthy: {case.what}"
        ending = "" if end == "finished" else f" ({end})"
        print(f"| {what} | {verdict}{ending} | {'yes' if is_right else 'NO'} | {took_s:.0f} |", flush=True)
    num_planted = sum(bool(case.expected) for _, case in chosen)
    num_healthy = len(chosen) - num_planted
    print(f"\n{named} of {num_planted} planted failures named; {alarms} false alarms in {num_healthy} healthy runs")
    return 0 if not alarms and named >= 0.9 * num_planted else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
