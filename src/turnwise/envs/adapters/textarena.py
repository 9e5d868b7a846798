"""TextArena games as worlds: `turnwise train textarena:TicTacToe-v0`.

The policy plays one seat. The other seats are played by a player that makes random legal moves, or by your function
`module:function`, which gets (seat, what that seat has read, a random generator) and returns a move. In games of two
the other player may also be a model (docs/opponents.md). In self-play (`turnwise.rollout.self_play`) the policy plays
all seats, and each seat is a trajectory. The policy reads what its seat reads, but not its own moves again. The reward
comes at the end: what the game gives to the policy's seat.

A move that the game cannot read or does not allow is flagged as unparsable. The game decides what it costs: most games
forgive one per turn, and a second one loses. After `max_turns` turns of the policy a game is truncated.

A task is a seed: even ones are for training, odd ones are held out. It also picks the seat, unless `seat` is given.
TextArena draws from Python's and numpy's global generators. The adapter keeps a state of these for every game and sets
it for each call, so games with equal seeds and moves are equal, whatever else runs at the same time.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from turnwise.envs.adapters.peers import import_peer, seed_tasks
from turnwise.envs.base import Env, EnvStep, Split, Task, assistant, user
from turnwise.envs.game import SeatOutcome
from turnwise.envs.seats import unloaded_opponent
from turnwise.envs.splits import random_for
from turnwise.envs.sync import as_env
from turnwise.errors import ConfigError
from turnwise.runtime.import_path import load_attribute
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message

Opponent = Callable[[int, str, random.Random], str]
"""Takes the seat, what that seat has read so far, and a random generator. Returns a move."""

RANDOM = "random"
DEFAULT_MAX_TURNS = 32

_MAX_PLAYERS = 8
_MAX_TRIES = 200
_MAX_MOVE_CHARS = 4_000
"""Longest part of a reply that a game gets. Some games fail on numbers with more digits."""
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_NUMBER = re.compile(r"[0-9]+")
_GLOBAL_RANDOM = threading.Lock()


class TextArenaWorld:
    """One registered game."""

    def __init__(
        self,
        game: str,
        *,
        make: dict[str, Any] | None = None,
        players: int | None = None,
        seat: int | None = None,
        opponent: str = RANDOM,
        max_turns: int | None = None,
        max_tokens: int = 64,
    ) -> None:
        """
        Args:
            make: Arguments for `textarena.make`, such as {max_rounds: 3}.
            players: Number of players. The default is the smallest number that the game takes.
            seat: The policy's seat, from 0. By default each task picks one.
            opponent: "random" (a random legal move) or module:function; in a game of two also a model.
            max_turns: Number of the policy's turns after which the game is truncated.
        """
        self.peer = import_peer("textarena", extra="textarena")
        self.game = game
        self.name = f"textarena:{game}"
        self.max_turns = max_turns or DEFAULT_MAX_TURNS
        self.max_tokens = max_tokens
        self.opponent = opponent
        is_function = ":" in opponent and "://" not in opponent
        self._function: Opponent | None = load_attribute(opponent) if is_function else None
        self.scripted_opponents = (opponent, RANDOM) if is_function else (RANDOM,)
        self._make_options = dict(make or {})
        self._seat = seat
        if game not in self.peer.envs.registration.ENV_REGISTRY:
            near = did_you_mean(game, self.peer.envs.registration.ENV_REGISTRY)
            raise ConfigError(f"textarena has no game {game!r}{near}")
        self.players = self._find_players(range(1, _MAX_PLAYERS + 1) if players is None else [players])
        if seat is not None and not 0 <= seat < self.players:
            raise ConfigError(f"seat={seat}; {game} has seats 0 to {self.players - 1}")
        if not self.has_two_sides and opponent not in self.scripted_opponents:
            raise ConfigError(
                f"opponent={opponent}: {game} is played by {self.players}, and a model has the other seat in games of "
                f"two; expected {RANDOM} or module:function"
            )

    @property
    def has_two_sides(self) -> bool:
        """Whether an opponent can have the other seat, as in `turnwise.envs.seats.TwoSidedWorld`."""
        return self.players == 2

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return seed_tasks(self.name, split, count, seed)

    def make_env(self, task: Task, seed: int) -> Env:  # noqa: ARG002 - the task's seed is the game's
        if self.opponent not in self.scripted_opponents:
            raise ConfigError(unloaded_opponent(self.opponent, self.scripted_opponents))
        return as_env(TextArenaEnv(self, seat=self.policy_seat(task), seed=task.data["seed"]))

    def policy_seat(self, task: Task) -> int:
        number: int = task.data["seed"]
        return number // 2 % self.players if self._seat is None else self._seat

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002 - there are none
        return []

    def make_game(self, task: Task, seed: int) -> TextArenaGame:  # noqa: ARG002 - the task's seed is the game's
        """Make a game with all seats free."""
        return TextArenaGame(self, seed=task.data["seed"])

    def scripted_reply(self, opponent: str, task: Task, game: TextArenaGame, seed: int) -> str:  # noqa: ARG002 - the game has its task
        return self.choose(opponent, game, random.Random(seed))

    def choose(self, opponent: str, game: TextArenaGame, rng: random.Random) -> str:
        """The move of a script for the seat that is to move."""
        seat = game.to_move
        assert seat is not None, "the game is over"
        if opponent != RANDOM:
            assert self._function is not None, "a script that is not random is a function"
            return self._function(seat, game.read[seat], rng)
        with game.random.in_place():
            return random_legal_move(game.inner, game.read[seat], rng)

    def open_game(self) -> Any:
        """Make TextArena's game without the wrappers that repeat the whole history in every observation."""
        return _without_observation_wrappers(self.peer, self.peer.make(self.game, **self._make_options))

    def _find_players(self, numbers: Sequence[int]) -> int:
        """The first of these numbers of players that the game starts with."""
        refusal: Exception | None = None
        for players in numbers:
            try:
                with GlobalRandom(0).in_place():
                    self.open_game().reset(num_players=players, seed=0)
            except (AssertionError, ValueError) as cause:
                refusal = cause
            except (ImportError, LookupError, OSError, TypeError) as cause:
                text = " ".join(str(cause).split())
                raise ConfigError(
                    f"{self.game} cannot be set up with make={self._make_options}: {text:.300}"
                ) from cause
            else:
                return players
        listed = ", ".join(str(number) for number in numbers)
        raise ConfigError(f"{self.game} does not start with {listed} players: {refusal}") from refusal


