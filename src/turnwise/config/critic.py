"""What the critic of a method that needs one can be told."""

from __future__ import annotations

from pydantic import Field

from turnwise.methods.lookup import methods_that
from turnwise.methods.options import MethodOptions
from turnwise.runtime.section import Section


class CriticConfig(Section):
    """The critic: a value head with an adapter of its own on the same base model."""

    rank: int = Field(default=0, ge=0, description="Rank of its adapter; 0 takes model.rank.")
    learning_rate: float = Field(default=0.0, ge=0, description="Of its AdamW; 0 is twice train.learning_rate.")
    updates: int = Field(default=1, ge=1, description="Its optimizer steps on the attempts of each policy step.")
    value_clip: float = Field(
        default=0.2, ge=0, description="Values that move further than this from the old ones gain nothing; 0 is off."
    )
    pretrain_steps: int = Field(
        default=50,
        ge=0,
        description="Most batches that it learns before the policy's first step, the policy left alone; 0 is none.",
    )
    pretrain_from: str = Field(
        default="rollouts",
        min_length=1,
        description="What it learns then: `rollouts` of the policy as it is, `demonstrations` of the world, or a run "
        "directory.",
    )
    pretrain_learning_rate: float = Field(default=1e-3, gt=0, description="Of its AdamW, meanwhile.")
    pretrain_updates: int = Field(default=4, ge=1, description="Its optimizer steps on each of those batches.")
    pretrain_patience: int = Field(
        default=5, ge=1, description="It ends when neither explained variance nor loss got better for so many batches."
    )

    def check(self, method: MethodOptions) -> None:
        """Refuse what the method does not read."""
        changed = [name for name, field in CriticConfig.model_fields.items() if getattr(self, name) != field.default]
        if changed and not method.needs_critic:
            readers = ", ".join(methods_that(lambda options: options.needs_critic))
            raise ValueError(
                f"critic.{changed[0]} is not read by method={method.name}, only by {readers}; leave it out"
            )
        unread = [name for name in changed if name.startswith("pretrain_") and name != "pretrain_steps"]
        if unread and not self.pretrain_steps:
            raise ValueError(f"critic.{unread[0]} is not read while critic.pretrain_steps is 0; leave it out")
