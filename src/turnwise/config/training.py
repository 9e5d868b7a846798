"""The sections that the training loop reads: `train`, `eval`, `warmup` and `run`.

The loop receives the whole config, so its own sections are here: `turnwise.training` imports `turnwise.config`, never
the other way round.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from turnwise.runtime.section import ONE_OR_MORE, Section

FULL_LEARNING_RATE = 1e-5
FULL_WARMUP_RATE = 1e-4
"""The defaults for all weights; an adapter starts at zero and takes higher ones."""
Logger = Literal["tensorboard", "wandb", "trackio"]


class TrainConfig(Section):
    """How long and how fast to learn."""

    steps: int = Field(
        default=50,
        ge=0,
        description="Number of steps. A step plays a batch of groups (or several, with `accumulate`) and "
        "learns from it.",
    )
    max_sampled_tokens: int = Field(
        default=0,
        ge=0,
        description="End after the step in which this many tokens have been sampled for training; 0 is no limit.",
    )
    tasks_per_step: int = Field(default=8, ge=1, description="Tasks in one batch; each task is one group.")
    num_tasks: int = Field(
        default=512, ge=1, description="Train tasks to take from the world; each is played once per pass."
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=4,
        description="Updates that a token may lag behind the weights that learn from it. 0 is synchronous: "
        "play, learn, play. With 1 or 2 the run goes on playing while it learns (docs/async.md).",
    )
    min_batch: int = Field(
        default=0,
        ge=0,
        description="With max_staleness: start an update when this many groups are done; it takes up to "
        "tasks_per_step groups. 0 is tasks_per_step.",
    )
    max_wait: int = Field(
        default=0,
        ge=0,
        description="With max_staleness: wait for an unfinished group after this many updates. 0 is "
        "max_staleness, which drops nothing. A larger value is faster but drops the longest "
        "dialogues.",
    )
    call_deadline_s: float = Field(
        default=1800.0, gt=0, description="Seconds for one call of the trainer or one checkpoint; then the run stops."
    )
    stall_deadline_s: float = Field(
        default=1800.0, gt=0, description="Stop the run if no call of any kind has returned for this many seconds."
    )
    substeps: int = Field(
        default=1, ge=1, description="Optimizer steps per batch; each learns from its share of the groups."
    )
    accumulate: int = Field(
        default=1,
        ge=1,
        description="Batches to play and learn from before the weights change; their gradients are averaged.",
    )
    learning_rate: float = Field(
        default=4e-5,
        gt=0,
        description="Learning rate of AdamW; a schedule starts from this value. With `model.train=full` the default is "
        "1e-5.",
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="How the learning rate goes down over train.steps, or over train.max_sampled_tokens if "
        "that ends the run first.",
    )
    lr_warmup: int = Field(
        default=0,
        ge=0,
        description="Steps in which the learning rate rises to its full value; 0 starts with the full value.",
    )
    lr_floor: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the learning rate that is left at the end of a schedule."
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the gradient's mean.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW's decay of the gradient's square.")
    eps: float = Field(
        default=1e-8, gt=0, description="AdamW's epsilon in the denominator; it limits the step of a small gradient."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    grad_clip_norm: float = Field(default=1.0, ge=0, description="Clip the gradient's norm to this; 0 is off.")
    seed: int = Field(
        default=0, ge=0, description="Seed of the adapter, the tasks, their order, the envs and the sampler."
    )
    save_every: int = Field(
        default=25,
        ge=0,
        description="Save a checkpoint every this many steps, and every this many batches of a critic's "
        "pre-training; 0 saves only at the end of each.",
    )
    keep_checkpoints: int = Field(default=3, ge=1, description="Number of the latest checkpoints to keep.")
    max_empty_steps: int = Field(
        default=20,
        ge=1,
        description="End after this many steps in a row without anything to learn from: normally if every "
        "attempt succeeded, otherwise with an error.",
    )

    stop_if_all_fail: bool = Field(
        default=True,
        description="Stop with an error if every attempt of the first evaluation or of the first batch fails "
        "through no fault of the policy; false goes on.",
    )

    @property
    def batch_size(self) -> int:
        """Groups that have to be done before an update starts."""
        return self.min_batch or self.tasks_per_step

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.lr_floor and self.lr_schedule == "constant":
            raise ValueError(f"lr_floor={self.lr_floor} is not read by lr_schedule=constant; choose linear or cosine")
        if self.accumulate > 1 and self.substeps > 1:
            raise ValueError(
                f"accumulate={self.accumulate} makes one optimizer step of several batches and "
                f"substeps={self.substeps} several of one batch; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _lag_fits(self) -> Self:
        for name in ("min_batch", "max_wait"):
            if getattr(self, name) and not self.max_staleness:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not read while max_staleness is 0; set max_staleness"
                )
        if self.min_batch > self.tasks_per_step:
            raise ValueError(
                f"min_batch={self.min_batch} is more than tasks_per_step={self.tasks_per_step}, the most that an "
                "update takes"
            )
        return self


class EvalConfig(Section):
    """Held-out tasks, played at the start, every `every` steps, and at the end."""

    every: int = Field(
        default=10, ge=0, description="Evaluate every this many steps; 0 evaluates only at the start and at the end."
    )
    tasks: int = Field(default=64, ge=0, description="Held-out tasks to evaluate on; 0 never evaluates.")
    samples: int = Field(default=1, ge=1, description="Attempts per held-out task.")
    temperature: float = Field(
        default=1.0, ge=0, le=100, description="Sampling temperature in evaluations; 0 is greedy."
    )
    keep_best: bool = Field(
        default=True,
        description="Also keep the checkpoint with the best held-out success (or reward, if the world does "
        "not judge success); `turnwise sample`, `eval` and `export` use it.",
    )

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if not self.tasks and name != "tasks" and value and value != field.default:
                raise ValueError(f"{name}={value} is not read while eval.tasks is 0; set eval.tasks, or leave it out")
        return self


class WarmupConfig(Section):
    """Supervised steps on the world's scripted dialogues before anything else; counted apart."""

    steps: int = Field(default=0, ge=0, description="Supervised steps before training; 0 is no warm-up.")
    demonstrations: int = Field(
        default=64, ge=1, description="Scripted dialogues to learn from, in the warm-up and in critic.pretrain_from."
    )
    batch_size: int = Field(default=8, ge=1, description="Dialogues per step.")
    learning_rate: float = Field(
        default=1e-3,
        gt=0,
        description="Learning rate of AdamW during the warm-up. With `model.train=full` the default is 1e-4.",
    )

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        """`steps: 0` says that there is none; options without `steps` were meant to do something."""
        if self.model_fields_set and "steps" not in self.model_fields_set:
            name = min(self.model_fields_set)
            raise ValueError(f"{name} is not read while warmup.steps is 0; set warmup.steps, or leave it out")
        return self


class RunConfig(Section):
    """The directory, name and loggers of a run."""

    dir: str = Field(default="", description="Directory of the run; empty: `runs/` and the run's name.")
    name: str = Field(default="", description="Name of the run; empty: world, model and time.")
    max_size_mb: int = Field(
        default=512, ge=1, description="Largest size of run.db; old token arrays are deleted first."
    )
    loggers: Annotated[tuple[Logger, ...], ONE_OR_MORE] = Field(
        default=(), description="More places to log metrics to."
    )
    project: str = Field(default="turnwise", min_length=1, description="Project name for wandb and trackio.")
    dialogues: int = Field(default=3, ge=0, description="Number of dialogues to print at the end.")

    @field_validator("name")
    @classmethod
    def _is_one_word(cls, name: str) -> str:
        if any(character in name for character in "/\\\n"):
            raise ValueError(f"{name!r} holds a slash; set run.dir to choose the place")
        return name

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        if self.project != "turnwise" and not {"wandb", "trackio"} & set(self.loggers):
            raise ValueError(f"project={self.project} is read by wandb and trackio only; add one to run.loggers")
        return self
