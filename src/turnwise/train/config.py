"""What a run can be told: one frozen model per section, refused at construction when it cannot work.

    generator:                          # a YAML file holds sections; what it leaves out has a default
      max_turns: 5
      sampling_params: {temperature: 1.0}

The command line says the same as `generator.max_turns=5` (`config_files.py` reads both). An option that no code would
read in a given combination is refused, not ignored: silence would look like success. 0 means "chosen for you" where a
description says so. This module imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from turnwise.errors import ConfigError

LossFn = Literal["importance_sampling", "ppo", "cispo", "dro", "gspo"]
Logger = Literal["tensorboard", "wandb", "trackio"]

LOSS_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "importance_sampling": (),
    "ppo": ("clip_low_threshold", "clip_high_threshold", "dual_clip"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
    "dro": ("beta",),
    "gspo": ("clip_low_threshold", "clip_high_threshold"),
}
"""The options of `method` that only some losses read."""
CLIP_BOUNDS: Mapping[str, tuple[float, float]] = {
    "ppo": (0.8, 1.2),
    "cispo": (0.0, 4.0),
    "gspo": (1 - 3e-4, 1 + 4e-4),
}
"""The bounds that a loss takes where the config names none, as absolute ratios."""


class Section(BaseModel):
    """Frozen, and closed: a key that is not a field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class ModelConfig(Section):
    """The base model and the adapter that is trained on it."""

    name: str = Field(
        default="smollm2", min_length=1, description="A model directory, a .gguf file, or a name: store or hub."
    )
    alias: str = Field(
        default="", description="A model that is used in place of `name`; the plan says so. Empty: none."
    )
    rank: int = Field(default=16, ge=1, description="Rank of the LoRA adapter.")
    train_attn: bool = Field(default=True, description="Adapt the attention projections.")
    train_mlp: bool = Field(default=True, description="Adapt the MLP projections.")
    train_unembed: bool = Field(default=True, description="Adapt the output head.")
    device: str = Field(
        default="auto", description="`cpu`, `cuda` or `cuda:1`; `auto` takes the GPU when there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Of the frozen weights; `auto` is float32 on a CPU and bfloat16 on a GPU."
    )

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ValueError("train_attn, train_mlp and train_unembed are all false; nothing would be trained")
        return self


class EnvConfig(Section):
    """The world: where tasks and envs come from."""

    name: str = Field(
        default="guess_number", min_length=1, description="A world of the library, or `module:Class` for your own."
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="The world's own options, such as `env.options.high=16`."
    )


class SamplingConfig(Section):
    """How replies are drawn."""

    max_generate_length: int = Field(
        default=0, ge=0, description="Most tokens of one reply; 0 takes the world's own limit."
    )
    temperature: float = Field(default=1.0, gt=0, le=100, description="Of sampling; the trainer uses the same one.")
    top_p: float = Field(default=1.0, description="Only 1 (off): the loss needs logprobs of the whole distribution.")
    top_k: int = Field(default=-1, description="Only -1 or 0 (off), for the same reason.")

    @model_validator(mode="after")
    def _draws_from_the_whole_distribution(self) -> Self:
        for name, is_off in (("top_p", self.top_p == 1), ("top_k", self.top_k in (-1, 0))):
            if not is_off:
                raise ValueError(
                    f"{name}={getattr(self, name)} would draw from a cut distribution, whose logprobs the loss does "
                    f"not have; leave {name} out, and use temperature to sharpen"
                )
        return self


