"""A config option is added in one place: a field in its room's section."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml
from pydantic import Field

import turnwise
from turnwise.commands.serve import FLAGS
from turnwise.config.config import Config
from turnwise.config.files import build_section, option_paths
from turnwise.config.reference import help_text, options, reference_page
from turnwise.engine.config import EngineConfig
from turnwise.errors import ConfigError
from turnwise.rollout.config import RolloutConfig
from turnwise.service.config import ServeConfig


class WiderRollout(RolloutConfig):
    """How attempts are played, with one option more."""

    patience: int = Field(default=3, ge=1, description="How long an attempt waits.")


class WiderConfig(Config):
    """A config with that section."""

    rollout: WiderRollout = Field(default_factory=WiderRollout)


def test_a_new_field_of_a_section_is_an_option_of_the_command_line_of_files_and_of_the_docs() -> None:
    assert "rollout.patience" in option_paths(WiderConfig)
    assert "| `rollout.patience` | whole number | `3` | How long an attempt waits. |" in reference_page(WiderConfig)
    assert "rollout.patience=3" in help_text(WiderConfig)
    config = build_section(WiderConfig, {}, ["rollout.patience=5", "rollout.max_turns=2"])
    assert (config.rollout.patience, config.rollout.max_turns) == (5, 2)
    written = yaml.safe_dump(config.model_dump(mode="json"))
    assert WiderConfig.model_validate(yaml.safe_load(written)) == config
    with pytest.raises(ConfigError, match=r"rollout\.patience=0: input should be greater than or equal to 1"):
        build_section(WiderConfig, {}, ["rollout.patience=0"])
    with pytest.raises(ConfigError, match=r"rollout\.patienc is not an option; did you mean 'rollout\.patience'"):
        build_section(WiderConfig, {}, ["rollout.patienc=5"])


def test_every_engine_setting_is_reached_from_train_and_from_serve() -> None:
    settings = [f"engine.{name}" for name in EngineConfig.model_fields]
    assert set(settings) <= set(option_paths(Config))
    assert set(settings) <= set(option_paths(ServeConfig))
    assert set(FLAGS.values()) <= set(option_paths(ServeConfig))
    given = {"models": ("tiny",), "data_dir": Path("x"), "engine.device": "cpu"}
    config = build_section(ServeConfig, given, ["engine.block_size=32", "engine.prefix_cache=false", "gap_s=5"])
    assert (config.engine.device, config.engine.block_size, config.engine.prefix_cache) == ("cpu", 32, False)
    with pytest.raises(ConfigError, match=r"engine\.device=cuda contradicts a flag that sets cpu"):
        build_section(ServeConfig, given, ["engine.device=cuda"])
    assert all(option.description.endswith(".") for option in options(ServeConfig))


def test_the_settings_of_a_run_reach_its_engine() -> None:
    config = Config.model_validate({"engine": {"block_size": 8}, "train": {"seed": 3}})
    assert config.engine_in_use == EngineConfig(block_size=8, seed=3)
    alone = Config.model_validate({"rollout": {"deterministic": True}, "engine": {"seed": 5}}).engine_in_use
    assert (alone.max_num_seqs, alone.prefix_cache, alone.seed) == (1, False, 5)


def test_no_section_is_declared_where_the_sections_are_put_together() -> None:
    source = (Path(turnwise.__file__).parent / "config" / "config.py").read_text(encoding="utf-8")
    assert [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)] == ["Config"]
