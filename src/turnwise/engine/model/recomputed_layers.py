"""Decoder layers of transformers that keep their input alone for the backward pass, and run again there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.engine.model.lora import RouteHolder


class RecomputedLayers:
    """The layers of one body, changed in place; they run as before while `is_on` is false."""

    def __init__(self, layers: Sequence[nn.Module], holder: RouteHolder, device: torch.device) -> None:
        self.is_on = False
        self._holder = holder
        self._anchor = torch.zeros(1, device=device, requires_grad=True)
        for layer in layers:
            layer.forward = functools.partial(self._run, layer, layer.forward)

    def _run(self, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on or not torch.is_grad_enabled():
            return forward(hidden, *args, **kwargs)
        route = self._holder.route
        weights: dict[str, Tensor] = dict(layer.named_parameters())  # those that this pass put into the layer

        def again(hidden: Tensor) -> Tensor:
            before, self._holder.route, self.is_on = self._holder.route, route, False
            try:
                return _first(torch.func.functional_call(layer, weights, (hidden, *args), kwargs))
            finally:
                self._holder.route, self.is_on = before, True

        rest: list[Any] = []

        def run(hidden: Tensor) -> Tensor:
            out = forward(hidden, *args, **kwargs)
            rest.extend(out[1:] if isinstance(out, tuple) else ())
            return _first(out)

        out = _RecomputedLayer.apply(self._anchor, hidden, run, again)
        return (out, *rest) if rest else out


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


class _RecomputedLayer(torch.autograd.Function):
    """Gradients of what is trained inside the layer go to its leaves directly."""

    @staticmethod
    def forward(ctx, anchor, hidden, run, again):  # noqa: ARG004 - the anchor asks for a gradient
        ctx.save_for_backward(hidden)
        ctx.again = again
        return run(hidden)

    @staticmethod
    def backward(ctx, grad):
        hidden = ctx.saved_tensors[0].detach().requires_grad_(True)
        with torch.enable_grad():
            out = ctx.again(hidden)
        torch.autograd.backward(out, grad)
        return torch.zeros(1, device=grad.device), hidden.grad, None, None
