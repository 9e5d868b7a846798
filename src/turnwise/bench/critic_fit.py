"""How much of the return can a critic predict in a world, and how many updates does it need for that?

    python -m turnwise.bench.critic_fit runs/a --attempts 900 --rates 1e-3 3e-3 --steps 120

The policy of a run plays held-out tasks once. A table of states is the bound: the mean return of all other attempts
that were in a state of the same name (`state_key()` of the env), which no critic can beat by much. New critics then
learn from a part of the attempts, batch by batch, and are asked about the rest: explained variance over all sampled
tokens, and in each fifth of an attempt. Nothing is done to the policy.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.client.base import TrainingClient
from turnwise.client.local import ServiceClient
from turnwise.config.config import Config
from turnwise.credit.gae import Gae
from turnwise.credit.values import (
    FloatArray,
    TrajectoryValues,
    concatenated,
    error_by_position,
    explained_variance,
    read_values,
    value_datums,
    value_sequences,
)
from turnwise.engine.config import EngineConfig
from turnwise.errors import ConfigError
from turnwise.training.run import Run, evaluate
from turnwise.trajectory import Trajectory
from turnwise.types import AdamParams

NUM_FOLDS = 10
HELD_OUT = 0.28
"""Share of the attempts that critics are asked about and do not learn from."""
NUM_PARTS = 5
ASKED_AT_ONCE = 32
PLAIN = Gae(critic_lambda=1.0)
"""The critic's targets: returns without any predicted value."""

Turns = Sequence[FloatArray]
"""[S] per turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How a critic learns off-line."""

    steps: int = 120
    batch_size: int = 16
    """Attempts in each step."""
    learning_rate: float = 3e-3
    rank: int = 32
    report_every: int = 40
    seed: int = 0


def returns_of(attempt: Trajectory) -> Turns:
    """What came after each sampled token."""
    return PLAIN.returns(attempt, _zeros(attempt))


def _zeros(attempt: Trajectory) -> TrajectoryValues:
    return TrajectoryValues(turns=tuple(np.zeros(len(turn.sampled_ids)) for turn in attempt.turns))


def values_by_state(attempts: Sequence[Trajectory]) -> list[Turns]:
    """What a table of states says of every attempt; the attempts of its own tenth are left out of the table.

    A state that the table lacks gets the mean over all states, which also counts as one attempt in every other.
    """
    if any(turn.env_state is None for attempt in attempts for turn in attempt.turns):
        raise ConfigError("this world's env does not name its states; give it a method state_key() -> str")
    found: list[Turns] = [()] * len(attempts)
    for fold in range(NUM_FOLDS):
        sums: dict[str | None, list[float]] = {}
        for attempt in (one for index, one in enumerate(attempts) if index % NUM_FOLDS != fold):
            for turn, due_S in zip(attempt.turns, returns_of(attempt), strict=True):
                sums.setdefault(turn.env_state, []).append(float(due_S[0]))
        base = float(np.mean([due for known in sums.values() for due in known])) if sums else 0.0
        for index in range(fold, len(attempts), NUM_FOLDS):
            means = [_mean_with(sums.get(turn.env_state, []), base) for turn in attempts[index].turns]
            lengths = [len(turn.sampled_ids) for turn in attempts[index].turns]
            found[index] = [np.full(length, mean) for length, mean in zip(lengths, means, strict=True)]
    return found


def _mean_with(known: Sequence[float], base: float) -> float:
    return (sum(known) + base) / (len(known) + 1)


def row(name: str, attempts: Sequence[Trajectory], values: Sequence[Turns]) -> str:
    """A line of the table: explained variance of all tokens, then of each fifth."""
    returns = [returns_of(attempt) for attempt in attempts]
    came, said = (
        np.fromiter((number for turns in kind for number in concatenated(turns)), float) for kind in (returns, values)
    )
    parts = [explained for _, explained in error_by_position(returns, values, num_parts=NUM_PARTS)]
    return f"| {name} | " + " | ".join(f"{one:.2f}" for one in (explained_variance(came, said), *parts)) + " |"


def ask(client: TrainingClient, attempts: Sequence[Trajectory]) -> list[Turns]:
    """The critic's values of every sampled token."""
    found: list[Turns] = []
    for start in range(0, len(attempts), ASKED_AT_ONCE):
        part = attempts[start : start + ASKED_AT_ONCE]
        asked = [value_sequences(attempt) for attempt in part]
        questions = [sequence.question() for sequences in asked for sequence in sequences]
        answers = iter(client.forward(questions, "value").result().loss_fn_outputs)
        for attempt, sequences in zip(part, asked, strict=True):
            said = [next(answers)["values"].tolist() for _ in sequences]
            found.append(read_values(attempt, sequences, said).turns)
    return found


def fit(
    client: TrainingClient, attempts: Sequence[Trajectory], asked: Sequence[Trajectory], options: FitOptions
) -> list[str]:
    """Teach a new critic; a line of the table for every report."""
    random, order, rows = np.random.default_rng(options.seed), list[int](), list[str]()
    for step in range(1, options.steps + 1):
        if len(order) < options.batch_size:
            order = [int(index) for index in random.permutation(len(attempts))]
        batch = [attempts[index] for index in order[: options.batch_size]]
        del order[: options.batch_size]
        returns = [returns_of(attempt) for attempt in batch]
        weight = 1.0 / sum(len(due_S) for due in returns for due_S in due)
        datums = [
            datum
            for attempt, due in zip(batch, returns, strict=True)
            for datum in value_datums(value_sequences(attempt), due, _zeros(attempt), weight=weight)
        ]
        client.forward_backward(datums, "value").result()
        client.optim_step(AdamParams(learning_rate=options.learning_rate, grad_clip_norm=1.0)).result()
        if step % options.report_every == 0 or step == options.steps:
            rows.append(row(f"critic, rate {options.learning_rate:g}, {step} updates", asked, ask(client, asked)))
    return rows


def play(run: str, count: int, more: Sequence[str]) -> tuple[Config, list[Trajectory]]:
    """Attempts of a run's last policy, in random order."""
    options = [f"eval.tasks={count}", *more]
    groups = evaluate(run, step="last", overrides=options).played.groups
    attempts = [one for group in groups for one in group.trajectories if one.failure is None]
    order = np.random.default_rng(1).permutation(len(attempts))
    return Run.open(run).config, [attempts[int(index)] for index in order]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="directory of a run whose policy plays")
    parser.add_argument("--attempts", type=int, default=900, help="held-out tasks that it plays")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3], help="learning rates of the critics")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of each critic")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION", help="more options of the attempts")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config, attempts = play(options.run, options.attempts, options.set)
    cut = round(HELD_OUT * len(attempts))
    asked, taught = attempts[:cut], attempts[cut:]
    print(f"{len(attempts)} attempts, mean return {np.mean([one.total_reward for one in attempts]):.3f}")
    print("| values | all | " + " | ".join(f"fifth {part}" for part in range(1, NUM_PARTS + 1)) + " |")
    print("|---" * (NUM_PARTS + 2) + "|")
    print(row("table of states", asked, values_by_state(attempts)[:cut]), flush=True)
    with ServiceClient(engine=EngineConfig(device=config.engine.device)) as service:
        for rate in options.rates:
            fitting = FitOptions(steps=options.steps, learning_rate=rate, rank=config.critic.rank or config.model.rank)
            client = service.create_critic_training_client(config.model.name, rank=fitting.rank, seed=fitting.seed)
            print("\n".join(fit(client, taught, asked, fitting)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
