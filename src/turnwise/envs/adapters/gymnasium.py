"""Gymnasium envs as worlds: `turnwise train gymnasium:FrozenLake-v1`, or `gymnasium:my_module:MyEnv-v0`.

    user       You act in FrozenLake-v1. Say one action in your last line: left, down, right, up.
               ...
               [S]FFF
               FHFH
    assistant  down
    user       (Down)
               SFFF
               [F]HFH

Actions are discrete (by name or by number) or text. Observations are text, numbers, or what the env prints in its
"ansi" render mode. `terminated` and `truncated` are what the env says. A reply that names no action, or several, is not
passed to the env: it is flagged as unparsable, answered with the list of actions, and uses up a turn. After `max_turns`
turns the attempt is truncated.

A task is a seed for `reset`: even seeds are for training, odd ones are held out. All of the env's randomness comes from
the seed, so the same replies always give the same game.

If the env itself, without its wrappers, has a method `demonstrate()` that returns the action of an expert, the world
has demonstrations for a warm-up.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from turnwise.envs.adapters.peers import import_peer, numbers_of, seed_tasks
from turnwise.envs.base import Env, EnvStep, Split, Task, user
from turnwise.envs.scripted import has_demonstrations, play_demonstrations
from turnwise.envs.sync import as_env
from turnwise.errors import ConfigError, DataError
from turnwise.runtime.import_path import add_current_folder
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message

DEFAULT_MAX_TURNS = 32

_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)
_WORD = re.compile(r"-?\w+")
_MAX_LISTED_ACTIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known about an env beyond its spaces."""

    actions: tuple[str, ...]
    success_return: float | None = None
    """A terminated attempt with at least this return is a success. None uses the env's own threshold."""
    describe: Callable[[Any, Any], str] | None = None
    """Takes the unwrapped env and an observation, and describes the state in words."""


def _describe_taxi(env: Any, observation: Any) -> str:
    row, column, passenger, goal = env.decode(int(observation))
    places = ("R", "G", "Y", "B", "the taxi")
    return f"Taxi in row {row}, column {column}. Passenger in {places[passenger]}, wants to go to {places[goal]}."


def _describe_blackjack(env: Any, observation: Any) -> str:  # noqa: ARG001 - the observation is enough
    own, dealer, ace = (int(part) for part in cast(Sequence[Any], observation))
    return f"Your hand: {own}{', with a usable ace' if ace else ''}. The dealer shows {dealer}."


_KNOWN: Mapping[str, Known] = {
    "FrozenLake": Known(actions=("left", "down", "right", "up"), success_return=1.0),
    "FrozenLake8x8": Known(actions=("left", "down", "right", "up"), success_return=1.0),
    "CliffWalking": Known(actions=("up", "right", "down", "left"), success_return=float("-inf")),
    "Taxi": Known(
        actions=("south", "north", "east", "west", "pickup", "dropoff"),
        success_return=float("-inf"),
        describe=_describe_taxi,
    ),
    "Blackjack": Known(actions=("stick", "hit"), success_return=1.0, describe=_describe_blackjack),
}


