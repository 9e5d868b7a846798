"""A method from outside the package is one class in one file, by name, as a class, or as an object."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import Field

from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml, config_to_yaml, load_config, override_config
from turnwise.errors import ConfigError
from turnwise.methods.base import PLAY_GROUPS, DataConfig, MethodSetup, checked_kept
from turnwise.methods.grpo import Grpo
from turnwise.methods.lookup import as_method_options, check_method, read_method
from turnwise.methods.options import FreeLoss, MethodOptions, Weighed
from turnwise.trajectory import TrajectoryGroup

TOY = '''
import dataclasses

from pydantic import Field

from turnwise.methods.grpo import Grpo


class DoubledGrpo:
    """GRPO with advantages `factor` times as large."""

    class Options(Grpo.Options):
        factor: float = Field(default=2.0, gt=0, description="What advantages are multiplied by.")

        def build(self, setup):
            plain = super().build(setup)
            return dataclasses.replace(plain, compare=lambda rewards: self.factor * plain.compare(rewards))
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedGrpo(Grpo):
    class Options(FreeLoss, Weighed):
        cap: float = Field(default=1.0, gt=0, description="Most that an advantage may be.")

        def build(self, setup: MethodSetup) -> CappedGrpo:
            return CappedGrpo(
                loss_fn=self.loss, loss_config=self.loss_config, weigh=self.weighting(setup), cap=self.cap
            )

    cap: float

    def advantages(self, group: TrajectoryGroup) -> list[NDArray[np.float64]]:
        return [own_K.clip(-self.cap, self.cap) for own_K in Grpo.advantages(self, group)]


@pytest.fixture
def toy(tmp_path: Path) -> str:
    file = tmp_path / "toy_methods.py"
    file.write_text(TOY, encoding="utf-8")
    return f"{file}:DoubledGrpo"


def test_its_options_are_checked_like_those_of_any_method(toy: str) -> None:
    config = load_config("guess_number", [f"method={toy}", "method.factor=4", "loss=ppo", "method.dual_clip=3"])
    assert (config.method.factor, config.method.loss, config.method.loss_config) == (4.0, "ppo", {"dual_clip": 3.0})
    for override, message in (
        ("method.factro=4", r"method\.factro is not an option"),
        ("method.factor=0", r"method\.factor=0: input should be greater than 0"),
        ("method.omega=1", "omega is not read by method=.*DoubledGrpo, only by gigpo"),
        ("critic.rank=4", "critic.rank is not read by method=.*DoubledGrpo, only by ppo"),
        ("rollout.group_size=1", "compares the attempts at a task; expected 2 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config("guess_number", [f"method={toy}", override])


def test_a_run_is_resumed_with_its_method_by_import_path_and_another_method_leaves_its_options_behind(toy: str) -> None:
    config = load_config("guess_number", [f"method={toy}", "method.factor=4"])
    assert config_from_yaml(config_to_yaml(config), "a run") == config
    assert override_config(config, ["train.steps=3"]).method == config.method
    assert override_config(config, ["method=rloo"]).method == read_method("rloo")


def test_a_run_whose_method_is_gone_can_be_looked_at_and_going_on_says_what_is_missing(toy: str) -> None:
    text = config_to_yaml(load_config("guess_number", [f"method={toy}", "method.factor=4"]))
    for name, message in (
        ("gone_from_here:Mine", "no module 'gone_from_here'"),
        ("object:notebook.Mine", "pass it again"),
    ):
        stored = config_from_yaml(text.replace(toy, name), "a run")
        assert (stored.method.name, stored.method.factor) == (name, 4.0)
        assert config_from_yaml(config_to_yaml(stored), "a run") == stored
        with pytest.raises(ConfigError, match=message):
            override_config(stored, ["train.steps=3"])
        with pytest.raises(ConfigError, match=message):
            stored.method.build(MethodSetup(data=DataConfig(), group_size=4, max_turns=1, max_tokens=4))


def test_python_takes_a_class_its_options_or_a_built_method() -> None:
    for given in (CappedGrpo, CappedGrpo.Options(), CappedGrpo.Options.path()):
        assert as_method_options(given) == CappedGrpo.Options()
    assert as_method_options(CappedGrpo, cap=0.5) == CappedGrpo.Options(cap=0.5)
    assert Config.model_validate({"method": CappedGrpo}).method == CappedGrpo.Options()
    config = Config(method=CappedGrpo.Options(cap=0.5))
    assert config_from_yaml(config_to_yaml(config), "a run") == config
    built = CappedGrpo(loss_fn="ppo", loss_config={"dual_clip": 3.0}, cap=0.5)
    passed = Config(method=as_method_options(built))
    setup = MethodSetup(data=DataConfig(), group_size=4, max_turns=1, max_tokens=4)
    assert config_from_yaml(config_to_yaml(passed), "a run").method.build(setup) is built
    assert (passed.method.loss, passed.method.loss_config) == ("ppo", {"dual_clip": 3.0})
    assert override_config(passed, ["train.steps=3"]).method is passed.method
    assert override_config(passed, ["method=rloo"]).method == read_method("rloo")
    with pytest.raises(ConfigError, match="loss_fn is given beside a method that is built"):
        override_config(passed, ["loss=cispo"])
    another = CappedGrpo(loss_fn="ppo", loss_config={}, cap=0.25)
    assert as_method_options(another).name != passed.method.name, "two objects are never mixed up"


def test_a_method_that_is_not_there_says_what_it_needs(tmp_path: Path) -> None:
    for name, message in (
        ("object:notebook.Mine", r"was passed as a Python object.*pass it again \(method=\.\.\.\)"),
        ("__main__:Mine", "was passed as a Python object"),
        ("no_such_module:Mine", "no module 'no_such_module'"),
        (f"{tmp_path / 'gone.py'}:Mine", "no file .*gone.py"),
        ("pathlib:Path", "has no Options; expected a class with `class Options"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config("guess_number", [f"method={name}"])
    with pytest.raises(ConfigError, match="expected a name, `module:Class`, a class with Options"):
        as_method_options(3)
    with pytest.raises(ConfigError, match="did you mean gigpo"):
        as_method_options("gigppo")

    class Unfinished(MethodOptions):
        pass

    with pytest.raises(NotImplementedError, match=r"Unfinished.build\(setup\) is missing"):
        Unfinished().build(MethodSetup(data=DataConfig(), group_size=4, max_turns=1, max_tokens=4))


class _PlainOptions:
    class Options:
        pass


class _NoLessons:
    source, loss_fn, loss_config = PLAY_GROUPS, "ppo", {}


def test_a_method_that_lacks_something_says_what_before_anything_is_spent() -> None:
    with pytest.raises(ConfigError, match="its Options does not inherit from MethodOptions"):
        as_method_options(_PlainOptions)
    with pytest.raises(ConfigError, match="_NoLessons has no lessons and no keep; a method has source, loss_fn"):
        as_method_options(_NoLessons())
    with pytest.raises(ConfigError, match=r"Mine\.build\(setup\) returned NoneType, which has no source"):
        check_method(None, "Mine.build(setup)")
    with pytest.raises(ConfigError, match=r"_NoLessons\.keep\(groups\) returned list; expected Kept\(groups"):
        checked_kept([], _NoLessons(), 0)


def test_a_misspelt_option_of_an_own_method_names_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"method\.capp is not an option of .*; did you mean method\.cap\?"):
        read_method({"name": CappedGrpo.Options.path(), "capp": 0.5})
