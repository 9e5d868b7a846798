"""Measure training on branched dialogues, as a tree against separate rows of the same engine.

The datums are those of `method=la_grpo`: a group shares several turns, then each member has one more turn, and only
that turn is trained.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from turnwise.bench.report import machine, make_engine, peak_gib
from turnwise.bench.tree import time_sharing
from turnwise.credit.advantages import center_by_group
from turnwise.methods.la_grpo import LaGrpo
from turnwise.rollout.sources import PlayBranches
from turnwise.trajectory import Branch, EndReason, Message, Trajectory, TrajectoryGroup, Turn
from turnwise.types import Datum


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, default=1, help="number of groups")
    parser.add_argument("--group-size", type=int, default=8, help="continuations per group")
    parser.add_argument("--turns", type=int, default=5, help="turns that a group shares")
    parser.add_argument("--observation", type=int, default=100, help="tokens that the world adds before each turn")
    parser.add_argument("--reply", type=int, default=60, help="tokens that the policy adds in each turn")


def run(args: argparse.Namespace) -> dict[str, Any]:
    engine = make_engine(args, kv_cache_gib=0.05)
    datums = make_datums(args, engine.vocab_size)
    alone, shared = time_sharing(engine, datums, args)
    total = sum(datum.model_input.length for datum in datums)
    prefix = args.turns * (args.observation + args.reply) + args.observation
    unique = args.groups * (prefix + args.group_size * (args.reply - 1))
    return {
        "bench": "branch",
        "model": args.model,
        "machine": machine(engine.device),
        "load": f"{args.groups} x {args.group_size} continuations of {args.turns} turns, {prefix} shared + "
        f"{args.reply} own tokens",
        "tokens_per_s": total / shared.median,
        "unshared_tokens_per_s": total / alone.median,
        "speedup": alone.median / shared.median,
        "ideal_speedup": total / unique,
        "peak_gib": peak_gib(engine.device),
    }


def make_datums(args: argparse.Namespace, vocab_size: int) -> list[Datum]:
    """Make datums with the method itself, from dialogues of random ids."""
    rng = np.random.default_rng(0)
    method = LaGrpo(
        source=PlayBranches(continuations=args.group_size),
        loss_fn="importance_sampling",
        loss_config={},
        compare=center_by_group,
    )
    groups = [_group(index, rng, args, vocab_size) for index in range(args.groups)]
    return [datum for lesson in method.lessons(groups) for datum in lesson.datums]


def _group(index: int, rng: np.random.Generator, args: argparse.Namespace, vocab_size: int) -> TrajectoryGroup:
    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(100, vocab_size, count).tolist())

    shared: list[Turn] = []
    ids: tuple[int, ...] = ()
    for _ in range(args.turns):
        prompt = ids + draw(args.observation)
        shared.append(_turn(prompt, draw(args.reply), 0.0))
        ids = prompt + shared[-1].sampled_ids
    prompt = ids + draw(args.observation)
    trajectories = tuple(
        Trajectory(
            task_id=f"task-{index}",
            attempt=attempt,
            seed=index,
            turns=(*shared, _turn(prompt, draw(args.reply), float(attempt))),
            end_reason=EndReason.TERMINATED,
            branch=Branch(turn=args.turns, seed=attempt),
        )
        for attempt in range(args.group_size)
    )
    return TrajectoryGroup(task_id=f"task-{index}", trajectories=trajectories, branch_turn=args.turns)


def _turn(prompt: tuple[int, ...], sampled: tuple[int, ...], reward: float) -> Turn:
    return Turn(
        prompt_ids=prompt,
        sampled_ids=sampled,
        sampler_logprobs=(-10.0,) * len(sampled),
        policy_version=1,
        reply=Message(role="assistant", content=""),
        reward_parts={"outcome": reward},
    )
