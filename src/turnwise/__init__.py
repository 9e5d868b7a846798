"""Multi-turn reinforcement learning for LLM agents.

    import turnwise as tw

    run = tw.train("guess_number", model="tiny", steps=5)
    run.metrics["rollout/reward_mean"]
    run.best.sample("Guess a number.")

`import turnwise as mint; mint.ServiceClient()` runs a MinT recipe. Names are looked up on first use (PEP 562), so that
importing the package stays quick and loads neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise import types as types
    from turnwise.client.base import SamplingClient as SamplingClient
    from turnwise.client.base import TrainingClient as TrainingClient
    from turnwise.client.local import ServiceClient as ServiceClient
    from turnwise.config.config import Config as Config
    from turnwise.envs.base import Env as Env
    from turnwise.envs.base import EnvStep as EnvStep
    from turnwise.envs.base import Task as Task
    from turnwise.envs.base import World as World
    from turnwise.envs.base import assistant as assistant
    from turnwise.envs.base import system as system
    from turnwise.envs.base import user as user
    from turnwise.envs.tools import tool as tool
    from turnwise.methods.base import Method as Method
    from turnwise.rounds.flywheel import flywheel as flywheel
    from turnwise.single_turn import RLAdapter as RLAdapter
    from turnwise.single_turn import RLConfig as RLConfig
    from turnwise.single_turn import run_grpo as run_grpo
    from turnwise.training.run import Run as Run
    from turnwise.training.run import evaluate as eval  # noqa: A004 - the command's own word
    from turnwise.training.run import start as start
    from turnwise.training.run import train as train
    from turnwise.trajectory import Message as Message
    from turnwise.trajectory import Trajectory as Trajectory
    from turnwise.watch.observer import Observer as Observer

__version__ = "0.1.0"

_HOMES = {
    "turnwise.client.base": ("SamplingClient", "TrainingClient"),
    "turnwise.client.local": ("ServiceClient",),
    "turnwise.config.config": ("Config",),
    "turnwise.envs.base": ("Env", "EnvStep", "Task", "World", "assistant", "system", "user"),
    "turnwise.envs.tools": ("tool",),
    "turnwise.methods.base": ("Method",),
    "turnwise.rounds.flywheel": ("flywheel",),
    "turnwise.single_turn": ("RLAdapter", "RLConfig", "run_grpo"),
    "turnwise.training.run": ("Run", "start", "train"),
    "turnwise.trajectory": ("Message", "Trajectory"),
    "turnwise.watch.observer": ("Observer",),
}
"""The module of each public name."""
_HOME_OF_NAME = {name: home for home, names in _HOMES.items() for name in names} | {"eval": "turnwise.training.run"}
_NAME_AT_HOME = {"eval": "evaluate"}  # inside the package, `eval` would hide Python's own

__all__ = [
    "Config",
    "Env",
    "EnvStep",
    "Message",
    "Method",
    "Observer",
    "RLAdapter",
    "RLConfig",
    "Run",
    "SamplingClient",
    "ServiceClient",
    "Task",
    "TrainingClient",
    "Trajectory",
    "World",
    "assistant",
    "eval",
    "flywheel",
    "run_grpo",
    "start",
    "system",
    "tool",
    "train",
    "types",
    "user",
]


def __getattr__(name: str) -> Any:
    if name == "types":
        return import_module("turnwise.types")
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF_NAME[name]), _NAME_AT_HOME.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