class GeneratorConfig(Section):
    """How attempts are played."""

    backend: Literal["local", "sglang", "vllm"] = Field(
        default="local", description="Who samples. `local` is the engine in this process; the others are not there yet."
    )
    use_conversation_multi_turn: bool = Field(
        default=True, description="One message per turn; false keeps all turns of an attempt in one assistant message."
    )
    renderer: Literal["auto", "chatml", "template"] = Field(
        default="auto",
        description="Messages to tokens; `auto` is ChatML where the model's template is, else the template.",
    )
    strip_thinking: bool = Field(
        default=False, description="ChatML: earlier replies lose their thinking, as in Qwen3's format."
    )
    max_turns: int = Field(default=0, ge=0, description="Most replies in one attempt; 0 takes the world's own limit.")
    max_trajectory_tokens: int = Field(
        default=0, ge=0, description="Most tokens of one attempt, prompts included; 0 takes the model's context."
    )
    n_samples_per_prompt: int = Field(
        default=8, ge=2, description="Attempts per task: the group that advantages are centred in."
    )
    min_group_size: int = Field(
        default=2, ge=2, description="A group with fewer attempts left is dropped, and counted."
    )
    max_retries: int = Field(default=2, ge=0, description="How often a failed attempt is played again, in a fresh env.")
    max_concurrency: int = Field(default=64, ge=1, description="Attempts under way at once.")
    stop: tuple[str, ...] = Field(default=(), description="Strings that end a reply, besides the format's end of turn.")
    on_unparsable: Literal["penalise", "mask", "end"] = Field(
        default="penalise",
        description="What an unreadable reply costs: a penalty, its place in the loss, or the attempt.",
    )
    unparsable_penalty: float = Field(
        default=0.0, ge=0, description="Taken off the reward by `penalise`; 0 lets the env's own reward stand."
    )
    attempt_deadline_s: float = Field(default=600.0, gt=0, description="Seconds for a whole attempt; then it is cut.")
    step_deadline_s: float = Field(
        default=60.0, gt=0, description="Seconds for one call of the env; then it has failed."
    )
    sample_deadline_s: float = Field(default=300.0, gt=0, description="Seconds for one reply, the wait included.")
    max_num_seqs: int = Field(
        default=256, ge=1, description="Most sequences that are decoded at once; the others wait."
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of a GPU's memory to plan with; a CPU has no use for it."
    )
    sampling_params: SamplingConfig = Field(default_factory=SamplingConfig, description="How replies are drawn.")

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_more(cls, stop: object) -> object:
        """`generator.stop="\\n"` means a list of one."""
        return ((stop,) if stop else ()) if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _turns_fit_the_backend(self) -> Self:
        if self.backend == "sglang" and not self.use_conversation_multi_turn:
            raise NotImplementedError("`use_conversation_multi_turn=False` is not supported for SGLang backend")
        return self

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        if self.unparsable_penalty and self.on_unparsable != "penalise":
            raise ValueError(
                f"unparsable_penalty={self.unparsable_penalty} is not read with on_unparsable={self.on_unparsable}"
            )
        if self.strip_thinking and (self.renderer == "template" or not self.use_conversation_multi_turn):
            raise ValueError("strip_thinking is read by the ChatML renderer with one message per turn only")
        if self.min_group_size > self.n_samples_per_prompt:
            raise ValueError(
                f"min_group_size={self.min_group_size} is more than n_samples_per_prompt={self.n_samples_per_prompt}; "
                "every group would be dropped"
            )
        return self


class MethodConfig(Section):
    """What makes a gradient out of groups of attempts."""

    name: Literal["grpo"] = Field(default="grpo", description="The method; `grpo` centres returns inside a group.")
    advantage: Literal["centered", "normalized", "leave_one_out"] = Field(
        default="centered",
        description="Return minus the group's mean; also divided by its deviation; minus the others' mean.",
    )
    credit: Literal["trajectory", "reward_to_go"] = Field(
        default="trajectory", description="One advantage for all turns, or each turn by the rewards from it on."
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per turn, for `reward_to_go`.")
    normalisation: Literal["token_mean", "seq_mean", "const"] = Field(
        default="token_mean",
        description="How trained tokens share a step: all alike, each attempt alike, or by a fixed length.",
    )
    loss_fn: LossFn = Field(default="importance_sampling", description="The loss, by Tinker's name.")
    clip_low_threshold: float | None = Field(
        default=None,
        ge=0,
        description="Lowest ratio of ppo (0.8), cispo (0) and gspo (0.9997); null takes the loss's own.",
    )
    clip_high_threshold: float | None = Field(
        default=None,
        ge=0,
        description="Highest ratio of ppo (1.2), cispo (4) and gspo (1.0004); null takes the loss's own.",
    )
    dual_clip: float = Field(
        default=0.0, ge=0, description="ppo: most that a ratio counts where the advantage is negative."
    )
    beta: float | None = Field(
        default=None, ge=0, description="dro: pull towards the sampling policy (0.05); null takes the loss's own."
    )
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of KL(policy || base model) in the loss.")
    kl_estimator: Literal["k2", "k3"] = Field(default="k2", description="How that KL is estimated.")
    entropy_coef: float = Field(
        default=0.0, ge=0, description="Bonus on the entropy of each trained token's distribution."
    )

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        read = LOSS_OPTIONS[self.loss_fn]
        for name in sorted({option for options in LOSS_OPTIONS.values() for option in options}):
            if name not in read and getattr(self, name) not in (None, 0.0):
                readers = ", ".join(loss for loss, options in LOSS_OPTIONS.items() if name in options)
                raise ValueError(f"{name} is not read by loss_fn={self.loss_fn}, only by {readers}; leave it out")
        if self.gamma != 1 and self.credit != "reward_to_go":
            raise ValueError(f"gamma={self.gamma} is not read by credit={self.credit}; set credit: reward_to_go")
        if self.kl_estimator != "k2" and self.kl_coef == 0:
            raise ValueError(f"kl_estimator={self.kl_estimator} is not read while kl_coef is 0; leave it out")
        return self

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        low, high = CLIP_BOUNDS.get(self.loss_fn, (0.0, 0.0))
        low = low if self.clip_low_threshold is None else self.clip_low_threshold
        high = high if self.clip_high_threshold is None else self.clip_high_threshold
        if low > high:
            raise ValueError(f"clip bounds {low} to {high}; expected low <= high, as absolute ratios (0.8 and 1.2)")
        if self.dual_clip != 0 and self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip}; expected more than 1 (3 is usual), or 0 for off")
        return self

    @property
    def loss_config(self) -> Mapping[str, float | str]:
        """What `forward_backward` is given beside the loss's name; options at rest are left to the loss."""
        names = [*LOSS_OPTIONS[self.loss_fn], "kl_coef", "entropy_coef"]
        given = {name: getattr(self, name) for name in names if getattr(self, name) not in (None, 0.0)}
        for name in ("clip_low_threshold", "beta"):  # here a 0 that was asked for is not the loss's default
            if name in LOSS_OPTIONS[self.loss_fn] and getattr(self, name) == 0:
                given[name] = 0.0
        return {**given, "kl_estimator": self.kl_estimator} if self.kl_coef else given


