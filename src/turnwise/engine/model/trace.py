"""The output of every part of a model in a pass, to compare two ways to run it part by part.

Parts are named by transformers' own module names: "embedding" (what the first layer reads), "layer 3 self_attn",
"layer 3 mlp", "last norm".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

EMBEDDING, LAST_NORM = "embedding", "last norm"


class Trace:
    """Rows [N, size] of each part in float32, in the order in which the parts first ran."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}

    def add(self, part: str, output: Any) -> None:
        """Keep a copy of the output of a part: a tensor, or a tuple that begins with one."""
        tensor = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(tensor, Tensor) or tensor.dim() < 2 or not tensor.is_floating_point():
            return
        rows = tensor.detach().float().reshape(-1, tensor.shape[-1]).clone()
        known = self.parts.get(part)
        self.parts[part] = rows if known is None else torch.cat([known, rows])


def layer_part(index: int, module: str) -> str:
    return f"layer {index} {module}"


def find_layers(body: nn.Module, num_layers: int) -> list[nn.Module]:
    """The decoder layers of a body of transformers."""
    lists = [module for module in body.modules() if isinstance(module, nn.ModuleList)]
    return next((list(found) for found in lists if len(found) == num_layers), [])


@contextmanager
def traced(body: nn.Module, num_layers: int, trace: Trace) -> Iterator[None]:
    """Fill `trace` while the modules of a body run."""
    handles = []

    def keep_output(part: str) -> Any:
        return lambda _module, _args, output: trace.add(part, output)

    def keep_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.add(EMBEDDING, args[0] if args else kwargs.get("hidden_states"))

    layers = find_layers(body, num_layers)
    if layers:
        handles.append(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
    for index, layer in enumerate(layers):
        handles += [
            child.register_forward_hook(keep_output(layer_part(index, name))) for name, child in layer.named_children()
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
