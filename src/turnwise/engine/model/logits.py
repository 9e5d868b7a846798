"""What some models do with the head's product before the softmax: a scale, and a soft cap (`blocks.LogitRule`)."""

from __future__ import annotations

from torch import Tensor

from turnwise.models.blocks import LogitRule


def finish_logits(product: Tensor, rule: LogitRule) -> Tensor:
    """cap(scale x), written over the head's product x."""
    if rule.scale != 1:
        product.mul_(rule.scale)
    if rule.softcap is not None:
        product.div_(rule.softcap).tanh_().mul_(rule.softcap)
    return product


def logit_slopes(logits: Tensor, rule: LogitRule) -> Tensor | None:
    """d logit / d product at finished `logits`, without the scale; None where it is 1 everywhere."""
    return None if rule.softcap is None else (logits / rule.softcap).square_().neg_().add_(1)
