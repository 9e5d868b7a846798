"""The stages of a round that train. Each is an ordinary run in a directory of its own, started from the one before it.

    rounds/02/continued    sft on the world's words in bad attempts
    rounds/02/sft          sft on the pool `sft`
    rounds/02/preference   dpo on the pool `preference`
    rounds/02/rl           the method of the file, on the tasks of the pool `rl`

A run that is there and not finished is resumed; one that is finished is taken as it is.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.client.checkpoints import CheckpointStore
from turnwise.config.config import Config
from turnwise.config.files import Tree, config_to_tree, tree_to_config
from turnwise.envs.listed import ListedTask, write_tasks
from turnwise.errors import TurnwiseError
from turnwise.outcomes.model import is_outcome_model
from turnwise.rollout.seeds import derive_seed
from turnwise.rounds.config import FlywheelConfig
from turnwise.rounds.export import write_pair_file, write_pool
from turnwise.rounds.refresh import verdict_of
from turnwise.rounds.store import PoolStore
from turnwise.rounds.verdicts import JudgeReward
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.checkpoint import choose_checkpoint
from turnwise.training.objects import PythonObjects
from turnwise.training.run import Run
from turnwise.training.setup import set_up_new, set_up_resume
from turnwise.training.stored import origin_of
from turnwise.watch.observer import Observer

STORED_TRAIN = (
    *("tasks_per_step", "learning_rate", "seed", "save_every", "keep_checkpoints", "grad_clip_norm"),
    *("weight_decay", "beta1", "beta2", "eps", "lr_schedule", "lr_warmup", "lr_floor"),
)
"""Options of `train` that a stage on stored data reads."""
STORED_ROLLOUT = ("renderer", "strip_thinking", "use_conversation_multi_turn", "max_tokens_per_turn", "max_turns")
"""Options of `rollout` that a stage on stored data reads; it samples nothing, so it starts no servers."""


class StageRuns:
    """Makes the runs of a flywheel's stages."""

    def __init__(
        self, store: PoolStore, config: Config, options: FlywheelConfig, objects: PythonObjects, observer: Observer
    ) -> None:
        self._store = store
        self._config = config
        self._options = options
        self._objects = objects
        self._observer = observer

    def place(self, number: int, name: str) -> Path:
        return self._store.round_place(number, name)

    def warm_up(self) -> str:
        """The supervised steps before the first round; the checkpoint that they end with."""
        tree = config_to_tree(self._config)
        tree["train"]["steps"] = 0
        tree["eval"] = {"tasks": 0}
        return self._train(self.place(0, "warmup"), tree, self._objects)

    def train(self, number: int, stage: str, current: str) -> dict[str, Any]:
        """One stage of a round, from the weights `current`; says what it did, and which weights there are now."""
        steps = self._options.stage_steps[stage]
        if not steps:
            return {"skipped": f"flywheel.{stage}_steps is 0", "model": current}
        data = self._write_data(number, stage)
        if data is None:
            return {"skipped": "its pool is empty", "model": current}
        tree = self._rl_tree(number, data) if stage == "rl" else self._stored_tree(stage, data)
        tree["model"]["start_from"] = current
        tree["train"] |= {"steps": steps, "seed": derive_seed(self._config.train.seed, stage, number)}
        place = self.place(number, stage)
        with self._judged() if stage == "rl" else nullcontext(self._objects) as objects:
            model = self._train(place, tree, objects)
        with RunReader(place) as run:
            updated = len(run.metric("train/optimizer_step"))  # a step of RL without a lesson updates nothing
        return {"model": model, "run": str(place.relative_to(self._store.directory)), "steps": updated}

    @contextmanager
    def _judged(self) -> Generator[PythonObjects]:
        """The run's objects; where a judge routes the attempts, with its score as what RL learns from."""
        if self._options.verdict != "judge":
            yield self._objects
            return
        reward = JudgeReward(self._options, self._config, self._store.directory)
        try:
            yield replace(self._objects, reward=reward)
        finally:
            reward.close()

    def _write_data(self, number: int, stage: str) -> Path | None:
        """The file that a stage learns from; None if there is nothing in its pool."""
        first = max(1, number + 1 - self._options.keep_rounds) if self._options.keep_rounds else 1
        if stage == "rl":
            return self._write_rl_tasks(number)
        if stage == "preference":
            path = self.place(number, "pairs.parquet")
            return path if write_pair_file(self._store, path, first, origin_of(self._config)) else None
        path = self.place(number, f"{stage}.jsonl")
        return path if write_pool(self._store, stage, path, f"samples.round >= {first}") else None

    def _write_rl_tasks(self, number: int) -> Path | None:
        """The tasks of this round's pool `rl`: what an older policy could half do says little about this one."""
        ids = {row["task_id"] for row in self._store.query("SELECT task_id FROM rl WHERE round = ?", number)}
        listed: list[ListedTask] = [one for one in self._store.active_tasks() if one.task.id in ids]
        if not listed:
            return None
        path = self.place(number, "rl_tasks.jsonl")
        write_tasks(path, [*listed, *self._store.held_out()])
        return path

    def _rl_tree(self, number: int, tasks: Path) -> Tree:
        tree = config_to_tree(self._config)
        tree["env"] |= {"tasks": str(tasks), "difficulty": -1}
        tree["warmup"], tree["eval"] = {"steps": 0}, {"tasks": 0}
        verdict = verdict_of(self._store, self._options, number)
        if is_outcome_model(Path(verdict).expanduser()):
            # What routes the attempts is also what RL learns from; the world's outcome is only logged and compared.
            weights = {**tree["reward"]["weights"], "outcome": 0.0}
            tree["reward"] |= {"model": verdict, "weights": weights}
        # A round goes on, also if the policy has learned all of its tasks before the last step.
        tree["train"]["max_empty_steps"] = self._options.rl_steps + 1
        return tree

    def _stored_tree(self, stage: str, data: Path) -> Tree:
        whole = config_to_tree(self._config)
        is_pairs = stage == "preference"
        rate = self._options.preference_learning_rate if is_pairs else self._options.sft_learning_rate
        train = {name: whole["train"][name] for name in STORED_TRAIN}
        return {
            **{name: whole[name] for name in ("model", "engine", "run")},
            "cluster": {name: value for name, value in whole["cluster"].items() if "env" not in name},
            "env": {**whole["env"], "tasks": "", "difficulty": -1},
            "rollout": {name: whole["rollout"][name] for name in STORED_ROLLOUT},
            "method": {"name": "dpo" if is_pairs else "sft"},
            "data": {"pairs": str(data)} if is_pairs else {"dialogues": str(data)},
            "train": train | ({"learning_rate": rate} if rate else {}),
            "eval": {"tasks": 0},
        }

    def _train(self, place: Path, tree: Tree, objects: PythonObjects) -> str:
        """Train in `place`, or go on with what is there; the path of the last checkpoint."""
        if not is_run(place):
            tree["run"] |= {"dir": str(place), "name": "", "dialogues": 0}
            Run.start(set_up_new(tree_to_config(tree), objects), observer=self._observer)
        elif Run.open(place).state != "finished":
            Run.start(set_up_resume(place, (), objects), observer=self._observer)
        state = Run.open(place).state
        if state != "finished":
            raise TurnwiseError(f"the run {place} is {state}, not finished; the same command goes on with it")
        with RunReader(place) as run:
            row = choose_checkpoint(run, "last").row
        if self._config.model.base_url:
            return row.path
        return str(CheckpointStore(place).directory(row.path).resolve())
