"""ScienceWorld as worlds: `turnwise train env=scienceworld:boil`.

A task is a variation of one of thirty experiments; the package says which variations are held out. The simulator runs
in a Java process that all attempts share. The script is the gold path that the simulator itself finds.
`simplifications` are ScienceWorld's own: doors that are open, teleporting, and so on.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from turnwise.envs.adapters.java_games import JavaHost, find_java
from turnwise.envs.adapters.peers import import_peer
from turnwise.envs.adapters.text_adventure import AdventureEnv, AdventureRules, Scene, walk
from turnwise.envs.base import Env, Split, Task
from turnwise.envs.difficulty import Levels
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw, random_for
from turnwise.envs.sync import as_env
from turnwise.errors import ConfigError
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message

PACKAGE = "scienceworld"
RULES = (
    "You do an experiment in a text world. Reply with one command, such as `look around`, `open door to kitchen`, "
    "`pick up metal pot`, `focus on water` or `wait`, and nothing else."
)
_INTERFACE = "scienceworld.runtime.pythonapi.PythonInterface"
_NOT_MOVES = frozenset({"reset", "quit"})
_SPACES = re.compile(r"\n\s*\n+")


SIMPLIFICATIONS = (
    *("easy", "teleportAction", "openDoors", "openContainers"),
    *("selfWateringFlowerPots", "noElectricalAction"),
)
ELECTRICAL = ("power-component", "conductivity")
"""Experiments with these words in their names need electrical actions."""


class ScienceWorldWorld:
    """One experiment."""

    difficulties: ClassVar[Levels] = (
        {"simplifications": "easy"},
        {"simplifications": "teleportAction,openContainers"},
        {"simplifications": "openDoors"},
        {"simplifications": ""},
    )

    def __init__(
        self,
        experiment: str,
        *,
        simplifications: str = "easy",
        admissible: bool = False,
        max_turns: int = 200,
        max_tokens: int = 24,
    ) -> None:
        """
        Args:
            simplifications: What ScienceWorld makes easier, with commas between: easy (its own choice of the others),
                teleportAction, openDoors, openContainers, selfWateringFlowerPots, noElectricalAction.
            admissible: Whether every observation lists the commands that the game would take: often hundreds.
        """
        import_peer(PACKAGE, extra=PACKAGE)
        find_java()
        known = experiment_names()
        if experiment not in known:
            near = did_you_mean(experiment, known)
            raise ConfigError(f"scienceworld has no experiment {experiment!r}{near}; expected {', '.join(known)}")
        if max_turns < 1:
            raise ConfigError(f"max_turns={max_turns}; expected at least 1")
        for one in filter(None, simplifications.split(",")):
            if one not in SIMPLIFICATIONS:
                near = did_you_mean(one, SIMPLIFICATIONS)
                raise ConfigError(f"simplifications={one!r}{near}; expected {', '.join(SIMPLIFICATIONS)}")
        if "noElectricalAction" in simplifications and any(part in experiment for part in ELECTRICAL):
            raise ConfigError(
                f"simplifications=noElectricalAction: {experiment} needs electrical actions; leave it out"
            )
        self.experiment = experiment
        self.name = f"scienceworld:{experiment}"
        self.simplifications = simplifications
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.admissible = admissible

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Variations by the package's own split."""
        numbers = read_variations(self.experiment)[split]
        found = [Task(id=f"{self.experiment}-{number}", data={"variation": number}) for number in numbers]
        return draw(found, count, random_for(self.name, split, seed)) if count else []

    def make_env(self, task: Task, seed: int) -> Env:  # noqa: ARG002 - a variation decides everything
        return as_env(AdventureEnv(lambda: ScienceGame(self, task.data["variation"]), self.rules))

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        """The gold paths that the simulator finds."""
        return play_demonstrations(self, self.expert, count, seed)

    def expert(self, task: Task) -> ScriptedPlayer:
        game = ScienceGame(self, task.data["variation"], has_path=True)
        try:
            game.start()
            return walk(game.gold_path())
        finally:
            game.close()

    def random_player(self, task: Task, seed: int) -> ScriptedPlayer:
        """Makes any command that was possible at the start."""
        game = ScienceGame(self, task.data["variation"])
        try:
            game.start()
            commands, rng = game.commands(), random_for("random", seed, task.id)
        finally:
            game.close()
        return lambda dialogue: rng.choice(commands)  # noqa: ARG005 - random play does not read

    @property
    def rules(self) -> AdventureRules:
        return AdventureRules(rules=RULES, max_turns=self.max_turns, admissible=self.admissible, forbidden=_NOT_MOVES)


