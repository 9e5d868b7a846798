"""The settings of losses: what each may be told, and what is refused before anything is computed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from turnwise.errors import ConfigError

OUTLIER_BOUNDS = (1e-4, 100.0)
"""`outlier_rejection` drops a sequence that holds a token whose ratio lies outside."""

KlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["none", "token_tis", "sequence_tis", "token_mask", "sequence_mask", "sequence_geo_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The settings of one loss with its defaults filled in; `make_loss` decides which of them a loss may be given."""

    clip_low_threshold: float = 0.0
    """Absolute ratio bound, not an epsilon: 0.8, not 0.2."""
    clip_high_threshold: float = math.inf
    dual_clip: float = 0.0
    """Where the advantage is negative the ratio counts as at most this; 0 is off (arXiv:1912.09729)."""
    beta: float = 0.0
    """DRO's pull towards the anchor."""
    tv_threshold: float = 0.0
    """dppo_tv: how far the probability of a token may move with its advantage."""
    tv_penalty: float = 0.0
    """dppo_tv: weight of the squared log-ratio."""
    kl_coef: float = 0.0
    """Weight of KL(trainer || reference) inside the loss; needs `ref_logprobs`."""
    kl_estimator: KlEstimator = "k2"
    """k2 has the gradient of the reverse KL; k3 that of the forward KL(reference || trainer); k1 has the right value
    but a gradient that is zero in expectation, so it serves as a metric only."""
    kl_importance: bool = False
    """Multiply the KL term by the constant trainer / sampler, which makes its gradient unbiased off-policy."""
    entropy_coef: float = 0.0
    """Bonus on the entropy of the whole next-token distribution."""
    correction: Correction = "none"
    """What is done about tokens that the sampler drew with another probability than the trainer's, with rho = old /
    sampler. `none` weighs by rho; `token_tis` by min(rho, high); `sequence_tis` by min(product of rho, high);
    the masks weigh by rho and reject, whole, each token (`token_mask`) or each sequence, by its product
    (`sequence_mask`) or geometric mean (`sequence_geo_mask`), whose ratio lies outside [low, high].
    In bypass there is no rho: masks judge the constant trainer / sampler, and truncations are refused."""
    correction_low: float = 0.0
    correction_high: float = math.inf
    outlier_rejection: bool = False
    """Reject every sequence that holds a token whose ratio lies outside `OUTLIER_BOUNDS`."""
    opsm_threshold: float = 0.0
    """Reject tokens of negative advantage in sequences whose mean log(anchor / trainer), an estimate of KL(anchor ||
    trainer), is above this; 0 is off. It keeps a policy from running away from what it is punished for (OPSM)."""


CORRECTION_BOUNDS: Mapping[str, tuple[float, float]] = {
    "none": (0.0, math.inf),
    "token_tis": (0.0, 2.0),
    "sequence_tis": (0.0, 5.0),
    "token_mask": (0.5, 2.0),
    "sequence_mask": (0.5, 2.0),
    "sequence_geo_mask": (0.99, 1.01),
}
"""Default `correction_low` and `correction_high`."""
TRUNCATIONS = ("token_tis", "sequence_tis")
CHOICES = {"kl_estimator": get_args(KlEstimator), "correction": get_args(Correction)}
FLAGS = frozenset({"kl_importance", "outlier_rejection"})


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or nothing where none is near."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_value(key: str, value: object) -> None:
    if key in CHOICES:
        if value not in CHOICES[key]:
            near = did_you_mean(value, CHOICES[key])
            raise ConfigError(f"{key}={value!r} is unknown{near}; expected one of {', '.join(CHOICES[key])}")
    elif key in FLAGS:
        if value not in (0, 1):
            raise ConfigError(f"{key}={value!r}; expected 0 (off) or 1 (on)")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{key}={value!r} is {type(value).__name__}; expected a number")
    elif not math.isfinite(value) or (value < 0 and key != "entropy_coef"):
        raise ConfigError(f"{key}={value!r}; expected a finite number that is not negative")


def correction_bounds(given: Mapping[str, float | str]) -> dict[str, float]:
    correction = str(given.get("correction", "none"))
    for key, is_read in (("correction_low", correction.endswith("mask")), ("correction_high", correction != "none")):
        if key in given and not is_read:
            raise ConfigError(f"{key}={given[key]} is not read by correction={correction!r}; leave it out")
    low, high = CORRECTION_BOUNDS[correction]
    return {"correction_low": low, "correction_high": high}


def check_ranges(config: LossConfig) -> None:
    for name, low, high in (
        ("clip", config.clip_low_threshold, config.clip_high_threshold),
        ("correction", config.correction_low, config.correction_high),
    ):
        if low > high:
            raise ConfigError(f"{name} bounds {low} to {high}; expected low <= high, as absolute ratios (0.8 and 1.2)")
    if config.dual_clip != 0 and config.dual_clip <= 1:
        raise ConfigError(f"dual_clip={config.dual_clip}; expected more than 1 (3 is usual), or 0 for off")
