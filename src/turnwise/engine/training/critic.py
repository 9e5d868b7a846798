"""A critic: an adapter on the shared base whose head says one number per position, the value of the state there.

    v_i = w . h_i + b         h_i: the last hidden state after the ids up to i; the head is float32

    loss = sum of weight_i * 1/2 max((v_i - R_i)^2, (clip(v_i, old_i - c, old_i + c) - R_i)^2)

w and b stand behind the LoRA weights in the adapter's flat tensor, so optimizer, norm and checkpoint take them along;
both start at zero, so a new critic says 0 everywhere. The loss is a sum over positions like every other one here:
packing, shared prefixes and passes leave its gradient alone.

Shape legend: N input positions of one datum, T those of all datums laid end to end, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engine.budget import PassLimit
from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import Adapter, Route, Span, leaf, target_shapes
from turnwise.engine.training.pack import MIN_SHARED, NO_SHARING, pack, split_batches
from turnwise.errors import ConfigError, DataError
from turnwise.losses.table import did_you_mean
from turnwise.types import Datum, ForwardBackwardOutput, LoraConfig, TensorData

VALUE_LOSS = "value"
VALUE_INPUTS: Mapping[str, str] = {
    "mask": "1 on each position whose value is asked for or learned, 0 on the others",
    "weights": "1.0 (or a normaliser) on each learned position",
    "returns": "what the value should have been, per position",
    "values": "what `forward` returned when the batch began, to be clipped around",
}
"""`loss_fn_inputs` keys of a critic, with what to send; all are as long as `model_input`."""


Picked = tuple[int, NDArray[np.int64]]
"""A datum's number, and positions in it."""


class CriticAdapter(Adapter):
    """LoRA on the body and a value head, all in one flat tensor."""

    def __init__(self, lora: LoraConfig, shapes: Mapping[str, tuple[int, int]], hidden_size: int, device: torch.device):
        super().__init__(lora, shapes, device, num_more=hidden_size + 1)
        self.head_flat = self.flat[-(hidden_size + 1) :]
        head_grad = self.grad[-(hidden_size + 1) :]
        self.weight_H, self.bias = leaf(self.head_flat[:-1]), leaf(self.head_flat[-1:])
        self.weight_H.grad, self.bias.grad = head_grad[:-1], head_grad[-1:]

    def values(self, hidden: Tensor) -> Tensor:
        """[rows, H] -> [rows]"""
        return hidden.float() @ self.weight_H + self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueColumns:
    """One checked datum, every array [N]."""

    input_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    weights: NDArray[np.float32]
    returns: NDArray[np.float32]
    old_values: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Half the squared error; with a `clip` above 0, the worse of that and the one of a value kept near its old one."""

    clip: float = 0.0

    def __call__(self, values_T: Tensor, returns_T: Tensor, old_T: Tensor | None) -> Tensor:
        error_T = (values_T - returns_T).square()
        if self.clip > 0 and old_T is not None:
            near_T = torch.clamp(values_T, old_T - self.clip, old_T + self.clip)
            error_T = torch.maximum(error_T, (near_T - returns_T).square())
        return 0.5 * error_T


def create_critic(model: CausalModel, lora: LoraConfig) -> CriticAdapter:
    """A critic whose head is the value; the model's own head has no part in it."""
    if lora.train_unembed:
        raise ConfigError("train_unembed=True: a critic has a head of its own, and does not use the model's")
    shapes = target_shapes(model.linears, lora)
    return CriticAdapter(lora, shapes, model.head.in_features, model.device)


def make_value_loss(loss_fn: object, config: Mapping[str, float | str] | None, *, is_learning: bool) -> ValueLoss:
    if loss_fn != VALUE_LOSS:
        raise ConfigError(f"loss {loss_fn!r} on a critic; it knows one loss: {VALUE_LOSS!r}")
    given = dict(config or {})
    for key in given:
        if key != "value_clip":
            raise ConfigError(f"{VALUE_LOSS} has no config key {key!r}{did_you_mean(key, ['value_clip'])}")
    clip = given.get("value_clip", 0.0)
    if isinstance(clip, str) or not (math.isfinite(clip) and clip >= 0):
        raise ConfigError(f"value_clip={clip!r}; expected a distance such as 0.2, or 0 for off")
    if clip and not is_learning:
        raise ConfigError("value_clip is not read by forward; leave it out")
    return ValueLoss(clip=float(clip))


