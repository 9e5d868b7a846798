"""The learning rate of a step.

    rate = learning_rate * min(1, (step + 1) / lr_warmup) * decay(p)

p is the share of the run that is done, by steps or by sampled tokens, whichever is further: 0 before the first step.
Tokens that a critic's pre-training took cannot be spent again, so they leave the bound before the share is taken.

    constant   1
    linear     1 - (1 - lr_floor) p
    cosine     lr_floor + (1 - lr_floor) (1 + cos(pi p)) / 2

It depends on the config, the step and the tokens drawn so far alone, so a resumed run goes on with the same rates, and
one whose `train.steps` or `train.learning_rate` was changed follows the new schedule from there.
"""

from __future__ import annotations

import math

from turnwise.config.training import TrainConfig


def rate_factor(train: TrainConfig, step: int, num_drawn: int, num_before: int = 0) -> float:
    """What the full learning rates are multiplied by in the step after `step` steps and `num_drawn` tokens.

    Args:
        num_before: those of the tokens that were drawn before the first step.
    """
    rise = min(1.0, (step + 1) / train.lr_warmup) if train.lr_warmup else 1.0
    return rise * _decay(train, progress(train, step, num_drawn, num_before))


def progress(train: TrainConfig, step: int, num_drawn: int, num_before: int = 0) -> float:
    """The share of the run that is done, from 0 to 1."""
    by_steps = step / train.steps if train.steps else 0.0
    bound = train.max_sampled_tokens - num_before
    by_tokens = (num_drawn - num_before) / bound if train.max_sampled_tokens and bound > 0 else 0.0
    return min(1.0, max(by_steps, by_tokens))


def _decay(train: TrainConfig, done: float) -> float:
    match train.lr_schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - (1 - train.lr_floor) * done
        case "cosine":
            return train.lr_floor + (1 - train.lr_floor) * (1 + math.cos(math.pi * done)) / 2
