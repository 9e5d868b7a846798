"""Measure sampling with guessed tokens (`engine.speculation=suffix`) beside the same load without.

The load is that of GRPO: several attempts at each of some tasks of a shipped world, sampled together at temperature 1
until they end, and the same tasks again with other seeds. `--train-steps` imitates the world's demonstrations first, as
a warm-up does, because a policy in training says more things twice than its base model. Both engines have the same
weights and play the same seeds, one after the other and by turns; `equal_share` is the share of replies that are equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.bench.drive import finish, submit
from turnwise.bench.report import machine, make_engine, model_directory
from turnwise.credit.datums import dialogue_to_datums
from turnwise.engine.engine import Engine
from turnwise.engine.model.lora import Policy
from turnwise.engine.training.trainable import LoraAdapter
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError
from turnwise.models.tokenizer import load_tokenizer
from turnwise.renderers import get_renderer
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.types import AdamParams, Datum, LoraConfig, SampleRequest, SampleResponse, SamplingParams

SEED = 0
LEARNING_RATE = 2e-3


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(repeats=4)
    parser.add_argument("--world", default="text_to_sql", help="the shipped world whose tasks are asked")
    parser.add_argument("--tasks", type=int, default=2, help="number of tasks")
    parser.add_argument("--attempts", type=int, default=8, help="attempts at each task, sampled together")
    parser.add_argument("--reply", type=int, default=64, help="most tokens in each reply")
    parser.add_argument("--temperature", type=float, default=1.0, help="temperature of all replies")
    parser.add_argument("--shown", type=int, default=16, help="demonstrations that each step of imitation learns from")
    parser.add_argument("--train-steps", type=int, default=0, help="steps of imitation before anything is sampled")


@dataclass(frozen=True, slots=True)
class _Load:
    prompts: Sequence[list[int]]
    stop: list[int]
    demonstrations: Sequence[Datum]


@dataclass(frozen=True, slots=True)
class _Play:
    """All attempts at all tasks, once."""

    seconds: float
    cpu_s: float
    """Processor time of all threads."""
    replies: list[list[int]]
    num_drafted: int
    num_accepted: int
    num_steps: int

    @property
    def num_tokens(self) -> int:
        return sum(len(reply) for reply in self.replies)


def run(args: argparse.Namespace) -> dict[str, Any]:
    load = _read_load(args)
    engines = [make_engine(args, speculation=kind, max_num_seqs=256) for kind in ("none", "suffix")]
    adapter = _train(engines[0], args, load.demonstrations)
    policies = [engine.base_policy if adapter is None else engine.publish(adapter) for engine in engines]
    plays: list[list[_Play]] = [[], []]
    for index in range(args.warmups + args.repeats):
        for side, (engine, policy) in enumerate(zip(engines, policies, strict=True)):
            played = _play(engine, policy, load, args, first_seed=1000 * index)
            if index >= args.warmups:
                plays[side].append(played)
    without, guessed = plays
    drafted = sum(play.num_drafted for play in guessed)
    pairs = list(zip(without, guessed, strict=True))
    equal = [one == other for a, b in pairs for one, other in zip(a.replies, b.replies, strict=True)]
    ratios = sorted(
        (b.num_tokens / b.seconds) / (a.num_tokens / a.seconds) for a, b in pairs
    )  # a reply that differs may have another length
    return {
        "bench": "speculation",
        "model": args.model,
        "machine": machine(engines[0].device),
        "dtype": str(engines[0].dtype).removeprefix("torch."),
        "load": f"{args.tasks} tasks of {args.world} x {args.attempts} attempts, up to {args.reply} tokens, at "
        f"temperature {args.temperature:g}, after {args.train_steps} steps of imitation; {args.repeats} plays",
        "tokens_per_reply": statistics.fmean(len(reply) for play in guessed for reply in play.replies),
        "without_tokens_per_s": _speed(without),
        "tokens_per_s": _speed(guessed),
        "speedup": _speed(guessed) / _speed(without),
        "speedup_least": ratios[0],
        "speedup_most": ratios[-1],
        "cpu_speedup": _per_cpu_second(guessed) / _per_cpu_second(without),
        "draft_tokens": drafted,
        "draft_accepted_share": sum(play.num_accepted for play in guessed) / drafted if drafted else 0.0,
        "without_steps": sum(play.num_steps for play in without),
        "steps": sum(play.num_steps for play in guessed),
        "equal_share": statistics.fmean(equal),
    }


def _speed(plays: Sequence[_Play]) -> float:
    return sum(play.num_tokens for play in plays) / sum(play.seconds for play in plays)


def _per_cpu_second(plays: Sequence[_Play]) -> float:
    return sum(play.num_tokens for play in plays) / sum(play.cpu_s for play in plays)


def _read_load(args: argparse.Namespace) -> _Load:
    world = get_world(args.world)
    renderer = get_renderer(load_tokenizer(model_directory(args.model)))
    asked = world.demonstrations(args.tasks, SEED + 1)
    if len(asked) < args.tasks:
        raise ConfigError(f"--world {args.world} demonstrates {len(asked)} of {args.tasks} tasks; ask for fewer")
    prompts = [list(dialogue_to_turns(renderer, messages)[0].prompt_ids) for messages in asked]
    shown = world.demonstrations(args.shown, SEED) if args.train_steps else []
    datums = [
        datum
        for messages in shown
        for datum in dialogue_to_datums([(t.prompt_ids, t.reply_ids) for t in dialogue_to_turns(renderer, messages)])
    ]
    return _Load(prompts, list(renderer.stop_ids), datums)


def _train(engine: Engine, args: argparse.Namespace, datums: Sequence[Datum]) -> LoraAdapter | None:
    if not args.rank:
        return None
    adapter = engine.create_adapter(LoraConfig(rank=args.rank, seed=SEED))
    for _ in range(args.train_steps):
        finish(engine.forward_backward(adapter, datums, "cross_entropy", None))
        engine.optim_step(adapter, AdamParams(learning_rate=LEARNING_RATE))
    return adapter


def _play(engine: Engine, policy: Policy, load: _Load, args: argparse.Namespace, *, first_seed: int) -> _Play:
    """Each attempt by a request of its own, all of them before the first step."""
    replies: dict[int, SampleResponse] = {}
    asked = [prompt for prompt in load.prompts for _ in range(args.attempts)]
    engine.sampler.drop_cache()
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    for index, prompt in enumerate(asked):
        params = SamplingParams(
            max_tokens=args.reply, seed=first_seed + index, temperature=args.temperature, stop=load.stop
        )
        submit(engine, SampleRequest(prompt, params), policy, replies, index)
    num_steps = 0
    while engine.sampler.has_work:
        engine.sampler.step()
        num_steps += 1
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    found = [replies[index] for index in range(len(asked))]
    return _Play(
        seconds=seconds,
        cpu_s=cpu_s,
        replies=[list(reply.sequences[0].tokens) for reply in found],
        num_drafted=sum(reply.num_draft_tokens for reply in found),
        num_accepted=sum(reply.num_accepted_draft_tokens for reply in found),
        num_steps=num_steps,
    )
