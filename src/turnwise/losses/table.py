"""The one table of losses: names, options with defaults and bounds, and what each loss reads.

Engine, client, service, config and docs read this table. The torch functions stand in `engine/training/losses.py` and
`engine/training/preference_losses.py`, and a test holds that table and functions match. To add a loss: a class of
options and a row here, and the function there. A loss from outside the package needs neither (`losses/outside.py`).

    options = read_settings("ppo", {"clip_high_threshold": 1.28})      # a PpoOptions; the rest has its defaults
    LOSSES["gspo"].is_separable                                        # False: one ratio for a whole sequence
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import annotated_types
from pydantic import Field
from pydantic.fields import FieldInfo

from turnwise.errors import ConfigError
from turnwise.runtime.section import Section
from turnwise.runtime.suggest import did_you_mean

Settings = Mapping[str, float | str]
"""Options of a loss as they travel over the wire: flags are 0 or 1."""
Correction = Literal["none", "token_tis", "sequence_tis", "token_mask", "sequence_mask", "sequence_geo_mask"]
CORRECTION_BOUNDS: Mapping[str, tuple[float, float]] = {
    "none": (0.0, math.inf),
    "token_tis": (0.0, 2.0),
    "sequence_tis": (0.0, 5.0),
    "token_mask": (0.5, 2.0),
    "sequence_mask": (0.5, 2.0),
    "sequence_geo_mask": (0.99, 1.01),
}
"""The ratios that each correction keeps, or truncates to, where no bounds are given."""


class LossOptions(Section):
    """What a loss can be told; a loss without options has exactly this."""

    def check(self) -> None:
        """Refuse options that are legal one by one and cannot work together."""

    if TYPE_CHECKING:  # the fields depend on the loss

        def __getattr__(self, name: str) -> Any: ...


class PolicyOptions(LossOptions):
    """What every loss that compares policies can be told."""

    kl_coef: float = Field(default=0.0, ge=0, description="Weight of KL(policy || base model).")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k2",
        description="How the KL in the loss is estimated. k2 has the gradient of the reverse KL, k3 that of the "
        "forward KL; k1 has a gradient of 0 in expectation, so it serves as a metric only.",
    )
    kl_importance: bool = Field(
        default=False,
        description="Multiply the KL in the loss by policy / sampler, which makes its gradient right off-policy.",
    )
    entropy_coef: float = Field(
        default=0.0, description="Weight of a bonus for the entropy of each trained token's distribution."
    )
    correction: Correction = Field(
        default="none",
        description="How to correct for a sampler that differs from the trainer: truncate the ratio (tis, "
        "which needs the old policy) or reject tokens (mask), by token, by the product over a "
        "sequence, or by its geometric mean.",
    )
    correction_low: float | None = Field(
        default=None, ge=0, description="Lowest ratio that a mask keeps; null is the correction's own default."
    )
    correction_high: float | None = Field(
        default=None,
        gt=0,
        description="Highest ratio that a mask keeps, or the value to truncate at; null is the correction's "
        "own default.",
    )
    outlier_rejection: bool = Field(
        default=False, description="Reject a sequence that has a token with a ratio outside 1e-4 to 100."
    )
    opsm_threshold: float = Field(
        default=0.0,
        ge=0,
        description="Reject tokens with a negative advantage in sequences that drifted more than this (1e-4); "
        "0 is off.",
    )

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """The ratios that the correction keeps or truncates to."""
        low, high = CORRECTION_BOUNDS.get(self.correction, CORRECTION_BOUNDS["none"])
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    @property
    def is_by_token(self) -> bool:
        """No rule of these looks at a whole sequence."""
        is_by_sequence = self.correction.startswith("sequence") or self.outlier_rejection or self.opsm_threshold != 0
        return not is_by_sequence

    @property
    def needs_old_policy(self) -> bool:
        """A truncation acts on old / sampler; without the old policy it would correct the ratio a second time."""
        return self.correction.endswith("tis")

    def check(self) -> None:
        for name, is_read in (
            ("correction_low", self.correction.endswith("mask")),
            ("correction_high", self.correction != "none"),
        ):
            if getattr(self, name) is not None and not is_read:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not read by correction={self.correction!r}; leave it out"
                )
        _check_order("correction", *self.correction_bounds)


class ClippedOptions(PolicyOptions):
    """A loss that bounds its ratio. Bounds are absolute ratios, not epsilons: 0.8, not 0.2."""

    clip_low_threshold: float = Field(default=0.0, ge=0, description="Lowest ratio that counts.")
    clip_high_threshold: float = Field(default=4.0, gt=0, description="Highest ratio that counts.")

    def check(self) -> None:
        super().check()
        _check_order("clip", self.clip_low_threshold, self.clip_high_threshold)


class PpoOptions(ClippedOptions):
    """PPO's clipped surrogate."""

    clip_low_threshold: float = Field(default=0.8, ge=0, description="Lowest ratio that counts.")
    clip_high_threshold: float = Field(default=1.2, gt=0, description="Highest ratio that counts.")
    dual_clip: float = Field(
        default=0.0, ge=0, description="Highest ratio that counts where the advantage is negative; 0 is off."
    )

    def check(self) -> None:
        super().check()
        if self.dual_clip != 0 and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip={self.dual_clip}; expected more than 1 (3 is usual), or 0 for off")


