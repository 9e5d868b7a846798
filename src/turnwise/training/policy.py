"""A policy to talk to and to measure: a checkpoint of a run, a checkpoint anywhere, or a model as it is.

policy = find_policy("runs/a")                  # the best checkpoint; step="last" or a number takes another
policy.sample("What is 2 + 2?")                 # text in, text out
policy.evaluate().row.success                   # held-out tasks of its world
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from turnwise.backends import BackendSetup, Publisher, find_publisher, make_publisher
from turnwise.client.base import SamplingClient
from turnwise.client.checkpoints import INFO_FILE, SCHEMES, CheckpointStore, read_info
from turnwise.client.publish import VersionedSampler
from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml, override_config
from turnwise.envs.base import World, user
from turnwise.envs.config import EnvConfig
from turnwise.envs.joint import leaf_of
from turnwise.envs.registry import world_names
from turnwise.errors import CheckpointError, ConfigError, DataError, ModelNotFoundError
from turnwise.judges import attach_judge
from turnwise.models import store as model_store
from turnwise.models.directories import ADAPTER_CONFIG
from turnwise.renderers.base import Renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.group import Rollout
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runtime.blocking import run_to_end
from turnwise.runtime.closing import ClosedOnExit
from turnwise.runtime.suggest import nearest
from turnwise.training.assemble import held_out_tasks, leaf_limits, make_eval_rollout, make_renderer
from turnwise.training.checkpoint import choose_checkpoint, saved_pool
from turnwise.training.evaluate import Evaluation, evaluate
from turnwise.training.objects import NO_OBJECTS, PythonObjects, check_played_objects, object_name
from turnwise.training.opponent_words import check_opponents, needs_opponents
from turnwise.training.opponents import Opponents
from turnwise.training.setup import (
    AnyService,
    Report,
    find_facts,
    find_model,
    make_service,
    read_config,
    report_nothing,
)
from turnwise.training.workers import bounded_by_workers, make_played_world, running_workers
from turnwise.trajectory import Message
from turnwise.types import ModelInput, SamplingParams

WHOLE_FILE = "model.safetensors"
"""The files that show whether a checkpoint is an adapter or a whole model."""
DEFAULT_WORLD = "guess_number"
"""A policy without a world gets the config of this one; talking uses nothing of the world."""
Prompt = str | Sequence[Message | Mapping[str, str]]
"""What a user says, or a conversation so far as messages or dicts with role and content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldChoice:
    """The world and the reward that a policy is to play with, in place of its own."""

    name: str | None = None
    """What `env.name` says of it; None: the policy's own world."""
    objects: PythonObjects = NO_OBJECTS
    """The world and the reward, where they are objects."""

    @classmethod
    def of(cls, env: Any = None, reward: Any = None) -> WorldChoice:
        """Tell a world's name from a world that is an object.

        Args:
            env: A world's name, or a world as an object.
            reward: A function of (task, messages).
        """
        if env is None or isinstance(env, str):
            return cls(name=env, objects=PythonObjects(reward=reward))
        return cls(name=object_name(env), objects=PythonObjects(env=env, reward=reward))

    def apply(self, config: Config, own: PythonObjects, overrides: Sequence[str]) -> tuple[Config, PythonObjects]:
        """A policy's config and objects, with this world in them.

        Options, level, tasks and reward of the policy's own world are not for another world, which brings its own.
        """
        given = self.objects
        if self.name is not None and self.name != config.env.name:
            config = config.model_copy(update={"env": EnvConfig()})
            return override_config(config, [f"env={self.name}", *overrides]), given
        merged = replace(
            own,
            env=own.env if given.env is None else given.env,
            reward=given.reward or own.reward,
        )
        return override_config(config, overrides), merged


OWN_WORLD = WorldChoice()


