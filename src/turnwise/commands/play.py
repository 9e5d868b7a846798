"""`turnwise eval` and `turnwise sample`: measure a policy, or talk to it.

A policy is named by a run directory (its best checkpoint, unless `--step` names another), a checkpoint (a directory or
a `tinker://` path in the store), or a model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from turnwise.client.base import SamplingClient
from turnwise.client.checkpoints import INFO_FILE, SCHEMES
from turnwise.config.config import Config, check_backend
from turnwise.config.files import config_from_yaml, override_config
from turnwise.envs.base import system, user
from turnwise.errors import CheckpointError, ConfigError
from turnwise.judges import attach_judge
from turnwise.models import store as model_store
from turnwise.renderers.base import Renderer
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.assemble import assemble, make_renderer
from turnwise.training.checkpoint import checkpoint_directory, choose_checkpoint
from turnwise.training.evaluate import evaluate
from turnwise.training.remote import AnyService
from turnwise.training.run import find_facts, find_model, make_service, read_config
from turnwise.trajectory import Message
from turnwise.types import ModelInput, SamplingParams
from turnwise.watch.terminal import evaluation_line

ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the command line named."""

    config: Config
    data_dir: Path | None
    checkpoint: str | None
    """None: the base model as it is."""
    step: int
    why: str = ""
    """Of a run: which of its checkpoints this is, and why."""

    @property
    def files(self) -> Path | None:
        """The checkpoint's directory; None where there is none here."""
        if self.checkpoint is None:
            return None
        if self.checkpoint.startswith(SCHEMES):
            return checkpoint_directory(self.data_dir or model_store.home(), self.checkpoint)
        return Path(self.checkpoint).expanduser()

    def say_which(self) -> None:
        """Tell a person which checkpoint of the run was taken."""
        if self.why:
            print(f"checkpoint: {self.why}", file=sys.stderr, flush=True)

    def sampler(self, service: AnyService) -> SamplingClient:
        if self.checkpoint is not None:
            return service.create_sampling_client(model_path=self.checkpoint)
        return service.create_sampling_client(base_model=self.config.model.name)


def run_eval(target: str, env: str | None, step: str | None, overrides: Sequence[str], *, as_json: bool) -> int:
    """Play held-out tasks with one policy and print what came out."""
    policy = find_policy(target, env, step, overrides)
    if env is None and not is_run(Path(target)):
        raise ConfigError(f"{target} does not say which world it is for; add --env NAME")
    policy.say_which()
    config = policy.config
    check_backend(config.generator)
    parts = assemble(config, find_facts(config))
    if not parts.held_out:
        raise ConfigError("eval.tasks is 0; there is nothing to evaluate")
    with make_service(config, policy.data_dir) as service:
        attach_judge(parts.world, service)
        sampler = policy.sampler(service)
        renderer = make_renderer(sampler.get_tokenizer(), config.generator)
        evaluation = asyncio.run(
            evaluate(
                *(parts.world, parts.held_out, sampler, renderer, parts.eval_rollout),
                seed=config.train.seed,
                label="eval",
                step=policy.step,
            )
        )
    print(json.dumps(asdict(evaluation.row)) if as_json else evaluation_line(evaluation.row))
    return 0


def run_sample(
    target: str, step: str | None, *, system_text: str | None, temperature: float, max_tokens: int, seed: int | None
) -> int:
    """Chat: line by line from a terminal, or every line of a pipe as one message."""
    policy = find_policy(target, None, step, [])
    policy.say_which()
    with make_service(policy.config, policy.data_dir) as service:
        sampler = policy.sampler(service)
        renderer = make_renderer(sampler.get_tokenizer(), policy.config.generator)
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed, stop_token_ids=list(renderer.stop_ids)
        )
        for reply in _replies(sampler, renderer, params, system_text):
            print(f"model> {reply}" if sys.stdin.isatty() else reply, flush=True)
    return 0


def find_policy(target: str, env: str | None, step: str | None, overrides: Sequence[str]) -> Policy:
    """What a command's target means; `step` is best, last or a number, for run directories only."""
    chosen = [f"env={env}", *overrides] if env is not None else list(overrides)
    path = Path(target).expanduser()
    if is_run(path):
        with RunReader(path) as run:
            config = config_from_yaml(run.config_yaml, str(run.directory))
            if env is not None and env != config.env.name:
                config = config.model_copy(update={"env": config.env.model_copy(update={"options": {}})})
            found = choose_checkpoint(run, step or "best")
        config = override_config(config, chosen)
        row = found.row
        return Policy(config=config, data_dir=path, checkpoint=row.path, step=row.step, why=found.why)
    if step is not None:
        raise ConfigError(f"--step is for run directories; {target} is none")
    if target.startswith(SCHEMES):
        path = checkpoint_directory(model_store.home(), target)
    if target.startswith(SCHEMES) or (path / INFO_FILE).is_file() or (path / ADAPTER_FILE).is_file():
        config = read_config(env or "guess_number", [f"model={_base_model(path)}", *overrides])
        return Policy(config=config, data_dir=None, checkpoint=target, step=0)
    config = read_config(env or "guess_number", [f"model={target}", *overrides])
    find_model(config)  # a name that is neither is refused with what was tried
    return Policy(config=config, data_dir=None, checkpoint=None, step=0)


def _base_model(checkpoint: Path) -> str:
    """The model directory that an adapter belongs to."""
    for file, key in ((INFO_FILE, "model_directory"), (ADAPTER_FILE, "base_model_name_or_path")):
        if (checkpoint / file).is_file():
            return str(json.loads((checkpoint / file).read_text(encoding="utf-8"))[key])
    raise CheckpointError(f"no checkpoint in {checkpoint}")


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
        reply = renderer.parse(sampled_ids)
        history.append(reply)
        yield reply.content


def _lines() -> Iterator[str]:
    """What the user says; empty lines are passed over."""
    while True:
        try:
            line = input("you> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                print()  # Ctrl-D leaves the cursor behind the prompt
            return
        if line.strip():
            yield line