class GymnasiumWorld:
    """One registered Gymnasium env."""

    def __init__(
        self,
        env_id: str,
        *,
        make: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        rules: str = "",
        view: Literal["auto", "ansi", "observation"] = "auto",
        max_turns: int | None = None,
        max_tokens: int = 32,
        success_return: float | None = None,
    ) -> None:
        """
        Args:
            make: Arguments for `gymnasium.make`, such as {is_slippery: false}.
            actions: Names of the discrete actions, in order. Numbers work too.
            rules: Text before the first observation, instead of the line that names the env.
            view: What the policy sees: the printed board, the observation itself, or the board where there is one.
            max_turns: Turns after which the attempt is truncated. The default is the env's own limit, at most 32.
            success_return: A terminated attempt with at least this return is a success; the env's own threshold by
                default, or any return above 0.
        """
        self._gymnasium = import_peer("gymnasium", extra="gymnasium")
        self._env_id = env_id
        self._make_options = dict(make or {})
        self._known = _KNOWN.get(env_id.rpartition("/")[2].partition("-v")[0])
        self.name = f"gymnasium:{env_id}"
        self.max_tokens = max_tokens
        spec = self._find_spec()
        with contextlib.closing(self._make_env(None)) as probe:
            modes = probe.metadata.get("render_modes", [])
            self.codec = make_codec(probe.action_space, actions or (self._known and list(self._known.actions)))
            self._demonstrates = has_demonstrations(probe.unwrapped)
        if view == "ansi" and "ansi" not in modes:
            raise ConfigError(
                f'{env_id} has no "ansi" render mode, only {", ".join(modes) or "none"}; use view=observation'
            )
        is_printed = view == "ansi" or (view == "auto" and "ansi" in modes)
        self._render_mode = "ansi" if is_printed else None
        limit = spec.max_episode_steps or DEFAULT_MAX_TURNS
        self.max_turns: int = max_turns or min(limit, DEFAULT_MAX_TURNS)
        known_return = self._known.success_return if self._known else None
        self.success_return = next(
            (value for value in (success_return, known_return, spec.reward_threshold) if value is not None), None
        )
        self.rules = rules or f"You act in {env_id}. {self.codec.hint}"

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return seed_tasks(self.name, split, count, seed)

    def make_env(self, task: Task, seed: int) -> Env:  # noqa: ARG002 - a gymnasium env has one seed, the task's
        return as_env(GymnasiumEnv(self, self._make_env, self._render_mode, seed=task.data["seed"]))

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        """What the env demonstrates; none if it does not."""
        return play_demonstrations(self, lambda _: None, count, seed) if self._demonstrates else []

    def describe(self, env: Any, observation: Any) -> str:
        """The text of a state for the policy."""
        parts = [clean_board(env.render())] if self._render_mode == "ansi" else []
        if self._known is not None and self._known.describe is not None:
            parts.append(self._known.describe(env.unwrapped, observation))
        elif not parts:
            parts.append(observation_to_text(observation))
        return "\n".join(parts)

    def is_success(self, total: float) -> bool:
        return total > 0 if self.success_return is None else total >= self.success_return

    def _find_spec(self) -> Any:
        add_current_folder()
        module, colon, env_id = self._env_id.rpartition(":")
        try:
            if colon:  # `my_module:MyEnv-v0`: the module registers the env
                importlib.import_module(module)
            return self._gymnasium.spec(env_id)
        except (self._gymnasium.error.Error, ModuleNotFoundError) as cause:
            near = did_you_mean(self._env_id, self._gymnasium.registry)
            raise ConfigError(f"gymnasium knows no env {self._env_id!r}{near}; it says: {cause}") from cause

    def _make_env(self, render_mode: str | None) -> Any:
        options = {**self._make_options, **({"render_mode": render_mode} if render_mode else {})}
        try:
            return self._gymnasium.make(self._env_id, disable_env_checker=True, **options)
        except (TypeError, self._gymnasium.error.Error) as cause:
            raise ConfigError(f"gymnasium.make({self._env_id!r}) failed: {cause}; look at env.options.make") from cause


