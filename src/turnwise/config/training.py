"""The sections that the training loop reads: `train`, `eval`, `warmup` and `run`.

The loop is given the whole config, so its own sections stand here, and `turnwise.training` imports `turnwise.config`,
never the other way.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from turnwise.runtime.section import Section

Logger = Literal["tensorboard", "wandb", "trackio"]


class TrainConfig(Section):
    """How long and how fast to learn."""

    steps: int = Field(
        default=50,
        ge=0,
        description="Steps to make: play a batch of groups (or several, `accumulate`) and learn from it.",
    )
    max_sampled_tokens: int = Field(
        default=0,
        ge=0,
        description="End after the step by which so many tokens were sampled for training; 0 is no bound.",
    )
    tasks_per_step: int = Field(default=8, ge=1, description="Tasks, that is groups, in one batch.")
    num_tasks: int = Field(
        default=512, ge=1, description="Train tasks to draw from the world; each is met once per pass."
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=4,
        description="Updates that a token may lag behind the weights that learn from it; 0 is synchronous: play, "
        "learn, play. 1 or 2 goes on playing while it learns (docs/async.md).",
    )
    min_batch: int = Field(
        default=0,
        ge=0,
        description="With max_staleness: an update starts when so many groups are done, and takes up to "
        "tasks_per_step; 0 is tasks_per_step.",
    )
    max_wait: int = Field(
        default=0,
        ge=0,
        description="With max_staleness: updates after which a group that is still played is waited for; 0 is "
        "max_staleness, and drops nothing. More is faster, and drops the longest dialogues.",
    )
    call_deadline_s: float = Field(
        default=1800.0, gt=0, description="Seconds for one call of the trainer, checkpoints included; then it stops."
    )
    stall_deadline_s: float = Field(
        default=1800.0, gt=0, description="Seconds in which nothing comes back from anybody; then the run stops."
    )
    substeps: int = Field(default=1, ge=1, description="Optimizer steps per batch, each on its share of the groups.")
    accumulate: int = Field(
        default=1,
        ge=1,
        description="Batches that are played and learned from before the weights move; their gradients are averaged.",
    )
    learning_rate: float = Field(default=4e-5, gt=0, description="Of AdamW; the most that a schedule reaches.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="How the learning rate goes down over train.steps, or over train.max_sampled_tokens if these run "
        "out first.",
    )
    lr_warmup: int = Field(
        default=0, ge=0, description="Steps in which the learning rate rises to its full size; 0 starts with it."
    )
    lr_floor: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the learning rate that a schedule leaves at the end."
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the mean.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW's decay of the square.")
    eps: float = Field(
        default=1e-8, gt=0, description="AdamW's term under the fraction, which bounds the step of a small gradient."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    grad_clip_norm: float = Field(default=1.0, ge=0, description="Clip the gradient's norm to this; 0 is off.")
    seed: int = Field(default=0, ge=0, description="Of the adapter, the tasks, their order, the envs and the sampler.")
    save_every: int = Field(
        default=25,
        ge=0,
        description="Save a checkpoint every so many steps, and batches of a critic's pre-training; 0 saves at the end "
        "of each only.",
    )
    keep_checkpoints: int = Field(default=3, ge=1, description="How many of the latest checkpoints are kept.")
    max_empty_steps: int = Field(
        default=20,
        ge=1,
        description="End after so many steps in a row that left nothing to learn from: well when every attempt of "
        "them succeeded, else with an error.",
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
    """Held-out tasks, played at the start, every so often, and at the end."""

    every: int = Field(
        default=10, ge=0, description="Evaluate every so many steps; 0 evaluates at the start and the end only."
    )
    tasks: int = Field(default=64, ge=0, description="Held-out tasks; 0 evaluates never.")
    samples: int = Field(default=1, ge=1, description="Attempts per held-out task.")
    temperature: float = Field(default=1.0, ge=0, le=100, description="Of sampling; 0 is greedy.")
    keep_best: bool = Field(
        default=True,
        description="Keep the checkpoint with the best held-out success (reward, where the world judges no success) "
        "beside the latest ones; `turnwise sample`, `eval` and `export` take it.",
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

    steps: int = Field(default=0, ge=0, description="Supervised steps; 0 is no warm-up.")
    demonstrations: int = Field(
        default=64, ge=1, description="Scripted dialogues to learn from, here and in critic.pretrain_from."
    )
    batch_size: int = Field(default=8, ge=1, description="Dialogues per step.")
    learning_rate: float = Field(default=1e-3, gt=0, description="Of AdamW, during the warm-up.")

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        """`steps: 0` says that there is none; options without `steps` were meant to do something."""
        if self.model_fields_set and "steps" not in self.model_fields_set:
            name = min(self.model_fields_set)
            raise ValueError(f"{name} is not read while warmup.steps is 0; set warmup.steps, or leave it out")
        return self


class RunConfig(Section):
    """Where the run is written down."""

    dir: str = Field(default="", description="The run's directory; empty: `runs/` and the run's name.")
    name: str = Field(default="", description="What the run is called; empty: world, model and time.")
    max_size_mb: int = Field(default=512, ge=1, description="Bound on run.db: beyond it, old token arrays go first.")
    loggers: tuple[Logger, ...] = Field(default=(), description="Also log metrics to these.")
    project: str = Field(default="turnwise", min_length=1, description="The project's name, for wandb and trackio.")
    dialogues: int = Field(default=3, ge=0, description="Dialogues to print at the end.")

    @field_validator("loggers", mode="before")
    @classmethod
    def _one_or_more(cls, loggers: object) -> object:
        """`run.loggers=wandb` means a list of one."""
        return ((loggers,) if loggers else ()) if isinstance(loggers, str) else loggers

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