def value_columns(
    datums: Sequence[Datum], loss: ValueLoss, *, vocab_size: int, max_length: int, is_learning: bool
) -> list[ValueColumns]:
    """Check the datums of one request; nothing is padded, cut or guessed."""
    if not datums:
        raise DataError("no datums; send at least one")
    required = (("mask", "returns", "values") if loss.clip else ("mask", "returns")) if is_learning else ()
    found: list[ValueColumns] = []
    for index, datum in enumerate(datums):
        try:
            found.append(_columns_of(datum, required, vocab_size=vocab_size, max_length=max_length))
        except DataError as cause:
            raise DataError(f"datum {index}: {cause}") from cause
    return found


def _columns_of(datum: Datum, required: Sequence[str], *, vocab_size: int, max_length: int) -> ValueColumns:
    inputs, ids = datum.loss_fn_inputs, np.asarray(datum.model_input.to_ints())
    for key in inputs:
        if key not in VALUE_INPUTS:
            near = did_you_mean(key, VALUE_INPUTS)
            raise DataError(f"loss_fn_inputs has no key {key!r}{near}; a critic reads {', '.join(VALUE_INPUTS)}")
    for key in required:
        if key not in inputs:
            raise DataError(f"{VALUE_LOSS} needs {key} in loss_fn_inputs; send {VALUE_INPUTS[key]}")
    if not 0 < len(ids) <= max_length:
        raise DataError(f"model_input has {len(ids)} tokens; expected 1 to {max_length} (the model's limit here)")
    if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab_size:
        raise DataError(f"model_input holds ids outside 0 to {vocab_size - 1}; expected this model's token ids")
    mask = _column(inputs, "mask", 1.0, len(ids))
    if not np.isin(mask, (0.0, 1.0)).all():
        raise DataError("mask holds other numbers than 0 and 1; normalisers belong into weights")
    return ValueColumns(
        input_ids=ids.astype(np.int64),
        mask=mask == 1,
        weights=_column(inputs, "weights", 1.0, len(ids)) * mask,
        returns=_column(inputs, "returns", 0.0, len(ids)),
        old_values=_column(inputs, "values", 0.0, len(ids)) if "values" in inputs else None,
    )


def _column(inputs: Mapping[str, TensorData], key: str, filler: float, length: int) -> NDArray[np.float32]:
    if key not in inputs:
        return np.full(length, filler, np.float32)
    column = inputs[key].to_numpy().astype(np.float32)
    if column.shape != (length,):
        raise DataError(f"{key} has shape {list(column.shape)} and model_input {length} tokens; expected as many")
    if not np.isfinite(column).all():
        at = int(np.argmin(np.isfinite(column)))
        raise DataError(f"{key} holds {column[at]} at position {at}; expected finite numbers: {VALUE_INPUTS[key]}")
    return column


