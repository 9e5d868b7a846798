"""The settings of `run_grpo`: MinT's fifteen with MinT's defaults, and four that a run needs besides."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass

from turnwise.client.checkpoints import CheckpointPath
from turnwise.errors import ConfigError, DataError
from turnwise.losses.table import LOSSES, policy_losses
from turnwise.runtime.suggest import did_you_mean
from turnwise.types import AdamParams, LoraConfig

_DEFAULT_BATCH_SIZE = 8

POLICY_LOSSES = tuple(name for name in policy_losses() if LOSSES[name].is_of_tinker)


@dataclass(frozen=True, slots=True, kw_only=True)
class RLConfig:
    """Settings of one run; what cannot work is refused here, before a model is loaded.

    >>> import turnwise as tw
    >>> tw.RLConfig(base_model="tiny", num_steps=2).group_size
    4
    """

    loss_fn: str = "importance_sampling"
    """One of `POLICY_LOSSES`, with that loss's own defaults (docs/training_api.md)."""
    group_size: int = 4
    """Responses per prompt; their mean reward is the baseline, so at least 2."""
    batch_size: int = _DEFAULT_BATCH_SIZE
    """Prompts per step. `RLConfig(groups_per_batch=8)` is the other way to say it."""
    max_tokens: int = 16
    """Longest response."""
    learning_rate: float = 2e-5
    temperature: float = 0.8
    """The temperature of sampling and of the trained logprobs; above 0, since greedy responses are all equal."""
    kl_penalty_coef: float = 0.0
    """Weight of KL(policy || base model) in the loss; 0 is off and costs nothing."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    base_model: str = "Qwen/Qwen3-0.6B"
    rank: int = 16
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    num_steps: int = 5
    """Optimizer steps."""
    seed: int = 0
    """Seed of the adapter's first weights, of the dataset's order and of the sampling: same seed, same run."""
    save_name: str = "grpo"
    """The final sampler weights are saved under it."""
    deadline_s: float = 600.0
    """Longest wait for any one request. Loading the model is not bound by it, since it may have to be downloaded."""
    groups_per_batch: InitVar[int | None] = None

    def __post_init__(self, groups_per_batch: int | None) -> None:
        if groups_per_batch is not None:
            if self.batch_size not in (groups_per_batch, _DEFAULT_BATCH_SIZE):
                raise ConfigError(
                    f"batch_size={self.batch_size} and groups_per_batch={groups_per_batch} are two names of one "
                    "setting; give one of them"
                )
            object.__setattr__(self, "batch_size", groups_per_batch)
        self._check_choices()
        self._check_numbers()
        try:
            _ = self.adam_params, self.lora
        except DataError as cause:
            raise ConfigError(str(cause)) from cause
        CheckpointPath("run", "sampler_weights", self.save_name)  # a bad name would be noticed after the last step

    @property
    def adam_params(self) -> AdamParams:
        beta1, beta2 = self.betas
        return AdamParams(
            learning_rate=self.learning_rate,
            beta1=beta1,
            beta2=beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(
            rank=self.rank,
            seed=self.seed,
            train_mlp=self.train_mlp,
            train_attn=self.train_attn,
            train_unembed=self.train_unembed,
        )

    @property
    def loss_fn_config(self) -> dict[str, float | str]:
        """What `forward_backward` is given beside the loss's name; see `grpo` on the choice of KL."""
        if self.kl_penalty_coef == 0:
            return {}
        return {"kl_coef": self.kl_penalty_coef, "kl_estimator": "k2", "kl_reference": "base"}

    def _check_choices(self) -> None:
        if self.loss_fn not in POLICY_LOSSES:
            hint = did_you_mean(str(self.loss_fn), POLICY_LOSSES)
            raise ConfigError(f"loss_fn={self.loss_fn!r}{hint}; expected one of {', '.join(POLICY_LOSSES)}")
        if len(self.betas) != 2:
            raise ConfigError(f"betas={self.betas!r}; expected two numbers, such as (0.9, 0.999)")

    def _check_numbers(self) -> None:
        for name, low in (
            ("group_size", 2),
            ("batch_size", 1),
            ("max_tokens", 1),
            ("rank", 1),
            ("num_steps", 1),
            ("seed", 0),
        ):
            value: object = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name}={value!r}; expected a whole number, at least {low}")
        for name in ("temperature", "deadline_s", "kl_penalty_coef"):
            number: float = getattr(self, name)
            if not math.isfinite(number) or number < 0 or (number == 0 and name != "kl_penalty_coef"):
                least = "0 (off) or more" if name == "kl_penalty_coef" else "more than 0"
                raise ConfigError(f"{name}={number!r}; expected a finite number, {least}")
