"""Losses from outside the package: a plain function, named as `module:function` or `file.py:function`.

    def tempered(logprobs, columns, *, sharpness: float = 2.0):
        ratio = (logprobs - columns.anchor_logprobs_T).exp()
        return -(ratio**sharpness) * columns.advantages_T        # [T] the loss of each token, before its weight

    method.loss_fn=my_module:tempered method.loss_options.sharpness=3

Both arguments are 0 wherever a token is not trained, so filler cannot make a NaN. The engine weighs and sums what
the function returns, and adds KL, entropy bonus and corrections as with any other loss over policies. Keyword-only
arguments are the loss's options, with their defaults. The function sees whole sequences; `declare_loss` says where it
needs less, or reads other columns. It runs in this process: a service does not import what a request names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pydantic import Field, create_model

from turnwise.errors import ConfigError
from turnwise.losses.table import POLICY_COLUMNS, LossInfo, PolicyOptions
from turnwise.runtime.import_path import import_path, is_importable, load_attribute

LossFunction = Callable[..., Any]
"""`(logprobs_T, columns, *, options...) -> loss_T`, on torch tensors; `columns` is a `LossColumns`."""

_PASSED: dict[str, LossFunction] = {}
"""Functions that were passed as objects, by the name that stands for them in a config."""
_DECLARATION = "__turnwise_loss__"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def declare_loss(
    *, columns: tuple[str, ...] = POLICY_COLUMNS, is_separable: bool = False
) -> Callable[[LossFunction], LossFunction]:
    """Say what a loss reads. Without this, it reads `logprobs` and `advantages`, and sees whole sequences.

    Args:
        columns: the `loss_fn_inputs` that every datum has to bring.
        is_separable: the loss of a token depends on that token alone, so the engine may cut a sequence anywhere.
    """

    def declare(function: LossFunction) -> LossFunction:
        setattr(function, _DECLARATION, {"columns": columns, "is_separable": is_separable})
        return function

    return declare


def is_outside(name: str) -> bool:
    """The name is an import path, and not one of the table."""
    return ":" in name


def as_loss_name(loss: str | LossFunction) -> str:
    """The value of `method.loss_fn` for a loss by name, by import path, or as a function.

    A function stays known in this process under its name, so it may also come from a notebook or a test.
    """
    if isinstance(loss, str):
        return loss
    if not callable(loss):
        raise ConfigError(f"loss={loss!r}; expected a name, `module:function`, or a function (logprobs, columns)")
    name = import_path(loss)
    _PASSED[name] = loss
    return name


def find_function(name: str) -> LossFunction:
    """The function that an import path stands for."""
    if name in _PASSED:
        return _PASSED[name]
    if not is_importable(name):
        raise ConfigError(
            f"loss {name} was passed as a Python function, and this process has none of that name; pass it again "
            "(loss=...), or put it into a module and name it as module:function"
        )
    found = load_attribute(name)
    if not callable(found):
        raise ConfigError(f"loss {name} is {type(found).__name__}; expected a function (logprobs, columns) -> Tensor")
    return found


@lru_cache(maxsize=64)
def outside_info(function: LossFunction) -> LossInfo:
    """The function as a row of the table: its options are its keyword-only arguments."""
    name = import_path(function)
    fields: dict[str, Any] = {}
    signature = inspect.signature(function)
    if sum(one.kind in _POSITIONAL for one in list(signature.parameters.values())[:2]) < 2:
        raise ConfigError(
            f"loss {name}{signature} cannot be called with (logprobs, columns); expected a function of (logprobs, "
            "columns, *, options...) that returns the loss of each token"
        )
    for option in list(signature.parameters.values())[2:]:
        if option.kind is not option.KEYWORD_ONLY or option.default is option.empty:
            raise ConfigError(
                f"loss {name}: argument {option.name} is not an option; expected (logprobs, columns, *, "
                f"{option.name}=DEFAULT)"
            )
        if option.name in PolicyOptions.model_fields:
            raise ConfigError(f"loss {name}: {option.name} is an option that every loss has; choose another name")
        if not isinstance(option.default, bool | int | float | str):
            raise ConfigError(f"loss {name}: {option.name}={option.default!r}; expected a number, a flag or a text")
        kind = float if type(option.default) is int else type(option.default)
        fields[option.name] = (kind, Field(default=kind(option.default), description=f"Option of {name}."))
    options = create_model(f"Options of {name}", __base__=PolicyOptions, **fields)
    declared = getattr(function, _DECLARATION, {"columns": POLICY_COLUMNS, "is_separable": False})
    return LossInfo(name=name, options=options, **declared)
