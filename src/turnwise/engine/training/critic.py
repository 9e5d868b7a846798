"""A critic: an adapter on the shared base model with a head that gives one number per position, the state's value.

    v_i = w . h_i + b         h_i: the last hidden state after the ids up to i; the head is float32

    loss = sum of weight_i * 1/2 max((v_i - R_i)^2, (clip(v_i, old_i - c, old_i + c) - R_i)^2)

w and b follow the LoRA weights in the adapter's flat tensor, so optimizer, norm and checkpoint include them. Both start
at zero, so a new critic gives 0 everywhere. The loss is a sum over positions like every other loss here: packing,
shared prefixes and the cut into passes do not change its gradient.

Shape legend: N input positions of one datum, T those of all datums laid end to end, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import Policy, Route, target_shapes
from turnwise.engine.training import adapter_files
from turnwise.engine.training.columns import Asked
from turnwise.engine.training.logprobs import TokenGradients
from turnwise.engine.training.objective import LossSettings, Objective
from turnwise.engine.training.pack import Entries
from turnwise.engine.training.trainable import LoraAdapter
from turnwise.errors import ConfigError, DataError
from turnwise.losses.table import VALUE_LOSS, read_settings
from turnwise.models.linears import Shape
from turnwise.runtime.suggest import did_you_mean
from turnwise.types import Datum, LoraConfig, TensorData

CRITIC_HINT = "a critic has forward and forward_backward with 'value'"
VALUE_INPUTS: Mapping[str, str] = {
    "mask": "1 on each position whose value is asked for or learned, 0 on the others",
    "weights": "1.0 (or a normaliser) on each learned position",
    "returns": "what the value should have been, per position",
    "values": "what `forward` returned when the batch began, to be clipped around",
}
"""`loss_fn_inputs` keys of a critic, with what to send; all are as long as `model_input`."""


class CriticAdapter(LoraAdapter):
    """LoRA on the body and a value head, all in one flat tensor."""

    def __init__(self, lora: LoraConfig, shapes: Mapping[str, Shape], hidden_size: int, device: torch.device) -> None:
        super().__init__(lora, shapes, device, num_more=hidden_size + 1)
        self.objective: Objective = STATE_VALUES
        self.head_flat = self.flat[-(hidden_size + 1) :]
        """[H + 1] the head's weight, then its bias."""
        self.head_grad = self.grad[-(hidden_size + 1) :]

    def publish(self, dtype: torch.dtype) -> Policy:  # noqa: ARG002 - there is nothing to publish
        raise ConfigError(f"this client trains a critic: sampling needs a policy; {CRITIC_HINT}")

    def _more_files(self) -> dict[str, adapter_files.TensorFile]:
        head = self.head_flat.cpu()
        return {
            adapter_files.HEAD_FILE: adapter_files.TensorFile({"weight": head[:-1].clone(), "bias": head[-1:].clone()})
        }

    def _read_parameters(self, directory: Path) -> Tensor:
        flat = adapter_files.read_flat(directory, self.shapes, self.lora, self.flat)
        head = adapter_files.read_head(directory, len(self.head_flat) - 1)
        flat[-len(head) :] = head
        return flat


def create_critic(model: CausalModel, lora: LoraConfig) -> CriticAdapter:
    """Create a critic. It has a value head and does not use the model's output head."""
    if lora.train_unembed:
        raise ConfigError("train_unembed=True: a critic has a head of its own, and does not use the model's")
    shapes = target_shapes(model.shapes, lora)
    return CriticAdapter(lora, shapes, model.head.in_features, model.device)


