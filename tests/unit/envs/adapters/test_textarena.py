from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

textarena = pytest.importorskip("textarena")

from attempts import play  # noqa: E402 - after the check that the library is there
from turnwise.client.fake import ScriptedSampler  # noqa: E402
from turnwise.envs.adapters.textarena import RANDOM, GlobalRandom, TextArenaWorld, random_legal_move  # noqa: E402
from turnwise.envs.base import Task, assistant  # noqa: E402
from turnwise.envs.game import Game  # noqa: E402
from turnwise.envs.registry import get_world  # noqa: E402
from turnwise.errors import ConfigError  # noqa: E402
from turnwise.opponents.seating import seat, seat_script, two_sided  # noqa: E402
from turnwise.opponents.tournament import play_tournament  # noqa: E402
from turnwise.renderers import get_renderer  # noqa: E402
from turnwise.rollout.config import RolloutConfig  # noqa: E402
from turnwise.rollout.self_play import play_games  # noqa: E402
from turnwise.trajectory import Message  # noqa: E402

OPPONENT = """\
def first_free(seat, read, rng):
    line = [line for line in read.splitlines() if line.startswith("Available Moves")][-1]
    return line.split("'")[1]
"""


def _task(seed: int) -> Task:
    return Task(id=f"train-{seed}", data={"seed": seed})


@pytest.fixture
def first_free(tmp_path: Path) -> str:
    file = tmp_path / "opponents.py"
    file.write_text(OPPONENT, encoding="utf-8")
    return f"{file}:first_free"


async def test_three_in_a_row_wins_against_a_scripted_opponent(first_free: str) -> None:
    world = get_world("textarena:TicTacToe-v0", seat=0, opponent=first_free)
    start, steps = await play(world, ["[4]", "[2]", "[6]"])
    assert start[0].content.startswith("You are Player 0 in Tic Tac Toe.")
    assert [step.reward for step in steps] == [0, 0, 1]
    assert (steps[-1].terminated, steps[-1].is_success) == (True, True)
    assert "Player 0 has won!" in steps[-1].messages[0].content


async def test_the_other_seat_sees_the_first_move_and_can_lose(first_free: str) -> None:
    world = get_world("textarena:TicTacToe-v0", seat=1, opponent=first_free)
    start, steps = await play(world, ["[3]", "[4]", "[8]"])
    assert "Player 0: [0]" in start[0].content
    assert (steps[-1].reward, steps[-1].terminated, steps[-1].is_success) == (-1, True, False)


async def test_ones_own_moves_are_not_repeated(first_free: str) -> None:
    _, steps = await play(get_world("textarena:TicTacToe-v0", seat=0, opponent=first_free), ["my move is [4]"])
    assert "my move is" not in steps[0].messages[0].content
    assert "Player 1: [0]" in steps[0].messages[0].content


async def test_an_invalid_move_is_flagged_and_costs_what_the_game_says() -> None:
    _, steps = await play(get_world("textarena:TicTacToe-v0", seat=0), ["hm", "[99]"])
    assert [step.is_unparsable for step in steps] == [True, True]
    assert "invalid move" in steps[0].messages[0].content
    assert (steps[1].reward, steps[1].terminated) == (-1, True)


