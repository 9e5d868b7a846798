"""TextWorld-Express as worlds: `turnwise train env=textworld_express:coin`.

Eight small games that a Java process plays quickly. A task is a seed of the package's own training or test games.
`level` is the dial; `settings` replaces single numbers of it. The script is the gold path that comes with a game.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from turnwise.envs.adapters.java_games import JavaGame, JavaHost, find_java
from turnwise.envs.adapters.peers import import_peer
from turnwise.envs.adapters.text_adventure import (
    RULES,
    AdventureRules,
    AdventureWorld,
    Scene,
    check_game,
    turns_of,
)
from turnwise.envs.base import Split, Task
from turnwise.envs.difficulty import Levels
from turnwise.envs.splits import draw, random_for
from turnwise.errors import ConfigError

PACKAGE = "textworld_express"
EXTRA = "textworld-express"
GAMES: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "coin": tuple(
        {"numLocations": rooms, "numDistractorItems": things, "includeDoors": doors, "limitInventorySize": 0}
        for rooms, things, doors in ((2, 0, 0), (5, 3, 0), (8, 5, 1), (11, 10, 1))
    ),
    "mapreader": tuple(
        {"numLocations": rooms, "maxDistanceApart": far, "maxDistractorItemsPerLocation": things, "includeDoors": doors}
        for rooms, far, things, doors in ((4, 2, 0, 0), (8, 3, 1, 0), (15, 4, 3, 0), (25, 8, 3, 1))
    ),
    "cookingworld": tuple(
        {"numLocations": rooms, "numIngredients": parts, "numDistractorItems": things, "includeDoors": doors}
        for rooms, parts, things, doors in ((1, 1, 0, 0), (2, 2, 3, 0), (5, 3, 5, 1), (11, 4, 10, 1))
    ),
    "twc": tuple(
        {"numLocations": rooms, "numItemsToPutAway": things, "includeDoors": doors}
        for rooms, things, doors in ((1, 1, 0), (2, 2, 0), (3, 3, 1), (3, 4, 1))
    ),
    "arithmetic": ({},),
    "sorting": ({},),
    "simonsays": tuple({"gameLength": length, "numDistractors": words} for length, words in ((3, 1), (5, 3), (10, 5))),
    "peckingorder": ({},),
}
"""The settings of each game, level by level."""
TURNS = (15, 30, 50, 100)
"""The turns of an attempt, by level."""
_INTERFACE = "textworldexpress.runtime.PythonInterface"
_BLANK_LINES = re.compile(r"\n\s*\n+")


class TextWorldExpressWorld(AdventureWorld):
    """One kind of game."""

    difficulties: ClassVar[Levels] = tuple({"level": level} for level in range(len(TURNS)))

    def __init__(
        self,
        game: str,
        *,
        level: int = 0,
        settings: dict[str, Any] | None = None,
        admissible: bool = False,
        max_turns: int | None = None,
        max_tokens: int = 24,
    ) -> None:
        """
        Args:
            level: How hard the games are, 0 to 3. A game with fewer levels stays at its last one.
            settings: Settings of the game in place of the level's, such as {numLocations: 3}.
            admissible: Whether every observation lists the commands that the game would take.
            max_turns: Number of commands after which the game is truncated. By default the level decides.
        """
        check_game(PACKAGE, "game", game, GAMES)
        self.max_turns = turns_of(level, TURNS, max_turns)
        if wrong := {name: value for name, value in (settings or {}).items() if not isinstance(value, int)}:
            name, value = next(iter(wrong.items()))
            raise ConfigError(f"settings has {name}={value!r}; expected a whole number, or 0 or 1 for a switch")
        import_peer(PACKAGE, extra=EXTRA)
        find_java()
        self.game = game
        self.name = f"textworld_express:{game}"
        self.settings = {**GAMES[game][min(level, len(GAMES[game]) - 1)], **(settings or {})}
        self.max_tokens = max_tokens
        self.admissible = admissible

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """Seeds of the package's own training and test games."""
        found = [Task(id=f"{split}-{number}", data={"seed": number, "fold": split}) for number in self._seeds(split)]
        return draw(found, count, random_for(self.name, split, seed)) if count else []

    def open_game(self, task: Task, *, has_path: bool = False) -> ExpressGame:  # noqa: ARG002 - every game has its path
        return ExpressGame(self, task)

    @property
    def rules(self) -> AdventureRules:
        return AdventureRules(
            rules=RULES, max_turns=self.max_turns, admissible=self.admissible, forbidden=frozenset({"help"})
        )

    def load(self, host: JavaHost) -> Any:
        """A simulator with this game. Settings that it refuses are named."""
        simulator = host.make(_INTERFACE)
        settings = ",".join(f"{name}={int(value)}" for name, value in self.settings.items())
        if problem := host.call(simulator, "load", self.game, settings):
            raise ConfigError(f"{self.game} refuses settings={self.settings}: {problem}")
        return simulator

    def _seeds(self, split: Split) -> list[int]:
        host = open_host()
        try:
            return list(host.call(self.load(host), "getSeedsTrain" if split == "train" else "getSeedsTest"))
        finally:
            host.release()


def open_host() -> JavaHost:
    return JavaHost.of(EXTRA, Path(str(importlib.resources.files(PACKAGE) / "textworld-express.jar")))


class ExpressGame(JavaGame):
    """A running game."""

    def __init__(self, world: TextWorldExpressWorld, task: Task) -> None:
        super().__init__(open_host, world.load)
        self._data = task.data

    def first_scene(self) -> Scene:
        seen = self.call("generateNewGameJSON", self._data["seed"], self._data["fold"], True)
        return self._scene(seen, f"{self.call('getTaskDescription')}\n\n")

    def next_scene(self, command: str) -> Scene:
        return self._scene(self.call("stepJSON", command))

    def _scene(self, answer: str, before: str = "") -> Scene:
        found = json.loads(answer)
        is_won, is_lost = bool(found["tasksuccess"]), bool(found["taskfailure"])
        return Scene(
            text=_BLANK_LINES.sub("\n", f"{before}{found['observation']}".strip()) or "Nothing happens.",
            score=1.0 if is_won else min(1.0, max(0.0, float(found["score"]))),
            is_over=is_won or is_lost,
            is_won=is_won,
            commands=tuple(sorted(found["validActions"])),
            state=json.dumps(self.said),
        )
