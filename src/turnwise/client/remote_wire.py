"""Datums for the Tinker wire, which has no mask, no weights beside advantages, and no temperature.

Tinker's losses are sums over every target, and a target trains nothing when its advantage is 0. So for a loss that is
linear in the advantages,

    sum_i mask_i w_i loss(r_i, A_i)  =  sum_i loss(r_i, mask_i w_i A_i),        w_i >= 0,

and mask and weights can be folded into the advantages. Where that does not hold (DRO's quadratic term, KL, entropy),
the request is refused before anything is sent, with the reason. A turnwise service accepts every column unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import ConfigError, DataError
from turnwise.losses.table import CLIP_KEYS, LOSSES, clip_bounds, is_imitation
from turnwise.types import Datum, SamplingParams

Dialect = Literal["tinker", "turnwise"]
"""Which columns the service reads: only Tinker's, or all of ours."""

FOLDED_LOSSES = tuple(name for name, info in LOSSES.items() if info.is_linear)
"""These losses are linear in the advantages, so mask and weights can be folded into them."""
CRITIC_METADATA: Mapping[str, str] = {"turnwise.kind": "critic"}
"""Tells a turnwise service to train a critic. It is in the metadata, the only thing that the SDKs pass through."""
_COLUMNS_LEFT_OUT: Mapping[str, str] = {
    "old_logprobs": "an old policy (method.old_policy)",
    "old_share": "an old policy (method.old_policy)",
    "ref_logprobs": "a reference policy",
    "turn_weights": "weights of turns",
    "pair": "pairs",
    "returns": "a critic",
}

Columns = Mapping[str, NDArray[Any]]


def to_columns(
    data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str], dialect: Dialect
) -> tuple[list[Columns], dict[str, float | str]]:
    """Return `loss_fn_inputs` of each datum, and the loss's settings, in the form that the service reads."""
    settings = {**clip_bounds(loss_fn), **config}  # always sent, because services have different defaults
    if dialect == "turnwise":
        return [_arrays(datum) for datum in data], settings
    if is_imitation(loss_fn):
        _refuse_settings(loss_fn, config, ())
        return [_imitated(index, datum) for index, datum in enumerate(data)], {}
    if loss_fn not in FOLDED_LOSSES:
        is_known = loss_fn in LOSSES and LOSSES[loss_fn].is_of_tinker
        reason = "its quadratic term is not linear in the advantages" if is_known else "it has no such loss"
        raise ConfigError(
            f"loss {loss_fn!r} cannot run on this service: {reason}, and the wire has no mask or weights; "
            f"use one of {', '.join(FOLDED_LOSSES)}, or a service that `turnwise serve` runs"
        )
    _refuse_settings(loss_fn, config, tuple(clip_bounds(loss_fn)))
    return [_folded(index, datum, loss_fn) for index, datum in enumerate(data)], settings


def _refuse_settings(loss_fn: str, config: Mapping[str, float | str], known: Sequence[str]) -> None:
    for key in config:
        if key not in known:
            raise ConfigError(
                f"{key}={config[key]} cannot be sent with loss {loss_fn!r}: Tinker's wire does not have it, and it "
                "cannot be folded into advantages; leave it out, or use a service that `turnwise serve` runs"
            )


def _arrays(datum: Datum) -> dict[str, NDArray[Any]]:
    return {key: tensor.to_numpy() for key, tensor in datum.loss_fn_inputs.items()}


def mask_of(datum: Datum) -> NDArray[np.bool_]:
    """Return which targets are trained, as the engine reads it: the mask, else nonzero weights, else all."""
    inputs = _arrays(datum)
    if "mask" in inputs:
        return inputs["mask"] != 0
    if "weights" in inputs:
        return inputs["weights"] != 0
    return np.ones(len(inputs["target_tokens"]), dtype=bool)


def _check_columns(index: int, inputs: Columns, mask: NDArray[np.bool_]) -> None:
    for key, what in _COLUMNS_LEFT_OUT.items():
        if key in inputs:
            raise ConfigError(f"datum {index} brings {key}: Tinker's wire has no place for {what}")
    _check_temperature(index, inputs, mask)


def _check_temperature(index: int, inputs: Columns, mask: NDArray[np.bool_]) -> None:
    temperature = inputs.get("temperature")
    if temperature is not None and bool((temperature[mask] != 1).any()):
        raise ConfigError(
            f"datum {index} was sampled at temperature {float(temperature[mask][0]):g}; this service's trainer has "
            "temperature 1 only: set rollout.temperature=1"
        )


def _weights(index: int, inputs: Columns, mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    weights = np.asarray(inputs.get("weights", np.ones(len(mask), dtype=np.float32)), dtype=np.float32)
    if bool((weights[mask] < 0).any()):
        raise DataError(f"datum {index} has negative weights; a clipped loss is not linear in those")
    return np.where(mask, weights, np.float32(0))


def _imitated(index: int, datum: Datum) -> Columns:
    inputs, mask = _arrays(datum), mask_of(datum)
    _check_temperature(index, inputs, mask)
    return {"target_tokens": inputs["target_tokens"], "weights": _weights(index, inputs, mask)}


def _folded(index: int, datum: Datum, loss_fn: str) -> Columns:
    inputs, mask = _arrays(datum), mask_of(datum)
    _check_columns(index, inputs, mask)
    for key in ("logprobs", "advantages"):
        if key not in inputs:
            raise DataError(f"datum {index} has no {key}; {loss_fn} needs them")
    advantages = np.where(mask, inputs["advantages"], 0.0) * _weights(index, inputs, mask)
    columns: dict[str, NDArray[Any]] = {
        "target_tokens": inputs["target_tokens"],
        "logprobs": np.where(mask, inputs["logprobs"], 0.0).astype(np.float32),
        "advantages": advantages.astype(np.float32),
    }
    for key in CLIP_KEYS:
        if key in inputs:
            columns[key] = inputs[key].astype(np.float32)
    if not LOSSES[loss_fn].is_separable:
        chosen = inputs.get("sequence_ratio_mask")
        columns["sequence_ratio_mask"] = (mask if chosen is None else (chosen != 0) & mask).astype(np.float32)
    return columns


def to_stop(params: SamplingParams) -> str | list[str] | list[int] | None:
    """Return the wire's `stop`, which holds strings or ids, not both."""
    strings = params.stop_strings()
    named = [int(token) for token in params.stop_token_ids or ()]
    if strings and named:
        raise ConfigError(
            f"stop strings ({strings[0]!r}, ...) together with the chat format's end of turn: Tinker's wire takes "
            "strings or ids, not both; leave rollout.stop out"
        )
    if named or params.stop is None:
        own = [] if params.stop is None else [int(token) for token in params.stop if not isinstance(token, str)]
        return [*named, *own] or None
    return strings or [int(token) for token in params.stop if not isinstance(token, str)]


def to_seed(seed: int | None) -> int | None:
    """Return the seed as a signed number with the same 64 bits."""
    if seed is None:
        return None
    bits = seed % 2**64
    return bits - 2**64 if bits >= 2**63 else bits
