"""SkyRL's names, and options that had another section, are taken wherever an option is."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml, config_to_yaml, load_config, option_paths, override_config
from turnwise.config.spellings import SPELLINGS, canonical_option
from turnwise.errors import ConfigError

OLD_FILE = """\
model: {name: tiny, device: cpu, dtype: float32}
generator:
  n_samples_per_prompt: 4
  max_turns: 3
  max_num_seqs: 32
  gpu_memory_utilization: 0.7
  sampling_params: {temperature: 0.5, max_generate_length: 16, top_p: 1.0, top_k: -1}
train: {steps: 2, micro_batch_tokens: 512}
"""


def test_every_spelling_stands_for_an_option() -> None:
    assert set(SPELLINGS.values()) <= set(option_paths())
    assert not set(SPELLINGS) & set(option_paths())


def test_a_file_the_command_line_and_python_read_the_same_spellings(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(OLD_FILE, encoding="utf-8")
    config = load_config(str(file))
    rollout, engine = config.rollout, config.engine_in_use
    assert (rollout.group_size, rollout.max_turns, rollout.temperature, rollout.max_tokens_per_turn) == (4, 3, 0.5, 16)
    assert (engine.device, engine.dtype, engine.max_num_seqs) == ("cpu", "float32", 32)
    assert (engine.gpu_memory_utilization, engine.micro_batch_tokens) == (0.7, 512)
    python = Config.model_validate({"generator": {"n_samples_per_prompt": 4}, "model": {"device": "cpu"}})
    assert (python.rollout.group_size, python.engine.device) == (4, "cpu")
    over = load_config(str(file), ["generator.n_samples_per_prompt=6", "model.device=cuda"])
    assert (over.rollout.group_size, over.engine.device) == (6, "cuda"), "an override wins over the file"


def test_a_config_is_written_with_the_options_own_names_and_older_ones_load() -> None:
    config = config_from_yaml(OLD_FILE, "an older run")
    text = config_to_yaml(config)
    assert "generator" not in text
    assert config_from_yaml(text, "run") == config
    assert override_config(config, ["generator.max_turns=5"]).rollout.max_turns == 5


def test_an_older_run_that_wrote_the_engines_own_values_under_generator_still_loads() -> None:
    """Such a run wrote every option down, also where nothing read it."""
    sizes = "max_num_seqs: 256, gpu_memory_utilization: 0.9"
    for others in ("generator: {deterministic: true, %s}", "model: {base_url: 'http://a'}\ngenerator: {%s}"):
        config = config_from_yaml(others % sizes, "an older run")
        assert (config.engine.max_num_seqs, config.engine.gpu_memory_utilization) == (256, 0.9)
        assert (config.rollout.max_num_seqs, config.rollout.gpu_memory_utilization) == (0, 0)


@pytest.mark.parametrize(
    "overrides",
    [["generator.n_samples_per_prompt=4", "rollout.group_size=8"], ["engine.device=cpu", "model.device=cuda"]],
)
def test_two_spellings_that_differ_are_refused(overrides: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"two spellings of {canonical_option(overrides[0].partition('=')[0])}"):
        load_config("guess_number", overrides)
    agreeing = [f"{text.partition('=')[0]}={overrides[0].partition('=')[2]}" for text in overrides]
    assert load_config("guess_number", agreeing)
    file = tmp_path / "both.yaml"
    file.write_text("generator: {n_samples_per_prompt: 4}\nrollout: {group_size: 8}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"generator\.n_samples_per_prompt=4 and rollout\.group_size=8"):
        load_config(str(file))


def test_options_that_must_be_off_are_taken_when_they_are() -> None:
    assert load_config("guess_number", ["generator.sampling_params.top_p=1"]) == load_config("guess_number")
    with pytest.raises(ConfigError, match="would sample from a truncated distribution"):
        load_config("guess_number", ["generator.sampling_params.top_k=40"])
