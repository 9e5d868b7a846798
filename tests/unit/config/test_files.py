"""What a file says, what the command line says on top, and what of the file is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from turnwise.cli import main
from turnwise.config.config import Config
from turnwise.config.files import (
    config_from_yaml,
    config_to_tree,
    config_to_yaml,
    left_out,
    load_config,
    override_config,
    preset_names,
)
from turnwise.envs.difficulty import levels_of
from turnwise.envs.registry import ADAPTERS, load_target, world_names, world_options
from turnwise.errors import ConfigError
from turnwise.losses.table import clip_bounds
from turnwise.methods.lookup import SHIPPED, read_method
from turnwise.methods.ppo import PPO_LOSS, Ppo
from turnwise.training.assemble import make_method
from turnwise.training.objects import NO_OBJECTS


def test_another_method_begins_with_its_own_defaults_whatever_a_preset_says_for_its_own() -> None:
    for preset in preset_names():
        file = load_config(preset).method
        assert load_config(preset, [f"method={file.name}"]).method == file
        without_memory = ["memory.window=0", "memory.summary_tokens=0"] if load_config(preset).memory.is_on else []
        for name in SHIPPED:
            if name != file.name:
                assert load_config(preset, [f"method={name}", *without_memory]).method == read_method(name)


def test_every_world_and_adapter_has_a_preset_of_its_name_whose_options_and_level_are_there() -> None:
    without = {"verifiers_classic"}  # nothing comes with it: it plays an env of the user's
    assert {*world_names(), *ADAPTERS} - without <= set(preset_names())
    for preset in preset_names():
        env = load_config(preset).env
        if env.mix:
            continue
        assert set(env.options) <= {option.name for option in world_options(env.name)}, preset
        assert env.difficulty < max(1, len(levels_of(load_target(env.name)))), preset
        if preset in (*world_names(), *ADAPTERS):
            assert env.name.partition(":")[0] == preset


def test_gspo_and_ppo_run_with_their_own_bounds_and_discount_on_presets_that_have_others() -> None:
    for preset in ("guess_number_tiny", "key_door"):
        config = load_config(preset, ["method=gspo"])
        assert "clip_high_threshold" not in config.method.loss_config, f"the loss has {clip_bounds('gspo')}"
        config = load_config(preset, ["method=ppo"])
        method = make_method(config, config.rollout.for_world(NO_OBJECTS.make_world(config.env), 512))
        assert isinstance(method, Ppo)
        assert (method.loss_config, method.gae.gamma) == (PPO_LOSS, 1.0)


def test_another_loss_leaves_behind_the_bounds_of_the_files_loss() -> None:
    cispo = load_config("guess_number_tiny", ["method.loss_fn=cispo"]).method
    assert (cispo.clip_high_threshold, cispo.entropy_coef) == (None, 0.003)
    same = load_config("guess_number_tiny", ["method.loss_fn=ppo"]).method
    assert same.clip_high_threshold == 1.28
    named = ["method.clip_high_threshold=3", "method.loss_fn=cispo"]
    assert load_config("guess_number_tiny", named).method.clip_high_threshold == 3


def test_another_correction_leaves_behind_the_bounds_of_the_files(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("method:\n  correction: token_mask\n  correction_high: 9\n", encoding="utf-8")
    assert load_config(str(file)).method.correction_high == 9
    assert load_config(str(file), ["method.correction=sequence_geo_mask"]).method.correction_high is None


def test_what_was_left_out_is_said_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "key_door", "model=tiny", "method=ppo", "--plan", "--no-time"]) == 0
    note = "left out, because key_door sets it for method=grpo: method.credit=reward_to_go, method.gamma=0.95"
    assert f"note         {note}\n" in capsys.readouterr().out
    assert main(["train", "key_door", "model=tiny", "method=grpo", "--plan", "--no-time"]) == 0
    assert "left out" not in capsys.readouterr().out


def test_a_run_that_goes_on_with_another_method_says_what_it_leaves_behind() -> None:
    stored = load_config("key_door", ["method.kl_coef=0.1"])
    config = override_config(stored, ["method=rloo"])
    assert config.method == read_method("rloo")
    (note,) = left_out(stored, ["method=rloo"])
    assert note.endswith("for method=grpo: method.credit=reward_to_go, method.gamma=0.95, method.kl_coef=0.1")
    assert left_out(stored, ["train.steps=3"]) == []


def test_a_mistake_in_the_file_is_told_even_where_its_method_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("method:\n  gama: 0.9\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"method\.gama is not an option"):
        load_config(str(file), ["method=ppo"])


def test_what_is_turned_off_takes_along_what_the_file_says_about_it() -> None:
    assert load_config("guess_number_tiny").eval.every == 50
    off = load_config("guess_number_tiny", ["eval.tasks=0", "warmup.steps=0"])
    assert (off.eval.tasks, off.eval.every, off.warmup.steps, off.warmup.batch_size) == (0, 10, 0, 8)
    assert config_from_yaml(config_to_yaml(off), "run") == off
    text = config_to_yaml(off).replace("every: 10", "every: 50")
    assert config_from_yaml(text, "a run of before").eval.every == 10


def test_a_run_without_servers_is_read_whatever_their_defaults_were_when_it_was_written() -> None:
    tree = config_to_tree(load_config("bargain"))
    tree["rollout"] |= {"server_deadline_s": 120.0, "server_start_s": 7.0}
    assert config_from_yaml(yaml.safe_dump(tree), "a run of before") == load_config("bargain")


def test_a_config_that_was_written_before_an_option_existed_says_what_that_run_did() -> None:
    def as_older(*overrides: str, method: str) -> Config:
        tree = config_to_tree(load_config("bargain", [f"method={method}", *overrides]))
        del tree["rollout"]["same_start"], tree["train"]["eps"]
        if method == "sft":
            tree["reward"]["turn_decay"] = 0.5
        return config_from_yaml(yaml.safe_dump(tree), "an old run")

    grpo = as_older(method="grpo")
    assert (grpo.rollout.same_start, grpo.train.eps) == (False, 1e-12)
    refuel = as_older("rollout.group_size=8", method="refuel")
    assert (refuel.rollout.same_start, refuel.rollout.group_size) == (True, 2)
    assert as_older(method="sft").reward.turn_decay == 1, "it was taken and not read"
    today = load_config("bargain")
    assert config_from_yaml(config_to_yaml(today), "a run") == today
