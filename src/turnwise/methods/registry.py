"""Every method by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from turnwise.methods.base import Method, MethodSetup, ReadingMethod
from turnwise.methods.dpo import make_dpo
from turnwise.methods.gigpo import make_gigpo
from turnwise.methods.grpo import make_grpo
from turnwise.methods.gspo import make_gspo
from turnwise.methods.la_grpo import make_la_grpo
from turnwise.methods.mt_grpo import make_mt_grpo
from turnwise.methods.ppo import make_ppo
from turnwise.methods.refuel import make_refuel
from turnwise.methods.reinforce import make_rebn, make_reinforce_pp
from turnwise.methods.rft import make_rft
from turnwise.methods.rloo import make_rloo
from turnwise.methods.sft import make_sft

AnyMethod = Method | ReadingMethod[Any]
Builder = Callable[[MethodSetup], AnyMethod]

BUILDERS: Mapping[str, Builder] = {
    "dpo": make_dpo,
    "gigpo": make_gigpo,
    "grpo": make_grpo,
    "gspo": make_gspo,
    "la_grpo": make_la_grpo,
    "mt_grpo": make_mt_grpo,
    "ppo": make_ppo,
    "rebn": make_rebn,
    "refuel": make_refuel,
    "reinforce_pp": make_reinforce_pp,
    "rft": make_rft,
    "rloo": make_rloo,
    "sft": make_sft,
}


def build_method(setup: MethodSetup) -> AnyMethod:
    """The method that `setup.config.name` names."""
    return BUILDERS[setup.config.name](setup)
