"""What a resumed run cannot change, because it would be ignored or would make the run's own record untrue."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.config.config import Config
from turnwise.config.files import SHORT_KEYS
from turnwise.errors import ConfigError

FIXED_SECTIONS = ("model", "env", "warmup")
"""Its weights and its tasks depend on them."""


def check_overrides(stored: Config, overrides: Sequence[str]) -> None:
    """Refuse another model, world, warm-up or method."""
    for text in overrides:
        key, _, value = (part.strip() for part in text.partition("="))
        if SHORT_KEYS.get(key, key).partition(".")[0] in FIXED_SECTIONS:
            raise ConfigError(f"{text}: a resumed run keeps its {', '.join(FIXED_SECTIONS)}; start a new one for that")
        if key in ("method", "method.name") and value != stored.method.name:
            raise ConfigError(
                f"{text}: a resumed run keeps its method, {stored.method.name}: the steps on record, the optimizer's "
                "state and a critic, which learns before the first step, belong to it; start a new run for another"
            )


def check_critic(stored: Config, config: Config, *, num_steps_done: int, has_critic: bool) -> None:
    """Refuse options of the critic that would come too late to be read."""
    changed = [
        name
        for name in type(config.critic).model_fields
        if getattr(config.critic, name) != getattr(stored.critic, name)
    ]
    for name in changed:
        if name.startswith("pretrain_") and num_steps_done:
            raise ConfigError(
                f"critic.{name} is not read any more: the critic learned alone before the first of the "
                f"{num_steps_done} steps that this run has done; leave it out, or start a new run"
            )
        if name == "rank" and has_critic:
            raise ConfigError("critic.rank: the run's critic is there and keeps its rank; start a new run for another")
