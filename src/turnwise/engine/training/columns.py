"""Turns a datum from a client into checked columns of equal length.

A datum has one of two forms. The full form has one number per input position in every tensor. The short form, which
MinT's multi-turn recipe writes, has targets only for the end of the input, and may give one advantage for all of them.
Any other mismatch of lengths is refused here, before anything is computed; nothing is padded, cut or guessed.

Arrays of a `DatumColumns` are [N], N = input length: position i predicts `target_ids[i]`. Axis `_T`: all positions of
several datums, concatenated.
"""

from __future__ import annotations

from array import array as number_array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.engine.training.losses import Loss, LossColumns, make_loss
from turnwise.engine.training.preference_losses import PreferenceLoss
from turnwise.errors import DataError
from turnwise.losses.table import ClippedOptions, is_imitation
from turnwise.runtime.suggest import did_you_mean
from turnwise.types import Datum, ModelInput, TensorData

AnyLoss = Loss | PreferenceLoss
FloatArray = NDArray[np.float32]

KNOWN_INPUTS: Mapping[str, str] = {
    "target_tokens": "the token id that each position predicts",
    "weights": "1.0 (or a normaliser) on each target to learn, 0.0 on the others",
    "mask": "1 on each target to learn, 0 on the others",
    "logprobs": "the logprob that the sampler returned with each target, 0.0 on targets that it did not draw",
    "advantages": "one number per target, 0.0 where nothing is to be learned",
    "old_logprobs": "what forward returned for these targets when the batch began",
    "old_share": "in place of old_logprobs: 0 where the old policy is the sampler, 1 where it is the trainer",
    "ref_logprobs": "what the reference model gives these targets",
    "temperature": "the temperature that each target was sampled at",
    "clip_low_threshold": "the lowest ratio per target, such as 0.8",
    "clip_high_threshold": "the highest ratio per target, such as 1.2",
    "sequence_ratio_mask": "1 on each target that enters the ratio of its sequence",
    "pair": "the number of the pair, from 1, on every target of its chosen side, and minus that on the rejected one",
    "turn_weights": "how much each target counts within its dialogue",
}
"""The keys of `loss_fn_inputs`, with what to send under each."""


class Asked(NamedTuple):
    """The positions of one datum that a pass reads; all arrays have one entry per position."""

    positions: NDArray[np.int64]
    temperatures: FloatArray
    targets: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatumColumns:
    """One checked datum. Positions before `target_start` have no target: id 0, untrained, weight 0."""

    input_ids: NDArray[np.int64]
    target_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    """True at trained positions."""
    weights: FloatArray
    """The weight of each position; 0 where it is not trained."""
    advantages: FloatArray
    sampler_logprobs: FloatArray
    temperature: FloatArray
    target_start: int
    """The position to which the caller's `target_tokens[0]` belongs."""
    old_logprobs: FloatArray | None = None
    old_share: FloatArray | None = None
    ref_logprobs: FloatArray | None = None
    clip_low: FloatArray | None = None
    clip_high: FloatArray | None = None
    sequence_ratio_mask: NDArray[np.bool_] | None = None
    pair: FloatArray | None = None
    turn_weights: FloatArray | None = None

    @property
    def num_targets(self) -> int:
        return len(self.input_ids) - self.target_start

    @property
    def has_reference(self) -> bool:
        """Whether the caller sent a reference's logprobs."""
        return self.ref_logprobs is not None

    def asked(self, *, only_trained: bool) -> Asked:
        """The trained positions, or every position that has a target."""
        is_asked = self.mask if only_trained else np.arange(len(self.input_ids)) >= self.target_start
        positions = np.nonzero(is_asked)[0]
        return Asked(positions, self.temperature[positions], self.target_ids[positions])

    def with_all_trained(self) -> DatumColumns:
        """The same datum with every target trained, weight 1."""
        mask = np.arange(len(self.input_ids)) >= self.target_start
        return replace(self, mask=mask, weights=mask.astype(np.float32))


def with_weights(datum: Datum) -> Datum:
    """Give a datum without weights or mask weights of 1: to read logprobs, nobody must choose what to train."""
    inputs = datum.loss_fn_inputs
    if "target_tokens" not in inputs or "weights" in inputs or "mask" in inputs:
        return datum
    ones = TensorData([1.0] * len(inputs["target_tokens"]))
    return Datum(model_input=datum.model_input, loss_fn_inputs={**inputs, "weights": ones})


