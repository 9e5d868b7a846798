"""Losses as pure functions of the trainer's target log-probabilities, looked up by Tinker's names.

A loss is a sum over tokens. The weights contain every normaliser, so micro-batches, packing and data parallelism do not
change the gradient. A loss uses up to three policies: the sampler that drew the tokens, the old policy (trainer
weights frozen when the batch began, optional) and the trainer, the only one that is differentiated.

    anchor   = old where it is given, else the sampler ("bypass": no third policy)
    old_i    = sampler_i^(1 - share_i) * trainer_i^share_i, a constant, where a share is given in its place
    ratio_i  = trainer_i / anchor_i
    factor_i = old_i / sampler_i, reshaped by the correction; 1 in bypass, where the ratio already holds it
    loss_i   = weight_i * (factor_i * policy_i + kl_coef * kl_i - entropy_coef * entropy_i)
    loss_i   = 0 where untrained, and where the correction rejects the token; weights are never renormalised

To ignore the sampler's distribution and anchor at the old policy alone, send the old log-probs as `logprobs`.
Axes: `_T` target position, `_D` datum (one sequence).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import ConfigError, DataError
from turnwise.losses.outside import LossFunction, outside_info
from turnwise.losses.table import (
    ClippedOptions,
    DppoTvOptions,
    DroOptions,
    LossInfo,
    LossOptions,
    PolicyOptions,
    PpoOptions,
    Settings,
    find_loss,
    read_settings,
)

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus or minus this before exp."""
OUTLIER_BOUNDS = (1e-4, 100.0)
"""`outlier_rejection` drops a sequence if the ratio of one of its tokens lies outside these bounds."""
NO_TERMS = PolicyOptions()
"""The shared terms of a loss that compares no policies: all are off."""