class PolicySampler(ClosedOnExit):
    """Weights that answer. Its model is loaded at the first question; `close`, or a with statement, frees it.

    >>> import turnwise as tw
    >>> small = {"eval": {"tasks": 0}, "warmup": {"steps": 0}, "observer": tw.Observer()}
    >>> with tw.train("guess_number", model="tiny", steps=1, **small) as run:
    ...     reply = run.last.sample("Guess a number.", max_tokens=4, seed=0)
    >>> isinstance(reply, str)
    True
    """

    def __init__(
        self,
        config: Config,
        *,
        data_dir: Path | None = None,
        checkpoint: str | None = None,
        step: int = 0,
        why: str = "",
        objects: PythonObjects = NO_OBJECTS,
    ) -> None:
        self.config = config
        self.data_dir = data_dir
        """The directory in which its service keeps checkpoints; None: in the model store's home."""
        self.checkpoint = checkpoint
        """None: the base model as it is."""
        self.step = step
        self.why = why
        """For a checkpoint of a run: which one this is, and why."""
        self.objects = objects
        """The world and the reward that it is measured with, where they are objects."""
        self._service: AnyService | None = None
        self._sampler: SamplingClient | None = None
        self._served: ServedPolicy | None = None

    @property
    def files(self) -> Path | None:
        """The checkpoint's directory; None where there is none here."""
        if self.checkpoint is None:
            return None
        if self.checkpoint.startswith(SCHEMES):
            return CheckpointStore(self.data_dir or model_store.home()).directory(self.checkpoint)
        return Path(self.checkpoint).expanduser()

    @property
    def service(self) -> AnyService:
        """The service that holds the policy's model."""
        if self._service is None:
            self._service = make_service(self.config, self.data_dir)
            weakref.finalize(self, self._service.close)
        return self._service

    @property
    def sampler(self) -> SamplingClient:
        """The sampling client of these weights, for calls with token ids; `rollout.backend` says who samples."""
        if self._sampler is None:
            if self.config.rollout.backend != "local":
                self._served = ServedPolicy(self.config, self._files_to_serve(), self.service)
                weakref.finalize(self, self._served.close)
                self._sampler = self._served.sampler
            elif self.checkpoint is not None:
                self._sampler = self.service.create_sampling_client(model_path=self.checkpoint)
            else:
                self._sampler = self.service.create_sampling_client(base_model=self.config.model.name)
        return self._sampler

    def _files_to_serve(self) -> Path | None:
        """The PEFT files of these weights, or the whole model, for a backend; None for the base model."""
        files = self.files
        if files is not None and not any((files / name).is_file() for name in (ADAPTER_CONFIG, WHOLE_FILE)):
            raise CheckpointError(
                f"{self.checkpoint} is not on this machine, so rollout.backend={self.config.rollout.backend} cannot "
                "serve it; expected a checkpoint with files here, or rollout.backend=local"
            )
        return files

    @property
    def renderer(self) -> Renderer:
        """Turns messages into token ids, as in training."""
        return make_renderer(self.sampler.get_tokenizer(), self.config.rollout, self.config.memory)

    def sampling_params(self, *, max_tokens: int, temperature: float, seed: int | None) -> SamplingParams:
        """Settings for a reply that ends where replies end in training: at the end of turn, or at `rollout.stop`."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop=list(self.config.rollout.stop) or None,
            stop_token_ids=list(self.renderer.stop_ids),
        )

    def sample(
        self, prompt: Prompt, *, max_tokens: int = 256, temperature: float = 1.0, seed: int | None = None
    ) -> str:
        """The policy's reply to a user's text, or to a conversation that ends with somebody else's message."""
        renderer = self.renderer
        params = self.sampling_params(max_tokens=max_tokens, temperature=temperature, seed=seed)
        request = ModelInput.from_ints(renderer.start(_to_messages(prompt)))
        sequence = self.sampler.sample(request, 1, params).result().sequences[0]
        return renderer.parse(list(sequence.tokens)).content

    def export(
        self, *, peft: str | Path | None = None, merged: str | Path | None = None, gguf: str | Path | None = None
    ) -> Path:
        """Write the weights for other programs, as `turnwise export` does; returns the new directory or file.

        Args:
            peft: A new directory for the adapter, in PEFT's format.
            merged: A new directory for a whole Hugging Face model.
            gguf: A new file for a whole model, for llama.cpp.
        """
        from turnwise.training.export import ExportPlaces, export_policy  # it reads policies

        places = ExportPlaces(peft=peft, merged=merged, gguf=gguf)
        place = places.place
        export_policy(self, places)
        return place

    def evaluate(self, *, label: str = "eval", tasks: slice = slice(None)) -> Evaluation:
        """Play the held-out tasks of its config's world, as an evaluation of a run does; `tasks` takes some of them."""
        config = self.config
        self.check_world()
        find_publisher(config.rollout.backend)
        # No method and no loss: a policy is measured without what it was trained with.
        world = make_played_world(config, self.objects)
        held_out = held_out_tasks(config, world)[tasks]
        if not held_out:
            raise ConfigError("eval.tasks is 0; there is nothing to evaluate")
        rollout = make_eval_rollout(config, config.rollout.for_world(world, find_facts(config).context_length))
        rollout = bounded_by_workers(rollout, world)
        attach_judge(world, self.service)
        limits = leaf_limits(config, world, find_facts(config).context_length)
        with running_workers(world), self.seated(world, rollout) as worlds:
            rollouts = {name: Rollout(one, self.sampler, self.renderer, rollout) for name, one in worlds.items()}
            for one in rollouts.values() if limits else ():
                one.rules = lambda task: make_eval_rollout(config, limits[leaf_of(world, task.id)])
            return run_to_end(evaluate(rollouts, held_out, seed=config.train.seed, label=label, step=self.step))

    @contextlib.contextmanager
    def seated(self, world: World, rollout: RolloutConfig) -> Generator[dict[str, World]]:
        """The world with each opponent of the config's panel, whose models are loaded; one world if it has none."""
        with self._opponents(world, rollout) as opponents:
            yield {"": world} if opponents is None else opponents.panel_worlds()

    @contextlib.contextmanager
    def opposed(self, world: World, rollout: RolloutConfig) -> Generator[World]:
        """The world with the opponent that the config names for training, whose model is loaded."""
        with self._opponents(world, rollout) as opponents:
            if opponents is not None and opponents.pool is not None:
                self._fill(opponents)
            yield world if opponents is None else opponents.world

    @contextlib.contextmanager
    def _opponents(self, world: World, rollout: RolloutConfig) -> Generator[Opponents | None]:
        check_opponents(self.config, world)
        if not needs_opponents(self.config, world):
            yield None
            return
        with Opponents(self.config, world, self.service, rollout) as opponents:
            opponents.open()
            opponents.follow(VersionedSampler(self.sampler, self.step))
            yield opponents

    def _fill(self, opponents: Opponents) -> None:
        """Let the snapshots join that the pool had at this checkpoint."""
        state = None
        if self.data_dir is not None and self.checkpoint is not None:
            state = saved_pool(self.data_dir, self.checkpoint)
        lost = [] if state is None else opponents.restore(state)
        opponents.check_pool(lost, "name one opponent: env.options.opponent=...")

    def check_world(self) -> None:
        """Refuse to play where the world or the reward was an object that a run directory cannot hold."""
        if self.data_dir is not None and is_run(self.data_dir):
            with RunReader(self.data_dir) as run:
                if config_from_yaml(run.config_yaml, str(run.directory)).env.name == self.config.env.name:
                    check_played_objects(run, self.objects)

    def evaluate_with(self, world: WorldChoice, overrides: Sequence[str]) -> Evaluation:
        """`evaluate` in another world, or with other settings; the model is not loaded again."""
        config, objects = world.apply(self.config, self.objects, overrides)
        if _served_by(config) != _served_by(self.config):
            raise ConfigError(
                "a policy keeps its model, its engine and its rollout.backend; expected other sections, such as eval"
            )
        other = PolicySampler(
            config, data_dir=self.data_dir, checkpoint=self.checkpoint, step=self.step, why=self.why, objects=objects
        )
        other._service, other._sampler = self.service, self.sampler
        return other.evaluate()

    def close(self) -> None:
        """Free the model, and stop the server that was started for it."""
        self._sampler = None
        if self._served is not None:
            self._served.close()
            self._served = None
        if self._service is not None:
            self._service.close()
            self._service = None

    def __repr__(self) -> str:
        return f"PolicySampler({self.checkpoint or self.config.model.name}, step {self.step})"


