from __future__ import annotations

import random
from typing import Any

import pytest

from attempts import play_replies
from turnwise.envs.base import Task, assistant, system, user
from turnwise.envs.check import check_env
from turnwise.envs.library.tic_tac_toe import (
    EMPTY,
    TicTacToe,
    TicTacToeGame,
    best_squares,
    free_squares,
    is_over,
    mover,
    openings,
    place,
    value,
    winner,
)
from turnwise.envs.seats import SeatedEnv
from turnwise.errors import ConfigError


def reply(world: TicTacToe, board: str, number: int) -> int:
    """The square that the script `number` takes."""
    task = Task(id="t", data={"board": board, "opponent": number})
    return int(world.scripted_reply(world.opponent, task, world.make_game(task, 0), 0)) - 1


def make_env(board: str, **options: Any) -> SeatedEnv:
    return TicTacToe(**options).make_env(Task(id="t", data={"board": board, "opponent": 3}), 0)


async def test_a_board_is_shown_with_the_numbers_of_free_squares() -> None:
    assert await make_env("X   O    ").start() == [
        system("You are X. Three in a row win. Say the number of a free square."),
        user("X 2 3\n4 O 6\n7 8 9"),
    ]
    (rules, _) = await make_env("X        ").start()
    assert rules.content.startswith("You are O.")


async def test_three_in_a_row_win_and_end_the_game_before_the_opponent_moves() -> None:
    (step,) = await play_replies(make_env("XX OO    "), "3")
    assert (step.reward_parts, step.terminated, step.is_success) == ({"outcome": 1.0}, True, True)
    assert step.info["win"] == 1.0


async def test_the_opponents_three_in_a_row_lose() -> None:
    (step,) = await play_replies(make_env("XX OO    ", opponent="minimax"), "9")
    assert (step.reward_parts, step.terminated, step.is_success) == ({"outcome": -1.0}, True, False)


async def test_a_full_board_is_a_draw_and_no_loss() -> None:
    (step,) = await play_replies(make_env("XOXXOOOX "), "9")
    assert (step.reward_parts, step.is_success, step.info["win"]) == ({"outcome": 0.0}, True, 0.0)


async def test_an_illegal_move_is_forgiven_once() -> None:
    env = make_env("X   O    ")
    taken, unread = await play_replies(env, "5", "no idea")
    assert [message.content for message in taken.messages] == ["X 2 3\n4 O 6\n7 8 9"]
    assert (taken.is_over, taken.is_unparsable) == (False, False)
    assert (unread.terminated, unread.is_unparsable, unread.is_success) == (True, True, False)
    assert unread.reward_parts == {"outcome": -1.0}
    (strict,) = await play_replies(make_env("X   O    ", max_illegal=0), "1")
    assert strict.terminated


@pytest.mark.parametrize("text", ["9", " 9\n", "I take 9.", "square 9 please"])
async def test_a_square_is_read_in_whatever_words(text: str) -> None:
    (step,) = await play_replies(make_env("XX OO    "), text)
    assert not step.is_unparsable


@pytest.mark.parametrize("text", ["", "0", "10", "12", "1 or 2", "-3", "3.5", "x3", "nine"])
async def test_no_square_or_two_are_unparsable(text: str) -> None:
    (step,) = await play_replies(make_env("XX OO    "), text)
    assert step.is_unparsable


def test_perfect_play_from_the_start_is_a_draw() -> None:
    assert value(EMPTY) == 0
    assert sorted(best_squares(EMPTY)) == list(range(9))
    assert best_squares("XX OO    ") == [2]


def test_minimax_never_loses_and_beats_random_play() -> None:
    world = TicTacToe(opponent="minimax")
    results = []
    for number in range(60):
        rng, board = random.Random(number), EMPTY
        while not is_over(board):
            board = place(board, rng.choice(free_squares(board)) if mover(board) == 0 else reply(world, board, number))
        results.append(winner(board))
    assert 0 not in results
    assert results.count(1) > 40


def test_an_opponent_plays_the_same_in_the_same_place_and_differs_by_number() -> None:
    world = TicTacToe()
    assert len({reply(world, "X        ", number) for number in range(40)}) > 5
    assert reply(world, "X        ", 7) == reply(world, "X        ", 7)
    careless = TicTacToe(opponent="minimax", epsilon=1.0)
    moves = {reply(careless, "XX O     ", number) for number in range(60)}
    assert len(moves) > 3  # the perfect answer is one


def test_every_opening_can_still_be_held_so_demonstrations_never_lose() -> None:
    assert len(openings()) == 1 + 9 + 72
    assert all(value(board) >= 0 for board in openings())


def test_demonstrations_without_skill_are_legal_and_often_lose() -> None:
    """The skill of a demonstration is a dial: what it leaves out, reinforcement learning has to find."""

    def num_lost(skill: float) -> int:
        world, lost = TicTacToe(demonstration_skill=skill), 0
        for task, dialogue in zip(world.tasks("train", 120, 1), world.demonstrations(120, 1), strict=True):
            board = task.data["board"]
            seat = mover(board)
            for message in dialogue:
                if message.role != "assistant":
                    continue
                assert int(message.content) - 1 in free_squares(board)
                board = place(board, int(message.content) - 1)
                if not is_over(board):
                    board = place(board, reply(world, board, task.data["opponent"]))
            assert is_over(board)
            lost += winner(board) == 1 - seat
        return lost

    losses = [num_lost(skill) for skill in (1.0, 0.5, 0.0)]
    assert losses[0] == 0
    assert losses[0] < losses[1] < losses[2]
    assert losses[2] > 25


def test_openings_are_held_out() -> None:
    world = TicTacToe()
    train, test = ({task.data["board"] for task in world.tasks(split, 3000, 0)} for split in ("train", "test"))
    assert not train & test
    assert len(train | test) == len(openings())


def test_the_two_seats_of_a_game_add_up_to_zero() -> None:
    for number in range(40):
        rng, game = random.Random(number), TicTacToeGame()
        while game.to_move is not None:
            game.move(assistant(str(rng.randint(0, 12))))
        assert game.outcome(0).reward + game.outcome(1).reward == 0


async def test_a_fork_goes_its_own_way() -> None:
    env = make_env("X   O    ")
    await play_replies(env, "5")
    fork = env.fork()
    assert fork.state_key() == env.state_key() == "X...O.... illegal 1 0"
    await play_replies(fork, "5")
    assert env.state_key() == "X...O.... illegal 1 0"


@pytest.mark.parametrize("options", [{"opponent": "minimax", "epsilon": 0.2}, {"max_illegal": 0}])
def test_every_variant_keeps_the_rules(options: dict[str, Any]) -> None:
    report = check_env(TicTacToe(**options), num_tasks=2, deadline_s=120)
    assert report.is_ok, report


@pytest.mark.parametrize("options", [{"epsilon": 2, "opponent": "minimax"}, {"epsilon": 0.1}, {"max_illegal": -1}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"expected|is not read"):
        TicTacToe(**options)
