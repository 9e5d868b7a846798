"""Losses over pairs of dialogues: DPO and REFUEL.

    Delta = sum over chosen of w (log p - log ref)  -  sum over rejected of w (log p - log ref)
    dpo      -log sigmoid(beta Delta - reward_offset (R - R'))              arXiv:2305.18290, 2404.12358, 2406.14868
    refuel   (Delta / eta - (R - R'))^2, or eta^2 times that (`repo`)       arXiv:2410.04612

The sums are over trained tokens: the policy's words, never the world's. The world's own probabilities are the same
under both policies and cancel. w is the `turn_weights` column (DMPO's phi; 1 without one), R the `advantages`
column, of which only the difference within a pair counts, and ref the `ref_logprobs` column; where that is not sent,
the engine computes it with the base model. `weights` holds the weight of the pair, the same at all its tokens.

Datums 2i and 2i+1 are a pair, the chosen one first. Where a dialogue is several datums, `pair` says who belongs
together: +n on every target of pair n's chosen side, -n on its rejected side, n from 1.

Axes: `_T` target position, `_P` pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from turnwise.engine.training.losses import LossColumns, masked_mean
from turnwise.errors import DataError
from turnwise.losses.table import DpoOptions, LossInfo, LossOptions, RefuelOptions, Settings, find_loss, read_settings

if TYPE_CHECKING:
    from turnwise.engine.training.columns import DatumColumns

PairFunction = Callable[["_Pairs", Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """One loss over pairs with its options; the trainer gives it the whole batch at once."""

    info: LossInfo
    config: LossOptions
    formula: PairFunction
    """[P] the loss of each pair before its weight."""

    is_separable = False
    spans_datums = True
    needs_entropy = False
    needs_reference = True

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def required_inputs(self) -> tuple[str, ...]:
        needs_rewards = isinstance(self.config, DpoOptions) and self.config.reward_offset != 0
        return (*self.info.columns, "advantages") if needs_rewards else self.info.columns

    def __call__(self, logprobs_T: Tensor, entropies_T: Tensor | None, columns: LossColumns) -> Tensor:  # noqa: ARG002
        """[T] the loss of each pair, divided evenly among its trained tokens; the loss is their sum."""
        pairs = _Pairs.of(logprobs_T, columns)
        share_T = (pairs.weights_P * self.formula(pairs, self.config) / pairs.num_tokens_P.clamp(min=1))[pairs.pair_T]
        return torch.where(columns.mask_T, share_T, 0.0)

    @torch.no_grad()
    def metrics(self, logprobs_T: Tensor, entropies_T: Tensor | None, columns: LossColumns) -> dict[str, float]:  # noqa: ARG002
        """Diagnostics under `name:reduction` keys; a mean is over pairs, of `kl_reference` over trained tokens."""
        pairs = _Pairs.of(logprobs_T, columns)
        loss_P = self.formula(pairs, self.config)
        is_pair_P = pairs.num_tokens_P > 0
        gap_T = pairs.log_ratio_T
        found = {
            "loss:sum": (pairs.weights_P * loss_P).sum(),
            "num_trained_tokens:sum": columns.mask_T.sum(),
            "num_pairs:sum": is_pair_P.sum(),
            "pair_loss:mean": masked_mean(loss_P, is_pair_P),
            "pair_margin:mean": masked_mean(pairs.delta_P, is_pair_P),
            "pair_accuracy:mean": masked_mean((pairs.delta_P > 0).float(), is_pair_P),
            "chosen_log_ratio:mean": masked_mean(pairs.chosen_P, is_pair_P),
            "rejected_log_ratio:mean": masked_mean(pairs.chosen_P - pairs.delta_P, is_pair_P),
            "kl_reference:mean": masked_mean(gap_T.square() / 2, columns.mask_T),
        }
        if "advantages" in self.required_inputs:
            found["reward_difference:mean"] = masked_mean(pairs.rewards_P, is_pair_P)
        values = torch.stack([value.to(logprobs_T.dtype) for value in found.values()]).tolist()
        return dict(zip(found, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """The sums of a batch for each pair."""

    pair_T: Tensor
    """int64; which pair a token belongs to, from 0."""
    log_ratio_T: Tensor
    """log(p / ref), 0 where untrained."""
    chosen_P: Tensor
    """The chosen side's weighted sum of log-ratios."""
    delta_P: Tensor
    """The chosen side's sum minus the rejected side's."""
    rewards_P: Tensor
    """R - R'."""
    weights_P: Tensor
    num_tokens_P: Tensor

    @classmethod
    def of(cls, logprobs_T: Tensor, columns: LossColumns) -> _Pairs:
        if columns.ref_logprobs_T is None:
            raise DataError("a loss over pairs needs ref_logprobs; send them with every datum")
        pair_T, is_chosen_T, num_pairs = _sides(columns)
        mask_T = columns.mask_T

        def summed(values_T: Tensor, of_T: Tensor) -> Tensor:
            return values_T.new_zeros(num_pairs).index_add(0, pair_T, torch.where(of_T, values_T, 0.0))

        # Mask before any arithmetic, because untrained tokens hold filler.
        log_ratio_T = torch.where(mask_T, logprobs_T, 0.0) - torch.where(mask_T, columns.ref_logprobs_T, 0.0)
        weighted_T = log_ratio_T if columns.turn_weights_T is None else log_ratio_T * columns.turn_weights_T
        of_chosen_T, of_rejected_T = mask_T & is_chosen_T, mask_T & ~is_chosen_T
        ones_T = torch.ones_like(logprobs_T)
        sizes = [summed(ones_T, side_T) for side_T in (of_chosen_T, of_rejected_T)]
        rewards = [
            summed(columns.advantages_T.to(ones_T.dtype), side_T) / size_P.clamp(min=1)
            for side_T, size_P in zip((of_chosen_T, of_rejected_T), sizes, strict=True)
        ]
        num_tokens_P = sizes[0] + sizes[1]
        chosen_P = summed(weighted_T, of_chosen_T)
        return cls(
            pair_T=pair_T,
            log_ratio_T=log_ratio_T,
            chosen_P=chosen_P,
            delta_P=chosen_P - summed(weighted_T, of_rejected_T),
            rewards_P=rewards[0] - rewards[1],
            weights_P=summed(columns.weights_T.to(ones_T.dtype), mask_T) / num_tokens_P.clamp(min=1),
            num_tokens_P=num_tokens_P,
        )


