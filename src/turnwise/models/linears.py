"""The linear layers of a model by name: what kind each one is, and which of them get an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from turnwise.errors import ConfigError

Shape = tuple[int, int]
"""(outputs, inputs)"""


class LoraTargets(Protocol):
    """Which linears get an adapter, and its rank: a run's `model` section, or the API's `LoraConfig`."""

    @property
    def rank(self) -> int: ...

    @property
    def train_attn(self) -> bool: ...

    @property
    def train_mlp(self) -> bool: ...

    @property
    def train_unembed(self) -> bool: ...


def linear_kind(name: str) -> str:
    """`attn`, `mlp` or `unembed`, told from a linear's dotted name in the model."""
    if ".layers." not in f".{name}":
        return "unembed"
    return "attn" if "attn" in name or "attention" in name else "mlp"


def adapted_linears(linears: Mapping[str, Shape], targets: LoraTargets) -> dict[str, Shape]:
    """The linears that get an adapter."""
    is_wanted = _by_kind(targets)
    return {name: shape for name, shape in linears.items() if is_wanted[linear_kind(name)]}


def check_kinds(linears: Iterable[str], targets: LoraTargets) -> None:
    """Refuse targets of a kind that the model does not have: nothing of that kind would learn."""
    present = {linear_kind(name) for name in linears}
    for kind, is_wanted in _by_kind(targets).items():
        if is_wanted and kind not in present:
            raise ConfigError(
                f"train_{kind}=True, but this model has no linear layer of that kind to adapt (routed experts are "
                f"none); set train_{kind}=False"
            )


def _by_kind(targets: LoraTargets) -> dict[str, bool]:
    return {"attn": targets.train_attn, "mlp": targets.train_mlp, "unembed": targets.train_unembed}
