"""The parts that all text adventures share, with a game of four rooms."""

from __future__ import annotations

import json
import random

import pytest

from cases import for_each
from turnwise.envs.adapters.text_adventure import (
    NOT_A_COMMAND,
    RULES,
    AdventureEnv,
    AdventureRules,
    AdventureWorld,
    Scene,
    check_game,
    random_command,
    read_command,
    turns_of,
    walk,
)
from turnwise.envs.base import Split, Task, assistant, user
from turnwise.errors import ConfigError

PLAIN = AdventureRules(rules=RULES, max_turns=6, admissible=False, forbidden=frozenset({"save", "tw"}))
LISTING = AdventureRules(rules=RULES, max_turns=6, admissible=True, forbidden=frozenset())


class Corridor:
    """Three doors to the east; a point for each of the first two, which going back takes away."""

    def __init__(self) -> None:
        self.room = 0
        self.num_closed = 0

    def start(self) -> Scene:
        return self._scene()

    def act(self, command: str) -> Scene:
        self.room += {"east": 1, "west": -1}.get(command, 0)
        return self._scene()

    def walkthrough(self) -> list[str]:
        return ["east"] * 3

    def close(self) -> None:
        self.num_closed += 1

    def _scene(self) -> Scene:
        return Scene(
            text=f"Room {self.room}.",
            score=self.room / 3,
            is_over=self.room == 3,
            is_won=self.room == 3,
            commands=("east", "west"),
            state=json.dumps(self.room),
        )


def test_the_rewards_of_a_won_game_add_up_to_one_though_points_were_lost_on_the_way() -> None:
    env = AdventureEnv(Corridor, PLAIN)
    env.start()
    steps = [env.step(assistant(command)) for command in ("east", "west", "east", "east", "east")]
    assert [step.reward for step in steps] == pytest.approx([1 / 3, 0, 0, 1 / 3, 1 / 3])
    assert (steps[-1].terminated, steps[-1].is_success) == (True, True)


def test_a_game_that_is_not_won_in_time_is_cut_and_not_a_success() -> None:
    env = AdventureEnv(Corridor, PLAIN)
    env.start()
    steps = [env.step(assistant("wait")) for _ in range(6)]
    assert [step.truncated for step in steps] == [False] * 5 + [True]
    assert (steps[-1].terminated, steps[-1].is_success) == (False, False)


@for_each(
    "reply",
    [
        "",
        "\n",
        "east. east",
        "east then east",
        "east\neast",
        "save",
        "SAVE game",
        "tw-print",
        "x" * 101,
        "{east}",
        "élan",
    ],
)
def test_what_is_not_one_command_for_the_game_is_flagged_and_does_not_reach_it(reply: str) -> None:
    env = AdventureEnv(Corridor, PLAIN)
    env.start()
    step = env.step(assistant(reply))
    assert step.is_unparsable
    assert step.messages[0].content == NOT_A_COMMAND
    assert env.step(assistant("east")).messages[0].content == "Room 1."


@for_each("reply", ["go east", "  take  T-shirt ", "cook egg with BBQ", "x lamp 2", "read Ann's note"])
def test_a_command_is_read_without_blanks_around_it(reply: str) -> None:
    assert read_command(reply, PLAIN) == " ".join(reply.split())


def test_commands_are_listed_only_if_asked_for_and_never_after_the_end() -> None:
    bare, listing = AdventureEnv(Corridor, PLAIN), AdventureEnv(Corridor, LISTING)
    assert bare.start()[-1].content == "Room 0."
    assert listing.start()[-1].content == "Room 0.\nCommands: east; west"
    last = [listing.step(assistant("east")) for _ in range(3)][-1]
    assert last.messages[0].content == "Room 3."


def test_the_key_names_the_room_the_best_score_and_the_turn_but_not_the_way() -> None:
    keys: list[str] = []
    for commands in (["east", "wait"], ["wait", "east"], ["east", "east"]):
        env = AdventureEnv(Corridor, PLAIN)
        env.start()
        for command in commands:
            env.step(assistant(command))
        keys.append(env.state_key())
    assert keys[0] == keys[1] != keys[2]


def test_close_frees_the_game_once_and_works_before_start() -> None:
    game = Corridor()
    env = AdventureEnv(lambda: game, PLAIN)
    env.close()
    env.start()
    env.close()
    env.close()
    assert game.num_closed == 1


def test_the_walkthrough_is_played_in_order_and_then_the_player_looks() -> None:
    player = walk(["east", "west"])
    assert [player([user("Room 0.")]) for _ in range(3)] == ["east", "west", "look"]


def test_random_play_takes_any_listed_command_and_refuses_to_play_without_a_list() -> None:
    player = random_command(random.Random(0))
    assert {player([user("Room 0.\nCommands: go east; go west")]) for _ in range(40)} == {"go east", "go west"}
    with pytest.raises(ConfigError, match="admissible=true"):
        player([user("Room 0.")])


class Corridors(AdventureWorld):
    """A world of one game; it keeps the games that it has opened."""

    name, max_turns, max_tokens = "corridors", 6, 8

    @property
    def rules(self) -> AdventureRules:
        return LISTING

    def __init__(self) -> None:
        self.opened: list[Corridor] = []

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return [Task(id=f"{split}-{seed + index}") for index in range(count)]

    def open_game(self, task: Task, *, has_path: bool = False) -> Corridor:  # noqa: ARG002 - it has one game
        self.opened.append(Corridor())
        return self.opened[-1]


def test_a_world_plays_its_walkthroughs_as_demonstrations_and_closes_every_game() -> None:
    world = Corridors()
    (dialogue,) = world.demonstrations(1, seed=0)
    assert [message.content for message in dialogue if message.role == "assistant"] == ["east"] * 3
    assert [game.num_closed for game in world.opened] == [1, 1]  # the expert's, and the one that is played
    assert world.random_player(Task(id="any"), 0)([user("Room 0.\nCommands: go east")]) == "go east"


def test_a_game_a_level_or_a_limit_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="shelf has no book 'hobit'; did you mean 'hobbit'"):
        check_game("shelf", "book", "hobit", ["hobbit", "emma"])
    assert (turns_of(1, (15, 30), None), turns_of(1, (15, 30), 4)) == (30, 4)
    with pytest.raises(ConfigError, match="level=2; expected 0 to 1"):
        turns_of(2, (15, 30), None)
    with pytest.raises(ConfigError, match="max_turns=0; expected at least 1"):
        turns_of(0, (15, 30), 0)
