from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turnwise.envs.base import EnvStep, Task, assistant, system, user
from turnwise.envs.library.dialogue import DialogueEnv, DialogueWorld, load_conversations, score_reply, word_overlap
from turnwise.envs.library.dialogue_data import make_conversations
from turnwise.errors import ConfigError

FRANCE = {
    "turns": [
        {"user": "What is the capital of France?", "keywords": ["Paris"]},
        {"user": "On which continent is it?", "keywords": ["Europe"]},
    ]
}


def make_env(conversation: dict[str, Any], **options: Any) -> DialogueEnv:
    return DialogueWorld(**options).make_env(Task(id="t", data=conversation), seed=0)


async def play(env: DialogueEnv, *replies: str) -> list[EnvStep]:
    await env.start()
    return [await env.step(assistant(reply)) for reply in replies]


async def test_the_dialogue_of_the_docstring() -> None:
    env = make_env(FRANCE)
    assert await env.start() == [user("What is the capital of France?")]
    first = await env.step(assistant("It is Paris."))
    assert (first.messages, first.reward, first.is_over) == ([user("On which continent is it?")], 1.0, False)
    second = await env.step(assistant("In Asia, I think."))
    assert (second.reward, second.terminated, second.is_success) == (0.0, True, False)


async def test_a_conversation_is_a_success_when_it_earns_its_share() -> None:
    assert (await play(make_env(FRANCE), "paris", "europe"))[-1].is_success
    assert (await play(make_env(FRANCE, success_share=0.5), "paris", "?"))[-1].is_success


async def test_a_system_text_comes_first() -> None:
    assert (await make_env({"system": "Be brief.", **FRANCE}).start())[0] == system("Be brief.")


async def test_a_turn_is_worth_its_reward_times_its_score() -> None:
    conversation = {"turns": [{"user": "Name two.", "keywords": ["red", "blue"], "reward": 0.8}]}
    (step,) = await play(make_env(conversation), "Red, I say")
    assert step.reward == pytest.approx(0.4)


async def test_listing_everything_is_no_answer() -> None:
    cities = "London Rome Paris Berlin Madrid " * 7
    (step, *_) = await play(make_env(FRANCE), cities)
    assert step.reward == 0.0
    (step, *_) = await play(make_env(FRANCE, max_words=0), cities)
    assert step.reward == 1.0


@pytest.mark.parametrize(
    ("turn", "text", "score"),
    [
        ({"keywords": ["Paris"]}, "paris!", 1.0),
        ({"keywords": ["Paris"]}, "Parisian", 0.0),
        ({"keywords": ["2.2 million|2 million"]}, "about 2 million people", 1.0),
        ({"keywords": ["a", "b", "c", "d"]}, "b a", 0.5),
        ({"keywords": ["C++"]}, "I like C++.", 1.0),
        ({"regex": r"^\d+$"}, "42", 1.0),
        ({"regex": r"^\d+$"}, "42!", 0.0),
        ({"assistant": "the capital is Paris"}, "The capital is Paris.", 1.0),
        ({"assistant": "the capital is Paris"}, "Paris", 0.4),
        ({"assistant": "Paris", "keywords": ["Rome"]}, "Rome", 1.0),
    ],
)
def test_replies_are_scored(turn: dict[str, Any], text: str, score: float) -> None:
    assert score_reply(turn, text) == pytest.approx(score)


def test_word_overlap_counts_repetitions_once_each() -> None:
    assert word_overlap("Paris Paris Paris", "Paris") == pytest.approx(0.5)
    assert word_overlap("", "Paris") == 0.0
    assert word_overlap("Paris", "") == 0.0


def test_the_shipped_conversations_are_well_formed_and_split(tmp_path: Path) -> None:
    conversations = make_conversations()
    file = tmp_path / "all.json"
    file.write_text(json.dumps(conversations), encoding="utf-8")
    assert load_conversations(file) == conversations
    world = DialogueWorld()
    train, test = ({task.id for task in world.tasks(split, 200, 0)} for split in ("train", "test"))
    assert len(train | test) == len(conversations)
    assert len(test) >= 32  # fewer would not tell a run that learns from one that does not
    for kind in ("capital", "opposite", "person", "sum"):
        assert any(name.startswith(kind) for name in test), f"no {kind} is held out"


def test_the_reference_replies_earn_everything() -> None:
    for conversation in make_conversations():
        for turn in conversation["turns"]:
            assert score_reply(turn, turn["assistant"]) == 1.0


def test_turns_with_a_reference_and_a_reward_load_as_they_are(tmp_path: Path) -> None:
    turns = [
        {"user": "What is the capital of France?", "assistant": "The capital of France is Paris.", "reward": 1.0},
        {"user": "How many people live there?", "assistant": "About 2.2 million.", "reward": 0.9},
    ]
    file = tmp_path / "conversations.jsonl"
    rows = [{"turns": turns, "split": "train"}, {"turns": turns, "split": "test", "id": "other"}]
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    world = DialogueWorld(path=file)
    assert world.max_turns == 2
    assert [task.id for task in world.tasks("train", 1, 0)] == ["dialogue-1"]
    assert [task.id for task in world.tasks("test", 1, 0)] == ["other"]
    (dialogue,) = world.demonstrations(1, 0)
    assert dialogue[-1] == assistant("About 2.2 million.")


def test_there_are_no_demonstrations_without_references(tmp_path: Path) -> None:
    file = tmp_path / "conversations.jsonl"
    file.write_text(json.dumps({**FRANCE, "split": "train"}), encoding="utf-8")
    world = DialogueWorld(path=file)
    assert world.demonstrations(3, 0) == []
    with pytest.raises(ConfigError, match=r"no test conversation in .*; add some, or mark some"):
        world.tasks("test", 1, 0)


async def test_state_is_the_turn_and_what_was_earned() -> None:
    env = make_env(FRANCE)
    await play(env, "Paris")
    assert env.state_key() == "turn 1 earned 1"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, 'has no "turns"'),
        ({"turns": []}, 'has no "turns"'),
        ({"turns": ["hi"]}, 'turn 1: expected an object with the text of the "user"'),
        ({"turns": [{"user": "hi"}]}, "turn 1 cannot be scored"),
        ({"turns": [{"user": "hi", "keyword": ["x"]}]}, "unknown key 'keyword'; did you mean 'keywords'"),
        ({"turns": [{"user": "hi", "keywords": "x"}]}, "expected a list of words"),
        ({"turns": [{"user": "hi", "keywords": []}]}, "expected a list of words"),
        ({"turns": [{"user": "hi", "regex": "("}]}, r"regex='\('"),
        ({"turns": [{"user": "hi", "regex": "x", "reward": 0}]}, "expected a positive number"),
        ({"turns": [{"user": "hi", "regex": "x"}], "split": "dev"}, 'expected "train" or "test"'),
        ({"turns": [{"user": "hi", "regex": "x"}], "name": "x"}, "unknown key 'name'"),
    ],
)
def test_conversations_that_cannot_be_played_are_refused(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    file = tmp_path / "conversations.jsonl"
    file.write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        DialogueWorld(path=file)


def test_ids_are_unique(tmp_path: Path) -> None:
    file = tmp_path / "conversations.jsonl"
    file.write_text("\n".join([json.dumps({**FRANCE, "id": "x"})] * 2), encoding="utf-8")
    with pytest.raises(ConfigError, match="two conversations with the id 'x'"):
        DialogueWorld(path=file)


@pytest.mark.parametrize("options", [{"success_share": 0.0}, {"max_words": -1}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        DialogueWorld(**options)