class GspoOptions(ClippedOptions):
    """PPO's surrogate on the ratio of a whole sequence, which moves little: the bounds are narrow."""

    clip_low_threshold: float = Field(default=1 - 3e-4, ge=0, description="Lowest ratio of a sequence that counts.")
    clip_high_threshold: float = Field(default=1 + 4e-4, gt=0, description="Highest ratio of a sequence that counts.")


class DroOptions(PolicyOptions):
    """Direct reward optimisation."""

    beta: float = Field(default=0.05, ge=0, description="Pull towards the policy that sampled.")


class DppoTvOptions(PolicyOptions):
    """Importance sampling that drops tokens whose probability moved too far."""

    tv_threshold: float = Field(default=0.2, ge=0, description="How far a token's probability may move.")
    tv_penalty: float = Field(default=1e-3, ge=0, description="Weight of the squared log-ratio.")


class DpoOptions(LossOptions):
    """Direct preference optimisation."""

    beta: float = Field(default=0.1, gt=0, description="Pull towards the reference.")
    reward_offset: float = Field(default=0.0, ge=0, description="Margin per unit of reward difference.")


class RefuelOptions(LossOptions):
    """Regression of log-ratios on rewards."""

    eta: float = Field(default=1.0, gt=0, description="Log-ratio that the loss aims at per unit of reward.")
    form: Literal["paper", "repo"] = Field(
        default="paper", description="The loss as in the paper, or eta^2 times that, as in the paper's code."
    )


