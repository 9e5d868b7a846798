"""The options of methods, and what methods declare about themselves: the base of every section `method`.

A method declares a class `Options` in its own file. Its fields are the options; its class attributes and methods say
what the method needs of the rest of a run; `build` makes the method:

    class MyMethod:
        class Options(FreeLoss, Weighed):
            power: float = Field(default=2.0, gt=0, description="Exponent of the return.")

            def build(self, setup: MethodSetup) -> MyMethod: ...

Options that several methods share are declared once, here: `Weighed` (normalisation), `PolicyTerms` (KL, entropy bonus,
old policy, correction) and `FreeLoss` (a choice of loss, with the options of that loss).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from annotated_types import Gt
from pydantic import Field, create_model, field_validator, model_validator
from pydantic_core import PydanticCustomError

from turnwise.credit.gae import Gae
from turnwise.credit.weights import Normalisation, Weighting, weighting
from turnwise.losses.outside import find_function, is_outside, outside_info
from turnwise.losses.table import (
    LOSSES,
    Correction,
    PolicyOptions,
    Settings,
    losses_that_read,
    policy_losses,
    read_settings,
)
from turnwise.methods.base import AnyMethod, MethodSetup
from turnwise.runtime.import_path import import_path
from turnwise.runtime.section import Section
from turnwise.runtime.suggest import nearest

LAGGING_LOSS = "cispo"
"""The loss that replaces plain importance sampling if attempts are older than the weights."""
FOREIGN_CAP = 2.0
"""The ratio of trainer to sampler at which it is truncated if another program samples."""
DECLARED: dict[str, type[MethodOptions]] = {}
"""Every class of options that this process has defined, by import path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageKl:
    """A penalty on KL(policy || base model) that is taken off each token's advantage."""

    coef: float
    gamma: float


class MethodOptions(Section):
    """The method: how attempts become a gradient."""

    name: str = Field(default="", description="The method; docs/algorithms explains each. `module:Class` is your own.")

    default_loss: ClassVar[str] = "importance_sampling"
    """Name of the loss. With `FreeLoss` it is the default; otherwise it is the only one."""
    needs_critic: ClassVar[bool] = False
    """Whether it learns from a critic's values; then `make_gae` computes the critic's targets."""
    branches: ClassVar[bool] = False
    """Whether it continues one dialogue several times."""
    data_options: ClassVar[tuple[str, ...]] = ()
    """The options of the section `data` that it reads."""
    only_stored: ClassVar[bool] = False
    """Whether it learns only from stored data and samples nothing."""

    def build(self, setup: MethodSetup) -> AnyMethod:
        """The method with these options."""
        raise NotImplementedError(f"{type(self).__qualname__}.build(setup) is missing; it returns the method")

    def make_gae(self) -> Gae:
        """How the critic's targets are estimated."""
        raise NotImplementedError(f"{type(self).__qualname__}.make_gae() is missing; a method with a critic needs it")

    @property
    def loss(self) -> str:
        """Name of the loss: the chosen one or the method's own."""
        return self.default_loss

    @property
    def loss_config(self) -> Settings:
        """The loss's settings for `forward_backward`, without options that are at their defaults."""
        given: dict[str, float | str] = {}
        for name in self._options_of_loss():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and (name, value) != ("correction", "none"):
                given[name] = float(value) if isinstance(value, bool) else value
        return given

    def _options_of_loss(self) -> Iterable[str]:
        return LOSSES[self.loss].options.model_fields

    @property
    def discount(self) -> float:
        """The discount per turn of returns; potentials use the same one."""
        return float(getattr(self, "gamma", 1.0))

    @property
    def advantage_kl(self) -> AdvantageKl | None:
        return None

    @property
    def old_policy_source(self) -> Literal["none", "forward", "loglinear"]:
        """The source of the logprobs of the weights at the start of a batch, if the loss reads them."""
        return "none"

    @property
    def learns_from_one(self) -> bool:
        """Whether a single attempt at a task is enough; otherwise attempts at a task are compared."""
        return False

    @property
    def judges_success(self) -> bool:
        """Whether it uses the world's verdict (success) and looks at rewards only if there is none."""
        return False

    def when_lagging(self) -> Self:
        """The method to use if samplers lag behind the weights."""
        return self

    def when_foreign(self) -> Self:
        """The method to use if another program samples: its logprobs are not quite the trainer's."""
        return self

    def correction_words(self) -> str:
        """How this method, as it runs, corrects for a sampler that differs from the trainer; for the plan."""
        return "the loss compares no policies, so there is nothing to correct"

    def why_not_own_worlds(self) -> str | None:
        """Why the attempts at a task must start in the same world; None if they need not."""
        if self.branches:
            return "continues one dialogue several times, and a dialogue has one world"
        if self.only_stored:
            return "reads stored data: no attempt is played that could start anywhere; leave it out"
        return None

    def why_not_group_size(self, num_attempts: int) -> str | None:  # noqa: ARG002
        """Why a task cannot have that many attempts; None if it can."""
        return None

    def why_not_potential(self) -> str | None:
        """Why potentials (`reward.potential`) would change what the method aims at.

        Potentials sum to -phi(s_0) over an attempt, and from turn k on to -phi(s_k). In a method that compares returns,
        that is the same for everything that is compared. A method that uses rewards differently says so here.
        """
        return None

    @property
    def imitation_coef(self) -> float:
        """Weight of the negative log-likelihood of the step's successes, which is added to the loss; 0: not added."""
        return 0.0

    def why_not_memory(self) -> str | None:
        """Why the method cannot learn from attempts that a memory (`memory.window`) cuts into several datums."""
        return None

    def why_discount_unread(self) -> str | None:
        """Why only potentials use the discount with these options; None if returns use it too."""
        return None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        DECLARED[cls.path()] = cls

    @classmethod
    def path(cls) -> str:
        """The import path of the method that these options belong to."""
        return import_path(cls).removesuffix(".Options")

    @classmethod
    def is_shipped(cls) -> bool:
        return cls.__module__.startswith("turnwise.methods.")

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, given: Any) -> Any:
        """Replace null by the method's default: a run stores every option, some of them as null."""
        if not isinstance(given, dict):
            return given
        options = cast(dict[str, Any], given)
        kept = {key: value for key, value in options.items() if value is not None}
        if cls.is_shipped():
            own = cls.model_fields["name"].default
            if kept.get("name", own) != own:
                raise ValueError(f"name={kept['name']!r} for the options of {own}; leave it out")
            return kept
        return kept if is_outside(str(kept.get("name", ""))) else {**kept, "name": cls.path()}

    if TYPE_CHECKING:  # the fields depend on the method

        def __getattr__(self, name: str) -> Any: ...


