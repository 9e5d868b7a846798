"""The one table of losses, and those that read it."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from turnwise.client.remote_wire import FOLDED_LOSSES
from turnwise.engine.training.columns import KNOWN_INPUTS
from turnwise.engine.training.losses import LOSS_FUNCTIONS, make_loss
from turnwise.engine.training.preference_losses import PAIR_FUNCTIONS, make_preference_loss
from turnwise.errors import ConfigError
from turnwise.losses.table import LOSSES, PolicyOptions, clip_bounds, losses_that_read, policy_losses, read_settings
from turnwise.types import LossFnType


def test_the_table_and_the_torch_functions_match_exactly() -> None:
    over_pairs = {name for name, info in LOSSES.items() if info.needs_pairs}
    assert set(PAIR_FUNCTIONS) == over_pairs
    assert set(LOSS_FUNCTIONS) == LOSSES.keys() - over_pairs
    for name, info in LOSSES.items():
        loss = make_preference_loss(name) if info.needs_pairs else make_loss(name)
        assert (loss.name, type(loss.config), loss.required_inputs) == (name, info.options, info.columns)
        assert (loss.is_separable, loss.needs_reference) == (info.is_separable, info.needs_reference)
        assert set(info.columns) <= KNOWN_INPUTS.keys()


def test_the_names_of_the_training_api_are_those_of_the_table() -> None:
    assert get_args(LossFnType) == tuple(name for name, info in LOSSES.items() if info.is_of_tinker)
    assert FOLDED_LOSSES == ("importance_sampling", "ppo", "cispo", "gspo")
    assert policy_losses() == ("importance_sampling", "ppo", "cispo", "dro", "dppo_tv", "gspo")


def test_every_option_of_a_loss_has_a_description_and_a_default_that_is_legal() -> None:
    for info in LOSSES.values():
        assert read_settings(info) == info.options()
        for name, field in info.options.model_fields.items():
            assert (field.description or "").endswith("."), (info.name, name)
    assert losses_that_read("beta") == ("dro", "dpo")
    assert clip_bounds("gspo") == {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}
    assert clip_bounds("dro") == {}


def test_an_option_is_refused_by_exactly_the_losses_that_do_not_have_it() -> None:
    legal = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5, "dual_clip": 3.0, "beta": 0.1, "eta": 2.0}
    legal |= {"tv_threshold": 0.1, "tv_penalty": 0.0, "reward_offset": 1.0, "form": "repo", "kl_coef": 0.1}
    own = {name for info in LOSSES.values() for name in info.own_options}
    assert own == legal.keys() - PolicyOptions.model_fields.keys()
    for name, info in LOSSES.items():
        for option, value in legal.items():
            if option in info.options.model_fields:
                assert getattr(read_settings(name, {option: value}), option) == value
            else:
                with pytest.raises(ConfigError, match="has no config key"):
                    read_settings(name, {option: value})


def test_the_table_loads_without_torch() -> None:
    code = "import sys, turnwise.losses.table; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
