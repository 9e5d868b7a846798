"""TextWorld games as worlds: `turnwise train env=textworld:treasure_hunter`.

A task is a seed: even ones are for training, odd ones are held out. TextWorld makes the game of a seed and compiles it;
the file is kept in `$TURNWISE_HOME/textworld`, so a game is made once, whichever process needs it first. `level` is the
dial; `settings` replaces single numbers of it. The script is the walkthrough that TextWorld itself finds.

The game is played by an interpreter inside this process. A command goes to it only if it is one command of the game:
TextWorld's own record of the game loses track of `go east. take key`, and `save`, `restore` or `tw-...` are not moves.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from turnwise.envs.adapters.peers import import_peer, seed_tasks
from turnwise.envs.adapters.text_adventure import (
    RULES,
    AdventureEnv,
    AdventureRules,
    AdventureWorld,
    Scene,
    check_game,
    turns_of,
)
from turnwise.envs.base import Env, Split, Task
from turnwise.envs.difficulty import Levels
from turnwise.envs.sync import as_env
from turnwise.errors import ConfigError
from turnwise.models.directories import home
from turnwise.runtime.suggest import did_you_mean

CUSTOM, COOKING = "custom", "cooking"
_KITCHEN = {"recipe": 1, "take": 0, "go": 1, "open": False, "cook": False, "cut": False, "drop": False}
GAMES: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    CUSTOM: tuple(
        {"rooms": rooms, "objects": objects, "quest_length": length}
        for rooms, objects, length in ((2, 5, 2), (4, 8, 4), (7, 12, 6), (12, 18, 10))
    ),
    "coin_collector": tuple({"level": level} for level in (3, 6, 110, 220)),
    "treasure_hunter": tuple({"level": level} for level in (2, 8, 16, 26)),
    COOKING: (
        _KITCHEN,
        {**_KITCHEN, "recipe": 2, "take": 1, "cut": True},
        {**_KITCHEN, "recipe": 3, "take": 2, "go": 6, "open": True, "cook": True, "cut": True},
        {**_KITCHEN, "recipe": 4, "take": 4, "go": 12, "open": True, "cook": True, "cut": True, "drop": True},
    ),
    "simple": (
        {"rewards": "dense", "goal": "detailed", "test": False},
        {"rewards": "balanced", "goal": "brief", "test": False},
        {"rewards": "sparse", "goal": "brief", "test": False},
        {"rewards": "sparse", "goal": "none", "test": False},
    ),
}
"""The settings of each game, level by level."""
TURNS = (15, 30, 60, 120)
"""The turns of an attempt, by level."""
_NOT_MOVES = (
    "again brief g notify oops o pronouns nouns q quit recording replay restart restore restrict save script "
    "superbrief short transcript noscript undo unscript verbose long verify version tw"
)
"""First words of what is said to the interpreter and not to the game."""
_STATUS = re.compile(r"\n?>[^\n]*$")
_BLANK_LINES = re.compile(r"\n\s*\n(\s*\n)*")
_MAKING = threading.Lock()


class TextWorldWorld(AdventureWorld):
    """One kind of game."""

    difficulties: ClassVar[Levels] = tuple({"level": level} for level in range(len(TURNS)))

    def __init__(
        self,
        game: str,
        *,
        level: int = 0,
        settings: dict[str, Any] | None = None,
        admissible: bool = False,
        folder: Path | None = None,
        max_turns: int | None = None,
        max_tokens: int = 24,
    ) -> None:
        """
        Args:
            level: How hard the games are, 0 to 3.
            settings: Settings of the game in place of the level's, such as {quest_length: 3}.
            admissible: Whether every observation lists the commands that the game would take.
            folder: Where compiled games are kept. The default is `$TURNWISE_HOME/textworld`.
            max_turns: Number of commands after which the game is truncated. By default the level decides.
        """
        check_game("textworld", "game", game, GAMES)
        self.max_turns = turns_of(level, TURNS, max_turns)
        known = GAMES[game][level]
        for name in settings or {}:
            if name not in known:
                raise ConfigError(
                    f"{game} has no setting {name!r}{did_you_mean(name, known)}; expected {', '.join(known)}"
                )
        self.peer = import_peer("textworld", extra="textworld")
        import_peer("textworld.challenges", extra="textworld")
        self.game = game
        self.name = f"textworld:{game}"
        self.settings = {**known, **(settings or {})}
        self.max_tokens = max_tokens
        self._admissible = admissible
        self._folder = folder or home() / "textworld"

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return seed_tasks(self.name, split, count, seed)

    def make_env(self, task: Task, seed: int) -> Env:  # noqa: ARG002 - the task's seed is the game's
        return as_env(TextWorldEnv(self, task))

    def open_game(self, task: Task, *, has_path: bool = False) -> TextWorldGame:  # noqa: ARG002 - every game has its path
        return TextWorldGame(self, task.data["seed"])

    @property
    def rules(self) -> AdventureRules:
        words = frozenset(_NOT_MOVES.split())
        return AdventureRules(rules=RULES, max_turns=self.max_turns, admissible=self._admissible, forbidden=words)

    def find_file(self, seed: int) -> Path:
        """The compiled game of a seed. It is made if it is not there yet."""
        settings = {**self.settings, "seed": seed, "textworld": self.peer.__version__, "game": self.game}
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]
        place = self._folder / f"{self.game}-{key}"
        with _MAKING:  # TextWorld's grammars and knowledge bases are shared by all threads
            if not place.is_dir():
                self._make(seed, place)
        return place / "game.z8"

    def _make(self, seed: int, place: Path) -> None:
        """Make the game in a folder beside it, which is moved there whole: another process may make the same."""
        self._folder.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=self._folder))
        try:
            options = self.peer.GameOptions()
            options.seeds = seed
            options.path = str(part / "game.z8")
            self.peer.generator.compile_game(self._generate(options, seed), options)
            os.rename(part, place)  # noqa: PTH104 - Path.rename would replace an empty folder silently
        except (AssertionError, ValueError) as cause:
            raise ConfigError(f"{self.game} refuses settings={self.settings}: {cause}") from cause
        except OSError:
            if not place.is_dir():
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _generate(self, options: Any, seed: int) -> Any:
        if self.game == CUSTOM:
            options.nb_rooms = self.settings["rooms"]
            options.nb_objects = self.settings["objects"]
            options.quest_length = self.settings["quest_length"]
            return self.peer.generator.make_game(options)
        settings = dict(self.settings)
        if self.game == COOKING:  # its own held-out food goes with held-out seeds
            settings |= {"recipe_seed": 0, "split": "test" if seed % 2 else "train"}
        make = self.peer.challenges.CHALLENGES[f"tw-{self.game}"][1]
        return make(settings, options)


class TextWorldGame:
    """A running game."""

    def __init__(self, world: TextWorldWorld, seed: int) -> None:
        self._world = world
        self._seed = seed
        self._env: Any = None

    def start(self) -> Scene:
        peer = self._world.peer
        names = ("admissible_commands", "policy_commands", "description", "inventory", "objective")
        names += ("max_score", "score", "won", "lost", "facts", "game")
        wanted = peer.EnvInfos(**dict.fromkeys(names, True))
        self._env = peer.start(str(self._world.find_file(self._seed)), request_infos=wanted)
        self._env.seed(1 + self._seed % 2**15)  # without one the interpreter draws from the clock
        state = self._env.reset()
        return self._scene(state, f"{state.objective}\n\n{state.description}")

    def act(self, command: str) -> Scene:
        state, _, _ = self._env.step(command)
        return self._scene(state, _STATUS.sub("", state.feedback.rstrip()))

    def walkthrough(self) -> list[str]:
        """The commands that win: those of the game's maker, if it gave any, else what TextWorld finds."""
        made: Sequence[str] = self._env.state.game.metadata.get("walkthrough") or ()
        return list(made or self._env.state.policy_commands)

    def copy(self) -> TextWorldGame:
        twin = TextWorldGame(self._world, self._seed)
        twin._env = self._env.copy()
        return twin

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _scene(self, state: Any, text: str) -> Scene:
        facts = sorted(str(fact) for fact in state.facts)
        return Scene(
            text=_BLANK_LINES.sub("\n", text.strip()) or "Nothing happens.",
            score=max(0.0, float(state.score or 0) / max(1, state.max_score)),
            is_over=bool(state.won or state.lost),
            is_won=bool(state.won),
            commands=tuple(state.admissible_commands),
            state=json.dumps([facts, state.description, state.inventory]),
        )


class TextWorldEnv(AdventureEnv):
    """An attempt that can be forked."""

    def __init__(self, world: TextWorldWorld, task: Task) -> None:
        super().__init__(lambda: world.open_game(task), world.rules)
        self._world = world
        self._task = task

    def fork(self) -> TextWorldEnv:
        assert isinstance(self.game, TextWorldGame), "fork comes after start"
        twin = TextWorldEnv(self._world, self._task)
        twin.move_to(self.game.copy(), self)
        return twin