def datums_to_columns(
    datums: Sequence[Datum], *, loss: AnyLoss | str, vocab_size: int, max_length: int
) -> list[DatumColumns]:
    """The columns of one request's datums. All datums must have the same optional tensors."""
    loss = make_loss(loss, None) if isinstance(loss, str) else loss
    columns: list[DatumColumns] = []
    for index, datum in enumerate(datums):
        try:
            columns.append(datum_to_columns(datum, loss=loss, vocab_size=vocab_size, max_length=max_length))
        except DataError as cause:
            raise DataError(f"datum {index}: {cause}") from cause
    _check_alike(columns)
    return columns


def datum_to_columns(datum: Datum, *, loss: AnyLoss | str, vocab_size: int, max_length: int) -> DatumColumns:
    """Check one datum for one loss. A loss given by name has its default settings."""
    loss = make_loss(loss, None) if isinstance(loss, str) else loss
    inputs = datum.loss_fn_inputs
    _check_keys(inputs, loss)
    input_ids = _input_ids(datum.model_input, vocab_size=vocab_size, max_length=max_length)
    targets = _target_ids(inputs["target_tokens"], num_inputs=len(input_ids), vocab_size=vocab_size)
    reader = _Reader(inputs, num_inputs=len(input_ids), num_targets=len(targets))
    mask = _mask(reader)
    clip_low, clip_high = reader.optional("clip_low_threshold"), reader.optional("clip_high_threshold")
    _check_clip(clip_low, clip_high, loss, reader, mask)
    return DatumColumns(
        input_ids=input_ids,
        target_ids=reader.aligned(targets, 0),
        mask=mask,
        weights=np.where(mask, reader.column("weights", 1.0), np.float32(0.0)),
        advantages=reader.column("advantages", 0.0),
        sampler_logprobs=reader.column("logprobs", 0.0),
        temperature=_temperature(reader),
        target_start=reader.target_start,
        old_logprobs=reader.optional("old_logprobs"),
        old_share=_old_share(reader),
        ref_logprobs=reader.optional("ref_logprobs"),
        clip_low=clip_low,
        clip_high=clip_high,
        sequence_ratio_mask=_sequence_ratio_mask(reader, mask),
        pair=reader.optional("pair"),
        turn_weights=reader.optional("turn_weights", 1.0),
    )


def collate_columns(datums: Sequence[DatumColumns]) -> LossColumns:
    """Concatenate the positions of all datums: T is the sum of the input lengths."""
    if not datums:
        raise DataError("no datums; expected at least one")
    _check_alike(datums)

    def laid(arrays: Sequence[np.ndarray | None]) -> torch.Tensor | None:
        present = [array for array in arrays if array is not None]
        return torch.from_numpy(np.concatenate(present)) if len(present) == len(arrays) else None

    def every(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays))

    has_ratio_mask = any(d.sequence_ratio_mask is not None for d in datums)
    ratio_masks = [d.mask if d.sequence_ratio_mask is None else d.sequence_ratio_mask for d in datums]
    return LossColumns(
        mask_T=every([d.mask for d in datums]),
        weights_T=every([d.weights for d in datums]),
        advantages_T=every([d.advantages for d in datums]),
        sampler_logprobs_T=every([d.sampler_logprobs for d in datums]),
        old_logprobs_T=laid([d.old_logprobs for d in datums]),
        old_share_T=laid([d.old_share for d in datums]),
        ref_logprobs_T=laid([d.ref_logprobs for d in datums]),
        clip_low_T=laid([d.clip_low for d in datums]),
        clip_high_T=laid([d.clip_high for d in datums]),
        sequence_ratio_mask_T=every(ratio_masks) if has_ratio_mask else None,
        pair_T=laid([d.pair for d in datums]),
        turn_weights_T=laid([d.turn_weights for d in datums]),
        datum_T=every([np.full(len(d.input_ids), index, dtype=np.int64) for index, d in enumerate(datums)]),
        num_datums=len(datums),
    )