def test_tasks_take_turns_with_the_seats() -> None:
    world = get_world("textarena:TicTacToe-v0")
    assert {task.data["seed"] // 2 % 2 for task in world.tasks("train", 20, 0)} == {0, 1}


async def test_a_single_player_game_has_no_opponent() -> None:
    world = get_world("textarena:GuessTheNumber-v0")
    for number in range(1, 21):
        _, steps = await play(world, [f"[{number}]"], _task(0))
        if steps[0].is_over:
            break
    assert steps[0].is_success
    assert steps[0].reward == 1


@pytest.mark.parametrize("game", ["Nim-v0", "KuhnPoker-v0", "ThreePlayerTicTacToe-v0", "ConnectFour-v0"])
async def test_the_random_opponent_makes_legal_moves(game: str) -> None:
    world = get_world(f"textarena:{game}")
    for seed in (0, 2, 4, 6):
        env = textarena.make(f"{game}-raw")
        with GlobalRandom(seed).in_place():
            env.reset(num_players=world.players, seed=seed)  # pyright: ignore[reportAttributeAccessIssue]
            rng, read = random.Random(seed), dict.fromkeys(range(8), "")
            for _ in range(60):
                if env.state.done:
                    break
                player, observation = env.get_observation()
                read[player] += "".join(f"{message}\n" for _, message, _ in observation)
                env.step(random_legal_move(env, read[player], rng))
        assert env.state.done
        assert not any(info["invalid_move"] for info in env.state.game_info.values())


async def test_equal_seeds_give_equal_games_whatever_else_draws_from_the_global_generators() -> None:
    world = get_world("textarena:KuhnPoker-v0")
    random.seed(1)
    first = await play(world, ["[check]", "[fold]", "[check]", "[fold]"], _task(6))
    random.seed(2)
    again = await play(world, ["[check]", "[fold]", "[check]", "[fold]"], _task(6))
    other = await play(world, ["[check]", "[fold]", "[check]", "[fold]"], _task(10))
    assert first == again != other


def test_a_game_with_all_seats_open_pays_every_seat() -> None:
    world = TextArenaWorld("TicTacToe-v0")
    game = world.make_game(_task(0), 0)
    seats = []
    for cell in (0, 3, 1, 4, 2):
        assert game.to_move is not None
        seats.append(game.to_move)
        assert "Available Moves" in game.view(game.to_move)[0].content
        assert game.move(assistant(f"[{cell}]"))
    assert seats == [0, 1, 0, 1, 0]
    assert game.to_move is None
    assert [game.outcome(seat).reward for seat in range(game.num_seats)] == [1, -1]
    assert "Player 0 has won!" in game.view(1)[0].content


def test_a_view_can_be_read_twice_and_holds_nothing_old() -> None:
    game = TextArenaWorld("TicTacToe-v0").make_game(_task(0), 0)
    assert game.view(0) == game.view(0)
    game.move(assistant("[4]"))
    game.move(assistant("[0]"))
    assert "You are Player 0" not in game.view(0)[0].content
    assert "Player 1: [0]" in game.view(0)[0].content


async def test_copies_of_the_policy_play_each_other(tiny_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_dir)
    renderer = get_renderer(tokenizer)

    def reply(prompt_ids: list[int]) -> list[int]:
        moves = tokenizer.decode(prompt_ids).rsplit("Available Moves: ", 1)[1].split("\n")[0]
        return renderer.encode_reply(assistant(moves.split("'")[1]))

    world, config = TextArenaWorld("TicTacToe-v0"), RolloutConfig(group_size=2)
    result = await play_games(world, [_task(0)], ScriptedSampler(reply), renderer, config, seed=0)
    assert [group.task_id for group in result.groups] == ["train-0/seat-0", "train-0/seat-1"]
    rewards = [[trajectory.total_reward for trajectory in group.trajectories] for group in result.groups]
    assert rewards == [[1.0, 1.0], [-1.0, -1.0]]


class Pointing:
    """A player that is no script: it names a fixed square, and keeps what it was shown."""

    name, is_scripted = "pointing", False

    def __init__(self, *squares: int) -> None:
        self.squares = list(squares)
        self.shown: list[str] = []

    async def reply(self, game: Game, dialogue: Sequence[Message], seed: int) -> str:  # noqa: ARG002 - it reads words
        self.shown = [message.content for message in dialogue]
        return f"I take [{self.squares.pop(0)}]"


async def test_another_model_has_the_other_seat_in_a_game_of_two(first_free: str) -> None:
    world = get_world("textarena:TicTacToe-v0", opponent="base", seat=1)
    assert two_sided(world) is not None
    with pytest.raises(ConfigError, match="nobody has loaded it"):
        world.make_env(_task(0), 0)
    other = Pointing(4, 2, 6)
    env: Any = seat(world, lambda _task, _seed: other).make_env(_task(0), 0)
    start = await env.start()
    assert "Player 0: I take [4]" in start[-1].content
    assert "You are Player 0" in other.shown[0]
    twin = env.fork()
    assert twin.state_key() == env.state_key()
    first = await env.step(assistant("[0]"))
    assert "Player 1: [0]" in other.shown[-1]
    assert (first.reward, first.terminated) == (0, False)
    assert twin.state_key() != env.state_key(), "a fork is a game of its own"
    last = await env.step(assistant("[1]"))
    assert (last.reward, last.terminated, last.is_success) == (-1, True, False)
    assert "Player 0 has won!" in last.messages[-1].content
    assert (last.labels["opponent"], last.labels["result"]) == ("pointing", "lost")
    for words in (RANDOM, first_free):
        scripted = seat_script(get_world("textarena:TicTacToe-v0", opponent=first_free, seat=0), words)
        _, steps = await play(scripted, ["[4]", "[2]", "[6]"])
        assert steps[0].labels == {"opponent": words}
        if words == first_free:
            assert [step.reward for step in steps] == [0, 0, 1], "the same game as without a seat for others"


async def test_a_tournament_of_textarena_has_both_seats(first_free: str) -> None:
    world = two_sided(get_world("textarena:TicTacToe-v0", opponent=first_free))
    assert world is not None
    tasks = [_task(number) for number in (1, 3)]
    games = await play_tournament(world, {RANDOM: None, first_free: None}, tasks, seed=0)
    assert len(games) == 4
    assert not [game.failure for game in games if game.failure]
    assert {game.names for game in games} == {(RANDOM, first_free), (first_free, RANDOM)}
    assert all(sum(game.rewards or (1,)) == 0 for game in games)


def test_a_game_leaves_the_global_generator_as_it_found_it() -> None:
    random.seed(5)
    expected = random.Random(5).random()
    with GlobalRandom(0).in_place():
        random.random()
    assert random.random() == expected


def test_two_games_never_draw_from_each_others_state() -> None:
    drawn: dict[int, list[float]] = {0: [], 1: []}
    games = [GlobalRandom(0), GlobalRandom(1)]

    def draw(game: int) -> None:
        for _ in range(200):
            with games[game].in_place():
                drawn[game].append(random.random())

    threads = [threading.Thread(target=draw, args=(game,)) for game in drawn]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for game, numbers in drawn.items():
        rng = random.Random(game)
        assert numbers == [rng.random() for _ in range(200)]


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("TicTacToe", {}, "no game 'TicTacToe'; did you mean 'TicTacToe-v0'"),
        ("TicTacToe-v0", {"seat": 2}, "seat=2; TicTacToe-v0 has seats 0 to 1"),
        ("TicTacToe-v0", {"make": {"no_such": 1}}, "cannot be set up with make="),
        ("TicTacToe-v0", {"players": 3}, "does not start with 3 players"),
        ("TicTacToe-v0", {"opponent": "no_such_module:f"}, "no module 'no_such_module'"),
        ("ThreePlayerTicTacToe-v0", {"opponent": "base"}, "is played by 3, and a model has the other seat in games of"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        get_world(f"textarena:{name}", **options)