class Weighed(MethodOptions):
    """A method with a choice of what counts the same: tokens, turns or attempts."""

    normalisation: Normalisation = Field(
        default="token_mean",
        description="What counts the same in a step: every token (token_mean), attempt (seq_mean), turn "
        "(turn_mean), turn of an attempt (traj_turn_mean) or task (prompt_mean). seq_sum adds up "
        "the tokens of an attempt; const divides them by a fixed length.",
    )

    def weighting(self, setup: MethodSetup) -> Weighting:
        return weighting(self.normalisation, max_tokens=setup.max_tokens)


class PolicyTerms(PolicyOptions, MethodOptions):
    """Options of every method whose loss compares policies."""

    kl_place: Literal["advantages", "loss"] = Field(
        default="advantages",
        description="Where to put the KL: subtract it from each token's advantage (one more forward pass), or "
        "add it to the loss.",
    )
    kl_gamma: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="For a KL in advantages: discount of later tokens' KL in a token's advantage; 0 counts "
        "only the token's own.",
    )
    kl_estimator: Literal["k2", "k3"] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default="k2", description="How to estimate a KL in the loss: k2 is the reverse KL, k3 the forward KL."
    )
    kl_importance: bool = Field(
        default=False, description="Weight a KL in the loss by policy / sampler, which makes it correct off-policy."
    )
    entropy_coef: float = Field(
        default=0.0, ge=0, description="Weight of a bonus for the entropy of each trained token's distribution."
    )
    old_policy: bool = Field(
        default=False,
        description="Take ratios against the weights at the start of the batch (one more forward pass), times "
        "their ratio to the sampler; false takes ratios against the sampler.",
    )
    old_policy_from: Literal["forward", "loglinear"] = Field(
        default="forward",
        description="With old_policy and train.max_staleness: `forward` makes that forward pass; `loglinear` "
        "saves it and places each token's old logprob between the sampler's and the trainer's, by "
        "their versions.",
    )

    correction: Literal["auto", Correction] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default="auto",
        description="How to correct for a sampler that differs from the trainer: truncate the ratio (tis, which needs "
        "the old policy) or reject tokens (mask), by token, by the product over a sequence, or by its geometric mean. "
        f"`auto` is none if this program samples; if another one does (rollout.backend), ratios are truncated at "
        f"{FOREIGN_CAP:g}: {LAGGING_LOSS} where the loss is auto, else token_tis with old_policy.",
    )

    @property
    def advantage_kl(self) -> AdvantageKl | None:
        is_there = self.kl_coef != 0 and self.kl_place == "advantages"
        return AdvantageKl(coef=self.kl_coef, gamma=self.kl_gamma) if is_there else None

    @property
    def old_policy_source(self) -> Literal["none", "forward", "loglinear"]:
        return self.old_policy_from if self.old_policy else "none"

    def _options_of_loss(self) -> Iterable[str]:
        left_out = () if self.kl_place == "loss" else ("kl_coef",)
        return [name for name in super()._options_of_loss() if name not in left_out]

    def when_foreign(self) -> Self:
        """Truncate the ratio of the weights at the start of the batch to the sampler. What the user set stays.

        A loss that clips its ratio (ppo, gspo) gets an old policy for this: else the sampler's rounding would use up
        the room that the clip leaves for learning. cispo against the sampler truncates that ratio itself.
        """
        if self.correction != "auto" or is_outside(self.loss):
            return self
        if self.loss == LAGGING_LOSS and not self.old_policy:
            return self
        return self.model_copy(update={"correction": "token_tis", "old_policy": True})

    def correction_words(self) -> str:
        if self.correction not in ("auto", "none"):
            low, high = self.correction_bounds
            kept = f"ratios from {low:g} to {high:g} count" if self.correction.endswith("mask") else f"cap {high:g}"
            extra = ", with one more forward pass" if self.old_policy_source == "forward" else ""
            return f"{self.correction} ({kept}{extra})"
        if is_outside(self.loss):
            return f"none: {self.loss} is a loss of your own; set method.correction to add one"
        if self.loss == LAGGING_LOSS:
            cap = self.loss_config.get("clip_high_threshold", LOSSES[self.loss].options().clip_high_threshold)
            return f"{self.loss} truncates the ratio to the sampler at {cap:g}"
        return "none (method.correction=none)" if self.correction == "none" else "none"

    @model_validator(mode="after")
    def _kl_options_are_read(self) -> Self:
        readers = {"kl_place": None, "kl_gamma": "advantages", "kl_estimator": "loss", "kl_importance": "loss"}
        for name, place in readers.items():
            value = getattr(self, name)
            if value == type(self).model_fields[name].default:
                continue
            if self.kl_coef == 0:
                raise ValueError(f"{name}={value} is not read while kl_coef is 0; leave it out")
            if place is not None and place != self.kl_place:
                raise ValueError(f"{name}={value} is not read by kl_place={self.kl_place}; set kl_place: {place}")
        return self

    @model_validator(mode="after")
    def _correction_fits(self) -> Self:
        if self.old_policy_from != "forward" and not self.old_policy:
            raise ValueError(
                f"old_policy_from={self.old_policy_from} is not read while old_policy is false; set old_policy: true"
            )
        if self.needs_old_policy and not self.old_policy:
            raise ValueError(
                f"correction={self.correction} truncates old / sampler, and there is no old policy: the ratio would "
                "be corrected twice; set old_policy: true, or use a mask"
            )
        low, high = self.correction_bounds
        if self.correction.endswith("mask") and not low <= 1 <= high:
            raise ValueError(
                f"correction={self.correction} would keep ratios from {low:g} to {high:g} and reject what the "
                "learning weights drew themselves, at 1; expected correction_low <= 1 <= correction_high"
            )
        return self

    @model_validator(mode="after")
    def _loss_takes_its_options(self) -> Self:
        if not is_outside(self.loss):
            read_settings(self.loss, self.loss_config)
        return self


