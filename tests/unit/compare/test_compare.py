"""What a comparison is asked, what it makes of its runs, and how it tells what came out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from turnwise.compare.compare import Grid
from turnwise.compare.figure import Curve, comparison_svg
from turnwise.compare.request import bounded, parse_request
from turnwise.compare.results import Result, area_under, holm, paired_difference, student_p, summarize
from turnwise.compare.table import branch_lines, markdown, table_lines, to_json
from turnwise.errors import ConfigError


def _result(label: str, seed: int, success: float, **fields: object) -> Result:
    known: dict[str, object] = {
        "world": "w",
        "success_low": success - 0.1,
        "success_high": success + 0.1,
        "best_success": success,
        "area": success / 2,
        "reward": success,
        "start_success": 0.1,
        "steps": 10,
        "sampled_tokens": 1000,
        "trained_tokens": 250,
        "duration_s": 60.0,
        "curve": ((0, 0, 0.1), (1000, 250, success)),
    } | fields
    return Result(label=label, seed=seed, success=success, **known)  # type: ignore[arg-type]


def test_methods_and_worlds_may_come_with_options_of_their_own() -> None:
    request = parse_request(
        [
            "methods=grpo,grpo[credit=reward_to_go;gamma=0.9], ppo[critic.pretrain_steps=0]",
            "worlds=key_door[tokens=500;env.options.num_rooms=2],bargain",
            *("model=tiny", "tokens=900", "jobs=4", "seeds=2"),
        ]
    )
    assert [(variant.label, variant.overrides) for variant in request.variants] == [
        ("grpo", ()),
        ("grpo[credit=reward_to_go;gamma=0.9]", ("method.credit=reward_to_go", "method.gamma=0.9")),
        ("ppo[critic.pretrain_steps=0]", ("critic.pretrain_steps=0",)),
    ]
    assert [(world.name, world.label, world.tokens) for world in request.worlds] == [
        ("key_door", "key_door[env.options.num_rooms=2]", 500),
        ("bargain", "bargain", 900),
    ]
    assert (request.seeds, request.jobs, request.overrides) == (2, 4, ("model=tiny",))
    config = request.config(request.worlds[0], request.variants[1], 1)
    assert (config.env.options["num_rooms"], config.method.gamma, config.train.seed) == (2, 0.9, 1)
    stored = parse_request(["methods=dpo[data.pairs=pairs-{seed}.parquet]", "worlds=bargain", "model=tiny"])
    assert stored.config(stored.worlds[0], stored.variants[0], 2).data.pairs == "pairs-2.parquet"


def test_env_and_out_are_other_words_for_worlds_and_dir() -> None:
    old = parse_request(["methods=grpo", "env=key_door"], "there")
    new = parse_request(["methods=grpo", "worlds=key_door", "dir=there"])
    assert old == new
    assert (old.directory, old.jobs, old.seeds) == (Path("there"), 1, 3)
    assert parse_request(["methods=grpo", "worlds=key_door,bargain"]).directory == Path("runs/compare-key_door-bargain")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["env=key_door"], "methods is missing"),
        (["methods=grpo"], r"worlds \(or env\) is missing"),
        (["methods=grpo", "env=x", "worlds=y"], "env and worlds are both given"),
        (["methods=gpro", "env=x"], "methods names 'gpro'; expected some of grpo"),
        (["methods=grpo,grpo", "env=x"], r"twice; set them apart by an option: grpo\[option=value\]"),
        (["methods=grpo", "env=x,x"], r"worlds names x twice"),
        (["methods=grpo[a=1", "env=x"], "cannot be read"),
        (["methods=grpo", "env=x", "seeds=0"], "seeds=0; expected a whole number from 1 up"),
        (["methods=grpo", "env=x", "jobs=0"], "jobs=0; expected a whole number from 1 up"),
        (["methods=grpo", "env=x", "tokens=many"], "tokens=many; expected a whole number from 0 up"),
        (["methods=grpo", "env=x[tokens=0]"], "tokens of x=0; expected a whole number from 1 up"),
    ],
)
def test_mistakes_are_told_with_what_to_do(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_request(arguments)


def test_a_bound_on_tokens_takes_the_place_of_every_other_end() -> None:
    """A run in which all attempts fail, or all succeed, would end before the others, and a failed one is in no mean."""
    request = parse_request(["methods=grpo,sft", "env=key_door", "model=tiny"])
    grpo, sft = (request.config(request.worlds[0], variant, 0) for variant in request.variants)
    train = bounded(grpo, 5000).train
    assert train.max_sampled_tokens == 5000
    assert min(train.steps, train.max_empty_steps) >= 1_000_000
    assert bounded(sft, 5000) == sft, "it samples nothing, and would never come to a bound"


def test_methods_of_one_world_and_seed_share_their_warm_up(tmp_path: Path) -> None:
    methods = "methods=grpo,ppo[critic.pretrain_steps=2],grpo[train.learning_rate=1e-3],grpo[warmup.steps=9],sft"
    request = parse_request(
        [methods, "worlds=key_door,bargain", "model=tiny", "seeds=2", f"dir={tmp_path}", "tokens=9"]
    )
    grid = Grid.plan(request)
    needs = {
        (run.world.label, run.variant.label, run.seed): [job.name for job in run.job.needs]
        for run in grid.runs
        if run.job is not None
    }
    assert len(needs) == 20
    assert len(grid.jobs) == 24, "and a warm-up for each world and seed"
    for world in ("key_door", "bargain"):
        for seed in (0, 1):
            shared = [f"{world}/warmup-grpo-seed{seed}"]
            own = {label: found for (w, label, s), found in needs.items() if (w, s) == (world, seed)}
            assert own.pop("grpo[warmup.steps=9]") == [], "nobody else has its weights"
            assert list(own.values()) == [shared] * 4


def test_runs_that_see_other_prompts_or_are_measured_otherwise_have_warm_ups_of_their_own(tmp_path: Path) -> None:
    """A memory changes the prompts that a warm-up learns, and a panel of opponents its evaluation."""

    def shared(world: str, *own: str) -> list[tuple[str, ...]]:
        """The warm-ups that the runs of a grid wait for, in the order of the methods."""
        methods = ",".join(["grpo", *(f"grpo[{options}]" for options in own)])
        arguments = [f"methods={methods}", f"worlds={world}", "model=tiny", "seeds=1", f"dir={tmp_path}", "tokens=9"]
        jobs = [run.job for run in Grid.plan(parse_request([*arguments, "warmup.steps=2"])).runs]
        return [tuple(needed.name for needed in job.needs) for job in jobs if job is not None]

    plain, same, *other = shared(
        "key_door", "train.learning_rate=1e-3", "memory.window=2", "memory.window=2;eval.every=3"
    )
    assert plain == same != ()
    assert plain not in other
    plain, same, other = shared("negotiate", "opponent.keep_last=3", "opponent.temperature=0.5")
    assert (plain == same, other) == (True, ())


def test_the_first_run_finds_the_bound_where_nobody_gave_one(tmp_path: Path) -> None:
    arguments = [
        "methods=sft,grpo,rloo",
        "worlds=key_door[tokens=9],bargain",
        "model=tiny",
        "seeds=1",
        "warmup.steps=0",
    ]
    grid = Grid.plan(parse_request([*arguments, f"dir={tmp_path}"]))
    needs = {run.job.name: [job.name for job in run.job.needs] for run in grid.runs if run.job is not None}
    assert needs == {
        "key_door/sft-seed0": [],
        "key_door/grpo-seed0": [],
        "key_door/rloo-seed0": [],
        "bargain/sft-seed0": [],
        "bargain/grpo-seed0": [],
        "bargain/rloo-seed0": ["bargain/grpo-seed0"],
    }


def test_the_table_has_means_over_seeds_and_both_kinds_of_tokens() -> None:
    results = [_result("a", 0, 0.5), _result("a", 1, 0.6), _result("b", 0, 0.2), _result("b", 1, 0.2)]
    lines = table_lines([*results, _result("a", 0, 0.9, world="v")])
    assert lines[0].split()[:5] == ["world", "method", "held-out", "success", "points"]
    assert "55.0% [0.0%, 100.0%]" in lines[1]
    assert "1,000" in lines[1]
    assert "250" in lines[1]
    assert "20.0% [20.0%, 20.0%]" in lines[2]
    assert lines[3].startswith("v"), "another world has rows of its own"
    assert "means over 2 seeds" in lines[4]
    assert "points more than a, seed by seed" in lines[4]


def test_a_difference_is_taken_seed_by_seed() -> None:
    """Seeds differ by 80 points and methods by 10: the difference is as sure as the methods' means are not."""
    results = [_result("a", 0, 0.1), _result("a", 1, 0.9), _result("b", 0, 0.2), _result("b", 1, 1.0)]
    found = paired_difference(results, "b", "a").interval
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert "+10.0 [+10.0, +10.0]" in table_lines(results)[2]
    assert "+10.0" not in table_lines(results)[1], "the first method is what the others are compared with"