class TextArenaGame:
    """One game with all its seats, as `turnwise.envs.game.Game`."""

    def __init__(self, world: TextArenaWorld, *, seed: int) -> None:
        self.num_seats = world.players
        self.random = GlobalRandom(seed)
        self.inner: Any = world.open_game()
        self.read = dict.fromkeys(range(world.players), "")
        """Everything that each seat has read."""
        self._unread = dict.fromkeys(range(world.players), "")
        self._moves = [str(seed)]
        with self.random.in_place():
            self.inner.reset(num_players=world.players, seed=seed)

    @property
    def to_move(self) -> int | None:
        state = self.inner.state
        return None if state.done else state.current_player_id

    def rules(self, seat: int) -> list[Message]:  # noqa: ARG002 - TextArena's prompt is part of the first view
        return []

    def view(self, seat: int) -> list[Message]:
        """What this seat has read since its last move, and at the end why the game ended."""
        self._take_in(seat)
        state = self.inner.state
        reason = str(state.game_info[seat].get("reason") or "") if state.done else ""
        return [user((self._unread[seat] + reason).strip() or "Your turn.")]

    def move(self, reply: Message) -> bool:
        seat = self.inner.state.current_player_id
        self._take_in(seat)
        self._unread[seat] = ""
        self._moves.append(reply.content)
        with self.random.in_place():
            self.inner.step(reply.content[:_MAX_MOVE_CHARS])
        return not is_refused(self.inner, seat)

    def outcome(self, seat: int) -> SeatOutcome:
        rewards: dict[int, float] = self.inner.state.rewards or {}
        reward = float(rewards.get(seat, 0.0))
        is_success = reward >= 1 if self.num_seats == 1 else reward > 0
        messages = self.view(seat) if self.to_move is None else ()
        return SeatOutcome(reward=reward, is_success=is_success, info={"seat": float(seat)}, messages=messages)

    def copy(self) -> TextArenaGame:
        twin = copy.copy(self)
        twin.random, twin.inner = copy.deepcopy(self.random), copy.deepcopy(self.inner)
        twin.read, twin._unread, twin._moves = dict(self.read), dict(self._unread), list(self._moves)
        return twin

    def key(self) -> str:
        """The seed and every move, because TextArena has no names for states."""
        return json.dumps(self._moves)

    def _take_in(self, seat: int) -> None:
        state = self.inner.state
        observation, state.observations[seat] = state.observations[seat], []
        text = _to_text(observation, seat, state.role_mapping)
        self._unread[seat] += text
        self.read[seat] += text