_Index = slice | Tensor
PolicyFunction = Callable[["_Tokens", Any], "_PolicyTerm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossColumns:
    """Per-token columns of a batch of datums laid end to end; every tensor is [T]."""

    mask_T: Tensor
    """bool; the trained positions. The loss reads other columns only at these positions."""
    weights_T: Tensor
    """float32; they contain every normaliser."""
    advantages_T: Tensor
    sampler_logprobs_T: Tensor
    datum_T: Tensor
    """int64; which datum a token belongs to, 0 to num_datums - 1."""
    num_datums: int
    old_logprobs_T: Tensor | None = None
    old_share_T: Tensor | None = None
    """Instead of `old_logprobs_T`: position of the old logprob between the sampler's (0) and the trainer's (1)."""
    ref_logprobs_T: Tensor | None = None
    clip_low_T: Tensor | None = None
    """Absolute ratio bounds per token; they replace those of the options."""
    clip_high_T: Tensor | None = None
    sequence_ratio_mask_T: Tensor | None = None
    """bool; the trained tokens that enter a sequence-level ratio. None: all of them."""
    pair_T: Tensor | None = None
    """Losses over pairs: +n on the chosen side of pair n, -n on the rejected one. None: datums in turn."""
    turn_weights_T: Tensor | None = None
    """Losses over pairs: the weight of each token's log-ratio within its dialogue. None: 1."""

    @property
    def anchor_logprobs_T(self) -> Tensor:  # noqa: N802 - the axis suffix of every column
        """The denominator of ratios: the old policy if it is given, else the sampler."""
        return self.sampler_logprobs_T if self.old_logprobs_T is None else self.old_logprobs_T

    def __post_init__(self) -> None:
        for name, column in self._tensors().items():
            assert column.shape == self.mask_T.shape, f"{name} is {tuple(column.shape)}, mask is {self.mask_T.shape}"

    def slice(self, index: _Index) -> LossColumns:
        """The same columns at fewer positions. A loss that is not separable needs whole datums."""
        return LossColumns(num_datums=self.num_datums, **{k: v[index] for k, v in self._tensors().items()})

    def to(self, device: str | torch.device) -> LossColumns:
        return LossColumns(num_datums=self.num_datums, **{k: v.to(device) for k, v in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: column for name, column in columns.items() if isinstance(column, Tensor)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss with its options; built by `make_loss`."""

    info: LossInfo
    config: LossOptions
    policy: PolicyFunction
    """[T] the loss of each token before correction, KL, entropy and weight."""

    spans_datums = False

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def terms(self) -> PolicyOptions:
        """The options that all losses over policies share."""
        return self.config if isinstance(self.config, PolicyOptions) else NO_TERMS

    @property
    def is_separable(self) -> bool:
        """Token i's loss depends on token i alone, so any slice of the columns may be evaluated by itself."""
        return self.info.is_separable and self.terms.is_by_token

    @property
    def needs_entropy(self) -> bool:
        return self.terms.entropy_coef != 0

    @property
    def needs_reference(self) -> bool:
        return self.terms.kl_coef != 0

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """The `loss_fn_inputs` that a datum must bring besides `target_tokens`; the engine can compute a reference."""
        return (*self.info.columns, "old_logprobs") if self.terms.needs_old_policy else self.info.columns

    def __call__(self, logprobs_T: Tensor, entropies_T: Tensor | None, columns: LossColumns) -> Tensor:
        """[T] the loss of each token; the loss is their sum. Untrained tokens have exactly 0, also as gradient."""
        return self._evaluate(logprobs_T, entropies_T, columns).loss_T

    def _evaluate(self, logprobs_T: Tensor, entropies_T: Tensor | None, columns: LossColumns) -> _Evaluation:
        config = self.terms
        if not self.info.compares_policies:
            columns = replace(columns, old_logprobs_T=None, ref_logprobs_T=None)
        if self.needs_reference and columns.ref_logprobs_T is None:
            raise DataError(f"kl_coef={config.kl_coef} but no ref_logprobs; send them with every datum, or set it to 0")
        tokens = _mask_tokens(logprobs_T, columns, self.config)
        policy = self.policy(tokens, self.config)
        factor_T, is_kept_T = _correct(tokens, config)
        loss_T = factor_T * policy.loss_T
        kl_T = None
        if columns.ref_logprobs_T is not None:
            kl_T = _kl_to_reference(tokens, columns.ref_logprobs_T, config)
        if self.needs_reference and kl_T is not None:
            loss_T = loss_T + config.kl_coef * kl_T
        if self.needs_entropy:
            assert entropies_T is not None, "entropy_coef is set, but no entropies were computed"
            loss_T = loss_T - config.entropy_coef * torch.where(tokens.mask_T, entropies_T, 0.0)
        loss_T = torch.where(is_kept_T, columns.weights_T * loss_T, 0.0)
        return _Evaluation(
            loss_T=loss_T, tokens=tokens, policy=policy, factor_T=factor_T, is_kept_T=is_kept_T, kl_T=kl_T
        )

    @torch.no_grad()
    def metrics(self, logprobs_T: Tensor, entropies_T: Tensor | None, columns: LossColumns) -> dict[str, float]:
        """Diagnostics under `name:reduction` keys. A mean is over trained tokens; it is 0 if there are none.

        A separable loss may be evaluated slice by slice: add the sums, and combine the means with the weights
        `num_trained_tokens:sum`. Only `ess_fraction:mean` is not a mean over tokens; it needs the whole batch.
        """
        evaluation = self._evaluate(logprobs_T, entropies_T, columns)
        found = {"loss:sum": evaluation.loss_T.sum(), "num_trained_tokens:sum": columns.mask_T.sum()}
        if entropies_T is not None:
            found["entropy:mean"] = masked_mean(entropies_T, columns.mask_T)
        if self.info.compares_policies:
            found |= _ratio_metrics(evaluation)
        values = torch.stack([value.to(logprobs_T.dtype) for value in found.values()]).tolist()  # one device read
        return dict(zip(found, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The columns for the formulas, with 0 at every token that is not trained."""

    mask_T: Tensor
    logprobs_T: Tensor
    advantages_T: Tensor
    log_ratio_T: Tensor
    """log(trainer / anchor), differentiable, not clamped."""
    log_sampler_ratio_T: Tensor
    """log(trainer / sampler), a constant."""
    log_rho_T: Tensor | None
    """log(old / sampler), a constant; None in bypass."""
    columns: LossColumns
    """The columns before masking."""
    clip_low_T: Tensor
    clip_high_T: Tensor
    sequence_mask_T: Tensor
    datum_T: Tensor
    num_datums: int

    def datum_sum(self, values_T: Tensor) -> Tensor:
        """[T] the sum over the datum that each token belongs to."""
        sums_D = values_T.new_zeros(self.num_datums).index_add(0, self.datum_T, values_T)
        return sums_D[self.datum_T]

    def sequence_sum(self, values_T: Tensor) -> Tensor:
        """[T] the sum over the datum's tokens that enter a sequence-level ratio."""
        return self.datum_sum(torch.where(self.sequence_mask_T, values_T, 0.0))

    def sequence_mean(self, values_T: Tensor) -> Tensor:
        return self.sequence_sum(values_T) / self.sequence_sum(torch.ones_like(values_T)).clamp(min=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PolicyTerm:
    """[T] a loss before factor and weight, with its ratio and where the ratio was clipped."""

    loss_T: Tensor
    ratio_T: Tensor
    clipped: Mapping[str, Tensor]
    """bool masks by side (low, high, dual); only the sides that the loss has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluation:
    loss_T: Tensor
    tokens: _Tokens
    policy: _PolicyTerm
    factor_T: Tensor
    is_kept_T: Tensor
    kl_T: Tensor | None


def _mask_tokens(logprobs_T: Tensor, columns: LossColumns, config: LossOptions) -> _Tokens:
    # Mask before any arithmetic: an untrained token may hold a huge gap, and inf * 0 is nan in the gradient.
    def masked(column_T: Tensor) -> Tensor:
        return torch.where(columns.mask_T, column_T, 0.0)

    def bound(column_T: Tensor | None, default: float) -> Tensor:
        return torch.full_like(logprobs_T, default) if column_T is None else masked(column_T)

    p_T, sampler_T = masked(logprobs_T), masked(columns.sampler_logprobs_T)
    old_T = None if columns.old_logprobs_T is None else masked(columns.old_logprobs_T)
    if columns.old_share_T is not None:
        old_T = sampler_T + masked(columns.old_share_T) * (p_T.detach() - sampler_T)
    sequence_mask_T = columns.sequence_ratio_mask_T
    low, high = 0.0, math.inf
    if isinstance(config, ClippedOptions):
        low, high = config.clip_low_threshold, config.clip_high_threshold
    return _Tokens(
        mask_T=columns.mask_T,
        logprobs_T=p_T,
        advantages_T=masked(columns.advantages_T),
        log_ratio_T=p_T - (sampler_T if old_T is None else old_T),
        log_sampler_ratio_T=p_T.detach() - sampler_T,
        log_rho_T=None if old_T is None else old_T - sampler_T,
        clip_low_T=bound(columns.clip_low_T, low),
        clip_high_T=bound(columns.clip_high_T, high),
        sequence_mask_T=columns.mask_T if sequence_mask_T is None else columns.mask_T & sequence_mask_T,
        datum_T=columns.datum_T,
        num_datums=columns.num_datums,
        columns=columns,
    )


def _ratio(log_ratio_T: Tensor) -> Tensor:
    return log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _correct(tokens: _Tokens, config: PolicyOptions) -> tuple[Tensor, Tensor]:
    """[T] the constant factor on each token's policy term, and whether the token is kept at all."""
    if tokens.log_rho_T is None and config.needs_old_policy:
        raise ConfigError(
            f"correction={config.correction!r} without old_logprobs: the ratio is already taken against the sampler, "
            "and would be corrected twice; send old_logprobs with every datum, or use a mask or correction='none'"
        )
    low, high = config.correction_bounds
    log_gap_T = tokens.log_sampler_ratio_T if tokens.log_rho_T is None else tokens.log_rho_T
    gap_T = _ratio(log_gap_T)
    factor_T = torch.ones_like(gap_T) if tokens.log_rho_T is None else gap_T
    judged_T = None
    match config.correction:
        case "token_tis":
            factor_T = gap_T.clamp(max=high)
        case "sequence_tis":
            factor_T = _ratio(tokens.sequence_sum(log_gap_T)).clamp(max=high)
        case "token_mask":
            judged_T = gap_T
        case "sequence_mask":
            judged_T = _ratio(tokens.sequence_sum(log_gap_T))
        case "sequence_geo_mask":
            judged_T = _ratio(tokens.sequence_mean(log_gap_T))
        case "none":
            pass
    is_kept_T = tokens.mask_T
    if judged_T is not None:
        is_kept_T = is_kept_T & _is_within(judged_T, low, high)
    if config.outlier_rejection:
        is_outlier_T = ~_is_within(gap_T, *OUTLIER_BOUNDS)
        is_kept_T = is_kept_T & (tokens.datum_sum(is_outlier_T.to(gap_T.dtype)) == 0)
    if config.opsm_threshold:
        drift_T = tokens.sequence_mean(-tokens.log_ratio_T.detach())
        is_kept_T = is_kept_T & ~((tokens.advantages_T < 0) & (drift_T > config.opsm_threshold))
    return factor_T, is_kept_T


def _is_within(values_T: Tensor, low: float, high: float) -> Tensor:
    return (values_T >= low) & (values_T <= high)


def _kl_to_reference(tokens: _Tokens, ref_logprobs_T: Tensor, config: PolicyOptions) -> Tensor:
    """[T] the estimate of KL(trainer || reference) at the drawn token (joschu.net/blog/kl-approx.html)."""
    gap_T = tokens.logprobs_T - torch.where(tokens.mask_T, ref_logprobs_T, 0.0)
    match config.kl_estimator:
        case "k1":
            kl_T = gap_T
        case "k2":
            kl_T = gap_T.square() / 2
        case "k3":
            kl_T = _ratio(-gap_T) - 1 + gap_T
    return kl_T * _ratio(tokens.log_sampler_ratio_T) if config.kl_importance else kl_T


def _cross_entropy(tokens: _Tokens, _: LossOptions) -> _PolicyTerm:
    return _PolicyTerm(loss_T=-tokens.logprobs_T, ratio_T=torch.ones_like(tokens.logprobs_T), clipped={})


def _importance_sampling(tokens: _Tokens, _: LossOptions) -> _PolicyTerm:
    """-ratio * A; on-policy its gradient is REINFORCE."""
    ratio_T = _ratio(tokens.log_ratio_T)
    return _PolicyTerm(loss_T=-ratio_T * tokens.advantages_T, ratio_T=ratio_T, clipped={})


def _ppo(tokens: _Tokens, config: PpoOptions) -> _PolicyTerm:
    return _clipped_surrogate(_ratio(tokens.log_ratio_T), tokens, config.dual_clip)


def _clipped_surrogate(ratio_T: Tensor, tokens: _Tokens, dual_clip: float = 0.0) -> _PolicyTerm:
    """-min(ratio A, clip(ratio) A) (arXiv:1707.06347 eq. 7), with the dual clip of arXiv:1912.09729 where A < 0."""
    advantages_T, low_T, high_T = tokens.advantages_T, tokens.clip_low_T, tokens.clip_high_T
    objective_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(low_T, high_T) * advantages_T)
    clipped = {
        "low": (advantages_T < 0) & (ratio_T < low_T),
        "high": (advantages_T > 0) & (ratio_T > high_T),
    }
    if dual_clip > 0:
        floor_T = dual_clip * advantages_T
        clipped["dual"] = (advantages_T < 0) & (objective_T < floor_T)
        objective_T = torch.where(clipped["dual"], floor_T, objective_T)
    return _PolicyTerm(loss_T=-objective_T, ratio_T=ratio_T, clipped=clipped)


def _cispo(tokens: _Tokens, _: LossOptions) -> _PolicyTerm:
    """-sg[clip(ratio)] log p A (arXiv:2506.13585); the value holds log p and does not compare with PPO's."""
    ratio_T = _ratio(tokens.log_ratio_T.detach())
    loss_T = -ratio_T.clamp(tokens.clip_low_T, tokens.clip_high_T) * tokens.logprobs_T * tokens.advantages_T
    clipped = {"low": ratio_T < tokens.clip_low_T, "high": ratio_T > tokens.clip_high_T}
    return _PolicyTerm(loss_T=loss_T, ratio_T=ratio_T, clipped=clipped)


def _dro(tokens: _Tokens, config: DroOptions) -> _PolicyTerm:
    """-(A log p - beta/2 log(ratio)^2) (arXiv:2405.19107)."""
    objective_T = tokens.advantages_T * tokens.logprobs_T - config.beta / 2 * tokens.log_ratio_T.square()
    return _PolicyTerm(loss_T=-objective_T, ratio_T=_ratio(tokens.log_ratio_T), clipped={})


def _dppo_tv(tokens: _Tokens, config: DppoTvOptions) -> _PolicyTerm:
    """-keep ratio A + penalty log(ratio)^2 (arXiv:2602.04879): a token is dropped if its probability (not its
    ratio) has already moved too far in the direction of its advantage."""
    ratio_T = _ratio(tokens.log_ratio_T)
    moved_T = (tokens.logprobs_T.exp() - (tokens.logprobs_T - tokens.log_ratio_T).exp()).detach()
    clipped = {
        "low": (tokens.advantages_T < 0) & (moved_T < -config.tv_threshold),
        "high": (tokens.advantages_T > 0) & (moved_T > config.tv_threshold),
    }
    objective_T = torch.where(clipped["low"] | clipped["high"], 0.0, ratio_T * tokens.advantages_T)
    loss_T = config.tv_penalty * tokens.log_ratio_T.square() - objective_T
    return _PolicyTerm(loss_T=loss_T, ratio_T=ratio_T, clipped=clipped)


def _gspo(tokens: _Tokens, _: LossOptions) -> _PolicyTerm:
    """PPO's surrogate on the geometric mean ratio of the sequence, s_i = sg[s] p_i / sg[p_i] (arXiv:2507.18071)."""
    log_s_T = tokens.sequence_mean(tokens.log_ratio_T.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_T = (log_s_T + tokens.logprobs_T - tokens.logprobs_T.detach()).exp()
    return _clipped_surrogate(ratio_T, tokens)


def _ratio_metrics(evaluation: _Evaluation) -> dict[str, Tensor]:
    tokens, policy, mask_T = evaluation.tokens, evaluation.policy, evaluation.tokens.mask_T
    sampler_ratio_T = torch.where(mask_T, _ratio(tokens.log_sampler_ratio_T), 0.0)
    found = {"ratio:mean": masked_mean(policy.ratio_T, mask_T), "ratio:max": _max(policy.ratio_T, mask_T)}
    found |= {
        f"clip_fraction_{side}:mean": masked_mean(clipped_T, mask_T) for side, clipped_T in policy.clipped.items()
    }
    # Tokens were drawn by the sampler, so these estimate KL(sampler || trainer); below 0.01 is healthy.
    found["kl_sampler_trainer_k1:mean"] = masked_mean(-tokens.log_sampler_ratio_T, mask_T)
    found["kl_sampler_trainer_k2:mean"] = masked_mean(tokens.log_sampler_ratio_T.square() / 2, mask_T)
    square_sum = (mask_T.sum() * sampler_ratio_T.square().sum()).clamp(min=torch.finfo(sampler_ratio_T.dtype).tiny)
    found["ess_fraction:mean"] = sampler_ratio_T.sum().square() / square_sum
    found["rejected_fraction:mean"] = masked_mean(~evaluation.is_kept_T, mask_T)
    if tokens.log_rho_T is not None:
        found["correction_factor:mean"] = masked_mean(evaluation.factor_T, mask_T)
        found["correction_factor:max"] = _max(evaluation.factor_T, mask_T)
    if evaluation.kl_T is not None:
        found["kl_reference:mean"] = masked_mean(evaluation.kl_T, mask_T)
    return found


def masked_mean(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """The mean of the values in the mask; 0 if it is empty."""
    return torch.where(mask_T, values_T, 0.0).sum() / mask_T.sum().clamp(min=1)


def _max(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """The largest of non-negative values; 0 if nothing is trained."""
    masked_T = torch.where(mask_T, values_T, 0.0)
    return masked_T.amax() if masked_T.numel() else masked_T.sum()


LOSS_FUNCTIONS: Mapping[str, PolicyFunction] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "dppo_tv": _dppo_tv,
    "gspo": _gspo,
}
"""The formulas of the table's losses over tokens; those over pairs are in `preference_losses.py`."""


def make_loss(name: str, config: Settings | None = None) -> Loss:
    """Make a loss by name with the given settings; the others get the loss's defaults."""
    info = find_loss(name)
    return Loss(info=info, config=read_settings(info, config), policy=LOSS_FUNCTIONS[name])


def make_outside_loss(function: LossFunction, config: Settings | None = None) -> Loss:
    """Make a loss from outside the package (`losses/outside.py`) with the given settings."""
    info = outside_info(function)
    return Loss(info=info, config=read_settings(info, config), policy=partial(_outside, function, info))


def _outside(function: LossFunction, info: LossInfo, tokens: _Tokens, config: LossOptions) -> _PolicyTerm:
    columns, options = tokens.columns, {name: getattr(config, name) for name in info.own_options}
    anchor_T = (tokens.logprobs_T - tokens.log_ratio_T).detach()
    ref_T = columns.ref_logprobs_T
    masked = replace(
        columns,
        advantages_T=tokens.advantages_T,
        sampler_logprobs_T=torch.where(tokens.mask_T, columns.sampler_logprobs_T, 0.0),
        old_logprobs_T=None if tokens.log_rho_T is None else anchor_T,
        old_share_T=None,
        ref_logprobs_T=None if ref_T is None else torch.where(tokens.mask_T, ref_T, 0.0),
    )
    loss_T = function(tokens.logprobs_T, masked, **options)
    if not isinstance(loss_T, Tensor) or loss_T.shape != tokens.logprobs_T.shape:
        came = tuple(loss_T.shape) if isinstance(loss_T, Tensor) else type(loss_T).__name__
        raise DataError(
            f"loss {info.name} returned {came} for {tuple(tokens.logprobs_T.shape)} tokens; expected one number for "
            "each token, not their sum: the engine weighs and sums them"
        )
    return _PolicyTerm(loss_T=loss_T, ratio_T=_ratio(tokens.log_ratio_T), clipped={})
