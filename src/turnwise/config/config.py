"""The config of a run: the sections of all packages together, and the checks that need several sections.

    rollout:                            # a YAML file holds sections; what it leaves out has a default
      max_turns: 5
      temperature: 1.0

On the command line this is `rollout.max_turns=5` (`files.py` reads both). Each package declares its own section; no
option is declared here. An option that has no effect in a given combination is refused, not ignored, because the user
would think that it works. 0 means "chosen for you" where a description says so. This module imports without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self, cast

from pydantic import BaseModel, Field, model_validator
from pydantic.fields import FieldInfo

from turnwise.config.checks import (
    check_bitwise,
    check_full,
    check_groups,
    check_lag,
    check_memory,
    check_play,
    check_replay,
    check_samplers,
    check_service,
    check_shard,
    check_stored,
    check_worlds,
)
from turnwise.config.critic import CriticConfig
from turnwise.config.spellings import to_canonical
from turnwise.config.training import (
    FULL_LEARNING_RATE,
    FULL_WARMUP_RATE,
    EvalConfig,
    RunConfig,
    TrainConfig,
    WarmupConfig,
)
from turnwise.credit.shaping import RewardConfig
from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.envs.config import EnvConfig
from turnwise.memory.config import MemoryConfig
from turnwise.methods.base import DataConfig
from turnwise.methods.grpo import Grpo
from turnwise.methods.lookup import AnyMethodOptions, check_data, every_option
from turnwise.methods.options import MethodOptions
from turnwise.models.config import ModelConfig
from turnwise.opponents.config import OpponentConfig
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.server_options import SHARED_OPTIONS
from turnwise.runtime.section import Section
from turnwise.watch.alarms import AlarmConfig

SHORTHANDS = ("model", "method", "env")
"""Sections that a bare name may stand for: `model=tiny` is `model.name=tiny`."""


class Config(Section):
    """All options of `turnwise train`.

    >>> import turnwise as tw
    >>> tw.Config(env="guess_number", model={"name": "tiny", "rank": 8}, train={"steps": 5}).train.steps
    5
    """

    model: ModelConfig = Field(default_factory=ModelConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    method: AnyMethodOptions = Field(default_factory=Grpo.Options)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    warmup: WarmupConfig = Field(default_factory=WarmupConfig)
    alarms: AlarmConfig = Field(default_factory=AlarmConfig)
    opponent: OpponentConfig = Field(default_factory=OpponentConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    @model_validator(mode="before")
    @classmethod
    def _read_other_spellings(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        sections = cast(dict[str, Any], given)
        named = {name: {"name": sections[name]} for name in SHORTHANDS if isinstance(sections.get(name), str)}
        return with_full_rates(to_canonical({**sections, **named}))

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        if self.train.substeps > self.train.tasks_per_step:
            raise ValueError(
                f"train.substeps={self.train.substeps} is more than train.tasks_per_step={self.train.tasks_per_step}; "
                "each optimizer step needs a group"
            )
        check_data(self.data, self.method)
        self.critic.check(self.method)
        check_play(self)
        check_full(self)
        check_replay(self)
        check_bitwise(self)
        check_shard(self)
        check_samplers(self)
        check_service(self)
        check_lag(self)
        check_stored(self)
        check_groups(self)
        check_memory(self)
        check_worlds(self)
        if self.rollout.group_size == 1 and not self.reads_stored and not self.method.learns_from_one:
            raise ValueError(
                f"rollout.group_size=1, and method={self.method.name} compares the attempts at a task; "
                "expected 2 or more"
            )
        return self

    @property
    def reads_stored(self) -> bool:
        """Whether it learns from stored data and plays nothing for training."""
        return self.method.only_stored or bool(self.data.pairs)

    @property
    def method_in_use(self) -> MethodOptions:
        """The method as it runs. If another program samples, its ratios are truncated (docs/backends.md). If samplers
        lag and no loss was chosen, `cispo` replaces `importance_sampling`, because its weights on stale tokens are
        bounded (docs/async.md)."""
        method = self.method.when_foreign() if self.is_sampled_elsewhere else self.method
        return method.when_lagging() if self.train.max_staleness else method

    @property
    def is_sampled_elsewhere(self) -> bool:
        """Whether the sampler is another program than the trainer, which rounds in its own way."""
        return self.rollout.backend != "local" and not self.reads_stored

    @property
    def engine_in_use(self) -> EngineConfig:
        """The engine's section as it runs: with the run's seed, with what `rollout` says about its sampler, and with
        one sequence at a time if it is deterministic."""
        engine = self.engine
        update: dict[str, object] = {"seed": self.train.seed if engine.seed is None else engine.seed}
        if self.model.train == "full":
            update["full_weights"] = True
        if self.model.routing_replay:
            update["routing_replay"] = True
        if self.rollout.backend == "local":
            update |= {name: getattr(self.rollout, name) for name in SHARED_OPTIONS if getattr(self.rollout, name)}
        if self.rollout.deterministic:
            update |= {"max_num_seqs": 1, "prefix_cache": False}
        return engine.model_copy(update=update)


def with_full_rates(given: dict[str, Any]) -> dict[str, Any]:
    """The default learning rates of full weights, where none are given: an adapter's would be too high for them."""
    model = given.get("model")
    if not isinstance(model, dict) or cast(dict[str, Any], model).get("train") != "full":
        return given
    rates = {"train": FULL_LEARNING_RATE} | ({"warmup": FULL_WARMUP_RATE} if given.get("warmup") else {})
    filled = dict(given)
    for section, rate in rates.items():
        options = filled.get(section, {})
        if isinstance(options, dict):
            filled[section] = {"learning_rate": rate, **cast(dict[str, Any], options)}
    return filled


def options_of(section: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The options of a section. For `method` these are the options of all shipped methods; a run has some of them."""
    return every_option() if section is MethodOptions else section.model_fields


def option_fields(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option with its full name: `train.steps`, `reward.weights.outcome`, ..."""
    for name, field in options_of(section).items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from option_fields(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field
