"""What `--plan` says about time, and that it is measured once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.config.files import load_config
from turnwise.models.tokenizer import load_tokenizer
from turnwise.training import speed
from turnwise.training.assemble import make_renderer
from turnwise.training.demonstrations import read_demonstrations
from turnwise.training.plan_time import NUM_DIALOGUES, PlannedAttempt, plan_time
from turnwise.training.setup import Setup, find_model, set_up_new
from turnwise.training.speed import Speed, SpeedLoad, find_speed

pytestmark = pytest.mark.model

LOAD = SpeedLoad(rows=4, context=16, reply_tokens=2, datums=4, datum_tokens=32, group_size=2)
SHORT = ("train.steps=4", "eval.every=0", "eval.tasks=32", "warmup.steps=8", "engine.device=cpu")


@dataclass
class Counted:
    """Stands in for the measurement, and counts."""

    count: int = 0

    def __call__(self, *_: object) -> Speed:
        self.count += 1
        return Speed(
            read_tokens_per_s=1000.0,
            sample_tokens_per_s=100.0,
            train_tokens_per_s=500.0,
            update_s=0.5,
            load_s=float(self.count),
        )


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> Counted:  # noqa: ARG001 - no record is there yet
    counted = Counted()
    monkeypatch.setattr(speed, "measure_speed", counted)
    return counted


def _set_up(directory: Path, *overrides: str) -> Setup:
    return set_up_new(load_config("guess_number", ["model=tiny", *SHORT, f"run.dir={directory}", *overrides]))


def test_the_time_of_a_run_is_measured_on_this_machine_and_grows_with_its_steps(
    tmp_path: Path,
    own_home: Path,  # noqa: ARG001 - measured here, not read
) -> None:
    short = plan_time(_set_up(tmp_path / "short"), report=lambda _: None)
    long = plan_time(_set_up(tmp_path / "long", "train.steps=8"), report=lambda _: None)
    assert 0 < 4 * short.step_s < short.run_s
    assert long.speed == short.speed, "what the first plan measured is on record"
    model_s = [plan.sampling_s + plan.training_s for plan in (short, long)]
    assert model_s[0] == pytest.approx(model_s[1]), "a step of either; only the env is timed again"
    assert long.run_s > 8 * long.step_s


def test_a_second_plan_reads_what_the_first_one_measured(counted: Counted) -> None:
    said: list[str] = []
    config = load_config("guess_number", ["model=tiny", "engine.device=cpu"])
    assert find_speed(config, LOAD, said.append) == find_speed(config, LOAD, said.append)
    assert counted.count == len(said) == 1


@pytest.mark.parametrize("changed", ["engine.dtype=bfloat16", "model.rank=4", "OMP_NUM_THREADS", "code", "load"])
def test_a_record_of_something_else_is_not_used(
    counted: Counted, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    options, load = ["model=tiny", "engine.device=cpu"], LOAD
    find_speed(load_config("guess_number", options), load, lambda _: None)
    match changed:
        case "OMP_NUM_THREADS":
            monkeypatch.setenv(changed, "1")
        case "code":
            monkeypatch.setattr("turnwise.__version__", "0.0.0")
        case "load":
            load = SpeedLoad(rows=8, context=16, reply_tokens=2, datums=4, datum_tokens=32, group_size=2)
        case _:
            options.append(changed)
    assert find_speed(load_config("guess_number", options), load, lambda _: None).load_s == 2
    assert counted.count == 2


def test_a_damaged_record_is_measured_again(counted: Counted, own_home: Path) -> None:
    config = load_config("guess_number", ["model=tiny", "engine.device=cpu"])
    find_speed(config, LOAD, lambda _: None)
    (record,) = (own_home / "speeds").iterdir()
    record.write_text('{"speed": {"load_s": 1}}', encoding="utf-8")
    assert find_speed(config, LOAD, lambda _: None).load_s == 2
    assert counted.count == 2


def test_the_seconds_of_steps_warm_up_and_evaluation_add_up_to_the_run(counted: Counted, tmp_path: Path) -> None:
    few, many = (plan_time(_set_up(tmp_path, f"train.steps={n}"), lambda _: None) for n in (4, 40))
    assert counted.count == 1, "more steps are the same load"
    assert many.run_s - few.run_s == pytest.approx(36 * few.step_s, rel=0.2)  # the env is timed each time
    assert few.training_s == pytest.approx(64 * few.shape.total_tokens / 500 + 0.5)
    assert few.longest_step_s > few.step_s, "scripted dialogues are shorter than the limits"
    assert few.sampling_s > 64 * few.shape.turns * few.shape.reply_tokens / 100


@pytest.mark.usefixtures("tiny_dir")
def test_the_plan_prints_time_once_and_leaves_it_out_on_request(
    counted: Counted, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["train", "guess_number", "model=tiny", *SHORT, "--plan"]
    assert main([*plan, "--no-time"]) == 0
    assert "\ntime " not in capsys.readouterr().out
    assert counted.count == 0
    assert main(plan) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^time +about .* per step \(sampling .*, env .*, training .*\), .* for the run", out, re.MULTILINE
    )
    assert main([*plan[:-1], "--no-time"]) == 2
    assert "--no-time is read with --plan only" in capsys.readouterr().err
    assert main([*plan, "cluster.learners=2"]) == 0
    assert "not measured: 2 learners train together" in capsys.readouterr().out


def test_with_a_memory_every_rewritten_prompt_is_counted(counted: Counted, tmp_path: Path) -> None:
    """What is trained is what the datums of the same scripted attempts hold, to the token that each is shifted by."""
    options = ["model=tiny", "engine.device=cpu", "env.options.level=3", "warmup.steps=0", "train.steps=2"]
    memory = ["memory.window=6", "memory.summary_tokens=12"]
    setup = set_up_new(load_config("workflow", [*options, *memory, f"run.dir={tmp_path}"]))
    renderer = make_renderer(load_tokenizer(find_model(setup.config)), setup.config.rollout, setup.config.memory)
    shown = read_demonstrations(
        setup.parts.world, renderer, NUM_DIALOGUES, 0, context_length=setup.parts.context_length
    )
    lengths = [[datum.model_input.length + 1 for datum in datums] for datums in shown.dialogues]
    shape = plan_time(setup, lambda _: None).shape
    assert shape.datums == sum(map(len, lengths)) / len(lengths) > 2
    assert shape.total_tokens == pytest.approx(sum(map(sum, lengths)) / len(lengths))
    assert shape.total_tokens > 2 * max(map(max, lengths)), "one prompt and its reply are not the attempt"
    assert counted.count == 1


def test_a_plan_without_scripts_counts_a_window_for_every_prompt_that_it_rewrites(
    counted: Counted,  # noqa: ARG001 - nothing is measured
    tmp_path: Path,
) -> None:
    silent = ["model=tiny", "engine.device=cpu", "env.options.median_s=0.001", "env.options.p99_s=0.002"]
    silent += ["memory.window=2", "rollout.max_turns=8"]

    def shape_of(name: str, *more: str) -> PlannedAttempt:
        given = [*silent, *more, f"run.dir={tmp_path / name}"]
        return plan_time(set_up_new(load_config("turnwise.bench.slow_world:SlowWorld", given)), lambda _: None).shape

    sliding, summed = shape_of("sliding"), shape_of("summed", "memory.summary_tokens=8")
    assert (sliding.turns, sliding.datums) == (8, 7), "every turn after the second rewrites the prompt"
    assert (summed.turns, summed.datums) == (summed.turns, 1 + (summed.turns - 2) / 2)
    assert sliding.total_tokens > 6 * sliding.prompt_tokens