class ServedPolicy:
    """Weights on the servers of a backend that needs no trainer; `close` stops what was started for them."""

    def __init__(self, config: Config, adapter: Path | None, service: AnyService) -> None:
        rollout = config.rollout
        find_publisher(rollout.backend).check_options(rollout)
        # A directory of its own: the run's may belong to a process that trains, with servers and files of its own.
        self._directory = tempfile.TemporaryDirectory(prefix="turnwise-served-")
        setup = BackendSetup(
            rollout=rollout.for_world(cast(Any, None), find_facts(config).context_length),
            model_directory=find_model(config),
            run_directory=Path(self._directory.name),
            engine=config.engine_in_use,
            service=service,
        )
        self._publisher: Publisher | None = make_publisher(setup)
        try:
            self.sampler: SamplingClient = run_to_end(self._publisher.serve(adapter))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the servers; a second call does nothing."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            try:
                run_to_end(publisher.close())
            finally:
                self._directory.cleanup()


def _served_by(config: Config) -> tuple[object, ...]:
    """The settings that a loaded policy keeps: its model, its engine and who samples."""
    return config.model, config.engine, config.rollout.backend, config.rollout.url


EXPECTED_POLICY = "expected a run, its directory, a checkpoint, a model's name, or a policy such as run.best"


