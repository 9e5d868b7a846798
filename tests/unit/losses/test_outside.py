"""A loss from outside the package is a plain function, and trains as its formula says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from turnwise.engine.training.losses import LossColumns, make_loss, make_outside_loss
from turnwise.errors import ConfigError, DataError
from turnwise.losses.outside import as_loss_name, declare_loss, find_function, outside_info
from unit.engine.training.test_losses import random_batch, value_and_grad

REGULARISED = {"kl_coef": 0.3, "entropy_coef": 0.1, "correction": "sequence_mask", "correction_high": 9.0}
MODULE = """
from turnwise.losses.outside import declare_loss

@declare_loss(is_separable=True)
def cispo_again(logprobs, columns, *, high: float = 4.0, name: str = "x", is_on: bool = True):
    ratio = (logprobs - columns.anchor_logprobs_T).detach().exp()
    return -ratio.clamp(max=high) * logprobs * columns.advantages_T
"""


def importance_sampling_again(logprobs: Tensor, columns: LossColumns) -> Tensor:
    return -(logprobs - columns.anchor_logprobs_T).exp() * columns.advantages_T


def test_a_built_in_loss_written_outside_has_the_same_value_gradient_and_metrics() -> None:
    for seed, old in ((1, {}), (2, {"old_logprobs_T": None})):
        p_T, entropies_T, columns = random_batch(seed, **old)
        for config in ({}, REGULARISED):
            own, outside = (
                make_loss("importance_sampling", config),
                make_outside_loss(importance_sampling_again, config),
            )
            expected = value_and_grad(own, p_T, columns, entropies_T)
            value, grad = value_and_grad(outside, p_T, columns, entropies_T)
            assert value == pytest.approx(expected[0], rel=1e-12)
            assert grad == pytest.approx(expected[1], rel=1e-12)
            assert outside.metrics(p_T, entropies_T, columns) == pytest.approx(own.metrics(p_T, entropies_T, columns))


def test_an_old_policy_told_by_its_share_reaches_a_loss_from_outside() -> None:
    p_T, _, columns = random_batch(3, old_logprobs_T=None)
    columns = replace(columns, old_share_T=torch.full_like(p_T, 0.5))
    expected = value_and_grad(make_loss("importance_sampling"), p_T, columns)
    assert value_and_grad(make_outside_loss(importance_sampling_again), p_T, columns)[1] == pytest.approx(expected[1])


def test_keyword_arguments_are_the_options_of_a_loss_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own_losses.py"
    file.write_text(MODULE, encoding="utf-8")
    function = find_function(f"{file}:cispo_again")
    info = outside_info(function)
    assert (info.own_options, info.is_separable, info.columns) == (
        ("high", "name", "is_on"),
        True,
        ("logprobs", "advantages"),
    )
    p_T, _, columns = random_batch(4, old_logprobs_T=None)
    for high in (4.0, 1.1):
        _, expected = value_and_grad(make_loss("cispo", {"clip_high_threshold": high}), p_T, columns)
        _, grad = value_and_grad(make_outside_loss(function, {"high": high}), p_T, columns)
        assert grad == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"has no config key 'hihg'; did you mean 'high'\?"):
        make_outside_loss(function, {"hihg": 1.0})
    with pytest.raises(ConfigError, match="high='1' is str; expected a number"):
        make_outside_loss(function, {"high": "1"})


def test_what_is_no_loss_is_refused_with_what_to_write() -> None:
    def takes_three(logprobs: Tensor, columns: LossColumns, third: float) -> Tensor: ...

    def has_a_shared_option(logprobs: Tensor, columns: LossColumns, *, kl_coef: float = 1.0) -> Tensor: ...

    def sums(logprobs: Tensor, columns: LossColumns) -> Tensor:
        return (logprobs * columns.advantages_T).sum()

    with pytest.raises(ConfigError, match=r"expected \(logprobs, columns, \*, third=DEFAULT\)"):
        outside_info(takes_three)
    with pytest.raises(ConfigError, match="an option that every loss has"):
        outside_info(has_a_shared_option)
    p_T, _, columns = random_batch(5)
    with pytest.raises(DataError, match="expected one number for each token, not their sum"):
        make_outside_loss(sums)(p_T, None, columns)
    with pytest.raises(ConfigError, match="expected a name, `module:function`, or a function"):
        as_loss_name(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="no module 'nowhere_at_all'"):
        find_function("nowhere_at_all:loss")


def test_a_function_that_was_passed_is_known_by_name_in_this_process_and_another_says_what_it_needs() -> None:
    @declare_loss(columns=("advantages",))
    def local(logprobs: Tensor, columns: LossColumns) -> Tensor:
        return logprobs * columns.advantages_T

    name = as_loss_name(local)
    assert find_function(name) is local
    assert outside_info(local).columns == ("advantages",)
    code = f"from turnwise.losses.outside import find_function; find_function({json.dumps(name)})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "was passed as a Python function" in run.stderr
    assert "pass it again" in run.stderr


def test_a_loss_with_other_parameters_is_refused_before_a_model_is_loaded() -> None:
    def one(logprobs): ...
    def named(*, logprobs, columns): ...

    for wrong in (one, named):
        with pytest.raises(ConfigError, match=r"cannot be called with \(logprobs, columns\); expected a function of"):
            outside_info(wrong)