class TextArenaEnv:
    """A game in which the policy has one seat and opponents have the others. Its methods are plain functions."""

    def __init__(self, world: TextArenaWorld, *, seat: int, seed: int) -> None:
        self._world = world
        self._seat = seat
        self._seed = seed
        self._rng = random_for("opponents", seed)
        self._game: TextArenaGame | None = None
        self._turn = 0

    def start(self) -> list[Message]:
        self._game = TextArenaGame(self._world, seed=self._seed)
        self._play_others(self._game)
        return self._game.view(self._seat)

    def step(self, reply: Message) -> EnvStep:
        game = self._game
        assert game is not None, "step comes after start"
        self._turn += 1
        is_move = game.move(reply)
        self._play_others(game)
        is_over = game.to_move is None
        is_cut = not is_over and self._turn >= self._world.max_turns
        outcome = game.outcome(self._seat)
        return EnvStep(
            messages=game.view(self._seat),
            reward=outcome.reward if is_over else 0.0,
            terminated=is_over,
            truncated=is_cut,
            is_success=outcome.is_success if is_over else False if is_cut else None,
            is_unparsable=not is_move,
            info=outcome.info,
        )

    def close(self) -> None:
        self._game = None

    def _play_others(self, game: TextArenaGame) -> None:
        """Play the other seats until it is the policy's turn, or the game is over."""
        while (seat := game.to_move) not in (None, self._seat):
            game.view(seat)
            game.move(assistant(self._world.choose(self._world.opponent, game, self._rng)))


class GlobalRandom:
    """A state of Python's and numpy's global generators that belongs to one game."""

    def __init__(self, seed: int) -> None:
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def in_place(self) -> Generator[None, None, None]:
        """Use this game's state in the global generators inside the block. Only one game can do so at a time."""
        with _GLOBAL_RANDOM:
            python, numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(numpy)


def random_legal_move(game: Any, read: str, rng: random.Random) -> str:
    """A random move like those that the game's text shows in brackets. It is tried on a copy of the game first."""
    for move in itertools.islice(_candidates(read, rng), _MAX_TRIES):
        if _is_legal(copy.deepcopy(game), move):
            return move
    return "[pass]"  # no move that the text shows is allowed; the game decides what happens


def _candidates(read: str, rng: random.Random) -> Iterator[str]:
    """The moves listed last, then any that were shown, then those with other numbers in them."""
    listed = next((line for line in reversed(read.splitlines()) if "available" in line.lower()), "")
    seen: set[str] = set()
    for text in (listed, read):
        moves = [move for move in dict.fromkeys(_MOVE.findall(text)) if move not in seen]
        seen.update(moves)
        rng.shuffle(moves)
        yield from moves
    forms = sorted(move for move in seen if _NUMBER.search(move))
    while forms:
        yield _NUMBER.sub(lambda _: str(rng.randrange(10)), rng.choice(forms))


def _is_legal(game: Any, move: str) -> bool:
    player = game.state.current_player_id
    game.state.error_count = 0
    game.step(move)
    return not is_refused(game, player)


def is_refused(game: Any, player: int) -> bool:
    """Whether the game refused this player's last move: the player is asked again, or has lost."""
    is_asked_again = game.state.current_player_id == player and getattr(game.state, "error_count", 0) > 0
    return is_asked_again or bool(game.state.game_info[player].get("invalid_move"))


def _without_observation_wrappers(peer: Any, game: Any) -> Any:
    if not isinstance(game, peer.Wrapper):
        return game
    game.env = _without_observation_wrappers(peer, game.env)
    return game.env if isinstance(game, peer.ObservationWrapper) else game


def _to_text(observation: Any, reader: int, names: Any) -> str:
    """Write a game's messages as text, without the reader's own moves."""
    lines: list[str] = []
    for sender, message, kind in observation or ():
        if kind.name == "PLAYER_ACTION" and sender == reader:
            continue
        lines.append(message if sender < 0 else f"{names.get(sender, f'Player {sender}')}: {message}")
    return "".join(f"{line}\n" for line in lines)
