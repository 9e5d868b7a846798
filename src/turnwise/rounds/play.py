"""Plays the tasks of a round, and the held-out tasks, with the weights of the moment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from turnwise.config.config import Config
from turnwise.config.files import config_to_tree, tree_to_config
from turnwise.envs.base import World
from turnwise.envs.listed import ListedTask, write_tasks
from turnwise.errors import TurnwiseError
from turnwise.judges import attach_judge
from turnwise.rollout.group import DroppedGroup, Rollout
from turnwise.rollout.seeds import derive_seed
from turnwise.rounds.store import PoolStore
from turnwise.rounds.tables import OVERALL
from turnwise.runtime.blocking import run_to_end
from turnwise.training.evaluate import summarize
from turnwise.training.objects import PythonObjects
from turnwise.training.policy import PolicySampler
from turnwise.training.setup import find_facts
from turnwise.training.workers import bounded_by_workers, make_played_world, running_workers


class RoundPlayer:
    """Plays for a flywheel. Every group has a seed of its own, so a round that was interrupted goes on as it was."""

    def __init__(self, store: PoolStore, config: Config, objects: PythonObjects) -> None:
        self._store = store
        self._config = config
        self._objects = objects

    def play(self, number: int, model: str, tasks: Sequence[ListedTask], samples: int, place: Path) -> None:
        """Play what is not yet played of a round; each group is written down as soon as it is done."""
        done = self._store.played_tasks(number)
        todo = [one for one in tasks if one.task.id not in done]
        if not todo:
            return
        config = self._with_tasks(place, tasks)
        with self._policy(config, model) as policy:
            world = make_played_world(config, self._objects)
            attach_judge(world, policy.service)
            with running_workers(world):
                run_to_end(self._play(policy, world, number, todo, samples))

    async def _play(
        self, policy: PolicySampler, world: World, number: int, todo: Sequence[ListedTask], samples: int
    ) -> None:
        config = policy.config
        rules = config.rollout.for_world(world, find_facts(config).context_length)
        rules = bounded_by_workers(rules, world)
        rules = rules.model_copy(update={"group_size": samples, "same_start": True})
        rollout = Rollout(world, policy.sampler, policy.renderer, rules)
        seed = derive_seed(config.train.seed, "flywheel", number)
        reasons: list[str] = []
        async with aclosing(rollout.stream([one.task for one in todo], seed=seed)) as groups:
            async for group in groups:
                if isinstance(group, DroppedGroup):
                    why = next((one.failure.detail for one in group.failed if one.failure), group.detail)
                    reasons.append(f"{group.why}: {why}")
                    self._store.add_dropped(number, group.task_id, group.why, why)
                else:
                    self._store.add_group(number, policy.checkpoint or config.model.name, group)
        if reasons and not self._store.query("SELECT 1 FROM attempts WHERE round = ? LIMIT 1", number):
            self._store.forget_dropped(number)  # so that the same command plays them once the cause is mended
            raise TurnwiseError(
                f"not one of the groups of round {number} could be played; the first: {reasons[0]}; mend it and repeat "
                "the command"
            )

    def evaluate(self, number: int, model: str, held_out: Sequence[ListedTask], place: Path) -> list[list[object]]:
        """Play the held-out tasks; the rows of the table `evaluations`, over all levels and for each."""
        config = self._with_tasks(place, held_out)
        eval_options = config.eval.model_copy(update={"tasks": len(held_out)})
        with self._policy(config.model_copy(update={"eval": eval_options}), model) as policy:
            played = policy.evaluate(label=f"round {number}").played
        level_of = {one.task.id: one.difficulty for one in held_out}
        rows: list[list[object]] = []
        for level in (OVERALL, *sorted(set(level_of.values()))):
            ids = {task_id for task_id, own in level_of.items() if level in (OVERALL, own)}
            groups = tuple(group for group in played.groups if group.task_id in ids)
            dropped = tuple(group for group in played.dropped if group.task_id in ids)
            row = summarize(type(played)(groups=groups, dropped=dropped, stats=played.stats), label="", step=number)
            numbers = (row.num_tasks, row.num_attempts, row.num_failed)
            measured = [_or_null(x) for x in (row.success, row.success_low, row.success_high, row.reward)]
            rows.append([number, level, *numbers, *measured, model or config.model.name])
        return rows

    def _with_tasks(self, place: Path, tasks: Sequence[ListedTask]) -> Config:
        write_tasks(place, tasks)
        tree = config_to_tree(self._config)
        tree["env"] |= {"tasks": str(place), "difficulty": -1}
        return tree_to_config(tree)

    def _policy(self, config: Config, model: str) -> PolicySampler:
        return PolicySampler(config, checkpoint=model or None, objects=self._objects)


def _or_null(value: float) -> float | None:
    return None if value != value else value