def unknown_name(kind: str, name: str, known: Iterable[str], own: str) -> PydanticCustomError:
    """The error about an unknown loss or method (`kind`); `own` is how the user names their own one."""
    choices = list(known)
    near = nearest(name, choices, cutoff=0.6)
    guess = "" if near is None else f"; did you mean {near}?"
    text = "there is no such {kind}; expected {choices}; a {kind} of your own is {own}{guess}"
    told = {"kind": kind, "choices": ", ".join(choices), "own": own, "guess": guess}
    return PydanticCustomError("unknown_name", text, told)


def _own_loss_fields() -> dict[str, Any]:
    """The options that only some losses have; null is the loss's own default."""
    found: dict[str, Any] = {}
    for option in dict.fromkeys(option for name in policy_losses() for option in LOSSES[name].own_options):
        readers = [name for name in losses_that_read(option) if name in policy_losses()]
        fields = {name: LOSSES[name].options.model_fields[option] for name in readers}
        about = (fields[readers[0]].description or "").removesuffix(".").replace(" of a sequence", "")
        defaults = ", ".join(f"{name} {field.default:g}" for name, field in fields.items())
        is_positive = any(isinstance(bound, Gt) for bound in fields[readers[0]].metadata)
        text = f"{about}. null is the loss's own: {defaults}."
        found[option] = (
            float | None,
            Field(default=None, description=text, gt=0.0 if is_positive else None, ge=None if is_positive else 0.0),
        )
    return found


