"""Shuffled items, intervals, the curve, the view, the plan, loggers: small things, each with its claim."""

from __future__ import annotations

import asyncio
import io
import math
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from turnwise.config.config import Config
from turnwise.config.files import load_config
from turnwise.errors import ConfigError
from turnwise.methods.base import Kept
from turnwise.rollout.group import DroppedGroup, RolloutResult
from turnwise.rollout.stats import RolloutStats
from turnwise.runlog.schema import EvaluationRow
from turnwise.training.assemble import split_evenly
from turnwise.training.plan import evaluation_steps
from turnwise.training.progress import NothingToLearnError, Progress
from turnwise.training.supply import Batch
from turnwise.training.task_order import ShuffledItems
from turnwise.watch.curve import curve_svg, runs_svg
from turnwise.watch.interrupt import Interrupt, Interrupted
from turnwise.watch.intervals import mean_interval, success_interval, wilson
from turnwise.watch.loggers import check_loggers, open_loggers
from turnwise.watch.terminal import LineView, LiveView, evaluation_line, format_duration, sparkline


def _row(step: int, label: str = "step", success: float = 0.5) -> EvaluationRow:
    return EvaluationRow(
        step=step,
        label=label,
        num_tasks=8,
        num_attempts=8,
        num_failed=1,
        success=success,
        success_low=0.2,
        success_high=0.8,
        reward=1.0,
        reward_low=0.5,
        reward_high=1.5,
    )


def test_every_item_comes_once_before_any_comes_again() -> None:
    items = ShuffledItems(range(10), batch_size=4, seed=1)
    dealt = [item for index in range(5) for item in items.batch(index)]
    assert Counter(dealt[:10]) == Counter(range(10))
    assert Counter(dealt[10:]) == Counter(range(10))
    assert dealt[:10] != dealt[10:]


def test_a_batch_depends_on_its_number_and_the_seed_alone() -> None:
    assert ShuffledItems(range(10), 4, 1).batch(7) == ShuffledItems(range(10), 4, 1).batch(7)
    assert ShuffledItems(range(10), 4, 1).batch(7) != ShuffledItems(range(10), 4, 2).batch(7)


def test_an_empty_deck_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        ShuffledItems([], 1, 0)


def test_shares_differ_by_at_most_one_and_lose_nothing() -> None:
    assert split_evenly([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4, 5]]
    assert split_evenly([1], 3) == [[1]]
    assert split_evenly([], 2) == []


def test_wilsons_interval_is_the_textbooks() -> None:
    interval = wilson(0.1, 20)
    assert (interval.low, interval.high) == (pytest.approx(0.0279, abs=1e-3), pytest.approx(0.3010, abs=1e-3))
    assert wilson(0.0, 10).low == 0.0
    assert wilson(1.0, 10).high == 1.0


def test_attempts_at_one_task_do_not_count_as_independent() -> None:
    alike = [[True] * 8] * 5 + [[False] * 8] * 5
    mixed = [[True, False] * 4] * 10
    assert success_interval(alike).high - success_interval(alike).low > 0.45
    assert success_interval(mixed).high - success_interval(mixed).low < 0.3
    assert success_interval([[True], [False]]).value == 0.5


def test_nothing_measured_is_nan() -> None:
    assert math.isnan(success_interval([]).value)
    assert mean_interval([[]]).number() == "not measured"


def test_a_share_is_shown_inside_of_0_and_100_percent() -> None:
    over_seeds = mean_interval([[0.98], [0.70], [0.95]])
    assert over_seeds.high > 1
    assert over_seeds.percent().endswith(", 100.0%]")