class GymnasiumEnv:
    """One attempt; plain functions, for `as_env`."""

    def __init__(
        self, world: GymnasiumWorld, make: Callable[[str | None], Any], render_mode: str | None, *, seed: int
    ) -> None:
        self._world = world
        self._make = make
        self._render_mode = render_mode
        self._seed = seed
        self._env: Any = None
        self._turn = 0
        self._return = 0.0

    def start(self) -> list[Message]:
        self._env = self._make(self._render_mode)
        observation, _ = self._env.reset(seed=self._seed)
        return [user(f"{self._world.rules}\n\n{self._world.describe(self._env, observation)}")]

    def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        is_last = self._turn >= self._world.max_turns
        action = self._world.codec.read(reply.content)
        if action is None:
            return EnvStep(
                messages=[] if is_last else [user(self._world.codec.hint)],
                truncated=is_last,
                is_success=False if is_last else None,
                is_unparsable=True,
            )
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._return += float(reward)
        terminated = bool(terminated)
        truncated = not terminated and (bool(truncated) or is_last)
        is_over = terminated or truncated
        return EnvStep(
            messages=[user(self._world.describe(self._env, observation))],
            reward=float(reward),
            terminated=terminated,
            truncated=truncated,
            is_success=terminated and self._world.is_success(self._return) if is_over else None,
            is_action=True,
            info=numbers_of(info),
        )

    def demonstrate(self) -> str:
        """The action that the env's own expert would take now, in words."""
        return self._world.codec.say(self._env.unwrapped.demonstrate())

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


@dataclass(frozen=True, slots=True)
class DiscreteActions:
    """Reads an action by name or number. The last line of a reply must hold exactly one."""

    by_word: Mapping[str, int]
    listed: str

    @property
    def hint(self) -> str:
        return f"Say one action in your last line: {self.listed}."

    def read(self, text: str) -> int | None:
        lines = text.strip().lower().splitlines()
        said: list[str] = _WORD.findall(lines[-1]) if lines else []
        found = {self.by_word[word] for word in said if word in self.by_word}
        return found.pop() if len(found) == 1 else None

    def say(self, action: Any) -> str:
        """The action's name, or its number if it has no name."""
        words = [word for word, number in self.by_word.items() if number == int(action)]
        if not words:
            raise DataError(f"demonstrate() returned {action!r:.60}; expected one of the actions: {self.listed}")
        return words[-1]


@dataclass(frozen=True, slots=True)
class TextActions:
    """Takes the whole reply as the action, if the action space contains it."""

    space: Any

    @property
    def hint(self) -> str:
        return f"Say {self.space.min_length} to {self.space.max_length} characters."

    def read(self, text: str) -> str | None:
        text = text.strip()
        return text if self.space.contains(text) else None

    def say(self, action: Any) -> str:
        return str(action)


def make_codec(space: Any, names: Sequence[str] | None) -> DiscreteActions | TextActions:
    """Choose how text becomes an action of this space."""
    kind = type(space).__name__
    if kind == "Text":
        return TextActions(space)
    if kind != "Discrete":
        raise ConfigError(f"its actions are {space}; a policy that writes text needs Discrete or Text actions")
    start, count = int(space.start), int(space.n)
    if names is not None and len(names) != count:
        raise ConfigError(f"actions={list(names)} are {len(names)} names; the env has {count} actions")
    words = {str(start + number): start + number for number in range(count)}
    for number, name in enumerate(names or ()):
        if not _WORD.fullmatch(name.lower()):
            raise ConfigError(f"the action name {name!r} is not a single word; use letters, digits and _")
        words[name.lower()] = start + number
    if names:
        listed = ", ".join(names)
    elif count <= _MAX_LISTED_ACTIONS:
        listed = ", ".join(str(start + number) for number in range(count))
    else:
        listed = f"a number from {start} to {start + count - 1}"
    return DiscreteActions(words, listed)


def clean_board(text: str) -> str:
    """Remove colours from a printed board, and put what was coloured in brackets."""
    return _COLOURED.sub(r"[\1]", text).strip("\n")


def observation_to_text(observation: Any) -> str:
    """Write an observation of any space as text: text as it is, numbers in a row, parts by name."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(
            f"{name}: {observation_to_text(part)}" for name, part in cast(Mapping[str, Any], observation).items()
        )
    if isinstance(observation, tuple | list):
        return ", ".join(observation_to_text(part) for part in cast(Sequence[Any], observation))
    if hasattr(observation, "tolist"):
        value = observation.tolist()
        return ", ".join(f"{part:.4g}" for part in value) if _is_flat(value) else str(value)
    return str(observation)


def _is_flat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, int | float) for part in cast(list[object], value))