_OWN_LOSS_FIELDS = _own_loss_fields()
OwnLossOptions = create_model("OwnLossOptions", __base__=PolicyTerms, __module__=__name__, **_OWN_LOSS_FIELDS)


class FreeLoss(OwnLossOptions):
    """A method whose loss can be chosen."""

    loss_fn: str = Field(
        default="auto",
        description=f"The loss: {', '.join(policy_losses())}, or `module:function` for one of your own. `auto` is "
        f"importance_sampling, and {LAGGING_LOSS} where samplers lag (train.max_staleness) or are not this program.",
    )
    loss_options: dict[str, float | str] = Field(
        default_factory=dict, description="Options of a loss of your own, such as `method.loss_options.sharpness=3`."
    )

    loss_defaults: ClassVar[dict[str, Settings]] = {}
    """The method's own defaults of a loss where they differ from the loss's, by loss."""

    @property
    def loss(self) -> str:
        return self.default_loss if self.loss_fn == "auto" else self.loss_fn

    @property
    def loss_config(self) -> Settings:
        return {**self.loss_defaults.get(self.loss, {}), **super().loss_config, **self.loss_options}

    def _options_of_loss(self) -> Iterable[str]:
        if not is_outside(self.loss):
            return super()._options_of_loss()
        left_out = () if self.kl_place == "loss" else ("kl_coef",)
        return [name for name in PolicyOptions.model_fields if name not in left_out]

    def when_lagging(self) -> Self:
        is_open = self.loss_fn == "auto" and self.default_loss == "importance_sampling"
        return self.model_copy(update={"loss_fn": LAGGING_LOSS}) if is_open else self

    def when_foreign(self) -> Self:
        is_open = self.loss_fn == "auto" and self.default_loss == "importance_sampling" and not self.old_policy
        if self.correction == "auto" and is_open:
            return self.model_copy(update={"loss_fn": LAGGING_LOSS, "clip_high_threshold": FOREIGN_CAP})
        return super().when_foreign()

    def check_outside_loss(self) -> None:
        """Import a loss from outside the package and check its options, before anything is spent."""
        if is_outside(self.loss):
            read_settings(outside_info(find_function(self.loss)), self.loss_config)

    @field_validator("loss_fn")
    @classmethod
    def _is_a_loss(cls, loss_fn: str) -> str:
        known = ("auto", *policy_losses())
        if loss_fn not in known and not is_outside(loss_fn):
            raise unknown_name("loss", loss_fn, known, "module:function or path/to/file.py:function")
        return loss_fn

    @model_validator(mode="after")
    def _every_loss_option_is_read(self) -> Self:
        read = () if is_outside(self.loss) else LOSSES[self.loss].own_options
        for name in _OWN_LOSS_FIELDS:
            if name not in read and getattr(self, name) is not None:
                readers = ", ".join(losses_that_read(name))
                raise ValueError(f"{name} is not read by loss_fn={self.loss}, only by {readers}; leave it out")
        if self.loss_options and not is_outside(self.loss):
            raise ValueError(
                f"loss_options is not read by loss_fn={self.loss}, whose options stand in `method` itself; it is for a "
                "loss of your own (loss_fn: module:function)"
            )
        return self
