"""What a method can be told: the sections `method` and `data` of a config.

Every option of a method is null until it is set, and then the method's own default holds (`METHOD_OPTIONS`); an option
that the chosen method, or its loss, does not read is refused by name. To add one: a field here, and its row in a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from turnwise.runtime.section import Section

MethodName = Literal[
    "grpo", "gspo", "rloo", "reinforce_pp", "rebn", "gigpo", "mt_grpo", "ppo", "la_grpo", "refuel", "dpo", "rft", "sft"
]
LossFn = Literal["importance_sampling", "ppo", "cispo", "dro", "gspo", "dppo_tv"]
Normalisation = Literal["token_mean", "seq_mean", "seq_sum", "const", "turn_mean", "traj_turn_mean", "prompt_mean"]
Correction = Literal["none", "token_tis", "sequence_tis", "token_mask", "sequence_mask", "sequence_geo_mask"]

LOSS_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "importance_sampling": (),
    "ppo": ("clip_low_threshold", "clip_high_threshold", "dual_clip"),
    "cispo": ("clip_low_threshold", "clip_high_threshold"),
    "dro": ("beta",),
    "gspo": ("clip_low_threshold", "clip_high_threshold"),
    "dppo_tv": ("tv_threshold", "tv_penalty"),
    "cross_entropy": (),
    "dpo": ("beta", "reward_offset"),
    "refuel": ("eta", "form"),
}
"""The options of `method` that only some losses read."""
CORRECTION_OPTIONS = ("correction", "correction_low", "correction_high", "outlier_rejection", "opsm_threshold")
OLD_POLICY_OPTIONS = ("old_policy", "old_policy_from")
KL_OPTIONS: Mapping[str, tuple[str, ...]] = {"advantages": ("kl_gamma",), "loss": ("kl_estimator", "kl_importance")}
"""What is read besides `kl_coef`, by where the KL stands."""
RL_OPTIONS = (
    *("kl_coef", "kl_place", "kl_gamma", "kl_estimator", "kl_importance", "entropy_coef"),
    *OLD_POLICY_OPTIONS,
    *CORRECTION_OPTIONS,
)
"""What every loss that compares policies reads besides."""
LOOP_OPTIONS = (*OLD_POLICY_OPTIONS, "kl_place", "kl_gamma")
"""Those of them that the loop reads, and the loss does not."""
RL_LOSSES = get_args(LossFn)
CLIP_BOUNDS: Mapping[str, tuple[float, float]] = {
    "ppo": (0.8, 1.2),
    "cispo": (0.0, 4.0),
    "gspo": (1 - 3e-4, 1 + 4e-4),
}
"""The bounds that a loss takes where the config names none, as absolute ratios."""
CORRECTION_BOUNDS: Mapping[str, tuple[float, float]] = {
    "token_mask": (0.5, 2.0),
    "sequence_mask": (0.5, 2.0),
    "sequence_geo_mask": (0.99, 1.01),
}
"""The same of the masks: what they keep."""
CHOICE_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "loss_fn": tuple(sorted({option for options in LOSS_OPTIONS.values() for option in options})),
    "correction": ("correction_low", "correction_high"),
}
"""Options whose values are meant for one choice of another option: a clip of `ppo` means nothing to `cispo`."""

METHOD_OPTIONS: Mapping[str, Mapping[str, float | str | None]] = {
    "grpo": {
        "advantage": "centered",
        "credit": "trajectory",
        "gamma": 1.0,
        "normalisation": "token_mean",
        "loss_fn": "importance_sampling",
    },
    "gspo": {
        "advantage": "centered",
        "credit": "trajectory",
        "gamma": 1.0,
        "normalisation": "seq_mean",
        "sequence": "trajectory",
    },
    "rloo": {"credit": "trajectory", "gamma": 1.0, "normalisation": "seq_sum", "loss_fn": "importance_sampling"},
    "reinforce_pp": {"normalisation": "token_mean", "loss_fn": "importance_sampling", "group_baseline": False},
    "rebn": {"gamma": 0.95, "normalisation": "token_mean", "loss_fn": "importance_sampling"},
    "gigpo": {
        "advantage": "centered",
        "gamma": 0.95,
        "omega": 1.0,
        "normalisation": "token_mean",
        "loss_fn": "importance_sampling",
    },
    "mt_grpo": {"turn_coef": 1.0, "normalisation": "token_mean", "loss_fn": "importance_sampling"},
    "ppo": {
        "gae": "token",
        "gamma": 1.0,
        "policy_lambda": "adaptive",
        "alpha": 1.5,
        "critic_lambda": 1.0,
        "whiten": False,
        "normalisation": "token_mean",
        "loss_fn": "ppo",
    },
    "la_grpo": {
        "advantage": "centered",
        "branch_turn": "uniform",
        "branch_p": 0.3,
        "trained_turns": "branch",
        "divide_by_probability": False,
        "normalisation": "token_mean",
        "loss_fn": "importance_sampling",
    },
    "refuel": {"branch_turn": "uniform", "branch_p": 0.3, "reference": "sampler"},
    "dpo": {"turn_weights": "none", "dmpo_gamma": 0.7, "reference": "sampler"},
    "rft": {"threshold": None, "normalisation": "token_mean"},
    "sft": {"normalisation": "token_mean"},
}
"""The options that a method reads, each with the method's own default."""
FIXED_LOSS: Mapping[str, str] = {
    "gspo": "gspo",
    "refuel": "refuel",
    "dpo": "dpo",
    "rft": "cross_entropy",
    "sft": "cross_entropy",
}
"""Methods that are made for one loss."""
READING_METHODS = ("sft",)
"""Methods that only read stored data, and sample nothing."""
BRANCHING_METHODS = ("la_grpo", "refuel")
"""Methods that continue one dialogue several times."""
DATA_READERS: Mapping[str, tuple[str, ...]] = {"dialogues": ("sft",), "pairs": ("dpo", "refuel")}
"""The methods that read each option of `data`."""


