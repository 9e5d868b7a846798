"""Multi-turn reinforcement learning for LLM agents.

`import turnwise as mint; mint.ServiceClient()` is the usual way in. Names are looked up on first use (PEP 562), so
that importing the package stays quick and loads neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise import types as types
    from turnwise.client.base import SamplingClient as SamplingClient
    from turnwise.client.base import TrainingClient as TrainingClient
    from turnwise.client.local import ServiceClient as ServiceClient
    from turnwise.single_turn import RLAdapter as RLAdapter
    from turnwise.single_turn import RLConfig as RLConfig
    from turnwise.single_turn import run_grpo as run_grpo

__version__ = "0.1.0"

_HOME_OF_NAME = {
    "ServiceClient": "turnwise.client.local",
    "TrainingClient": "turnwise.client.base",
    "SamplingClient": "turnwise.client.base",
    "RLAdapter": "turnwise.single_turn",
    "RLConfig": "turnwise.single_turn",
    "run_grpo": "turnwise.single_turn",
}

__all__ = ["RLAdapter", "RLConfig", "SamplingClient", "ServiceClient", "TrainingClient", "run_grpo", "types"]


def __getattr__(name: str) -> Any:
    if name == "types":
        return import_module("turnwise.types")
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF_NAME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
