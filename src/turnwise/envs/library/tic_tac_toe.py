"""Tic-tac-toe on a board of numbers, against a script, a model or oneself.

    system     You are X. Three in a row win. Say the number of a free square.
    user       1 2 3
               4 5 6
               7 8 O
    assistant  5
    user       1 2 O                                                    the opponent took 3
               4 X 6
               7 8 O
    assistant  6
    ...

A win is worth 1, a draw 0, a loss -1; the two seats of a game always add up to 0. `is_success` means that the game was
not lost, which perfect play guarantees; wins are counted in `env_win`. After a taken square or an unreadable reply the
board is shown again, once (`max_illegal`); the next one loses the game. Only an unreadable reply is flagged as
unparsable.

A task is an opening of up to two moves, and a number. Openings are held out. The policy plays the seat that moves next.
`opponent="random"` takes any free square; `"minimax"` plays perfectly, except for a share `epsilon` of its moves. Its
moves depend only on the task and the board, so every attempt of a group meets the same opponent.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnwise.envs.base import Split, Task, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.game import SeatOutcome
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.seats import SeatedEnv, scripted_env, with_script
from turnwise.envs.splits import draw, random_for, split_of
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

Board = str
"""Nine characters: X, O or a space."""

EMPTY: Board = " " * 9
SEATS = "XO"
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
NUM_OPPONENTS = 1000
"""Number of different scripted opponents per opening."""

_SQUARE = re.compile(r"(?<![\w.-])[1-9](?![\w]|\.\d)")


def free_squares(board: Board) -> list[int]:
    return [square for square, mark in enumerate(board) if mark == " "]


def mover(board: Board) -> int:
    """The seat to move: 0 (X) if both have moved equally often, else 1 (O)."""
    return sum(mark != " " for mark in board) % 2


def place(board: Board, square: int) -> Board:
    return board[:square] + SEATS[mover(board)] + board[square + 1 :]


def winner(board: Board) -> int | None:
    """The seat that has three in a row."""
    for a, b, c in LINES:
        if board[a] != " " and board[a] == board[b] == board[c]:
            return SEATS.index(board[a])
    return None


def is_over(board: Board) -> bool:
    return winner(board) is not None or " " not in board


@functools.cache
def value(board: Board) -> int:
    """The result of perfect play for the seat to move: 1, 0 or -1."""
    if winner(board) is not None:
        return -1  # the other seat has just won
    return max((-value(place(board, square)) for square in free_squares(board)), default=0)


def best_squares(board: Board) -> list[int]:
    return [square for square in free_squares(board) if -value(place(board, square)) == value(board)]


def openings() -> list[Board]:
    """All boards after at most two moves."""
    ones = [place(EMPTY, square) for square in range(9)]
    return [EMPTY, *ones, *(place(board, square) for board in ones for square in free_squares(board))]


class TicTacToeGame:
    """A game with two seats."""

    num_seats = 2

    def __init__(self, board: Board = EMPTY, *, max_illegal: int = 1) -> None:
        self.board = board
        self._max_illegal = max_illegal
        self._num_illegal = [0, 0]
        self._forfeited: int | None = None  # the seat that lost by illegal moves

    @property
    def to_move(self) -> int | None:
        return None if self._forfeited is not None or is_over(self.board) else mover(self.board)

    def rules(self, seat: int) -> list[Message]:
        return [system(f"You are {SEATS[seat]}. Three in a row win. Say the number of a free square.")]

    def view(self, seat: int) -> list[Message]:  # noqa: ARG002 - nothing is hidden
        cells = [str(square + 1) if mark == " " else mark for square, mark in enumerate(self.board)]
        return [user("\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6)))]

    def move(self, reply: Message) -> bool:
        seat = self.to_move
        assert seat is not None, "the game is over"
        found = set(_SQUARE.findall(reply.content))
        square = int(found.pop()) - 1 if len(found) == 1 else None
        if square is None or self.board[square] != " ":
            self._num_illegal[seat] += 1
            if self._num_illegal[seat] > self._max_illegal:
                self._forfeited = seat
        else:
            self.board = place(self.board, square)
        return square is not None

    def outcome(self, seat: int) -> SeatOutcome:
        won_by = winner(self.board) if self._forfeited is None else 1 - self._forfeited
        reward = 0.0 if won_by is None else (1.0 if won_by == seat else -1.0)
        info = {"win": float(won_by == seat), "illegal": float(self._num_illegal[seat])}
        return SeatOutcome(reward=reward, is_success=reward >= 0, info=info)

    def key(self) -> str:
        """The state: the board, and the number of illegal moves so far."""
        return f"{self.board.replace(' ', '.')} illegal {self._num_illegal[0]} {self._num_illegal[1]}"

    def copy(self) -> TicTacToeGame:
        twin = copy.copy(self)
        twin._num_illegal = list(self._num_illegal)
        return twin


@dataclass(frozen=True, slots=True, kw_only=True)
class TicTacToe:
    """The world `tic_tac_toe`."""

    name: ClassVar[str] = "tic_tac_toe"
    difficulties: ClassVar[Levels] = (
        {"opponent": "random"},
        {"opponent": "minimax", "epsilon": 0.6},
        {"opponent": "minimax", "epsilon": 0.3},
        {"opponent": "minimax", "epsilon": 0.0},
    )
    max_tokens: ClassVar[int] = 4

    scripted_opponents: ClassVar[tuple[str, ...]] = ("random", "minimax")

    opponent: str = "random"
    """Who has the other seat: random, minimax, or a model (docs/opponents.md)."""
    epsilon: float = 0.0
    """How often `minimax` takes a random free square instead."""
    max_illegal: int = 1
    """Illegal replies that are forgiven in one game."""
    demonstration_skill: float = 1.0
    """How often a demonstration plays a best move instead of a random one. 0 shows only the form of a reply."""

    def __post_init__(self) -> None:
        check_fractions(self, "epsilon", "demonstration_skill")
        if self.epsilon and self.opponent != "minimax":
            raise ConfigError(f"epsilon={self.epsilon} is not read by opponent={self.opponent!r}; leave it out")
        if self.max_illegal < 0:
            raise ConfigError(f"max_illegal={self.max_illegal}; expected 0 or more")

    @property
    def max_turns(self) -> int:
        return 5 + self.max_illegal

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        rng = random_for(self.name, split, seed)
        boards = [board for board in openings() if split_of(f"opening-{board}") == split]
        pairs = [(board, number) for board in boards for number in range(NUM_OPPONENTS)]
        return [_make_task(board, number) for board, number in draw(pairs, count, rng)]

    def make_env(self, task: Task, seed: int) -> SeatedEnv:
        return scripted_env(self, task, seed)

    def policy_seat(self, task: Task) -> int:
        return mover(task.data["board"])

    def make_game(self, task: Task, seed: int) -> TicTacToeGame:  # noqa: ARG002 - a game of two has no randomness
        return TicTacToeGame(task.data["board"], max_illegal=self.max_illegal)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """Games of perfect play, except for the random moves that `demonstration_skill` allows."""

        def player_of(task: Task) -> ScriptedPlayer:
            return _player(f"demo:{seed}:{task.id}", self.demonstration_skill)

        return play_demonstrations(with_script(self), player_of, count, seed)

    def scripted_reply(self, opponent: str, task: Task, game: TicTacToeGame, seed: int) -> str:  # noqa: ARG002
        """The move of a script. It follows from the task, which numbers its script, and the board."""
        rng = random_for(opponent, task.data["opponent"], game.board)
        is_random = opponent == "random" or rng.random() < self.epsilon
        return str(rng.choice(free_squares(game.board) if is_random else best_squares(game.board)) + 1)


def _make_task(board: Board, number: int) -> Task:
    return Task(id=f"ttt-{board.replace(' ', '.')}-{number}", data={"board": board, "opponent": number})


def _player(seed: str, skill: float) -> ScriptedPlayer:
    def reply(dialogue: Sequence[Message]) -> str:
        cells = dialogue[-1].content.split()
        board = "".join(" " if cell.isdigit() else cell for cell in cells)
        rng = random_for(seed, board)
        is_skilled = skill == 1 or rng.random() < skill
        return str(rng.choice(best_squares(board) if is_skilled else free_squares(board)) + 1)

    return reply
