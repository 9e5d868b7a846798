"""The section `critic`, for methods that need one."""

from __future__ import annotations

from pydantic import Field

from turnwise.methods.lookup import methods_that
from turnwise.methods.options import MethodOptions
from turnwise.runtime.section import Section


class CriticConfig(Section):
    """The critic: a value head with its own adapter on the same base model."""

    rank: int = Field(default=0, ge=0, description="Rank of the critic's adapter; 0 takes model.rank.")
    learning_rate: float = Field(
        default=0.0, ge=0, description="Learning rate of the critic; 0 is twice train.learning_rate."
    )
    updates: int = Field(
        default=1, ge=1, description="Optimizer steps of the critic on the attempts of each policy step."
    )
    value_clip: float = Field(
        default=0.2, ge=0, description="Largest change of a value that still lowers the loss; 0 is off."
    )
    pretrain_steps: int = Field(
        default=50,
        ge=0,
        description="Most batches that the critic learns from before the policy's first step; the policy does "
        "not change. 0 is no pre-training; in no world that was measured did it pay for its tokens "
        "(docs/algorithms/ppo.md).",
    )
    pretrain_from: str = Field(
        default="rollouts",
        min_length=1,
        description="What the critic learns from before the first step: `rollouts` of the unchanged policy, "
        "`demonstrations` of the world, a run directory, or a .jsonl file that `turnwise pools` wrote.",
    )
    pretrain_learning_rate: float = Field(
        default=1e-3, gt=0, description="Learning rate of the critic during pre-training."
    )
    pretrain_updates: int = Field(
        default=4, ge=1, description="Optimizer steps of the critic on each batch of the pre-training."
    )
    pretrain_patience: int = Field(
        default=5,
        ge=1,
        description="End the pre-training if neither explained variance nor loss improved for this many batches.",
    )

    def check(self, method: MethodOptions) -> None:
        """Refuse options that the method does not read."""
        changed = [name for name, field in CriticConfig.model_fields.items() if getattr(self, name) != field.default]
        if changed and not method.needs_critic:
            readers = ", ".join(methods_that(lambda options: options.needs_critic))
            raise ValueError(
                f"critic.{changed[0]} is not read by method={method.name}, only by {readers}; leave it out"
            )
        unread = [name for name in changed if name.startswith("pretrain_") and name != "pretrain_steps"]
        if unread and not self.pretrain_steps:
            raise ValueError(f"critic.{unread[0]} is not read while critic.pretrain_steps is 0; leave it out")