class MethodConfig(Section):
    """What makes a gradient out of attempts."""

    name: MethodName = Field(default="grpo", description="The method; docs/algorithms tells them apart.")
    advantage: Literal["centered", "normalized", "leave_one_out", "max_rl"] | None = Field(
        default=None,
        description="Return minus the group's mean; also divided by its deviation; minus the others' mean; divided by "
        "the mean. null takes the method's own, here and below.",
    )
    credit: Literal["trajectory", "reward_to_go"] | None = Field(
        default=None, description="One advantage for all turns, or each turn by the rewards from it on."
    )
    gamma: float | None = Field(
        default=None, gt=0, le=1, description="Discount per turn (grpo 1, rebn and gigpo 0.95), never per token."
    )
    normalisation: Normalisation | None = Field(
        default=None,
        description="How trained tokens share a step: all alike, each attempt alike, by their number, by a fixed "
        "length, each turn alike, each turn of an attempt alike, each task alike.",
    )
    loss_fn: LossFn | None = Field(default=None, description="The loss, by Tinker's name.")
    sequence: Literal["trajectory", "turn"] | None = Field(
        default=None, description="gspo: what one ratio spans, the whole attempt or each turn."
    )
    group_baseline: bool | None = Field(
        default=None, description="reinforce_pp: subtract the group's mean before the batch is whitened (false)."
    )
    omega: float | None = Field(default=None, ge=0, description="gigpo: weight of the step advantage (1).")
    turn_coef: float | None = Field(default=None, ge=0, description="mt_grpo: weight of the turn's own reward (1).")
    gae: Literal["token", "turn", "bilevel"] | None = Field(
        default=None, description="ppo: what a step of the advantage's recursion is; bilevel is turns, then tokens."
    )
    policy_lambda: float | Literal["adaptive"] | None = Field(
        default=None, description="ppo: lambda of the policy's advantages, 0 to 1; `adaptive` follows the length."
    )
    alpha: float | None = Field(
        default=None, gt=0, description="ppo: reach of the adaptive lambda as a share of the attempt (1.5; VAPO 0.05)."
    )
    critic_lambda: float | None = Field(
        default=None, ge=0, le=1, description="ppo: lambda of the critic's targets (1: plain returns)."
    )
    whiten: bool | None = Field(
        default=None, description="ppo: scale a step's advantages to mean 0 and deviation 1 (false)."
    )
    threshold: float | None = Field(
        default=None, description="rft: keep attempts with more reward than this; null keeps successes."
    )
    branch_turn: Literal["uniform", "geometric"] | None = Field(
        default=None, description="la_grpo, refuel: how the turn to branch at is drawn (uniform)."
    )
    branch_p: float | None = Field(
        default=None, gt=0, lt=1, description="Of the geometric distribution over turns; more is earlier (0.3)."
    )
    trained_turns: Literal["branch", "from_branch"] | None = Field(
        default=None, description="la_grpo: train the turn branched at, or that and all after it (branch)."
    )
    divide_by_probability: bool | None = Field(
        default=None, description="la_grpo: weigh a group by 1 / P(its turn), for the sum over all turns (false)."
    )
    eta: float | None = Field(
        default=None, gt=0, description="refuel: log-ratio per unit of reward that the loss asks for (1)."
    )
    form: Literal["paper", "repo"] | None = Field(
        default=None, description="refuel: the loss as in the paper, or eta^2 times that, as in its code (paper)."
    )
    reward_offset: float | None = Field(
        default=None, ge=0, description="dpo: margin asked for per unit of reward difference (0)."
    )
    turn_weights: Literal["none", "dmpo"] | None = Field(
        default=None, description="dpo: all turns count alike, or later ones less, as in DMPO (none)."
    )
    dmpo_gamma: float | None = Field(default=None, gt=0, le=1, description="dpo: DMPO's discount per turn (0.7).")
    reference: Literal["sampler", "base"] | None = Field(
        default=None,
        description="dpo, refuel: the policy that log-ratios are taken against: the one that sampled, or the base "
        "model (sampler).",
    )
    clip_low_threshold: float | None = Field(
        default=None,
        ge=0,
        description="Lowest ratio of ppo (0.8), cispo (0) and gspo (0.9997).",
    )
    clip_high_threshold: float | None = Field(
        default=None,
        gt=0,
        description="Highest ratio of ppo (1.2), cispo (4) and gspo (1.0004).",
    )
    dual_clip: float | None = Field(
        default=None, ge=0, description="ppo: most that a ratio counts where the advantage is negative; 0 is off."
    )
    tv_threshold: float | None = Field(
        default=None, ge=0, description="dppo_tv: how far a token's probability may move (0.2)."
    )
    tv_penalty: float | None = Field(
        default=None, ge=0, description="dppo_tv: weight of the squared log-ratio (0.001)."
    )
    beta: float | None = Field(
        default=None, ge=0, description="Pull towards the reference: of dro (0.05), of dpo (0.1)."
    )
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of KL(policy || base model).")
    kl_place: Literal["advantages", "loss"] = Field(
        default="advantages",
        description="Where that KL stands: taken off each token's advantage (one more forward pass), or a term of the "
        "loss.",
    )
    kl_gamma: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="In advantages: how much of the next token's KL a token answers for; 0 is its own alone.",
    )
    kl_estimator: Literal["k2", "k3"] = Field(default="k2", description="In the loss: how that KL is estimated.")
    kl_importance: bool = Field(
        default=False, description="In the loss: weigh that KL by policy / sampler, which is right off-policy."
    )
    entropy_coef: float = Field(
        default=0.0, ge=0, description="Bonus on the entropy of each trained token's distribution."
    )
    old_policy: bool = Field(
        default=False,
        description="Ratios against the weights at the start of the batch (one more forward pass), times their ratio "
        "to the sampler; false takes ratios against the sampler.",
    )
    old_policy_from: Literal["forward", "loglinear"] = Field(
        default="forward",
        description="With old_policy and train.max_staleness: that forward pass, or `loglinear`, which saves it: each "
        "token's logprob between the sampler's and the trainer's, by their versions.",
    )
    correction: Correction = Field(
        default="none",
        description="Against a sampler that drifted: truncate its ratio (tis, with old_policy) or reject (mask), by "
        "token, by the product over a sequence, or by its geometric mean.",
    )
    correction_low: float | None = Field(default=None, ge=0, description="Lowest ratio that a mask keeps.")
    correction_high: float | None = Field(default=None, gt=0, description="Highest ratio kept, or the truncation.")
    outlier_rejection: bool = Field(
        default=False, description="Reject a sequence that holds a token with a ratio outside 1e-4 to 100."
    )
    opsm_threshold: float = Field(
        default=0.0,
        ge=0,
        description="Reject tokens of negative advantage in sequences that drifted more than this (1e-4); 0 is off.",
    )

    def chosen(self, option: str) -> Any:
        """The value of an option: what was set, else the method's own default."""
        given = getattr(self, option)
        return METHOD_OPTIONS[self.name][option] if given is None else given

    @property
    def loss(self) -> str:
        """The loss by name, chosen or the method's own."""
        return FIXED_LOSS[self.name] if self.name in FIXED_LOSS else self.chosen("loss_fn")

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        own = METHOD_OPTIONS[self.name]
        for name in sorted({option for options in METHOD_OPTIONS.values() for option in options}):
            if name not in own and getattr(self, name) is not None:
                readers = ", ".join(method for method, options in METHOD_OPTIONS.items() if name in options)
                raise ValueError(f"{name} is not read by method={self.name}, only by {readers}; leave it out")
        if "credit" in own and self.gamma not in (None, 1) and self.chosen("credit") != "reward_to_go":
            credit = self.chosen("credit")
            raise ValueError(f"gamma={self.gamma} is not read by credit={credit}; set credit: reward_to_go")
        if isinstance(self.policy_lambda, float):
            if not 0 <= self.policy_lambda <= 1:
                raise ValueError(f"policy_lambda={self.policy_lambda}; expected 0 to 1, or adaptive")
            if self.alpha is not None:
                raise ValueError(f"alpha is not read by policy_lambda={self.policy_lambda}; leave one of them out")
        for name, other, value in (("branch_p", "branch_turn", "geometric"), ("dmpo_gamma", "turn_weights", "dmpo")):
            if getattr(self, name) is not None and self.chosen(other) != value:
                raise ValueError(f"{name} is not read by {other}={self.chosen(other)}; set {other}: {value}")
        return self

    @model_validator(mode="after")
    def _every_loss_option_is_read(self) -> Self:
        read = LOSS_OPTIONS[self.loss]
        for name in sorted({option for options in LOSS_OPTIONS.values() for option in options}):
            if name not in read and getattr(self, name) is not None:
                readers = ", ".join(loss for loss, options in LOSS_OPTIONS.items() if name in options)
                raise ValueError(f"{name} is not read by loss_fn={self.loss}, only by {readers}; leave it out")
        if self.loss not in RL_LOSSES:
            for name in RL_OPTIONS:
                if getattr(self, name) != MethodConfig.model_fields[name].default:
                    raise ValueError(f"{name} is not read by {self.loss}, the loss of method={self.name}; leave it out")
        return self

    @model_validator(mode="after")
    def _kl_options_are_read(self) -> Self:
        for name in ("kl_place", *(option for options in KL_OPTIONS.values() for option in options)):
            value = getattr(self, name)
            if value == MethodConfig.model_fields[name].default:
                continue
            if self.kl_coef == 0:
                raise ValueError(f"{name}={value} is not read while kl_coef is 0; leave it out")
            if name != "kl_place" and name not in KL_OPTIONS[self.kl_place]:
                other = "loss" if self.kl_place == "advantages" else "advantages"
                raise ValueError(f"{name}={value} is not read by kl_place={self.kl_place}; set kl_place: {other}")
        return self

    @model_validator(mode="after")
    def _correction_fits(self) -> Self:
        if self.old_policy_from != "forward" and not self.old_policy:
            raise ValueError(
                f"old_policy_from={self.old_policy_from} is not read while old_policy is false; set old_policy: true"
            )
        if self.correction.endswith("tis") and not self.old_policy:
            raise ValueError(
                f"correction={self.correction} truncates old / sampler, and there is no old policy: the ratio would "
                "be corrected twice; set old_policy: true, or use a mask"
            )
        for name, is_read in (
            ("correction_low", self.correction.endswith("mask")),
            ("correction_high", self.correction != "none"),
        ):
            if getattr(self, name) is not None and not is_read:
                raise ValueError(f"{name} is not read by correction={self.correction}; leave it out")
        return self

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        low, high = CLIP_BOUNDS.get(self.loss, (0.0, 0.0))
        low = low if self.clip_low_threshold is None else self.clip_low_threshold
        high = high if self.clip_high_threshold is None else self.clip_high_threshold
        if low > high:
            raise ValueError(f"clip bounds {low} to {high}; expected low <= high, as absolute ratios (0.8 and 1.2)")
        if self.loss == "dpo" and self.beta == 0:
            raise ValueError("beta=0 is a loss of dpo that no reply changes; expected more than 0 (0.1 is usual)")
        if self.correction in CORRECTION_BOUNDS:
            low, high = CORRECTION_BOUNDS[self.correction]
            low = low if self.correction_low is None else self.correction_low
            high = high if self.correction_high is None else self.correction_high
            if not low <= 1 <= high:
                raise ValueError(
                    f"correction={self.correction} would keep ratios from {low:g} to {high:g} and reject what the "
                    "learning weights drew themselves, at 1; expected correction_low <= 1 <= correction_high"
                )
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip}; expected more than 1 (3 is usual), or 0 for off")
        return self

    @property
    def loss_config(self) -> Mapping[str, float | str]:
        """What `forward_backward` is given beside the loss's name; options at rest are left to the loss."""
        given = {name: getattr(self, name) for name in LOSS_OPTIONS[self.loss] if getattr(self, name) is not None}
        left_out = LOOP_OPTIONS if self.kl_place == "loss" else (*LOOP_OPTIONS, "kl_coef")
        for name in RL_OPTIONS:
            value = getattr(self, name)
            if name not in left_out and value != MethodConfig.model_fields[name].default:
                given[name] = float(value) if isinstance(value, bool) else value
        return given


class DataConfig(Section):
    """Stored data to learn from, for the methods that read some."""

    dialogues: str = Field(
        default="", description="sft: a run whose successes in training are imitated; empty: the world's dialogues."
    )
    pairs: str = Field(default="", description="Preference pairs to learn from, as `turnwise pairs` writes them.")

    def check(self, method: str) -> None:
        """Refuse what the method does not read."""
        for option, readers in DATA_READERS.items():
            if getattr(self, option) and method not in readers:
                who = f"only by {', '.join(readers)}" if readers else "nor by any other"
                raise ValueError(f"data.{option} is not read by method={method}, {who}; leave it out")