def test_a_pair_that_started_from_other_weights_is_marked_where_its_difference_stands() -> None:
    results = [_result("a", seed, 0.5, start_weights=f"made-{seed}") for seed in range(3)]
    results += [_result("b", seed, 0.7, start_weights=f"made-{min(seed, 1)}") for seed in range(3)]
    results += [_result("c", seed, 0.7, start_weights=f"made-{seed}" if seed else "") for seed in range(3)]
    assert paired_difference(results, "b", "a").other_starts == (2,)
    assert paired_difference(results, "c", "a").other_starts == (), "a start that is not known is not another one"
    lines = table_lines(results)
    assert [line.count("†") for line in lines[1:4]] == [0, 2, 0]
    (said,) = [line for line in lines[4:] if line.startswith("†")]
    assert "w, b: with seeds 2 it started from other weights than a" in said
    request = parse_request(["methods=grpo", "env=key_door"])
    assert said in markdown(results, request, "turnwise compare")
    assert json.loads(to_json(request, results, []))["summary"][1]["more_success"]["other_starts"] == [2]


def test_a_seed_that_one_method_lacks_is_in_no_difference() -> None:
    results = [_result("a", 0, 0.5), _result("a", 1, 0.9), _result("b", 0, 0.4)]
    found = paired_difference(results, "b", "a")
    assert (found.interval.value, found.interval.low, found.interval.high) == (pytest.approx(-0.1), -math.inf, math.inf)
    assert math.isnan(found.p)
    assert "  -10.0  " in table_lines(results)[2], "one seed says nothing about others, so there is no interval"


