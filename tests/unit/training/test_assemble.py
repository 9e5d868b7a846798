"""From a config to the parts of a loop."""

from __future__ import annotations

import dataclasses

from turnwise.config.config import Config
from turnwise.config.files import load_config
from turnwise.training.assemble import make_optim
from turnwise.types import AdamParams


def test_train_options_cover_all_of_adamw() -> None:
    values = {"beta1": 0.5, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.1, "grad_clip_norm": 2.0}
    assert {field.name for field in dataclasses.fields(AdamParams)} == {"learning_rate", *values}
    config = load_config("guess_number", [f"train.{name}={value!r}" for name, value in values.items()])
    assert make_optim(config, 0.3) == AdamParams(learning_rate=0.3, **values)
    assert make_optim(Config(), 0.3).eps == 1e-8