def test_the_success_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Few tasks and many samples of each are the hard case; the truth is the mean of the rates that tasks come from."""
    rng = np.random.default_rng(0)
    worlds = ((1, 1), (0.2, 0.2), (0.5, 2), (0.3, 3), (5, 5))  # Beta: from tasks that differ a lot to tasks alike
    # How much wider than with spread and rate known: Student's quantile over the normal one, and a little more.
    for num_tasks, samples, most in ((4, 16, 1.9), (6, 8, 1.5), (8, 16, 1.4), (16, 16, 1.25), (64, 4, 1.1)):
        coverages, ratios = list[float](), list[float]()
        for a, b in worlds:
            truth, alike = a / (a + b), 1 / (a + b + 1)
            variance = truth * (1 - truth) * (alike + (1 - alike) / samples) / num_tasks
            outcomes = rng.random((400, num_tasks, samples)) < rng.beta(a, b, size=(400, num_tasks, 1))
            found = [success_interval(one.tolist()) for one in outcomes]
            coverages.append(float(np.mean([one.low <= truth <= one.high for one in found])))
            ratios.append(float(np.mean([one.high - one.low for one in found])) / (2 * 1.96 * variance**0.5))
        assert min(coverages) >= 0.925, (num_tasks, samples, coverages)  # 400 draws of 0.945 fall below once in 20
        assert np.mean(coverages) >= 0.945, (num_tasks, samples, coverages)
        assert max(ratios) <= most, (num_tasks, samples, ratios)


def test_the_reward_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    intervals = [mean_interval([[float(x)] for x in rng.normal(size=6)]) for _ in range(400)]
    covered = sum(interval.low <= 0 <= interval.high for interval in intervals)
    assert 0.92 <= covered / 400 <= 0.98


def test_the_curve_is_valid_svg_with_a_point_per_evaluation() -> None:
    rows = [_row(0, "start"), _row(5), _row(10, "end"), _row(11, success=math.nan)]
    svg = curve_svg("a <b> & c", rows, [(1.0, 0.5), (2.0, 0.7)])
    root = ElementTree.fromstring(svg)
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 3
    assert "a &lt;b&gt; &amp; c" in svg


def test_a_curve_of_nothing_is_still_a_picture() -> None:
    ElementTree.fromstring(curve_svg("empty", [], []))
    ElementTree.fromstring(runs_svg("empty", {"a": []}))


def test_the_curves_of_runs_start_at_the_last_evaluation_of_their_first_step() -> None:
    seeds = {f"seed <{seed}>": [_row(0, "start"), _row(0, "warm-up"), _row(10, "end")] for seed in range(2)}
    svg = runs_svg("two seeds", seeds)
    root = ElementTree.fromstring(svg)
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 4
    assert "seed &lt;1&gt;" in svg


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.5, math.nan], low=0, high=1) == "▅ "
    assert sparkline([]) == ""
    assert len(sparkline([1.0] * 500)) == 48


def test_durations_read_well() -> None:
    assert [format_duration(s) for s in (5, 65, 3700)] == ["5 s", "1 min 05 s", "1 h 01 min"]


def test_an_evaluation_is_one_line() -> None:
    line = evaluation_line(_row(5))
    assert "success 50.0% [20.0%, 80.0%]" in line
    assert "1 failed" in line


def test_the_line_view_prints_one_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    view = LineView()
    view.step(3, 10, {"rollout/reward_mean": 0.25, "rollout/success_mean": 0.5, "train/grad_norm": math.nan})
    out = capsys.readouterr().out
    assert out.startswith("step 3/10  reward 0.250  success 50.0%  ")
    assert re.search(r" s, about .+ left\n$", out), "also where there is no terminal"


def test_a_long_warm_up_prints_its_first_and_its_last_line_and_the_time_that_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = LineView()
    for number in range(1, 301):
        view.warmup(number, 300, {"warmup/loss": 2.0})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 20, "hundreds of steps pass in a few seconds"
    assert re.fullmatch(r"warm-up 1/300  loss 2.000  .+ s, about .+ left", lines[0])
    assert re.fullmatch(r"warm-up 300/300  loss 2.000  .+ s", lines[-1])


def test_a_step_says_how_many_attempts_were_dropped_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    dropped = {"rollout/dropped_env_failed": 3.0, "rollout/dropped_group_too_small": 1.0}
    LineView().step(1, 2, {"rollout/reward_mean": 0.0, **dropped})
    assert "dropped 3 env_failed, 1 group_too_small" in capsys.readouterr().out


def test_a_run_that_ends_because_every_task_is_quarantined_says_what_failed() -> None:
    why = "2 groups in a row were lost; the last: step: disk full"
    lost = DroppedGroup(task_id="t", why="quarantined", detail=why)
    played = RolloutResult(groups=(), dropped=(lost,), stats=RolloutStats())
    batch = Batch(played=played, kept=Kept(groups=(), reasons=()), items=())
    with pytest.raises(NothingToLearnError, match=r"1 quarantined.* not played again: .*disk full"):
        Progress(1).check(batch, is_empty=True)


def test_the_live_view_shows_a_wait_whole() -> None:
    view, slow = LiveView(10), "step of guess-1-16-s14-p3, attempt 3 (12 s), and of 15 other attempts"
    try:
        view.waiting(slow, 12.0)
        console = Console(width=40, file=io.StringIO(), record=True)
        console.print(view.panel())
    finally:
        view.close()
    shown = " ".join(line.strip("│ ") for line in console.export_text().splitlines())
    assert f"waiting for {slow}" in shown


def test_the_live_view_has_a_line_for_progress_reward_success_and_speed() -> None:
    view = LiveView(10)
    try:
        view.evaluation(_row(0))
        view.phase("training")
        view.step(
            3,
            10,
            {
                "rollout/reward_mean": 0.25,
                "rollout/success_mean": 0.5,
                "rollout/sampled_tokens_per_s": 300.0,
                "rollout/entropy_estimate": 1.25,
            },
        )
        console = Console(width=100, file=io.StringIO(), record=True)
        console.print(view.panel())
    finally:
        view.close()
    lines = [line.strip("│ ") for line in console.export_text().splitlines()]
    assert re.fullmatch(r"training  step 3/10, about .* left", lines[1])
    assert set(lines[2]) <= set("━╸╺ ")
    assert [line.split() for line in lines[3:6]] == [
        ["reward", "▁", "0.250"],
        ["success", "▅", "0.500"],
        ["held-out", "success", "▅", "0.500"],
    ]
    assert lines[6] == "reward 0.250  success 50.0%  tokens/s 300  entropy 1.25"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_logger_comes_with_its_pip_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'turnwise\[{name}\]'"):
        check_loggers([name])


def test_tensorboard_gets_every_metric_with_its_step(tmp_path: Path) -> None:
    (logger,) = open_loggers(["tensorboard"], tmp_path, project="turnwise", run_name="mine", settings={})
    for step in (1, 2):
        logger.metrics(step, {"rollout/reward_mean": step / 2})
    logger.close()
    written = EventAccumulator(str(tmp_path / "tensorboard"))
    written.Reload()
    events = written.Tensors("rollout/reward_mean")
    assert [(event.step, make_ndarray(event.tensor_proto).item()) for event in events] == [(1, 0.5), (2, 1.0)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_hosted_loggers_are_given_the_project_the_config_and_every_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, object]] = []
    stand_in = SimpleNamespace(
        init=lambda **options: calls.append(("init", options)),
        log=lambda values, *, step: calls.append(("log", (step, values))),
        finish=lambda: calls.append(("finish", None)),
    )
    monkeypatch.setitem(sys.modules, name, stand_in)  # pyright: ignore[reportArgumentType]
    settings = {"train": {"steps": 2}}
    (logger,) = open_loggers([name], tmp_path, project="ours", run_name="mine", settings=settings)
    logger.metrics(1, {"eval/success": 0.5})
    logger.close()
    assert calls == [
        ("init", {"project": "ours", "name": "mine", "config": {"train": {"steps": 2}}}),
        ("log", (1, {"eval/success": 0.5})),
        ("finish", None),
    ]


def test_a_hosted_logger_that_does_not_start_is_a_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NotLoggedInError(Exception):
        pass

    def init(**_: object) -> None:
        raise NotLoggedInError("No API key configured.")

    stand_in = SimpleNamespace(init=init, Error=NotLoggedInError)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"wandb does not start: No API key configured\. .*WANDB_MODE=offline"):
        open_loggers(["wandb"], tmp_path, project="turnwise", run_name="mine", settings={})


def test_evaluations_are_at_the_start_after_the_warm_up_every_so_often_and_at_the_end() -> None:
    config = load_config("guess_number", ["train.steps=10", "eval.every=5", "warmup.steps=1"])
    assert evaluation_steps(config) == [("start", 0), ("warm-up", 0), ("step", 5), ("end", 10)]
    assert evaluation_steps(Config.model_validate({"eval": {"tasks": 0}})) == []


async def test_an_interrupt_cancels_the_work_and_lets_it_clean_up() -> None:
    interrupt, cleaned = Interrupt(), []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    asyncio.get_running_loop().call_later(0.01, interrupt.ask)
    with pytest.raises(Interrupted):
        await interrupt.unless(work())
    assert cleaned == [True]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_work_that_is_not_interrupted_gives_its_value() -> None:
    async def work() -> int:
        return 7

    assert await Interrupt().unless(work()) == 7


def test_presets_are_inside_the_package() -> None:
    import turnwise.config

    assert (Path(turnwise.config.__file__).parent / "presets" / "guess_number.yaml").is_file()
