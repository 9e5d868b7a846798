from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.envs.adapters.peers import import_peer, numbers_of, row_tasks, seed_tasks
from turnwise.envs.registry import ADAPTERS, get_world, load_target, world_options
from turnwise.errors import ConfigError


def test_a_missing_library_comes_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"need the package 'no_such_gym'.*pip install 'turnwise\[no-such\]'"):
        import_peer("no_such_gym.inner", extra="no-such")


def test_a_library_that_would_replace_ours_is_installed_by_a_second_command() -> None:
    with pytest.raises(ConfigError, match=r"turnwise\[no-such\]' && pip install --no-deps no-such$"):
        import_peer("no_such_gym", extra="no-such", then="pip install --no-deps no-such")


def test_an_error_inside_a_library_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_a_gym.py").write_text("import no_such_package_at_all\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        import_peer("half_a_gym", extra="half")


def test_seeds_are_even_for_training_and_odd_for_test() -> None:
    train, test = seed_tasks("x", "train", 50, 0), seed_tasks("x", "test", 50, 0)
    assert {task.data["seed"] % 2 for task in train} == {0}
    assert {task.data["seed"] % 2 for task in test} == {1}
    assert seed_tasks("x", "train", 50, 0) == train != seed_tasks("x", "train", 50, 1)


def _write(path: Path, numbers: range) -> Path:
    path.write_text("\n".join(json.dumps({"prompt": str(n)}) for n in numbers), encoding="utf-8")
    return path


def test_rows_are_held_out_by_their_content(tmp_path: Path) -> None:
    tasks = row_tasks(_write(tmp_path / "a.jsonl", range(100)), None)
    again = row_tasks(_write(tmp_path / "b.jsonl", range(99, -1, -1)), None)
    assert len(tasks["train"]) + len(tasks["test"]) == 100
    assert {task.id for task in tasks["test"]} == {task.id for task in again["test"]}
    assert 5 <= len(tasks["test"]) <= 40


def test_rows_that_are_in_both_files_are_refused(tmp_path: Path) -> None:
    train, test = _write(tmp_path / "a.jsonl", range(10)), _write(tmp_path / "b.jsonl", range(9, 12))
    with pytest.raises(ConfigError, match=r'1 tasks are both trained on and held out, such as \{"prompt": "9"\}'):
        row_tasks(train, test)


def test_only_finite_numbers_are_logged() -> None:
    assert numbers_of({"a": 1, "b": 0.5, "c": float("nan"), "d": "text", "e": True, 3: 4}) == {"a": 1, "b": 0.5, "e": 1}
    assert numbers_of(None) == {}


@pytest.mark.parametrize("prefix", ADAPTERS)
def test_the_options_of_an_adapter_can_be_listed_and_all_have_defaults(prefix: str) -> None:
    options = world_options(f"{prefix}:anything")
    assert "max_tokens" in {option.name for option in options}
    assert not [option.name for option in options if option.is_required]


def test_a_prefix_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="'gymnasium:' is missing its env_id"):
        load_target("gymnasium:")


def test_an_unknown_option_of_an_adapter_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="world gymnasium:Taxi-v4: unknown option 'mak'; did you mean 'make'"):
        get_world("gymnasium:Taxi-v4", mak={})


def test_a_name_near_a_prefix_is_pointed_to_it() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'gymnasium'\?.*gymnasium:\.\.\."):
        get_world("gymnasum")