class CriticTrainer:
    """Runs a critic's datums through the model."""

    def __init__(self, model: CausalModel, limit: PassLimit, *, share_prefixes: bool) -> None:
        self.model = model
        self.limit = limit
        self.min_shared = MIN_SHARED if share_prefixes else NO_SHARING

    def forward(
        self, critic: CriticAdapter, datums: Sequence[ValueColumns]
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """The value of every masked position; no gradient."""
        values_T, offsets = self._blank(datums)
        for members in self._passes(datums):
            with torch.no_grad():
                hidden, columns, _ = self._rows(critic, datums, members, offsets)
                values_T[columns] = critic.values(hidden)
            yield
        return _output(datums, values_T, offsets, {})

    def forward_backward(
        self, critic: CriticAdapter, datums: Sequence[ValueColumns], loss: ValueLoss
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """The same values, and the gradient of `loss` added to the critic's; a pass that fails leaves none behind."""
        before = critic.grad.clone()
        values_T, offsets = self._blank(datums)
        total = torch.zeros((), device=self.model.device)
        try:
            for members in self._passes(datums):
                with torch.enable_grad():
                    hidden, columns, picked = self._rows(critic, datums, members, offsets)
                    values = critic.values(hidden)
                    returns = self._gather([datums[member].returns for member, _ in picked], picked)
                    weights = self._gather([datums[member].weights for member, _ in picked], picked)
                    old = None
                    if loss.clip > 0:
                        old = self._gather([_old_values(datums[member]) for member, _ in picked], picked)
                    summed = (weights * loss(values, returns, old)).sum()
                summed.backward()
                total += summed.detach()
                values_T[columns] = values.detach()
                yield
        except BaseException:
            critic.grad.copy_(before)
            raise
        return _output(datums, values_T, offsets, _metrics(datums, values_T.cpu().numpy(), float(total), loss))

    def _blank(self, datums: Sequence[ValueColumns]) -> tuple[Tensor, NDArray[np.int64]]:
        offsets = np.cumsum([0, *(len(datum.input_ids) for datum in datums)])
        return torch.zeros(int(offsets[-1]), device=self.model.device), offsets

    def _passes(self, datums: Sequence[ValueColumns]) -> list[list[int]]:
        chosen = [index for index, datum in enumerate(datums) if datum.mask.any()]
        sequences = [datums[index].input_ids for index in chosen]
        batches = split_batches(sequences, self.limit, min_shared=self.min_shared)
        return [[chosen[index] for index in batch] for batch in batches]

    def _rows(
        self,
        critic: CriticAdapter,
        datums: Sequence[ValueColumns],
        members: Sequence[int],
        offsets: NDArray[np.int64],
    ) -> tuple[Tensor, Tensor, list[Picked]]:
        """Hidden states of the masked positions, where they stand in T, and which position of which datum each is."""
        batch = pack([datum.input_ids for datum in datums], members, min_shared=self.min_shared)
        device = self.model.device
        hidden = self.model.hidden(
            torch.from_numpy(batch.input_ids).to(device),
            torch.from_numpy(batch.position_ids).to(device),
            batch.plan,
            Route(spans=[Span(0, batch.num_tokens, critic)]),
        )
        picked = [(member, np.nonzero(datums[member].mask)[0]) for member in batch.members]
        tokens = [index[at] for index, (_, at) in zip(batch.packed_index, picked, strict=True)]
        columns = [at + offsets[member] for member, at in picked]
        rows = torch.from_numpy(np.concatenate(tokens)).to(device)
        return hidden[rows], torch.from_numpy(np.concatenate(columns)).to(device), picked

    def _gather(self, columns: Sequence[NDArray[np.float32]], picked: Sequence[Picked]) -> Tensor:
        """Each datum's column at its picked positions, one after the other."""
        flat = np.concatenate([column[at] for column, (_, at) in zip(columns, picked, strict=True)])
        return torch.from_numpy(flat).to(self.model.device)


def _old_values(datum: ValueColumns) -> NDArray[np.float32]:
    assert datum.old_values is not None, "value_columns requires them where values are clipped"
    return datum.old_values


def _metrics(
    datums: Sequence[ValueColumns], values_T: NDArray[np.float32], total: float, loss: ValueLoss
) -> dict[str, float]:
    mask_T = np.concatenate([datum.mask for datum in datums])
    values, returns = values_T[mask_T], np.concatenate([datum.returns for datum in datums])[mask_T]
    num = max(1, len(values))
    metrics = {
        "loss:sum": total,
        "num_trained_tokens:sum": float(len(values)),
        "value:mean": float(values.sum() / num),
        "return:mean": float(returns.sum() / num),
        "value_error:mean": float(np.abs(values - returns).sum() / num),
    }
    if loss.clip > 0:
        old = np.concatenate([_old_values(datum) for datum in datums])[mask_T]
        metrics["value_clip_fraction:mean"] = float((np.abs(values - old) > loss.clip).sum() / num)
    return metrics


def _output(
    datums: Sequence[ValueColumns], values_T: Tensor, offsets: NDArray[np.int64], metrics: Mapping[str, float]
) -> ForwardBackwardOutput:
    """Per datum its values, and a mask of the positions that they are known at."""
    known = values_T.cpu().numpy()
    outputs = [
        {
            "values": TensorData.from_numpy(known[int(start) : int(stop)]),
            "mask": TensorData.from_numpy(datum.mask.astype(np.float32)),
        }
        for datum, start, stop in zip(datums, offsets, offsets[1:], strict=False)
    ]
    return ForwardBackwardOutput("ArrayRecord", outputs, dict(metrics))
