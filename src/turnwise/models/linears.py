"""The linear layers of a model by name: what kind each one is, and which of them get an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from turnwise.errors import ConfigError


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

    @property
    def train_router(self) -> bool: ...

    @property
    def expert_rank(self) -> int: ...


class Shape(NamedTuple):
    """One matrix, or the matrices of all experts of a layer."""

    outputs: int
    inputs: int
    experts: int = 0
    """0: not an expert's."""
    num_chosen: int = 0
    """Experts that a token uses."""

    @property
    def num_values(self) -> int:
        return self.outputs * self.inputs * max(1, self.experts)

    @property
    def num_active(self) -> int:
        """Values that one token is multiplied with."""
        return self.outputs * self.inputs * max(1, self.num_chosen)

    def rank(self, targets: LoraTargets) -> int:
        """Rank of the adapter here. Experts share the rank out: those of one token have the adapter's rank together."""
        if not self.experts:
            return targets.rank
        return targets.expert_rank or max(1, targets.rank // self.num_chosen)

    def num_adapter_values(self, targets: LoraTargets) -> int:
        return self.rank(targets) * (self.outputs + self.inputs) * max(1, self.experts)


ROUTERS = ("gate", "router")
"""Names of the modules that choose experts."""


def can_be_adapted(name: str) -> bool:
    """Whether a linear of this name can have an adapter: it belongs to a layer, and is no part of a router."""
    *parents, _ = name.split(".")
    return ".layers." in f".{name}" and not set(ROUTERS) & set(parents)


def linear_kind(name: str) -> str:
    """`attn`, `mlp`, `router` or `unembed`, told from a linear's dotted name in the model."""
    if ".layers." not in f".{name}":
        return "unembed"
    if "attn" in name or "attention" in name:
        return "attn"
    return "router" if name.rpartition(".")[2] in ROUTERS else "mlp"


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
                f"train_{kind}=True, but this model has no linear layer of that kind to adapt; set train_{kind}=False"
            )


def _by_kind(targets: LoraTargets) -> dict[str, bool]:
    return {
        "attn": targets.train_attn,
        "mlp": targets.train_mlp,
        "unembed": targets.train_unembed,
        "router": targets.train_router,
    }
