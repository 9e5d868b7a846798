"""One world of a mix in which nothing can be learned."""

from __future__ import annotations

import math

import pytest

from turnwise.doctor import diagnose
from unit.doctor.conftest import WrittenRun


def _mix(run: WrittenRun, **success: float) -> WrittenRun:
    run.overrides = [f"env.mix={','.join(success)}"]
    run.set(**{f"world__success_{name}": value for name, value in success.items()})
    run.set(**{f"world__groups_{name}": 2.0 for name in success})
    return run


def test_a_world_in_which_every_attempt_fails_is_named(run: WrittenRun) -> None:
    (finding,) = diagnose(_mix(run, guess_number=0.4, key_door=0.0).write())
    assert finding.name == "world_fails"
    assert "all attempts of the last 20 groups in key_door failed" in finding.seen
    assert [fix.option for fix in finding.fixes] == [
        "warmup.steps=50",
        "env.mix.key_door.curriculum=true",
        "env.mix.key_door.share=0.5",
    ]


def test_a_world_that_is_solved_costs_its_share(run: WrittenRun) -> None:
    assert _mix(run, guess_number=0.4, key_door=1.0).names == ["world_solved"]


def test_worlds_that_learn_or_were_hardly_played_are_not_named(run: WrittenRun) -> None:
    _mix(run, guess_number=0.4, key_door=0.0).set(world__groups_key_door=0.5)
    assert run.names == []


def test_a_world_beside_one_that_is_never_judged_is_not_compared_with_it(run: WrittenRun) -> None:
    _mix(run, guess_number=0.4, key_door=0.0).set(world__success_guess_number=math.nan)
    assert run.names == []


@pytest.mark.parametrize("option", ["curriculum=true", "difficulty=0"])
def test_a_curriculum_is_not_proposed_where_there_is_one_or_no_easier_level(run: WrittenRun, option: str) -> None:
    _mix(run, guess_number=0.4, key_door=0.0).overrides.append(f"env.mix.key_door.{option}")
    (finding,) = diagnose(run.write())
    assert [fix.option for fix in finding.fixes] == ["warmup.steps=50", "env.mix.key_door.share=0.5"]