class ValueHead:
    """The value heads of the critics in a route, applied to the rows of one packed batch."""

    def __init__(self, route: Route, entries: Entries) -> None:
        self.entries = entries
        self.spans: list[tuple[slice, CriticAdapter]] = []
        for span in route.spans:
            start, stop = np.searchsorted(entries.host_tokens, [span.start, span.stop]).tolist()
            self.spans.append((slice(start, stop), cast(CriticAdapter, span.weights)))

    def outputs(self, hidden_RH: Tensor) -> tuple[Tensor, None]:
        """Values [E]."""
        parts = [hidden_RH[rows].float() @ critic.head_flat[:-1] + critic.head_flat[-1] for rows, critic in self.spans]
        return torch.cat(parts)[self.entries.rows], None

    def backward(self, hidden_RH: Tensor, gradients: TokenGradients) -> tuple[Tensor, Tensor, None]:
        """d loss / d hidden [R, H] and values [E]; the heads' gradients are added in place."""
        values_E, _ = self.outputs(hidden_RH)
        grad_E, _ = gradients(values_E, None, slice(0, len(values_E)))
        grad_R = torch.zeros(len(hidden_RH), device=hidden_RH.device).index_add_(0, self.entries.rows, grad_E)
        grad_hidden = torch.empty_like(hidden_RH)
        for rows, critic in self.spans:
            critic.head_grad[:-1].addmv_(hidden_RH[rows].float().t(), grad_R[rows])
            critic.head_grad[-1:] += grad_R[rows].sum()
            torch.mul(grad_R[rows, None], critic.head_flat[:-1], out=grad_hidden[rows])
        return grad_hidden, values_E, None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDatum:
    """One checked datum, every array [N]."""

    input_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    weights: NDArray[np.float32]
    returns: NDArray[np.float32]
    old_values: NDArray[np.float32] | None

    target_start = 0
    has_reference = False

    def asked(self, *, only_trained: bool) -> Asked:  # noqa: ARG002 - values are read where they are learned
        """The positions whose mask is 1; a value has neither temperature nor target."""
        positions = np.nonzero(self.mask)[0]
        return Asked(positions, np.ones(len(positions), np.float32), np.zeros(len(positions), np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueColumns:
    """The columns that the loss reads besides the values; every tensor is [T]."""

    mask_T: Tensor
    weights_T: Tensor
    """0 outside the mask."""
    returns_T: Tensor
    old_T: Tensor | None
    """The old values, around which new ones are clipped."""

    def slice(self, index: slice | Tensor) -> ValueColumns:
        return self._each(lambda column: column[index])

    def to(self, device: str | torch.device) -> ValueColumns:
        return self._each(lambda column: column.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> ValueColumns:
        return ValueColumns(
            mask_T=change(self.mask_T),
            weights_T=change(self.weights_T),
            returns_T=change(self.returns_T),
            old_T=None if self.old_T is None else change(self.old_T),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Half the squared error. With a `clip` above 0, the larger of that error and the error of the clipped value."""

    clip: float = 0.0
    is_learning: bool = True
    """False if values are only read: then datums have no returns, and there are no metrics."""

    is_separable = True
    spans_datums = False
    needs_entropy = False
    needs_reference = False

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """The `loss_fn_inputs` that a datum must bring."""
        if not self.is_learning:
            return ()
        return (*VALUE_LOSS.columns, "values") if self.clip else VALUE_LOSS.columns

    def __call__(self, values_T: Tensor, entropies_T: Tensor | None, columns: ValueColumns) -> Tensor:  # noqa: ARG002
        error_T = (values_T - columns.returns_T).square()
        if self.clip > 0 and columns.old_T is not None:
            near_T = torch.clamp(values_T, columns.old_T - self.clip, columns.old_T + self.clip)
            error_T = torch.maximum(error_T, (near_T - columns.returns_T).square())
        return columns.weights_T * 0.5 * error_T

    def metrics(self, values_T: Tensor, entropies_T: Tensor | None, columns: ValueColumns) -> dict[str, float]:  # noqa: ARG002
        if not self.is_learning:
            return {}
        own = columns.slice(columns.mask_T)
        values = values_T[columns.mask_T]
        num = max(1, len(values))
        metrics = {
            "loss:sum": float(self(values, None, own).sum()),
            "num_trained_tokens:sum": float(len(values)),
            "value:mean": float(values.sum() / num),
            "return:mean": float(own.returns_T.sum() / num),
            "value_error:mean": float((values - own.returns_T).abs().sum() / num),
        }
        if self.clip > 0 and own.old_T is not None:
            metrics["value_clip_fraction:mean"] = float(((values - own.old_T).abs() > self.clip).sum() / num)
        return metrics


class StateValues:
    """The objective of a critic: values of states, from its value head."""

    output_name = "values"

    def make_loss(self, name: object, settings: LossSettings, *, is_learning: bool) -> ValueLoss:
        if name != VALUE_LOSS.name:
            raise ConfigError(f"loss {name!r} on a critic; it knows one loss: {VALUE_LOSS.name!r}")
        clip = read_settings(VALUE_LOSS, settings).value_clip
        if clip and not is_learning:
            raise ConfigError("value_clip is not read by forward; leave it out")
        return ValueLoss(clip=clip, is_learning=is_learning)

    def read_datums(
        self,
        datums: Sequence[Datum],
        loss: ValueLoss,
        model: CausalModel,
        *,
        is_learning: bool,  # noqa: ARG002
    ) -> list[ValueDatum]:
        if not datums:
            raise DataError("no datums; send at least one")
        found: list[ValueDatum] = []
        for index, datum in enumerate(datums):
            try:
                found.append(_read_datum(datum, loss, model))
            except DataError as cause:
                raise DataError(f"datum {index}: {cause}") from cause
        return found

    def collate(self, datums: Sequence[ValueDatum]) -> ValueColumns:
        old = [datum.old_values for datum in datums if datum.old_values is not None]
        return ValueColumns(
            mask_T=torch.from_numpy(np.concatenate([datum.mask for datum in datums])),
            weights_T=torch.from_numpy(np.concatenate([datum.weights for datum in datums])),
            returns_T=torch.from_numpy(np.concatenate([datum.returns for datum in datums])),
            old_T=torch.from_numpy(np.concatenate(old)) if len(old) == len(datums) else None,
        )

    def make_head(self, model: CausalModel, route: Route, entries: Entries, *, with_entropy: bool) -> ValueHead:  # noqa: ARG002
        return ValueHead(route, entries)


STATE_VALUES = StateValues()


def _read_datum(datum: Datum, loss: ValueLoss, model: CausalModel) -> ValueDatum:
    inputs, ids = datum.loss_fn_inputs, np.asarray(datum.model_input.to_ints())
    for key in inputs:
        if key not in VALUE_INPUTS:
            near = did_you_mean(key, VALUE_INPUTS)
            raise DataError(f"loss_fn_inputs has no key {key!r}{near}; a critic reads {', '.join(VALUE_INPUTS)}")
    for key in loss.required_inputs:
        if key not in inputs:
            raise DataError(f"{VALUE_LOSS.name} needs {key} in loss_fn_inputs; send {VALUE_INPUTS[key]}")
    if not 0 < len(ids) <= model.max_context_length:
        raise DataError(
            f"model_input has {len(ids)} tokens; expected 1 to {model.max_context_length} (the model's limit here)"
        )
    if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= model.vocab_size:
        raise DataError(f"model_input holds ids outside 0 to {model.vocab_size - 1}; expected this model's token ids")
    mask = _column(inputs, "mask", 1.0, len(ids))
    if not np.isin(mask, (0.0, 1.0)).all():
        raise DataError("mask holds other numbers than 0 and 1; normalisers belong into weights")
    return ValueDatum(
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
