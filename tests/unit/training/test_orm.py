"""What an outcome model has learned from does not measure it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import pytest

import turnwise as tw
from cases import for_each
from turnwise.cli import main
from turnwise.client.local_clients import LocalTrainingClient
from turnwise.commands.orm import run_orm_eval
from turnwise.config.config import Config
from turnwise.config.files import config_to_yaml, load_config
from turnwise.envs.base import assistant, user
from turnwise.errors import ConfigError, Party
from turnwise.outcomes.labelled import LabelledAttempt, write_labelled
from turnwise.outcomes.model import OutcomeInfo
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import AttemptRecord, Phase
from turnwise.runlog.writer import RunWriter
from turnwise.training.assemble import make_optim
from turnwise.training.orm import OrmConfig, best_of_n, learned_tasks, read_attempts, train_outcome_model
from turnwise.training.pairs import read_pairs
from turnwise.training.stored import own_task
from turnwise.trajectory import EndReason, Failure
from turnwise.types import AdamParams
from unit.credit.groups import make_attempt


class FirstIsBest:
    """Stands for an outcome model; of equal scores the first is picked."""

    is_attached = True

    async def score(self, conversations: Sequence[Any]) -> list[float]:
        return [1.0 for _ in conversations]


def _attempt(task_id: str) -> LabelledAttempt:
    messages = (user("go"), assistant("gone"))
    return LabelledAttempt(world="guess_number", task_id=task_id, messages=messages, label=True)


def test_attempts_at_learned_tasks_are_no_measure(tmp_path: Path) -> None:
    attempts = [_attempt(f"task {n}") for n in range(20)]
    write_labelled(tmp_path / "attempts.jsonl", attempts)
    learned = learned_tasks(tmp_path)
    assert learned == {(one.world, one.task_id) for one in attempts if one.split == "train"}
    assert 0 < len(learned) < 20
    info = OutcomeInfo(kind="classifier", base_model="tiny", checkpoint="none", worlds=("guess_number",))
    info.write(tmp_path)
    write_labelled(tmp_path / "same.jsonl", [one for one in attempts if one.split == "train"])
    with pytest.raises(ConfigError, match="has learned from the tasks of all"):
        run_orm_eval(str(tmp_path), [str(tmp_path / "same.jsonl")], as_json=True)
    (tmp_path / "attempts.jsonl").unlink()
    with pytest.raises(ConfigError, match="which tasks the model has learned from"):
        run_orm_eval(str(tmp_path), [str(tmp_path / "same.jsonl")], as_json=True)


@pytest.mark.usefixtures("tiny_dir")
def test_best_of_n_leaves_out_the_tasks_that_the_model_has_learned_from(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval": {"tasks": 3, "samples": 2}, "warmup": {"steps": 0}, "observer": tw.Observer()}
    run = tw.train("guess_number", model="tiny", steps=1, directory=tmp_path, **options)
    tasks = sorted({row.task_id for row in run.attempts(phase="eval")})
    model, service = cast(Any, FirstIsBest()), cast(Any, None)
    whole, part = (
        best_of_n(model, tmp_path, service, {("guess_number", task) for task in own}) for own in ((), tasks[:1])
    )
    assert (whole.num_left_out, part.num_left_out) == (0, 1)
    assert part.num_groups * 3 == whole.num_groups * 2 > 0
    with pytest.raises(ConfigError, match="has learned from the tasks of the evaluations"):
        best_of_n(model, tmp_path, service, {("guess_number", task) for task in tasks})


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_on_an_outcome_model_is_replayed_and_paired_with_its_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = [dataclasses.replace(_attempt(f"task {n}"), label=n % 2 == 0) for n in range(60)]
    write_labelled(tmp_path / "attempts.jsonl", attempts)
    model, place = str(tmp_path / "orm"), str(tmp_path / "run")
    train_outcome_model([tmp_path / "attempts.jsonl"], model, OrmConfig(model="tiny", steps=10, batch_size=8))
    settings: dict[str, Any] = {"eval": {"tasks": 0}, "warmup": {"steps": 0}, "observer": tw.Observer(), "steps": 1}
    settings |= {"env": {"options": {"max_turns": 2}}, "train": {"tasks_per_step": 2}, "rollout": {"group_size": 4}}
    run = tw.train("guess_number", model="tiny", directory=place, reward={"model": model}, **settings)
    with RunReader(place) as reader:
        last = reader.attempt(run.attempts()[0].id).trajectory.turns[-1]
    assert "judge" in last.reward_parts
    assert main(["replay", place, "--attempt", "1"]) == 0, capsys.readouterr().out
    assert "replayed exactly" in capsys.readouterr().out
    out = tmp_path / "pairs.parquet"
    assert main(["pairs", place, "--tasks", "4", "--samples", "4", "--out", str(out)]) == 0, capsys.readouterr().err
    assert all("judge" in side.turns[-1].reward_parts for one in read_pairs(out) for side in (one.pair.chosen,))
    assert main(["pairs", place, "reward.weights.judge=0", "--out", str(out)]) == 2
    assert "reward.weights.judge is not read by turnwise pairs" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny_dir")
async def test_an_attempt_that_failed_after_a_verdict_is_no_lesson_and_no_measure(tmp_path: Path) -> None:
    """One seat of a game may have won before the other one failed; then nobody is scored."""
    good = [make_attempt([1.0], attempt=i, is_success=True) for i in range(3)]
    failure = Failure(party=Party.OPPONENT, detail="another seat of the game failed")
    failed = dataclasses.replace(good[2], end_reason=EndReason.FAILED, failure=failure)
    writer = RunWriter.create(tmp_path, config_to_yaml(load_config("key_door", ["model=tiny"])), max_size_mb=8)
    for phase in get_args(Phase):
        writer.attempts(1, phase, [AttemptRecord(trajectory=one, outcome="trained") for one in good[:2]])
        writer.attempts(1, phase, [AttemptRecord(trajectory=failed, outcome="failed")])
    writer.commit(1)
    writer.close()
    assert len(read_attempts([tmp_path], 100)[0]) == 2
    assert best_of_n(cast(Any, FirstIsBest()), tmp_path, cast(Any, None)).mean_size == 2


class Recorded(Exception):  # noqa: N818 - no error: it ends the training
    """Stands for the first update."""


def test_a_classifier_learns_with_the_optimizer_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_update(client: Any, params: AdamParams) -> None:  # noqa: ARG001
        raise Recorded(params)

    monkeypatch.setattr(LocalTrainingClient, "optim_step", first_update)
    attempts = [dataclasses.replace(_attempt(f"task {n}"), label=n % 2 == 0) for n in range(60)]
    write_labelled(tmp_path / "attempts.jsonl", attempts)
    with pytest.raises(Recorded) as caught:
        train_outcome_model([tmp_path / "attempts.jsonl"], tmp_path / "orm", OrmConfig(model="tiny", batch_size=2))
    assert caught.value.args[0] == make_optim(Config(), OrmConfig().learning_rate)


def test_every_source_gives_a_share_of_the_most_attempts_and_its_latest(tmp_path: Path) -> None:
    for name, count in {"a": 30, "b": 2, "c": 30}.items():
        write_labelled(tmp_path / f"{name}.jsonl", [_attempt(f"{name}{n}") for n in range(count)])
    sources = [tmp_path / f"{name}.jsonl" for name in "abc"]
    found, _ = read_attempts(sources, 11)
    expected = [*(f"a{n}" for n in range(26, 30)), "b0", "b1", *(f"c{n}" for n in range(25, 30))]
    assert [one.task_id for one in found] == expected
    assert len(read_attempts(sources, 1000)[0]) == 62


@for_each(
    ("options", "match"),
    [
        ({"rl_steps": 3}, "rl_steps is not read by kind=classifier"),
        ({"rl_learning_rate": 1e-3}, "rl_learning_rate is not read by kind=classifier"),
        ({"max_chars": 300}, "max_chars is not read by kind=classifier"),
        ({"num_votes": 1}, "num_votes is not read by kind=classifier"),
        ({"kind": "generative", "rl_steps": 0, "rl_learning_rate": 1e-3}, "not read while rl_steps is 0"),
    ],
)
def test_an_option_that_the_training_would_not_read_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        OrmConfig(**options)


@pytest.mark.usefixtures("tiny_dir")
def test_a_task_that_was_learned_in_a_mix_is_known_in_a_run_of_its_own(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"warmup": {"steps": 0}, "observer": tw.Observer(), "model": "tiny", "steps": 1}
    (tmp_path / "mix.yaml").write_text(
        "env: {mix: {guess: {name: guess_number, curriculum: true}, doors: {name: key_door}}}"
    )
    tw.train(tmp_path / "mix.yaml", directory=tmp_path / "mix", eval={"tasks": 0}, **quick)
    found, _ = read_attempts([tmp_path / "mix"], 1000)
    assert {one.world for one in found} == {"guess_number", "key_door"}, "F1 by world tells members apart"
    known = {(one.world, one.task_id) for one in found if one.world == "guess_number"}
    assert known
    assert all(task_id.startswith("guess-") for _, task_id in known), "without the member and the level"
    config = Config(env={"name": "guess_number"}, model={"name": "tiny"})  # pyright: ignore[reportArgumentType]
    assert {own_task(config, task_id) for _, task_id in known} == known, "the same task in a run of its own"
