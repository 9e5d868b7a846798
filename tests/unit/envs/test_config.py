"""The section `env`: spellings of a mix, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from cases import for_each
from turnwise.config.files import config_from_yaml, config_to_yaml, left_out, load_config
from turnwise.errors import ConfigError

BOTH = {"guess_number": 2.0, "key_door": 1.0}


@for_each(
    "options",
    [
        ["env.mix=guess_number=2,key_door=1"],
        ["env.mix={guess_number: 2, key_door: 1}"],
        ["env.mix={guess_number: {share: 2}, key_door: }"],
        ["env.mix=[guess_number, key_door]", "env.mix.guess_number.share=2"],
        ["env.mix.guess_number.share=2", "env.mix.key_door.name=key_door"],
    ],
)
def test_a_mix_may_be_written_in_several_ways(options: list[str]) -> None:
    env = load_config("mix", options).env
    assert {name: member.share for name, member in env.mix.items()} == BOTH
    assert [member.name for member in env.mix.values()] == list(BOTH)
    assert env.name == "mix"


def test_members_have_options_of_their_own_and_come_back_from_a_run() -> None:
    sections = "{easy: {name: key_door, difficulty: 0}, hard: {name: key_door, options: {num_rooms: 3}, share: 3}}"
    config = load_config("mix", [f"env.mix={sections}", "env.mix.easy.options.demonstration_skill=0.5"])
    assert config_from_yaml(config_to_yaml(config), "run") == config
    assert config.env.mix["easy"].options == {"demonstration_skill": 0.5}
    assert config.env.mix["hard"].options == {"num_rooms": 3}


def test_a_mix_on_the_command_line_takes_the_place_of_a_files_world() -> None:
    options = ["env.mix=guess_number,key_door"]
    assert load_config("guess_number", options).env.options == {}
    (note,) = left_out("guess_number", options)
    assert "env.mix names the worlds: env.name, env.options of guess_number" in note
    assert load_config("mix_tiny", ["env=key_door"]).env.mix == {}


def test_a_curriculum_takes_the_place_of_the_level_that_a_file_sets() -> None:
    options = ["env.curriculum=true"]
    assert load_config("household", options).env.options == {"demonstration_skill": 0.7}
    (note,) = left_out("household", options)
    assert "env.curriculum=true sets it: env.options.level=2 of household" in note


@for_each(
    ("options", "told"),
    [
        ([], "env: name=mix has no worlds; say which"),
        (["env.mix=guess_number"], "mix has one world, guess_number; expected two or more"),
        (["env.mix=guess_number=-1,key_door"], "env.mix.guess_number.share='-1': input should be greater than 0"),
        (["env.mix=guess_number=0,key_door"], "env.mix.guess_number.share='0': input should be greater than 0"),
        (["env.mix=guess_number,guess_number"], "guess_number comes twice"),
        (["env.mix=[a, a]"], "a name comes twice"),
        (["env.mix=a,,b"], "'' is no member; expected NAME or NAME=SHARE"),
        (["env.mix=3"], "3; expected names, or names with shares"),
        (["env.mix=my.module:World,key_door"], "cannot be a member's name"),
        (["env.mix=a,b", "env.difficulty=1"], "difficulty is not read beside mix; set it for a member"),
        (["env.mix=a,b", "env.name=key_door"], "name=key_door beside mix=a,b: both are worlds"),
        (["env.mix=a,b", "env.mix.a.shares=2"], "env.mix.a.shares is not an option"),
        (["env.mix=a,b", "cluster.env_workers=2"], "env.mix with cluster.env_workers=2: a worker serves one world"),
        (["env.mix=a,b", "opponent.train=both"], "opponent.train is not read with env.mix"),
        (["env.mix=a=2,b", "method=sft"], "env.mix.a.share is not read by method=sft"),
        (["env=key_door", "env.curriculum_target=0.3"], "curriculum_target is not read without curriculum=true"),
        (["env=key_door", "env.curriculum=true", "env.tasks=a.jsonl"], "curriculum chooses them; leave one"),
        (["env=key_door", "env.curriculum=true", "env.curriculum_target=1"], "should be less than 1"),
        (["env=key_door", "env.curriculum=true", "cluster.env_workers=2"], "env.curriculum with cluster.env_workers"),
        (["env=key_door", "env.curriculum=true", "method=sft"], "a curriculum is not read by method=sft"),
    ],
)
def test_what_cannot_be_played_is_refused_with_its_reason(options: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("mix", options)
    assert told in str(caught.value)


def test_a_dictionary_from_python_is_read_the_same_way() -> None:
    from turnwise.training.arguments import read_arguments

    mix: dict[str, Any] = {"guess_number": {"share": 2}, "key_door": {}}
    config, _, _ = read_arguments("mix", {"env": {"mix": mix}}, [])
    assert {name: member.share for name, member in config.env.mix.items()} == BOTH
