"""Decoder layers of transformers that keep their inputs alone for the backward pass, and run again there.

A layer may read keys and values of an earlier layer, and the stream of a layer's own inputs (Gemma 4). Those are inputs
like the hidden states: they have gradients too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.engine.model.lora import RouteHolder

SHARED = "shared_kv_states"
"""The argument in which layers hand keys and values on: a mapping from a kind of layer to its key and value."""


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
        call = _LayerCall(args, kwargs)

        def again(*tensors: Tensor) -> list[Tensor]:
            before, self._holder.route, self.is_on = self._holder.route, route, False
            try:
                run = functools.partial(torch.func.functional_call, layer, weights)
                return call.run(lambda *args, **kwargs: run(args, kwargs), tensors)
            finally:
                self._holder.route, self.is_on = before, True

        out, *handed_on = _RecomputedLayer.apply(
            self._anchor, functools.partial(call.run, forward), again, hidden, *call.tensors
        )
        call.hand_on(handed_on)
        return (out, *call.rest) if call.rest else out


class _LayerCall:
    """The arguments of one call of a layer, and which tensors among them, and behind them, carry gradients."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self._shared: Any = kwargs.get(SHARED)
        self._known = dict(self._shared or {})
        self._places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad]
        self._new: list[str] = []
        self.rest: Sequence[Any] = ()
        """What the layer returned beside its hidden states."""

    @property
    def tensors(self) -> list[Tensor]:
        """What the layer reads beside its hidden states."""
        return [*(self._args[place] for place in self._places), *itertools.chain.from_iterable(self._known.values())]

    def run(self, layer: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The hidden states that `layer` returns, then the keys and values that it hands on."""
        hidden, *rest = tensors
        args, kwargs = list(self._args), dict(self._kwargs)
        for place in self._places:
            args[place] = rest.pop(0)
        shared = {kind: (rest.pop(0), rest.pop(0)) for kind in self._known}
        if self._shared is not None:
            kwargs[SHARED] = shared
        out = layer(hidden, *args, **kwargs)
        self.rest = out[1:] if isinstance(out, tuple) else ()
        self._new = [kind for kind in shared if kind not in self._known]
        return [out[0] if isinstance(out, tuple) else out, *(side for kind in self._new for side in shared[kind])]

    def hand_on(self, tensors: Sequence[Tensor]) -> None:
        """Give the keys and values of this call to the layers behind it."""
        sides = iter(tensors)
        for kind in self._new:
            self._shared[kind] = next(sides), next(sides)


class _RecomputedLayer(torch.autograd.Function):
    """Gradients of what is trained inside the layer go to its leaves directly."""

    @staticmethod
    def forward(ctx, anchor, run, again, *tensors):  # noqa: ARG004 - the anchor asks for a gradient
        ctx.save_for_backward(*tensors)
        ctx.again = again
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx, *grads):
        needed = ctx.needs_input_grad[3:]
        tensors = [
            one.detach().requires_grad_(need) for one, need in zip(ctx.saved_tensors, (True, *needed[1:]), strict=True)
        ]
        with torch.enable_grad():
            outs = ctx.again(*tensors)
        torch.autograd.backward(outs, grads)
        return torch.zeros(1, device=grads[0].device), None, None, *(one.grad for one in tensors)