class ValueOptions(LossOptions):
    """Squared error of a critic's values."""

    value_clip: float = Field(
        default=0.0, ge=0, description="How far a value may move from its old one and still gain; 0 is off."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInfo:
    """One row of the table."""

    name: str
    options: type[LossOptions]
    columns: tuple[str, ...] = ()
    """The `loss_fn_inputs` that every datum brings besides `target_tokens`."""
    is_separable: bool = True
    """The loss of token i depends on token i alone, as long as no option says otherwise."""
    needs_pairs: bool = False
    """Datums come in pairs, chosen and rejected, and the loss sees all of a batch at once."""
    is_imitation: bool = False
    """The loss imitates: only weights say what to learn. A datum brings `weights`, or a `mask` in place of them."""
    needs_reference: bool = False
    """Reads `ref_logprobs` whatever its options are; the engine asks the base model where they are not sent."""
    is_linear: bool = False
    """Linear in the advantages: weights may be folded into them."""
    is_of_tinker: bool = False
    """The Tinker SDK knows the name."""
    tinker_defaults: Settings = field(default_factory=dict[str, float | str])
    """The defaults of Tinker's service that differ from ours."""

    @property
    def compares_policies(self) -> bool:
        return issubclass(self.options, PolicyOptions)

    @property
    def is_clipped(self) -> bool:
        return issubclass(self.options, ClippedOptions)

    @property
    def own_options(self) -> tuple[str, ...]:
        """The options that not every loss over policies has."""
        return tuple(name for name in self.options.model_fields if name not in PolicyOptions.model_fields)


CLIP_KEYS = ("clip_low_threshold", "clip_high_threshold")
POLICY_COLUMNS = ("logprobs", "advantages")
LOSSES: Mapping[str, LossInfo] = {
    info.name: info
    for info in (
        LossInfo(name="cross_entropy", options=LossOptions, is_imitation=True, is_of_tinker=True),
        LossInfo(
            name="importance_sampling",
            options=PolicyOptions,
            columns=POLICY_COLUMNS,
            is_linear=True,
            is_of_tinker=True,
        ),
        LossInfo(name="ppo", options=PpoOptions, columns=POLICY_COLUMNS, is_linear=True, is_of_tinker=True),
        LossInfo(
            name="cispo",
            options=ClippedOptions,
            columns=POLICY_COLUMNS,
            is_linear=True,
            is_of_tinker=True,
            tinker_defaults={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        ),
        LossInfo(name="dro", options=DroOptions, columns=POLICY_COLUMNS, is_of_tinker=True),
        LossInfo(name="dppo_tv", options=DppoTvOptions, columns=POLICY_COLUMNS),
        LossInfo(
            name="gspo",
            options=GspoOptions,
            columns=POLICY_COLUMNS,
            is_separable=False,
            is_linear=True,
            is_of_tinker=True,
        ),
        LossInfo(name="dpo", options=DpoOptions, is_separable=False, needs_pairs=True, needs_reference=True),
        LossInfo(
            name="refuel",
            options=RefuelOptions,
            columns=("advantages",),
            is_separable=False,
            needs_pairs=True,
            needs_reference=True,
        ),
    )
}


VALUE_LOSS = LossInfo(name="value", options=ValueOptions, columns=("mask", "returns"))
"""The one loss of a critic; a policy has those of `LOSSES`."""


def policy_losses() -> tuple[str, ...]:
    """The losses that a method may choose from: those that compare policies."""
    return tuple(name for name, info in LOSSES.items() if info.compares_policies)


def losses_that_read(option: str) -> tuple[str, ...]:
    """The names of the losses that have an option."""
    return tuple(name for name, info in LOSSES.items() if option in info.options.model_fields)


def is_imitation(name: object) -> bool:
    """Whether this is the name of a loss whose weights say all that is to be learned."""
    return isinstance(name, str) and name in LOSSES and LOSSES[name].is_imitation


def clip_bounds(name: str) -> Settings:
    """The bounds of a clipped loss as settings; nothing for any other loss."""
    if name not in LOSSES or not LOSSES[name].is_clipped:
        return {}
    return {key: LOSSES[name].options.model_fields[key].default for key in CLIP_KEYS}


def find_loss(name: str) -> LossInfo:
    """The row of a loss; an unknown name is refused with the nearest known one."""
    if name not in LOSSES:
        raise ConfigError(f"loss {name!r} is unknown{did_you_mean(name, LOSSES)}; expected one of {', '.join(LOSSES)}")
    return LOSSES[name]


def read_settings(info: LossInfo | str, given: Settings | None = None) -> LossOptions:
    """Check what a loss is told and fill in its defaults."""
    info = find_loss(info) if isinstance(info, str) else info
    known = info.options.model_fields
    for key, value in (given or {}).items():
        if key not in known:
            expected = f"expected one of {', '.join(sorted(known))}" if known else "it takes no config"
            raise ConfigError(f"{info.name} has no config key {key!r}{did_you_mean(key, known)}; {expected}")
        _check_value(key, value, known[key])
    options = info.options.model_validate(dict(given or {}))
    options.check()
    return options


def _check_value(key: str, value: object, field: FieldInfo) -> None:
    """Numbers are not read from texts, and flags are 0 or 1: what comes over the wire has a type."""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if choices:
        if value not in choices:
            near = did_you_mean(value, choices)
            raise ConfigError(f"{key}={value!r} is unknown{near}; expected one of {', '.join(choices)}")
    elif field.annotation is bool:
        if value not in (0, 1):
            raise ConfigError(f"{key}={value!r}; expected 0 (off) or 1 (on)")
    elif field.annotation is not str:
        _check_number(key, value, field)


def _check_number(key: str, value: object, field: FieldInfo) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{key}={value!r} is {type(value).__name__}; expected a number")
    number = float(value)
    is_positive = any(isinstance(bound, annotated_types.Gt) for bound in field.metadata)
    is_bounded = is_positive or any(isinstance(bound, annotated_types.Ge) for bound in field.metadata)
    if not math.isfinite(number) or (number < 0 and is_bounded):
        more = " that is not negative" if is_bounded else ""
        raise ConfigError(f"{key}={value!r}; expected a finite number{more}")
    if number == 0 and is_positive:
        raise ConfigError(f"{key}={value!r}; expected more than 0")


def _check_order(name: str, low: float, high: float) -> None:
    if low > high:
        raise ConfigError(f"{name} bounds {low} to {high}; expected low <= high, as absolute ratios (0.8 and 1.2)")