def test_a_run_that_breaks_down_counts_for_its_method() -> None:
    """A policy that never comes to an end is judged by no env, and would be left out of the mean of its method."""
    curve = ((0, 0, math.nan), (1000, 250, math.nan))
    lost = {"success_low": math.nan, "success_high": math.nan, "area": math.nan, "curve": curve, "reward": 0.0}
    broken = _result("b", 1, math.nan, best_success=math.nan, start_success=math.nan, **lost)
    results = [_result("a", seed, 0.5) for seed in range(2)] + [_result("b", 0, 0.6), broken]
    _, b = summarize(results)
    assert (b.success.value, b.best_success, b.area.value) == pytest.approx((0.3, 0.3, 0.15))
    assert b.more_success is not None
    assert (b.more_success.interval.value, b.more_success.num_seeds) == (pytest.approx(-0.2), 2)
    failed = [results[0], results[1], results[2], replace(broken, reward=math.nan)]
    assert summarize(failed)[1].success.value == 0.6, "of attempts that failed nobody knows how they would have ended"
    never = [replace(broken, label=label) for label in "ab"]
    assert math.isnan(summarize(never)[0].success.value), "nobody judges anything there"


def test_one_seed_has_the_interval_of_its_held_out_tasks() -> None:
    lines = table_lines([_result("a", 0, 0.5)])
    assert "50.0% [40.0%, 60.0%]" in lines[1]
    assert "one seed" in lines[2]


def test_a_success_that_was_never_measured_is_said_to_be_so() -> None:
    lines = table_lines([_result("a", 0, math.nan, start_success=math.nan, area=math.nan)])
    assert lines[1].count("not measured") == 4


def test_the_chance_of_a_difference_agrees_with_tables_of_students_t() -> None:
    """Critical values at 5 % and 1 %, two-sided; and no difference at all."""
    for freedom, at_5, at_1 in (
        (1, 12.706, 63.657),
        (2, 4.303, 9.925),
        (4, 2.776, 4.604),
        (9, 2.262, 3.250),
        (30, 2.042, 2.750),
    ):
        assert student_p(at_5, freedom) == pytest.approx(0.05, abs=5e-5)
        assert student_p(-at_1, freedom) == pytest.approx(0.01, abs=2e-5)
        assert student_p(0.0, freedom) == pytest.approx(1.0)


def test_holm_corrects_each_for_those_that_are_left() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    corrected = holm([math.nan, 0.04])
    assert math.isnan(corrected[0])
    assert corrected[1] == pytest.approx(0.04)


def test_a_difference_that_one_test_finds_may_be_lost_among_many() -> None:
    """b is better by 10 points, give or take: sure enough alone, not among four that were tried."""
    gaps = {
        "b": (0.02, 0.1, 0.18, 0.1, 0.1),
        "c": (0.1, -0.1, 0, 0.1, -0.1),
        "d": (0.1, -0.1, 0.1, 0, 0),
        "e": (0, 0.1, -0.1, 0, 0),
    }
    seeds = range(5)
    pair = [_result("a", seed, 0.5) for seed in seeds] + [_result("b", seed, 0.5 + gaps["b"][seed]) for seed in seeds]
    many = [_result("a", seed, 0.5) for seed in seeds]
    many += [_result(label, seed, 0.5 + gap[seed] * 0.9) for label, gap in gaps.items() for seed in seeds]
    alone, among = summarize(pair)[1].more_success, summarize(many)[1].more_success
    assert alone is not None
    assert among is not None
    assert (alone.is_told, alone.is_told_by_holm) == (True, True)
    assert among.p == pytest.approx(alone.p)
    assert among.p_holm == pytest.approx(4 * alone.p)
    assert (among.is_told, among.is_told_by_holm) == (True, False)


