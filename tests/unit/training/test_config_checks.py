"""Every option that is accepted is read by somebody: what reads nothing of it refuses it, or the plan says so."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from turnwise.cli import main
from turnwise.config.config import Config
from turnwise.config.files import load_config
from turnwise.errors import ConfigError
from turnwise.methods.lookup import SHIPPED, every_option
from turnwise.methods.ppo import PPO_LOSS
from turnwise.rollout.limits import RolloutLimits
from turnwise.training.assemble import make_method
from unit.training.conftest import MakeRig

LIMITS = RolloutLimits(max_turns=3, max_tokens_per_turn=5, max_trajectory_tokens=64)
COMPANIONS: tuple[dict[str, Any], ...] = (
    {},
    {"credit": "reward_to_go"},
    {"branch_turn": "geometric"},
    {"turn_weights": "dmpo"},
    {"kl_coef": 0.1},
    {"kl_coef": 0.1, "kl_place": "loss"},
    {"correction": "token_mask"},
    {"correction": "token_tis", "old_policy": True},
    *({"loss_fn": loss} for loss in ("ppo", "cispo", "dro", "dppo_tv")),
)
"""What some options need beside them to be read."""
READ_BY_THE_LOOP = ("old_policy", "old_policy_from", "kl_place", "kl_gamma", "kl_coef", "positive_nll")


def _parts(value: Any) -> Any:
    """A method as plain values, so that two of them can be compared."""
    if dataclasses.is_dataclass(value):
        return {field.name: _parts(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, Mapping):
        return {key: _parts(each) for key, each in value.items()}
    closure = getattr(value, "__closure__", None)
    return (value.__qualname__, [cell.cell_contents for cell in closure]) if closure else value


def _other_values(option: str) -> Iterator[Any]:
    """Some of the values that an option may have; some are refused."""

    def literals(annotation: Any) -> list[Any]:
        inner = [found for part in get_args(annotation) for found in literals(part)]
        return list(get_args(annotation)) if get_origin(annotation) is Literal else inner

    annotation = every_option()[option].annotation
    kinds = get_args(annotation) or (annotation,)
    yield from literals(annotation)
    yield from (True, False) if bool in kinds else ()
    yield from (0.37, 1.7, 3.5, 0) if float in kinds else ()


def _config(method: dict[str, Any], data: dict[str, str]) -> Config | None:
    try:
        return Config.model_validate({"method": method, "data": data})
    except ValidationError:
        return None


def test_every_option_that_a_method_accepts_changes_the_method_or_is_the_loops() -> None:
    for name, shipped in SHIPPED.items():
        for data in ({}, {"pairs": "p"}) if name in ("dpo", "refuel") else ({},):
            for companions in COMPANIONS:
                before = {"name": name, **companions}
                base = _config(before, data)
                for option in every_option().keys() - before.keys() if base else ():
                    fields = shipped.model_fields
                    default = fields[option].default if option in fields else every_option()[option].default
                    default = PPO_LOSS.get(option, default) if name == "ppo" else default
                    for value in _other_values(option):
                        is_at_rest = value == default or (option, value) == ("correction", "none")  # as in older runs
                        config = None if is_at_rest else _config({**before, option: value}, data)
                        if config is None or base is None or option in READ_BY_THE_LOOP:
                            continue
                        made = (_parts(make_method(one, LIMITS)) for one in (base, config))
                        assert next(made) != next(made), f"{before}, {data}: {option}={value} is accepted and not read"


@pytest.mark.parametrize("method", [["method=sft"], ["method=dpo", "data.pairs=p"], ["method=refuel", "data.pairs=p"]])
def test_what_only_played_attempts_have_a_use_for_is_refused_with_stored_data(method: list[str]) -> None:
    for option in (
        *("reward.turn_decay=0.5", "reward.weights.format=2", "reward.potential=true", "reward.max_length=9"),
        *("reward.on_truncated=mask", "train.max_empty_steps=9"),
        *("rollout.min_group_size=3", "alarms.max_kl=1", "alarms.stop_after=3"),
        *(("method.branch_turn=geometric",) if "method=refuel" in method else ()),
    ):
        with pytest.raises(ConfigError, match=rf"{option.partition('=')[0].split('.')[1]}.* is not read by method="):
            load_config("key_door", [*method, option])


@pytest.mark.parametrize("method", ["rebn", "reinforce_pp", "rft", "sft"])
def test_methods_that_compare_no_attempts_of_one_task_learn_from_one_attempt_each(
    method: str, make_rig: MakeRig
) -> None:
    rig = make_rig(
        {
            "method": {"name": method},
            "rollout": {"group_size": 1, "same_start": method == "sft"},
            "train": {"steps": 1, "tasks_per_step": 6},
            "eval": {"tasks": 0},
        }
    )
    asyncio.run(rig.loop().run())
    assert rig.methods_called().count("optim_step") == 1


def test_methods_that_compare_attempts_still_need_two() -> None:
    for method in ("grpo", "gspo", "rloo", "gigpo", "mt_grpo", "la_grpo", "dpo"):
        with pytest.raises(ConfigError, match="compares the attempts at a task; expected 2 or more"):
            load_config("key_door", [f"method={method}", "rollout.group_size=1"])


def test_what_is_accepted_for_a_presets_sake_and_not_read_is_said_in_the_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "guess_number_tiny", "method=sft", "--plan", "--no-time"]) == 0
    assert "rollout.group_size is not read: nothing is played for training" in capsys.readouterr().out
    assert main(["train", "study_chain", "method=sft", "--plan", "--no-time"]) == 0
    assert "train.max_sampled_tokens is not read: nothing is played for training" in capsys.readouterr().out
    assert main(["train", "key_door", "model=tiny", "method=rft", "reward.turn_decay=0.9", "--plan", "--no-time"]) == 0
    assert "reward.turn_decay is read only in a world that does not say" in capsys.readouterr().out
    assert main(["train", "guess_number_tiny", "warmup.steps=0", "warmup.batch_size=4", "--plan", "--no-time"]) == 0
    assert "warmup.batch_size is not read: warmup.steps is 0" in capsys.readouterr().out
    assert main(["train", "guess_number_tiny", "warmup.steps=0", "--plan", "--no-time"]) == 0
    assert "is not read" not in capsys.readouterr().out
