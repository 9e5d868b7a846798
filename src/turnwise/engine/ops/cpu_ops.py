"""The ops of a CPU: C kernels where a compiler built them, else plain torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from turnwise.engine.ops import (
    build,
    cpu,
    cpu_attention,
    cpu_bitwise,
    cpu_head,
    cpu_layers,
    cpu_pass,
    cpu_products,
    torch_draw,
    torch_layers,
)
from turnwise.engine.ops.bitwise_draw import draw_like
from turnwise.engine.ops.facts import facts_of
from turnwise.engine.ops.interface import DrawSettings, Ops, SoftmaxOps
from turnwise.engine.ops.looped_experts import LoopedExperts
from turnwise.engine.ops.transfer import HostTransfer
from turnwise.engine.threads import use_allowed_threads
from turnwise.errors import ConfigError


def make_ops(device: torch.device) -> Ops:
    return Ops(
        device=device,
        facts=facts_of(device.type),
        layers=torch_layers if build.library() is None else cpu_layers,
        products=cpu_products,
        attention=cpu_attention,
        softmax_for=_softmax_for,
        draw=_draw,
        experts=LoopedExperts(cpu_products),
        transfer=HostTransfer(),
        stack=cpu_pass,
        prepare_process=use_allowed_threads,
    )


def make_bitwise(usual: Ops) -> Ops:
    """The same in one order of sums for sampler and trainer; only the C kernels have one."""
    if build.library() is None:
        raise ConfigError(
            "engine.bitwise=true on a CPU needs a C compiler ($CC, cc, gcc or clang) to build its kernels, and there "
            "is none; install one, or leave it out"
        )
    return replace(
        usual, is_bitwise=True, products=cpu_bitwise, attention=cpu_bitwise, draw=draw_like(usual), stack=None
    )


def _softmax_for(dtype: torch.dtype) -> SoftmaxOps | None:
    return cpu_head if dtype is torch.float32 and build.library() is not None else None


def _draw(logits_BV: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
    kernels = cpu.load() if settings.cut is None and logits_BV.dtype is torch.float32 else None
    if kernels is None:
        return torch_draw.draw(logits_BV, settings)
    return kernels.sample_rows(logits_BV, settings.temperature, settings.uniform)
