"""Draws as everywhere, and reports logprobs as the trainer computes them (`engine.bitwise`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from turnwise.engine.ops.interface import DrawSettings, Ops


def draw_like(usual: Ops) -> Callable[[Tensor, DrawSettings], tuple[Tensor, Tensor]]:
    """The draw of `usual`, whose logprobs have the bits of `TargetHead`'s."""

    def draw(logits_BV: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
        logits_BV = logits_BV.contiguous()
        tokens, _ = usual.draw(logits_BV, settings)
        temperature = torch.where(settings.temperature == 0, 1.0, settings.temperature).float()
        softmax = usual.softmax_for(logits_BV.dtype)
        assert softmax is not None, "the kernels are there"
        logsumexps, _ = softmax.row_stats(logits_BV, temperature)
        chosen = logits_BV.gather(1, tokens.clamp_min(0)[:, None])[:, 0].float() / temperature
        return tokens, chosen - logsumexps

    return draw
