"""ScienceWorld as worlds: `turnwise train env=scienceworld:boil`.

A task is a variation of one of thirty experiments; the package says which variations are held out. Each attempt has a
Java process of its own (`open_host` says why). The script is the gold path that the simulator itself finds.
`simplifications` are ScienceWorld's own: doors that are open, teleporting, and so on.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from turnwise.envs.adapters.java_games import JavaGame, JavaHost, find_java
from turnwise.envs.adapters.peers import import_peer
from turnwise.envs.adapters.text_adventure import AdventureRules, AdventureWorld, Scene, check_game, checked_turns
from turnwise.envs.base import Split, Task
from turnwise.envs.difficulty import Levels
from turnwise.envs.scripted import ScriptedPlayer
from turnwise.envs.splits import draw, random_for
from turnwise.errors import ConfigError
from turnwise.runtime.suggest import did_you_mean

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


class ScienceWorldWorld(AdventureWorld):
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
        check_game(PACKAGE, "experiment", experiment, experiment_names())
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
        self.max_turns = checked_turns(max_turns)
        self.max_tokens = max_tokens
        self.admissible = admissible

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Variations by the package's own split."""
        numbers = read_variations(self.experiment)[split]
        found = [Task(id=f"{self.experiment}-{number}", data={"variation": number}) for number in numbers]
        return draw(found, count, random_for(self.name, split, seed)) if count else []

    def open_game(self, task: Task, *, has_path: bool = False) -> ScienceGame:
        return ScienceGame(self, task.data["variation"], has_path=has_path)

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


class ScienceGame(JavaGame):
    """One running experiment."""

    def __init__(self, world: ScienceWorldWorld, variation: int, *, has_path: bool = False) -> None:
        super().__init__(open_host, lambda host: host.make(_INTERFACE))
        self._world = world
        self._variation = variation
        self._has_path = has_path

    def first_scene(self) -> Scene:
        world = self._world
        self.call("load", world.experiment, self._variation, world.simplifications, self._has_path)
        self.call("reset")
        seen = self._step("look around")
        return self._scene(f"{self.call('getTaskDescription')}\n\n{seen}")

    def next_scene(self, command: str) -> Scene:
        return self._scene(self._step(command))

    def commands(self) -> list[str]:
        """What the simulator would take now, in an order that does not depend on it."""
        return sorted(str(command) for command in self.call("getValidActionObjectCombinations"))

    def _step(self, command: str) -> str:
        text = str(self.call("step", command))
        if text.lstrip().startswith("ERROR"):  # its own, and not the policy's: it would count as a lost attempt
            raise RuntimeError(f"ScienceWorld says: {text.strip()[:500]}")
        return text

    def _scene(self, text: str) -> Scene:
        score = float(self.call("getScore"))
        is_over = bool(self.call("getCompleted")) or score < 0
        return Scene(
            text=_SPACES.sub("\n", text.strip()) or "Nothing happens.",
            score=max(0.0, score),
            is_over=is_over,
            is_won=is_over and score >= 1.0,
            commands=tuple(self.commands()) if self._world.admissible and not is_over else (),
            state=json.dumps(self.said),
        )