def test_the_area_is_the_mean_of_the_curve_up_to_the_bound() -> None:
    rising = [(0, 0, 0.0), (100, 0, 1.0)]
    assert area_under(rising, 100) == pytest.approx(0.5)
    assert area_under(rising, 200) == pytest.approx(0.75), "a run that ended early keeps what it has"
    assert area_under(rising, 50) == pytest.approx(0.25), "what was sampled beyond the bound is not counted"
    late = [(0, 0, 0.0), (50, 0, 0.0), (100, 0, 1.0)]
    assert area_under(late, 100) == pytest.approx(0.25), "tokens of a critic's pre-training count"
    assert math.isnan(area_under([(0, 0, 0.5), (0, 10, 0.9)], 100)), "nothing was sampled"


def test_the_page_and_the_numbers_hold_every_method(tmp_path: Path) -> None:
    request = parse_request(["methods=grpo,rloo", "worlds=key_door,bargain", "seeds=1", f"dir={tmp_path}"])
    results = [_result("grpo", 0, 0.5, world="key_door"), _result("rloo", 0, 0.7, world="key_door", area=math.nan)]
    page = markdown(results, request, "turnwise compare methods=grpo,rloo")
    assert "$ turnwise compare methods=grpo,rloo" in page
    assert "| `key_door` | `grpo` | 50.0% [40.0%, 60.0%] |" in page
    assert "|  | `rloo` | 70.0% [60.0%, 80.0%] | +20.0 |" in page
    assert "2 of 4 runs" in page
    tree = json.loads(to_json(request, results, ["x: it failed"]))
    assert tree["summary"][1]["more_success"]["interval"] == {"value": pytest.approx(0.2), "low": None, "high": None}
    assert tree["results"][1]["area"] is None
    assert tree["failures"] == ["x: it failed"]


def test_the_figure_has_a_panel_per_world_with_means_and_bands() -> None:
    curves = [
        Curve(world="v", label="a<b", points=((0, 0, 0.1), (100, 20, 0.5))),
        Curve(world="v", label="a<b", points=((0, 0, 0.2), (90, 30, 0.6))),
        Curve(world="w", label="a<b", points=((0, 0, 0.2), (90, 30, 0.6))),
        Curve(world="w", label="c", points=((0, 0, math.nan),)),
    ]
    root = ElementTree.fromstring(comparison_svg("title & more", curves))
    texts = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert {"a<b", "c", "title & more", "v", "w"} <= set(texts)
    assert texts.count("sampled tokens") == 2
    assert "trained tokens" not in texts
    assert len([node for node in root.iter() if node.tag.endswith("polygon")]) == 1, "one line has no band"
    alone = ElementTree.fromstring(comparison_svg("title", curves[:2]))
    texts = [node.text for node in alone.iter() if node.tag.endswith("text")]
    assert (texts.count("sampled tokens"), texts.count("trained tokens")) == (1, 1), "a world alone shows both"


def test_methods_of_a_world_may_not_have_bounds_of_their_own() -> None:
    own = "methods=grpo,ppo[train.max_sampled_tokens=20000]"
    with pytest.raises(ConfigError, match=r"is 48000 and 20000 in study_chain; .* set tokens=N"):
        Grid.plan(parse_request([own, "worlds=study_chain"]))


def test_a_shared_warm_up_is_a_run_that_is_taken_whatever_its_methods_allow() -> None:
    lone = ["methods=ppo,reinforce_pp", "worlds=study_value", "rollout.group_size=1"]
    lagging = ["methods=grpo,rloo", "worlds=study_chain", "train.max_staleness=1", "alarms.max_stale_share=0.3"]
    for arguments in (lone, lagging):
        assert Grid.plan(parse_request(arguments)).warmups


def test_equal_differences_of_a_few_seeds_prove_nothing() -> None:
    results = [_result(label, seed, 0.5 + (label == "b") / 64) for label in ("a", "b") for seed in (0, 1)]
    assert math.isnan(paired_difference(results, "b", "a").p)


def test_the_table_says_how_much_variance_is_left_after_the_branch_for_methods_that_branch() -> None:
    shares = {("la_grpo", 0): 0.2, ("la_grpo", 1): 0.4}
    results = [_result("grpo", 0, 0.5), *(_result(*key, 0.6, branch_share=share) for key, share in shares.items())]
    assert branch_lines(results) == ["Var(R | prefix) / Var(R): 0.30 (la_grpo, w); branching pays below about 0.25"]
    assert table_lines(results)[-1] == branch_lines(results)[0]
    assert branch_lines(results[:1]) == []
