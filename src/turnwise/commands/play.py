"""`turnwise eval` and `turnwise sample`: measure a policy, or chat with it.

A policy is named by a run directory (its best checkpoint, unless `--step` names another), a checkpoint (a directory or
a `tinker://` path in the store), or a model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from turnwise.backends import find_publisher
from turnwise.client.base import SamplingClient
from turnwise.commands.train import say
from turnwise.envs.base import system, user
from turnwise.errors import ConfigError
from turnwise.renderers.base import Renderer
from turnwise.runlog.reader import is_run
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.policy import PolicySampler, WorldChoice, find_policy
from turnwise.trajectory import Message
from turnwise.types import ModelInput, SamplingParams
from turnwise.watch.terminal import evaluation_line


def open_policy(target: str, env: str | None, step: str | None, overrides: Sequence[str] = ()) -> PolicySampler:
    """Open the policy that a command names; print on stderr which checkpoint of a run it is."""
    policy = find_policy(target, WorldChoice.of(env), step, overrides, report=say)
    if policy.why:
        say(f"checkpoint: {policy.why}")
    rollout = policy.config.rollout
    if rollout.backend != "local":
        say(f"sampler: {find_publisher(rollout.backend).describe(rollout)}; rollout.backend=local samples here")
    return policy


def run_eval(target: str, env: str | None, step: str | None, overrides: Sequence[str], *, as_json: bool) -> ExitCode:
    """Play held-out tasks with one policy and print the result."""
    if env is None and not is_run(Path(target)):
        find_policy(target, step=step, overrides=overrides, report=say)  # an unknown target before a missing world
        raise ConfigError(f"{target} does not say which world it is for; add --env NAME")
    with open_policy(target, env, step, overrides) as policy:
        evaluation = policy.evaluate()
    row, parts = evaluation.row, {"by_world": evaluation.by_world, "by_opponent": evaluation.by_opponent}
    if as_json:
        told = {key: {name: asdict(one) for name, one in rows.items()} for key, rows in parts.items() if rows}
        print(json.dumps(asdict(row) | told))
        return ExitCode.OK
    lines = [f"{name}: {evaluation_line(one)}" for rows in parts.values() for name, one in rows.items()]
    print("\n".join([*lines, f"together: {evaluation_line(row)}" if lines else evaluation_line(row)]))
    return ExitCode.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How `turnwise sample` talks."""

    system_text: str | None = None
    temperature: float = 0.7
    max_tokens: int = 256
    seed: int | None = None


def run_sample(target: str, step: str | None, overrides: Sequence[str], options: ChatOptions) -> ExitCode:
    """Chat: line by line from a terminal, or every line of a pipe as one message."""
    with open_policy(target, None, step, overrides) as policy:
        sampler, renderer = policy.sampler, policy.renderer
        params = policy.sampling_params(
            max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed
        )
        for reply in _replies(sampler, renderer, params, options.system_text):
            print(f"model> {reply}" if sys.stdin.isatty() else reply, flush=True)
    return ExitCode.OK


def _replies(
    sampler: SamplingClient, renderer: Renderer, params: SamplingParams, system_text: str | None
) -> Iterator[str]:
    history: list[Message] = [system(system_text)] if system_text else []
    prompt_ids: list[int] = []
    sampled_ids: list[int] = []
    for line in _lines():
        if sampled_ids:
            prompt_ids = renderer.extend(prompt_ids, sampled_ids, [user(line)], history=history[:-1]).ids
            history.append(user(line))
        else:
            history.append(user(line))
            prompt_ids = renderer.start(history)
        sequence = sampler.sample(ModelInput.from_ints(prompt_ids), 1, params).result().sequences[0]
        sampled_ids = list(sequence.tokens)
        if sequence.stop_reason == "length":
            say(f"the reply is cut after {len(sampled_ids)} tokens; --max-tokens allows more")
        reply = renderer.parse(sampled_ids)
        history.append(reply)
        yield reply.content


def _lines() -> Iterator[str]:
    """The user's lines, without empty ones."""
    while True:
        try:
            line = input("you> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                print()  # Ctrl-D leaves the cursor behind the prompt
            return
        if line.strip():
            yield line