class _Reader:
    """Reads the tensors of one datum and lines them up with its input."""

    def __init__(self, inputs: Mapping[str, TensorData], *, num_inputs: int, num_targets: int) -> None:
        self.inputs = inputs
        self.num_inputs = num_inputs
        self.num_targets = num_targets
        self.target_start = num_inputs - num_targets

    def aligned(self, values: np.ndarray, filler: float) -> np.ndarray:
        """[N] the values at the end of the input, where the targets are; `filler` before them."""
        if not self.target_start:
            return values
        before = np.full(self.target_start, filler, dtype=values.dtype)
        return np.concatenate([before, values])

    def column(self, key: str, filler: float) -> FloatArray:
        """[N] the tensor under `key`; all `filler` if it was not sent."""
        column = self.optional(key, filler)
        return np.full(self.num_inputs, filler, dtype=np.float32) if column is None else column

    def optional(self, key: str, filler: float = 0.0) -> FloatArray | None:
        if key not in self.inputs:
            return None
        values = _to_array(key, self.inputs[key]).astype(np.float32, copy=False)
        is_bad = ~np.isfinite(values)
        if is_bad.any():
            at = int(np.argmax(is_bad))
            raise DataError(f"{key} holds {values[at]} at position {at}; expected finite numbers: {KNOWN_INPUTS[key]}")
        is_short_form = self.num_targets < self.num_inputs
        if key == "advantages" and is_short_form and len(values) == 1:
            values = np.repeat(values, self.num_targets)
        if len(values) != self.num_targets:
            raise DataError(
                f"lengths differ: model_input {self.num_inputs}, target_tokens {self.num_targets}, {key} "
                f"{len(values)}; expected {key} to be as long as target_tokens: {KNOWN_INPUTS[key]}"
            )
        return self.aligned(values, filler)

    def refuse(self, key: str, is_bad: NDArray[np.bool_], expected: str) -> None:
        """Raise an error about a column's first bad value. Positions are counted among the targets, as the caller
        does."""
        if is_bad.any():
            at = int(np.argmax(is_bad[self.target_start :]))
            raise DataError(f"{key} holds {self.column(key, 0.0)[self.target_start + at]} at position {at}; {expected}")


def _check_keys(inputs: Mapping[str, TensorData], loss: AnyLoss) -> None:
    for key in inputs:
        if key not in KNOWN_INPUTS:
            near = did_you_mean(key, KNOWN_INPUTS)
            raise DataError(f"loss_fn_inputs has no key {key!r}{near}; expected some of {', '.join(KNOWN_INPUTS)}")
    came = ", ".join(inputs) or "nothing"
    for key in ("target_tokens", *loss.required_inputs):
        if key not in inputs and not (key == "old_logprobs" and "old_share" in inputs):
            who = loss.name
            if key == "old_logprobs" and isinstance(loss, Loss):
                who = f"{who} with correction={loss.terms.correction!r}"
            raise DataError(f"{who} needs {key} in loss_fn_inputs, and {came} came; send {KNOWN_INPUTS[key]}")
    if is_imitation(loss.name) and not inputs.keys() & {"weights", "mask"}:
        hint = KNOWN_INPUTS["weights"]
        raise DataError(f"{loss.name} needs weights (or mask) in loss_fn_inputs, and {came} came; send {hint}")


def _to_array(key: str, tensor: TensorData) -> np.ndarray:
    """The tensor as numpy, one-dimensional."""
    try:
        with np.errstate(over="ignore"):  # a number too large for float32 becomes inf, which is refused later
            array = tensor.to_numpy()
    except (TypeError, ValueError, OverflowError) as cause:
        raise DataError(f"{key} cannot be read as {tensor.dtype} of shape {tensor.shape}: {cause}") from cause
    if array.ndim != 1:
        extra = "; [N, K] targets are not supported, send one datum per target column" if key == "target_tokens" else ""
        raise DataError(f"{key} has shape {list(array.shape)}; expected one dimension{extra}")
    return array


def _input_ids(model_input: ModelInput, *, vocab_size: int, max_length: int) -> NDArray[np.int64]:
    tokens = model_input.to_ints()
    if not tokens:
        raise DataError("model_input is empty; expected at least one token")
    if len(tokens) > max_length:
        raise DataError(
            f"model_input has {len(tokens)} tokens; expected at most {max_length} (the model's limit here); "
            "drop or split the longest turns"
        )
    try:  # the quickest check that a long list holds only integers
        ids = np.frombuffer(number_array("q", tokens), dtype=np.int64)
    except (TypeError, OverflowError):
        ids = np.asarray(tokens)
    if not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"model_input holds {ids.dtype} values; expected integer token ids")
    _check_ids("model_input", ids, vocab_size)
    return ids.astype(np.int64, copy=False)


