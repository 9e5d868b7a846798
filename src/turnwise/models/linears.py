"""The linear layers of a model by name: what kind each is, and which of them an adapter lies on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from turnwise.errors import ConfigError

Shape = tuple[int, int]
"""(outputs, inputs)"""


class LoraTargets(Protocol):
    """Which linears an adapter lies on, and its rank: a run's `model` section and the API's `LoraConfig` are both."""

    @property
    def rank(self) -> int: ...

    @property
    def train_attn(self) -> bool: ...

    @property
    def train_mlp(self) -> bool: ...

    @property
    def train_unembed(self) -> bool: ...


def linear_kind(name: str) -> str:
    """`attn`, `mlp` or `unembed` for a linear's dotted name in the model."""
    if ".layers." not in f".{name}":
        return "unembed"
    return "attn" if "attn" in name or "attention" in name else "mlp"


def adapted_linears(linears: Mapping[str, Shape], wanted: Mapping[str, bool]) -> dict[str, Shape]:
    """Those of the wanted kinds."""
    return {name: shape for name, shape in linears.items() if wanted[linear_kind(name)]}


def check_kinds(linears: Iterable[str], wanted: Mapping[str, bool]) -> None:
    """Refuse a kind that is wanted and is not there: nothing of it would learn."""
    there = {linear_kind(name) for name in linears}
    for kind, is_wanted in wanted.items():
        if is_wanted and kind not in there:
            raise ConfigError(
                f"train_{kind}=True, but this model has no linear layer of that kind to adapt (routed experts are "
                f"none); set train_{kind}=False"
            )