@functools.cache
def experiment_names() -> tuple[str, ...]:
    rows = json.loads((importlib.resources.files(PACKAGE) / "tasks.json").read_text(encoding="utf-8"))
    return tuple(row["task_name"] for row in rows)


def open_host() -> JavaHost:
    """A Java process that nobody else holds: simplifications, names and random numbers are global in the simulator."""
    jar = Path(str(importlib.resources.files(PACKAGE) / "scienceworld.jar"))
    return JavaHost.of(PACKAGE, jar, is_shared=False)


@functools.cache
def read_variations(experiment: str) -> Mapping[Split, tuple[int, ...]]:
    """The numbers of an experiment's variations, for training and held out."""
    host = open_host()
    try:
        simulator = host.make(_INTERFACE)
        host.call(simulator, "load", experiment, 0, "", False)
        return {
            "train": tuple(host.call(simulator, "getVariationsTrain")),
            "test": tuple(host.call(simulator, "getVariationsTest")),
        }
    finally:
        host.release()


class ScienceGame:
    """One running experiment."""

    def __init__(self, world: ScienceWorldWorld, variation: int, *, has_path: bool = False) -> None:
        self._world = world
        self._variation = variation
        self._has_path = has_path
        self._host: JavaHost | None = None
        self._simulator: Any = None
        self._said: list[str] = []

    def start(self) -> Scene:
        self._host = open_host()
        self._simulator = self._host.make(_INTERFACE)
        world = self._world
        self._call("load", world.experiment, self._variation, world.simplifications, self._has_path)
        self._call("reset")
        seen = self._step("look around")
        return self._scene(f"{self._call('getTaskDescription')}\n\n{seen}")

    def act(self, command: str) -> Scene:
        self._said.append(command)
        return self._scene(self._step(command))

    def gold_path(self) -> list[str]:
        return [str(command) for command in self._call("getGoldActionSequence")]

    def commands(self) -> list[str]:
        """What the simulator would take now, in an order that does not depend on it."""
        return sorted(str(command) for command in self._call("getValidActionObjectCombinations"))

    def close(self) -> None:
        host, self._host, self._simulator = self._host, None, None
        if host is not None:
            host.release()

    def _call(self, method: str, *arguments: object) -> Any:
        assert self._host is not None, "start comes first"
        return self._host.call(self._simulator, method, *arguments)

    def _step(self, command: str) -> str:
        text = str(self._call("step", command))
        if text.lstrip().startswith("ERROR"):  # its own, and not the policy's: it would count as a lost attempt
            raise RuntimeError(f"ScienceWorld says: {text.strip()[:500]}")
        return text

    def _scene(self, text: str) -> Scene:
        score = float(self._call("getScore"))
        is_over = bool(self._call("getCompleted")) or score < 0
        return Scene(
            text=_SPACES.sub("\n", text.strip()) or "Nothing happens.",
            score=max(0.0, score),
            is_over=is_over,
            is_won=is_over and score >= 1.0,
            commands=tuple(self.commands()) if self._world.admissible and not is_over else (),
            state=json.dumps(self._said),  # the simulator shows less than decides what it does
        )