def find_policy(
    target: str,
    world: WorldChoice = OWN_WORLD,
    step: str | int | None = None,
    overrides: Sequence[str] = (),
    report: Report = report_nothing,
    own: PythonObjects = NO_OBJECTS,
) -> PolicySampler:
    """What a target means: a run directory, a checkpoint (a directory or a `tinker://` path), or a model.

    Args:
        world: The world to play; default: the run's own.
        step: best, last or a number; for run directories only.
        own: The objects that the run was started with, where they are known.
    """
    path = Path(target).expanduser()
    if is_run(path):
        with RunReader(path) as run:
            config = config_from_yaml(run.config_yaml, str(run.directory))
            found = choose_checkpoint(run, str(step) if step is not None else "best")
        config, objects = world.apply(config, own, overrides)
        row = found.row
        return PolicySampler(config, data_dir=path, checkpoint=row.path, step=row.step, why=found.why, objects=objects)
    if step is not None:
        raise ConfigError(f"step {step} names a checkpoint of a run, and {target} is no run's directory; leave it out")
    if target.startswith(SCHEMES):
        path = CheckpointStore(model_store.home()).directory(target)
    if target.startswith(SCHEMES) or (path / INFO_FILE).is_file() or (path / ADAPTER_CONFIG).is_file():
        settings = [f"model={_base_model(path)}", *_trained_part(path), *overrides]
        config = read_config(world.name or DEFAULT_WORLD, settings)
        return PolicySampler(config, checkpoint=target, objects=world.objects)
    check_is_there(target)
    config = read_config(world.name or DEFAULT_WORLD, [f"model={target}", *overrides])
    try:
        find_model(config, report)  # a name that is neither is refused with what was tried
    except ModelNotFoundError as cause:
        if target in world_names():
            raise ConfigError(f"{target} is a world; {EXPECTED_POLICY}, and the world as env={target}") from cause
        raise
    return PolicySampler(config, objects=world.objects)


def check_is_there(target: str | Path) -> None:
    """Refuse a path at which there is nothing, before it is looked for as the name of a model."""
    is_path = isinstance(target, Path) or target.startswith(("/", "./", "../", "~", "runs/"))
    path = Path(target).expanduser()
    if not is_path or path.exists():
        return
    runs = sorted(place.name for place in path.parent.glob("*") if is_run(place)) if path.parent.is_dir() else []
    near = f"; did you mean {path.parent / close}?" if (close := nearest(path.name, runs)) else ""
    raise ConfigError(f"{target} is not there{near}; {EXPECTED_POLICY}")


def _base_model(checkpoint: Path) -> str:
    """The model directory that an adapter belongs to."""
    for file, key in ((INFO_FILE, "model_directory"), (ADAPTER_CONFIG, "base_model_name_or_path")):
        if (checkpoint / file).is_file():
            return str(json.loads((checkpoint / file).read_text(encoding="utf-8"))[key])
    raise CheckpointError(f"no checkpoint in {checkpoint}")


def _trained_part(checkpoint: Path) -> list[str]:
    """The setting of `model.train` that a checkpoint's files belong to."""
    info = read_info(checkpoint)
    return ["model.train=full"] if info is not None and info.lora is None else []


def _to_messages(prompt: Prompt) -> list[Message]:
    if isinstance(prompt, str):
        return [user(prompt)]
    try:
        return [one if isinstance(one, Message) else Message(**one) for one in prompt]  # pyright: ignore[reportArgumentType]
    except TypeError as cause:
        raise DataError(
            f"prompt={prompt!r:.80} ({cause}); expected a text, or messages such as "
            "[{'role': 'user', 'content': 'Hi.'}]"
        ) from cause
