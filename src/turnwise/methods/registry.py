"""Every method that ships with the package."""

from __future__ import annotations

from turnwise.methods.dpo import Dpo
from turnwise.methods.gigpo import Gigpo
from turnwise.methods.grpo import Grpo
from turnwise.methods.gspo import Gspo
from turnwise.methods.la_grpo import LaGrpo
from turnwise.methods.mt_grpo import MtGrpo
from turnwise.methods.ppo import Ppo
from turnwise.methods.refuel import Refuel
from turnwise.methods.reinforce import Rebn, ReinforcePp
from turnwise.methods.rft import Rft
from turnwise.methods.rloo import Rloo
from turnwise.methods.sft import Sft

METHODS = (Grpo, Gspo, Rloo, ReinforcePp, Rebn, Gigpo, MtGrpo, Ppo, LaGrpo, Refuel, Dpo, Rft, Sft)
