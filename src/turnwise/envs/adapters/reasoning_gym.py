"""reasoning-gym data sets as worlds: `turnwise train reasoning_gym:chain_sum`.

    system     Give your final answer between <answer> and </answer>.
    user       State the final answer to the following arithmetic problem: 4 + 3 =
    assistant  <answer>8</answer>
    user       That is not right. Try again.                            (attempts=2)
    assistant  <answer>7</answer>                                       reward 1.0, terminated, a success

The data set scores every answer from 0 to 1. With one attempt that score is the reward. With several, a turn earns what
it adds to the best score so far, so that the sum is the best score. A reply without an answer is flagged as unparsable
and uses up an attempt.

A task is the number of an item of the data set with seed 0. Only an item's question decides whether it is held out, so
no question of the test split occurs in training. Items are made by number, so a replay is exact.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from turnwise.envs.adapters.peers import import_peer
from turnwise.envs.base import Env, EnvStep, Split, Task, system, user
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw, random_for, split_of
from turnwise.envs.sync import as_env
from turnwise.errors import ConfigError
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message

RULES = "Give your final answer between <answer> and </answer>."
TRY_AGAIN = "That is not right. Try again."
NO_ANSWER = "There is no answer between <answer> and </answer>. Try again."

_DATASET_SEED = 0
_TRIES_PER_TASK = 50


class ReasoningGymWorld:
    """One registered data set."""

    def __init__(
        self,
        dataset: str,
        *,
        config: dict[str, Any] | None = None,
        attempts: int = 1,
        items: int = 1_000_000,
        rules: str = RULES,
        max_tokens: int = 256,
    ) -> None:
        """
        Args:
            config: Options of the data set, such as {min_terms: 2, max_terms: 3}.
            attempts: How often the policy may answer. This is the number of turns.
            items: Number of items of the data set. Use fewer if it makes all of them at once.
            rules: The system message. The answer is read between <answer> and </answer>.
        """
        if attempts < 1:
            raise ConfigError(f"attempts={attempts}; expected at least 1")
        self._peer = import_peer("reasoning_gym", extra="reasoning-gym")
        self.name = f"reasoning_gym:{dataset}"
        self.max_turns = attempts
        self.max_tokens = max_tokens
        self._rules = rules
        self._items = items
        self._dataset = self._create(dataset, config or {})

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        rng = random_for(self.name, split, seed)
        found: dict[str, Task] = {}
        for number in self._candidates(rng, count):
            question = str(self._dataset[number]["question"])
            if split_of(question) == split:
                found.setdefault(question, Task(id=f"{split}-{number}", data={"item": number}))
            if len(found) >= count:
                break
        if not found and count:
            raise ConfigError(f"{self.name} has no {split} item; let it make more different questions")
        return draw(list(found.values()), count, rng) if count else []

    def make_env(self, task: Task, seed: int) -> Env:  # noqa: ARG002 - the item is the task, nothing else is random
        return as_env(ReasoningGymEnv(self._peer, self._dataset, task.data["item"], self.max_turns, self._rules))

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """The data set's own answers. None if the data set can check answers but does not give them."""
        return play_demonstrations(self, self._player, count, seed) if self._has_answers() else []

    def _player(self, task: Task) -> ScriptedPlayer:
        answer = self._dataset[task.data["item"]]["answer"]
        return lambda dialogue: f"<answer>{answer}</answer>"  # noqa: ARG005 - the script knows the answer

    def _has_answers(self) -> bool:
        items = [self._dataset[number] for number in range(min(3, len(self._dataset)))]
        return all(
            isinstance(item["answer"], str) and self._dataset.score_answer(item["answer"], item) == 1 for item in items
        )

    def _candidates(self, rng: random.Random, count: int) -> Sequence[int]:
        size = len(self._dataset)
        return rng.sample(range(size), min(size, _TRIES_PER_TASK * max(count, 10)))

    def _create(self, dataset: str, config: dict[str, Any]) -> Any:
        known = self._peer.factory.DATASETS
        if dataset not in known:
            raise ConfigError(f"reasoning_gym has no data set {dataset!r}{did_you_mean(dataset, known)}")
        fields = {field.name for field in dataclasses.fields(known[dataset][1])} - {"seed", "size"}
        for name in config:
            if name not in fields:
                near = did_you_mean(name, fields)
                raise ConfigError(f"{dataset} has no option {name!r}{near}; expected {', '.join(sorted(fields))}")
        try:
            return self._peer.create_dataset(dataset, seed=_DATASET_SEED, size=self._items, **config)
        except (AssertionError, TypeError, ValueError) as cause:
            raise ConfigError(f"{dataset} refuses config={config}: {cause}") from cause


class ReasoningGymEnv:
    """One question. Its methods are plain functions; `as_env` runs them."""

    def __init__(self, peer: Any, dataset: Any, number: int, attempts: int, rules: str) -> None:
        self._peer = peer
        self._dataset = dataset
        self._item: Any = dataset[number]
        self._attempts = attempts
        self._rules = rules
        self._turn = 0
        self._best = 0.0

    def start(self) -> list[Message]:
        return [system(self._rules), user(str(self._item["question"]))]

    def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        answer = self._peer.utils.extract_answer(reply.content)
        score = 0.0 if answer is None else float(self._dataset.score_answer(answer, self._item))
        gain = max(0.0, score - self._best)
        self._best += gain
        is_over = score >= 1 or self._turn >= self._attempts
        return EnvStep(
            messages=[] if is_over else [user(NO_ANSWER if answer is None else TRY_AGAIN)],
            reward=gain,
            terminated=is_over,
            is_success=score >= 1 if is_over else None,
            is_unparsable=answer is None,
            info={"score": score},
            labels={"answer": str(answer).strip()} if is_over and answer is not None else {},
        )

    def close(self) -> None:
        pass
