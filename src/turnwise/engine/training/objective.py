"""What a training pass computes at each position, and how a loss reads it.

Every trainable has an objective. The trainer packs datums, runs the model and carries gradients back; it asks the
objective for all that differs: how datums are checked, which loss there is, and which head turns a hidden state into
one number. `TOKEN_LOGPROBS` is here: the number is the logprob of a target token. The other one is
`critic.STATE_VALUES`.

Shape legend: T positions of all datums of a job laid end to end, E positions that one pass reads, R rows of hidden
states (several E may share one R), H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import Route
from turnwise.engine.training.columns import Asked, DatumColumns, collate_columns, datums_to_columns, with_weights
from turnwise.engine.training.logprobs import TargetHead, TokenGradients
from turnwise.engine.training.losses import make_loss, make_outside_loss
from turnwise.engine.training.pack import Entries
from turnwise.engine.training.preference_losses import check_pairs, make_preference_loss
from turnwise.errors import DataError
from turnwise.losses.outside import LossFunction
from turnwise.losses.table import find_loss
from turnwise.types import Datum

LossSettings = Mapping[str, float | str] | None
"""`loss_fn_config` as a client sends it."""


class PassColumns(Protocol):
    """What a loss reads besides the head's numbers; every column is [T]."""

    def slice(self, index: slice | Tensor) -> Any: ...

    def to(self, device: str | torch.device) -> Any: ...


class PassLoss(Protocol):
    """A sum over positions; normalisers are part of the columns, so any cut into passes gives the same gradient."""

    @property
    def is_separable(self) -> bool:
        """Whether the loss of one position depends on that position alone."""
        ...

    @property
    def spans_datums(self) -> bool:
        """Whether datums belong together, as the two sides of a pair do, so that the loss must see the whole batch."""
        ...

    @property
    def needs_entropy(self) -> bool: ...

    @property
    def needs_reference(self) -> bool:
        """Whether the columns must hold the logprobs of a reference policy."""
        ...

    def __call__(self, outputs_T: Tensor, entropies_T: Tensor | None, columns: Any, /) -> Tensor:
        """[T] the loss of each position."""
        ...

    def metrics(self, outputs_T: Tensor, entropies_T: Tensor | None, columns: Any, /) -> dict[str, float]: ...


class PassDatum(Protocol):
    """One checked datum."""

    @property
    def input_ids(self) -> NDArray[np.int64]: ...

    @property
    def target_start(self) -> int:
        """The first position that the caller sees outputs of."""
        ...

    @property
    def has_reference(self) -> bool:
        """Whether it brings what a loss that `needs_reference` reads."""
        ...

    def asked(self, *, only_trained: bool) -> Asked:
        """The positions that a pass reads."""
        ...


class PassHead(Protocol):
    """Turns hidden states of one packed batch into one number per entry."""

    def outputs(self, hidden_RH: Tensor) -> tuple[Tensor, Tensor | None]:
        """Numbers and entropies [E]; records no gradient."""
        ...

    def backward(self, hidden_RH: Tensor, gradients: TokenGradients) -> tuple[Tensor, Tensor, Tensor | None]:
        """d loss / d hidden [R, H], numbers and entropies [E]. Adds the head's own gradients in place."""
        ...


class Objective(Protocol):
    """What the passes of a trainable compute. It has no state."""

    @property
    def output_name(self) -> str:
        """The key of the numbers in `loss_fn_outputs`."""
        ...

    def make_loss(self, name: str | LossFunction, settings: LossSettings, *, is_learning: bool) -> PassLoss: ...

    def read_datums(
        self, datums: Sequence[Datum], loss: Any, model: CausalModel, *, is_learning: bool
    ) -> Sequence[PassDatum]:
        """Check what a client sent. Nothing is padded, cut or guessed."""
        ...

    def collate(self, datums: Sequence[Any]) -> PassColumns:
        """The columns of all datums, laid end to end."""
        ...

    def make_head(self, model: CausalModel, route: Route, entries: Entries, *, with_entropy: bool) -> PassHead: ...


class TokenLogprobs:
    """Logprobs of target tokens, from the model's own output head."""

    output_name = "logprobs"

    def make_loss(self, name: str | LossFunction, settings: LossSettings, *, is_learning: bool) -> PassLoss:  # noqa: ARG002
        # The engine reads `kl_reference`; the loss sees the logprobs that come from it.
        own = {key: value for key, value in (settings or {}).items() if key != "kl_reference"}
        if not isinstance(name, str):
            return make_outside_loss(name, own)
        return make_preference_loss(name, own) if find_loss(name).needs_pairs else make_loss(name, own)

    def read_datums(
        self, datums: Sequence[Datum], loss: Any, model: CausalModel, *, is_learning: bool
    ) -> list[DatumColumns]:
        if not datums:
            raise DataError("no datums; send at least one")
        given = datums if is_learning else [with_weights(datum) for datum in datums]
        sizes = {"vocab_size": model.vocab_size, "max_length": model.max_context_length}
        columns = datums_to_columns(given, loss=loss, **sizes)
        if loss.spans_datums:
            check_pairs(columns)
        return columns

    def collate(self, datums: Sequence[Any]) -> PassColumns:
        return collate_columns(datums)

    def make_head(self, model: CausalModel, route: Route, entries: Entries, *, with_entropy: bool) -> PassHead:
        return TargetHead(
            model.head, model.computed(route), entries, with_entropy=with_entropy, rule=model.sizes.logits
        )


TOKEN_LOGPROBS = TokenLogprobs()