def _target_ids(tensor: TensorData, *, num_inputs: int, vocab_size: int) -> NDArray[np.int64]:
    targets = _to_array("target_tokens", tensor)
    if tensor.dtype != "int64":
        raise DataError(f"target_tokens came as {tensor.dtype}; expected int64 token ids")
    if not 0 < len(targets) <= num_inputs:
        raise DataError(
            f"lengths differ: model_input {num_inputs}, target_tokens {len(targets)}; expected a target for each input "
            "position, or, for the end of the input only, at least one"
        )
    _check_ids("target_tokens", targets, vocab_size)
    return targets


def _check_ids(key: str, ids: np.ndarray, vocab_size: int) -> None:
    is_bad = (ids < 0) | (ids >= vocab_size)
    if is_bad.any():
        at = int(np.argmax(is_bad))
        raise DataError(
            f"{key} holds token id {ids[at]} at position {at}; expected 0 to {vocab_size - 1}; "
            "were the tokens made by this model's tokenizer?"
        )


def _mask(reader: _Reader) -> NDArray[np.bool_]:
    """The mask that was sent, else nonzero weights, else every target. A token with advantage 0 is still trained."""
    is_target = np.arange(reader.num_inputs) >= reader.target_start
    explicit = reader.optional("mask")
    if explicit is not None:
        is_bad = (explicit != 0) & (explicit != 1)
        reader.refuse("mask", is_bad, "expected 0 or 1; normalisers belong into weights")
        return explicit == 1
    return is_target & (reader.column("weights", 1.0) != 0)


def _sequence_ratio_mask(reader: _Reader, mask: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    column = reader.optional("sequence_ratio_mask")
    if column is None:
        return None
    reader.refuse(
        "sequence_ratio_mask",
        (column != 0) & ~mask,
        "expected 0 there, because that target is untrained and its logprob is not computed; "
        "train it with an advantage of 0, or leave it out of the ratio",
    )
    return column != 0


def _old_share(reader: _Reader) -> FloatArray | None:
    share = reader.optional("old_share")
    if share is None:
        return None
    if "old_logprobs" in reader.inputs:
        raise DataError("both old_logprobs and old_share came; expected one of them: both are the old policy")
    reader.refuse("old_share", (share < 0) | (share > 1), "expected 0 (the sampler) to 1 (the trainer)")
    return share


def _temperature(reader: _Reader) -> FloatArray:
    temperature = reader.column("temperature", 1.0)
    reader.refuse("temperature", temperature <= 0, "expected more than 0; 1.0 where the target was not sampled")
    return temperature


def _check_clip(
    low: FloatArray | None, high: FloatArray | None, loss: AnyLoss, reader: _Reader, mask: NDArray[np.bool_]
) -> None:
    """Check that low <= high for bounds per token; if only one side was sent, compare it with the config's other
    side."""
    if low is not None:
        reader.refuse("clip_low_threshold", low < 0, "expected an absolute ratio bound, such as 0.8")
    if high is not None:
        reader.refuse("clip_high_threshold", high < 0, "expected an absolute ratio bound, such as 1.2")
    if not isinstance(loss.config, ClippedOptions) or (low is None and high is None):
        return
    lows = np.broadcast_to(loss.config.clip_low_threshold if low is None else low, mask.shape)
    highs = np.broadcast_to(loss.config.clip_high_threshold if high is None else high, mask.shape)
    is_crossed = mask & (lows > highs)
    if is_crossed.any():
        at = int(np.argmax(is_crossed))
        key = "clip_high_threshold" if low is None else "clip_low_threshold"
        reader.refuse(key, is_crossed, f"expected low <= high, and the bounds there are {lows[at]} and {highs[at]}")


def _check_alike(columns: Sequence[DatumColumns]) -> None:
    for name in ("old_logprobs", "old_share", "ref_logprobs", "clip_low", "clip_high", "pair", "turn_weights"):
        present = [getattr(datum, name) is not None for datum in columns]
        if any(present) and not all(present):
            key = f"{name}_threshold" if name.startswith("clip") else name
            raise DataError(
                f"datum {present.index(True)} brings {key} and datum {present.index(False)} does not; "
                "send it with every datum of a request, or with none"
            )