class TrainConfig(Section):
    """How long and how fast to learn."""

    steps: int = Field(default=50, ge=0, description="Batches of groups to play and learn from.")
    tasks_per_step: int = Field(default=8, ge=1, description="Tasks, that is groups, in one batch.")
    num_tasks: int = Field(
        default=512, ge=1, description="Train tasks to draw from the world; each is met once per pass."
    )
    substeps: int = Field(default=1, ge=1, description="Optimizer steps per batch, each on its share of the groups.")
    learning_rate: float = Field(default=4e-5, gt=0, description="Of AdamW.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the mean.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW's decay of the square.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    grad_clip_norm: float = Field(default=1.0, ge=0, description="Clip the gradient's norm to this; 0 is off.")
    micro_batch_tokens: int = Field(
        default=0, ge=0, description="Tokens in one training pass; 0 is chosen for the device."
    )
    seed: int = Field(default=0, ge=0, description="Of the adapter, the tasks, their order, the envs and the sampler.")
    save_every: int = Field(
        default=25, ge=0, description="Save a checkpoint every so many steps; 0 saves at the end only."
    )
    keep_checkpoints: int = Field(default=3, ge=1, description="How many of the latest checkpoints are kept.")
    max_empty_steps: int = Field(
        default=20, ge=1, description="Give up after so many steps in a row that left nothing to learn from."
    )


class EvalConfig(Section):
    """Held-out tasks, played at the start, every so often, and at the end."""

    every: int = Field(
        default=10, ge=0, description="Evaluate every so many steps; 0 evaluates at the start and the end only."
    )
    tasks: int = Field(default=64, ge=0, description="Held-out tasks; 0 evaluates never.")
    samples: int = Field(default=1, ge=1, description="Attempts per held-out task.")
    temperature: float = Field(default=1.0, ge=0, le=100, description="Of sampling; 0 is greedy.")


class WarmupConfig(Section):
    """Supervised steps on the world's scripted dialogues before anything else; counted apart."""

    steps: int = Field(default=0, ge=0, description="Supervised steps; 0 is no warm-up.")
    demonstrations: int = Field(default=64, ge=1, description="Scripted dialogues to learn from.")
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


class Config(Section):
    """Everything that `turnwise train` can be told."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    method: MethodConfig = Field(default_factory=MethodConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    warmup: WarmupConfig = Field(default_factory=WarmupConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        if self.train.substeps > self.train.tasks_per_step:
            raise ValueError(
                f"train.substeps={self.train.substeps} is more than train.tasks_per_step={self.train.tasks_per_step}; "
                "each optimizer step needs a group"
            )
        return self


def check_backend(config: GeneratorConfig) -> None:
    """Refuse a backend that this release does not have, before anything is spent."""
    if config.backend != "local":
        raise ConfigError(
            f"generator.backend={config.backend} is not there yet in this release; what is there is the engine in "
            "this process: generator.backend=local (the other generator options mean the same with it)"
        )
