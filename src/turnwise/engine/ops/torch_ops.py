"""The ops in plain torch: the reference, and what runs on a device that has no kernels of its own."""

from __future__ import annotations

import torch

from turnwise.engine.ops import torch_attention, torch_draw, torch_layers, torch_products
from turnwise.engine.ops.facts import facts_of
from turnwise.engine.ops.interface import Ops
from turnwise.engine.ops.looped_experts import LoopedExperts
from turnwise.engine.ops.transfer import PackedTransfer


def make_ops(device: torch.device) -> Ops:
    return Ops(
        device=device,
        facts=facts_of(device.type),
        layers=torch_layers,
        products=torch_products,
        attention=torch_attention,
        softmax_for=lambda _: None,
        draw=torch_draw.draw,
        experts=LoopedExperts(torch_products),
        transfer=PackedTransfer(device),
    )
