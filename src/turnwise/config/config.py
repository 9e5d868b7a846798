"""What a run can be told: one frozen model per section, refused at construction when it cannot work.

    generator:                          # a YAML file holds sections; what it leaves out has a default
      max_turns: 5
      sampling_params: {temperature: 1.0}

The command line says the same as `generator.max_turns=5` (`config_files.py` reads both). An option that no code would
read in a given combination is refused, not ignored: silence would look like success. 0 means "chosen for you" where a
description says so. This module imports without torch.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from turnwise.config.checks import check_groups, check_lag, check_service, check_stored
from turnwise.errors import ConfigError
from turnwise.methods.config import READING_METHODS, DataConfig, LossFn, MethodConfig
from turnwise.runtime.section import Section
from turnwise.training.critic_config import CriticConfig
from turnwise.watch.alarms import AlarmConfig

Logger = Literal["tensorboard", "wandb", "trackio"]
LONE_METHODS = ("ppo", "reinforce_pp", "rebn", "rft")
"""Methods that can learn from a single attempt at a task."""
LAGGING_LOSS: LossFn = "cispo"
"""What takes the place of plain importance sampling when attempts are older than the weights."""


class ModelConfig(Section):
    """The base model and the adapter that is trained on it."""

    name: str = Field(
        default="smollm2", min_length=1, description="A model directory, a .gguf file, or a name: store or hub."
    )
    alias: str = Field(
        default="", description="A model that is used in place of `name`; the plan says so. Empty: none."
    )
    base_url: str = Field(
        default="",
        description="A service that trains and samples: `turnwise serve`, Tinker or MinT. Empty: this process does.",
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

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, base_url: str) -> str:
        if base_url and not base_url.startswith(("http://", "https://")):
            raise ValueError(f"{base_url!r}; expected http://HOST:PORT or https://HOST")
        return base_url.rstrip("/")


class EnvConfig(Section):
    """The world: where tasks and envs come from."""

    name: str = Field(
        default="guess_number",
        min_length=1,
        description="A world of the library, `module:Class` for your own, or `prefix:name` of another library.",
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
        default=8,
        ge=1,
        description="Attempts per task: the group that advantages are centred in. 1 is for methods that compare no "
        "attempts of one task: ppo, reinforce_pp, rebn and rft, and those that read stored data.",
    )
    min_group_size: int = Field(
        default=2, ge=2, description="A group with fewer attempts left is dropped, and counted."
    )
    same_start: bool = Field(
        default=True,
        description="The attempts at a task start in the same world: they share the env's seed, and differ by what the "
        "policy says. false: each draws a world of its own, and luck is compared too. Evaluations always do that.",
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
    deterministic: bool = Field(
        default=False,
        description="With max_staleness 0: replies do not depend on what else is sampled, so a resumed run equals an "
        "unbroken one bit for bit at any max_concurrency. One sequence at a time and no prefix reuse: slower.",
    )
    kv_across_updates: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="A dialogue that goes on over an update: its next turns are drawn with the new weights, which "
        "read it again (recompute), or with the old ones to its end (keep). Logprobs are exact either way.",
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
        if self.deterministic and self.max_num_seqs not in (1, type(self).model_fields["max_num_seqs"].default):
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} is not read with deterministic: one sequence is decoded at a time; "
                "leave one of them out"
            )
        if self.min_group_size > max(2, self.n_samples_per_prompt):
            raise ValueError(
                f"min_group_size={self.min_group_size} is more than n_samples_per_prompt={self.n_samples_per_prompt}; "
                "every group would be dropped"
            )
        return self


class RewardWeights(Section):
    """What each channel of the reward counts in the return."""

    outcome: float = Field(default=1.0, description="Weight of the task's own reward.")
    format: float = Field(default=1.0, description="Weight of the reward for a well-formed reply.")
    shaping: float = Field(default=1.0, description="Weight of help on the way, the env's and that of the potential.")
    penalty: float = Field(default=1.0, description="Weight of what is taken off.")
    judge: float = Field(default=1.0, description="Weight of a judge's score.")


class RewardConfig(Section):
    """What is made of the env's rewards before they are credited; docs/algorithms/rewards.md tells what cancels."""

    weights: RewardWeights = Field(default_factory=RewardWeights, description="Of the channels.")
    potential: bool = Field(
        default=False, description="Shape by the env's `potential()`, with the method's own discount."
    )
    turn_decay: float = Field(
        default=1.0, gt=0, le=1, description="Multiply the outcome by this for every turn after the first; 1 is off."
    )
    max_length: int = Field(
        default=0, ge=0, description="Sampled tokens of an attempt from which the length penalty is 1 in full; 0: off."
    )
    length_buffer: int = Field(default=0, ge=0, description="The penalty grows over this many tokens before that.")
    length_penalty: float = Field(default=1.0, ge=0, description="Size of that penalty.")
    on_truncated: Literal["keep", "mask"] = Field(
        default="keep", description="An attempt that a limit cut short: trained like others, or left out of the loss."
    )

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        if not self.max_length and (self.length_buffer or self.length_penalty != 1):
            raise ValueError("length_buffer and length_penalty are not read while max_length is 0; set max_length")
        if self.length_buffer > self.max_length:
            raise ValueError(f"length_buffer={self.length_buffer} is more than max_length={self.max_length}")
        return self


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
    micro_batch_tokens: int = Field(
        default=0, ge=0, description="Tokens in one training pass; 0 is chosen for the device."
    )
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


class Config(Section):
    """Everything that `turnwise train` can be told."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    method: MethodConfig = Field(default_factory=MethodConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    warmup: WarmupConfig = Field(default_factory=WarmupConfig)
    alarms: AlarmConfig = Field(default_factory=AlarmConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        if self.train.substeps > self.train.tasks_per_step:
            raise ValueError(
                f"train.substeps={self.train.substeps} is more than train.tasks_per_step={self.train.tasks_per_step}; "
                "each optimizer step needs a group"
            )
        self.data.check(self.method.name)
        self.critic.check(self.method.name)
        check_service(self)
        check_lag(self)
        check_stored(self)
        check_groups(self)
        if self.method.omega == 0 and self.method.gamma is not None and not self.reward.potential:
            raise ValueError(
                f"method.gamma={self.method.gamma} is not read while method.omega is 0: whole attempts are not "
                "discounted; leave it out"
            )
        alone = self.reads_stored or (self.method.name in LONE_METHODS and not self.method.group_baseline)
        if self.generator.n_samples_per_prompt == 1 and not alone:
            raise ValueError(
                f"generator.n_samples_per_prompt=1, and method={self.method.name} compares the attempts at a task; "
                "expected 2 or more"
            )
        return self

    @property
    def reads_stored(self) -> bool:
        """It learns from stored data: nothing is played for training."""
        return self.method.name in READING_METHODS or bool(self.data.pairs)

    @property
    def method_in_use(self) -> MethodConfig:
        """The method as it runs: where samplers lag and no loss was chosen, `importance_sampling` gives way to
        `cispo`, whose weights on stale tokens are bounded (docs/async.md)."""
        method = self.method
        is_open = method.loss_fn is None and method.loss == "importance_sampling"
        return method.model_copy(update={"loss_fn": LAGGING_LOSS}) if self.train.max_staleness and is_open else method


def check_backend(config: GeneratorConfig) -> None:
    """Refuse a backend that this release does not have, before anything is spent."""
    if config.backend != "local":
        raise ConfigError(
            f"generator.backend={config.backend} is not there yet in this release; what is there is the engine in "
            "this process: generator.backend=local (the other generator options mean the same with it)"
        )
