"""The ops of a GPU: flash attention and Triton kernels where the card runs them, else plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from turnwise.engine.ops import cuda_attention, torch_draw, torch_layers, torch_products
from turnwise.engine.ops.bitwise_draw import draw_like
from turnwise.engine.ops.cuda_support import has_triton
from turnwise.engine.ops.facts import facts_of
from turnwise.engine.ops.interface import Captured, DrawSettings, Ops
from turnwise.engine.ops.looped_experts import LoopedExperts
from turnwise.engine.ops.transfer import PinnedTransfer
from turnwise.errors import ConfigError

LARGE_BYTES = 1 << 28


def make_ops(device: torch.device) -> Ops:
    plain = Ops(
        device=device,
        facts=facts_of(device.type),
        layers=torch_layers,
        products=torch_products,
        attention=cuda_attention,
        softmax_for=lambda _: None,
        draw=torch_draw.draw,
        experts=LoopedExperts(torch_products),
        transfer=PinnedTransfer(device),
        new_graph_recorder=lambda: CudaGraphRecorder(device),
    )
    return _with_triton(plain) if has_triton() else plain


def make_bitwise(usual: Ops) -> Ops:
    """The same in one order of sums for sampler and trainer; only the Triton kernels have one."""
    if not has_triton():
        raise ConfigError("engine.bitwise=true on a GPU needs Triton, which does not run here; leave it out")
    from turnwise.engine.ops import cuda_bitwise

    return replace(
        usual, is_bitwise=True, products=cuda_bitwise, attention=cuda_bitwise, draw=draw_like(usual), few_rows=None
    )


def _with_triton(plain: Ops) -> Ops:
    from turnwise.engine.ops import triton_head, triton_layers, triton_rows
    from turnwise.engine.ops.triton_draw import draw_rows
    from turnwise.engine.ops.triton_experts import TritonExperts
    from turnwise.engine.ops.triton_lora import add_low_rank

    def draw(logits_BV: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
        if settings.cut is not None:
            return torch_draw.draw(logits_BV, settings)
        return draw_rows(logits_BV, settings.temperature, settings.uniform)

    return replace(
        plain,
        layers=triton_layers,
        softmax_for=lambda _: triton_head,
        draw=draw,
        experts=TritonExperts(),
        add_low_rank=add_low_rank,
        few_rows=triton_rows,
    )


class CudaGraphRecorder:
    """Captures steps as CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, inputs: Tensor, step: Callable[[Tensor], Tensor]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        before = torch.cuda.memory_reserved(self._device)
        with torch.cuda.stream(side):
            step(inputs)  # the first launch sets things up that a graph must not capture
        torch.cuda.current_stream(self._device).wait_stream(side)
        if torch.cuda.memory_reserved(self._device) - before > LARGE_BYTES:
            torch.cuda.empty_cache()  # only the side stream could use what it freed
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = step(inputs)
        self._pool = self._pool or graph.pool()
        return Captured(graph.replay, inputs, outputs)
