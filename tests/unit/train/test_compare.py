"""What a comparison is asked, and how it tells what came out."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from turnwise.errors import ConfigError
from turnwise.train.compare import Result, paired_difference, parse_request, table_lines
from turnwise.train.compare_figure import Curve, comparison_svg


def _result(label: str, seed: int, success: float, **fields: object) -> Result:
    known: dict[str, object] = {
        "success_low": success - 0.1,
        "success_high": success + 0.1,
        "reward": success,
        "start_success": 0.1,
        "steps": 10,
        "sampled_tokens": 1000,
        "trained_tokens": 250,
        "duration_s": 60.0,
        "curve": ((0, 0, 0.1), (1000, 250, success)),
    } | fields
    return Result(label=label, seed=seed, success=success, **known)  # type: ignore[arg-type]


def test_methods_may_come_with_options_of_their_own() -> None:
    request = parse_request(
        ["methods=grpo,grpo[credit=reward_to_go;gamma=0.9], ppo[critic.pretrain_steps=0]", "env=key_door", "model=tiny"]
    )
    assert [variant.label for variant in request.variants] == [
        "grpo",
        "grpo[credit=reward_to_go;gamma=0.9]",
        "ppo[critic.pretrain_steps=0]",
    ]
    assert [variant.overrides for variant in request.variants] == [
        (),
        ("method.credit=reward_to_go", "method.gamma=0.9"),
        ("critic.pretrain_steps=0",),
    ]
    assert (request.env, request.seeds, request.tokens, request.overrides) == ("key_door", 3, 0, ("model=tiny",))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["env=key_door"], "methods is missing"),
        (["methods=grpo"], "env is missing"),
        (["methods=gpro", "env=x"], "methods names 'gpro'; expected some of grpo"),
        (["methods=grpo,grpo", "env=x"], r"twice; set them apart by an option: grpo\[option=value\]"),
        (["methods=grpo[a=1", "env=x"], "cannot be read"),
        (["methods=grpo", "env=x", "seeds=0"], "seeds=0; expected a whole number from 1 up"),
        (["methods=grpo", "env=x", "tokens=many"], "tokens=many; expected a whole number from 0 up"),
    ],
)
def test_mistakes_are_told_with_what_to_do(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_request(arguments)


def test_the_table_has_means_over_seeds_and_both_kinds_of_tokens() -> None:
    lines = table_lines([_result("a", 0, 0.5), _result("a", 1, 0.6), _result("b", 0, 0.2), _result("b", 1, 0.2)])
    assert lines[0].split() == [
        "method",
        "held-out",
        "success",
        "points",
        "more",
        "before",
        "reward",
        "sampled",
        "trained",
        "steps",
        "time",
    ]
    assert "55.0% [0.0%, 100.0%]" in lines[1]
    assert "1,000" in lines[1]
    assert "250" in lines[1]
    assert "20.0% [20.0%, 20.0%]" in lines[2]
    assert "means over 2 seeds" in lines[3]
    assert "points more than a, seed by seed" in lines[3]


def test_a_difference_is_taken_seed_by_seed() -> None:
    """Seeds differ by 80 points and methods by 10: the difference is as sure as the methods' means are not."""
    results = [_result("a", 0, 0.1), _result("a", 1, 0.9), _result("b", 0, 0.2), _result("b", 1, 1.0)]
    found = paired_difference(results, "b", "a")
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert "+10.0 [+10.0, +10.0]" in table_lines(results)[2]
    assert "+10.0" not in table_lines(results)[1], "the first method is what the others are compared with"


def test_a_seed_that_one_method_lacks_is_in_no_difference() -> None:
    results = [_result("a", 0, 0.5), _result("a", 1, 0.9), _result("b", 0, 0.4)]
    found = paired_difference(results, "b", "a")
    assert (found.value, found.low, found.high) == (pytest.approx(-0.1), -math.inf, math.inf)
    assert "  -10.0  " in table_lines(results)[2], "one seed says nothing about others, so there is no interval"


def test_one_seed_has_the_interval_of_its_held_out_tasks() -> None:
    lines = table_lines([_result("a", 0, 0.5)])
    assert "50.0% [40.0%, 60.0%]" in lines[1]
    assert "one seed" in lines[2]


def test_a_success_that_was_never_measured_is_said_to_be_so() -> None:
    lines = table_lines([_result("a", 0, math.nan, start_success=math.nan)])
    assert lines[1].count("not measured") == 2


def test_the_figure_is_a_picture_of_every_run_in_both_panels() -> None:
    curves = [
        Curve(label="a<b", points=((0, 0, 0.1), (100, 20, 0.5))),
        Curve(label="a<b", points=((0, 0, 0.2), (90, 30, 0.6))),
        Curve(label="c", points=((0, 0, math.nan),)),
    ]
    root = ElementTree.fromstring(comparison_svg("title & more", curves))
    lines = [node for node in root.iter() if node.tag.endswith("polyline")]
    thin = [line for line in lines if line.get("stroke-opacity") == "0.35"]
    assert len(thin) == 4, "two measured runs, two panels"
    texts = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert {"a<b", "c", "title & more", "sampled tokens", "trained tokens"} <= set(texts)