def _sides(columns: LossColumns) -> tuple[Tensor, Tensor, int]:
    """[T] the pair of each token, [T] whether it is on the chosen side, and the largest possible number of pairs."""
    if columns.pair_T is None:
        return columns.datum_T // 2, columns.datum_T % 2 == 0, (columns.num_datums + 1) // 2
    number_T = columns.pair_T.abs().to(torch.int64)
    num_pairs = int(number_T.max()) if number_T.numel() else 0
    return (number_T - 1).clamp(min=0), columns.pair_T > 0, max(num_pairs, 1)


def _dpo(pairs: _Pairs, config: DpoOptions) -> Tensor:
    return -functional.logsigmoid(config.beta * pairs.delta_P - config.reward_offset * pairs.rewards_P)


def _refuel(pairs: _Pairs, config: RefuelOptions) -> Tensor:
    if config.form == "paper":
        return (pairs.delta_P / config.eta - pairs.rewards_P).square()
    return (pairs.delta_P - config.eta * pairs.rewards_P).square()


PAIR_FUNCTIONS: Mapping[str, PairFunction] = {"dpo": _dpo, "refuel": _refuel}
"""The formulas of the table's losses over pairs."""


def make_preference_loss(name: str, config: Settings | None = None) -> PreferenceLoss:
    """Make a loss by name with the given settings; the others get their defaults."""
    info = find_loss(name)
    return PreferenceLoss(info=info, config=read_settings(info, config), formula=PAIR_FUNCTIONS[name])


def check_pairs(datums: Sequence[DatumColumns]) -> None:
    """Refuse a batch in which a side of a pair is missing, or the tokens of a pair have different weights."""
    sides: dict[int, set[bool]] = {}
    weights: dict[int, float] = {}
    has_numbers = datums[0].pair is not None
    if not has_numbers and len(datums) % 2:
        raise DataError(f"{len(datums)} datums; expected pairs, chosen and rejected in turn, or a `pair` column")
    for index, datum in enumerate(datums):
        number = pair_number(index, datum)
        sides.setdefault(abs(number), set()).add(number > 0)
        for weight in datum.weights[datum.mask].tolist():
            if not math.isclose(weights.setdefault(abs(number), weight), weight, rel_tol=1e-5):
                raise DataError(
                    f"datum {index}: weights of pair {abs(number)} are {weights[abs(number)]} and {weight}; expected "
                    "the same at all its tokens; weights inside a dialogue belong into turn_weights"
                )
    for number, found in sides.items():
        if len(found) < 2:
            raise DataError(f"pair {number} has no {'rejected' if True in found else 'chosen'} side; send both at once")


def pair_number(index: int, datum: DatumColumns) -> int:
    """The pair of the datum at `index`, from 1; negative on the rejected side."""
    if datum.pair is None:
        return index // 2 + 1 if index % 2 == 0 else -(index // 2 + 1)
    numbers = datum.pair[datum.target_start :]
    number = int(numbers[0])
    if not (numbers == number).all() or number == 0:
        raise DataError(f"datum {index}: pair holds {sorted(set(numbers.tolist()))[:4]}; expected one number, not 0")
    return number
