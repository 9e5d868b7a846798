"""One attempt for the page: the dialogue, rewards by channel, numbers by token; and the tree of its group."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import DataError
from turnwise.opponents.seating import SAID
from turnwise.runlog.arrays import unpack_messages
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import StoredAttempt, StoredDialogue
from turnwise.trajectory import EndReason, Message, Turn
from turnwise.view.attempts import group_rows
from turnwise.view.runs import Json
from turnwise.view.tokens import token_texts

MAX_GROUP = 256
"""Most attempts of a group that the tree draws."""
NODE_TEXT = 80
PICTURE = "screenshot."
"""A label of this name and a number is a picture, as a data: address: 0 of the start, n after the n-th reply."""
TURN_FACTS = ("policy_version", "temperature", "is_trained", "is_cut", "is_unparsable", "env_state")


def attempt_json(run: RunReader, attempt_id: int, model: str) -> Json:
    """One attempt; parts that the run does not hold any more are null, with the reason in `missing`."""
    missing: list[str] = []
    try:
        dialogue = run.stored_dialogue(attempt_id)
    except DataError as error:
        if "dropped" not in str(error):
            raise
        row = next(row for row in run.attempts() if row.id == attempt_id)
        return {"row": asdict(row), "start": [], "turns": [], "missing": [str(error)]}
    tokens: list[Json] | None = None
    if dialogue.row.has_tokens:
        tokens, missing = _tokens(run.attempt(attempt_id), model)
    else:
        missing.append("token arrays were dropped to keep the file small; raise run.max_size_mb to keep more")
    return {**_dialogue_json(dialogue, tokens), "task": _task(run, dialogue.row.task_id), "missing": missing}


def _dialogue_json(dialogue: StoredDialogue, tokens: list[Json] | None) -> Json:
    row = asdict(dialogue.row)
    reason = next((one for one in EndReason if one == row["end_reason"]), None)
    pictures = {name: text for name, text in dialogue.labels.items() if name.startswith(PICTURE)}
    turns: list[Json] = []
    for index, turn in enumerate(dialogue.turns):
        picture = pictures.get(f"{PICTURE}{index + 1}")
        observation = [message_json(message) for message in turn.observation]
        reply = message_json(turn.reply)
        if picture is not None:  # what the policy saw after its reply; a last reply may have no answer
            (observation or [reply])[-1]["images"] = [picture]
        turns.append(
            {
                **{name: getattr(turn, name) for name in TURN_FACTS},
                "reward_parts": dict(turn.reward_parts),
                "credited_parts": None if turn.credited_parts is None else dict(turn.credited_parts),
                "reply": reply,
                "observation": observation,
                "tokens": None if tokens is None else tokens[index],
            }
        )
    start = [message_json(message) for message in dialogue.start]
    if start and f"{PICTURE}0" in pictures:
        start[-1]["images"] = [pictures[f"{PICTURE}0"]]
    return {
        "row": row,
        "end_meaning": "" if reason is None else reason.description,
        "seed": dialogue.seed,
        "duration_s": dialogue.duration_s,
        "metrics": dict(dialogue.metrics),
        "labels": {name: text for name, text in dialogue.labels.items() if name not in (*pictures, SAID)},
        "branch": None if dialogue.branch is None else asdict(dialogue.branch),
        "failure": None if dialogue.failure is None else asdict(dialogue.failure),
        "start": start,
        "turns": turns,
    }


def message_json(message: Message) -> Json:
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    return {"role": message.role, "content": message.content, "name": message.name, "tool_calls": calls}


def _tokens(stored: StoredAttempt, model: str) -> tuple[list[Json], list[str]]:
    """For each turn its tokens with all numbers about them, and what was not recorded."""
    missing: list[str] = []
    found: list[Json] = []
    for index, turn in enumerate(stored.trajectory.turns):
        before = () if index == 0 else _ids(stored.trajectory.turns[index - 1])
        texts = token_texts(model, turn.sampled_ids)
        if texts is None and not missing:
            missing.append(f"the tokenizer of {model} is not on this machine, so tokens are shown as numbers")
        found.append(
            {
                "ids": list(turn.sampled_ids),
                "texts": texts or [str(one) for one in turn.sampled_ids],
                "num_prompt": len(turn.prompt_ids),
                "is_rewritten": turn.prompt_ids[: len(before)] != before,
                "sampler": _numbers(np.asarray(turn.sampler_logprobs)),
                "trainer": _numbers(stored.trainer_logprobs[index]),
                "advantage": _numbers(stored.advantages[index]),
                "mask": [bool(flag) for flag in stored.masks[index]],
                "value": _numbers(stored.critic_values[index]),
            }
        )
    if stored.row.outcome != "trained":
        missing.append(f"not trained on ({stored.row.outcome}), so there are no trainer logprobs and no advantages")
    elif all(values is None for values in stored.critic_values):
        missing.append("no critic values: the method has no critic; method=ppo has one")
    return found, missing


def _ids(turn: Turn) -> tuple[int, ...]:
    return turn.prompt_ids + turn.sampled_ids


def _numbers(values: NDArray[Any] | None) -> list[float | None] | None:
    if values is None:
        return None
    return [round(float(value), 5) if np.isfinite(value) else None for value in values]


def _task(run: RunReader, task_id: str) -> Any:
    try:
        return dict(run.task(task_id))
    except DataError:
        return None


def group_json(database: sqlite3.Connection, attempt_id: int) -> Json:
    """The group of an attempt as a tree: attempts share a node as long as they said and were told the same."""
    row = database.execute("SELECT phase, step, task_id FROM run.trajectories WHERE id = ?", (attempt_id,)).fetchone()
    if row is None:
        raise DataError(f"no attempt {attempt_id} in this run")
    members = _same_seat(database, attempt_id, group_rows(database, row["phase"], row["step"], row["task_id"]))
    shown = members[:MAX_GROUP]
    nodes: dict[Any, Json] = {}
    for member in shown:
        parent: Any = None
        told = b""
        for turn in _turn_rows(database, member["id"]):
            key = (parent, told, turn["sampled"] or turn["reply"])
            if key not in nodes:
                number = len(nodes)
                text = _short(unpack_messages(turn["reply"]))
                at = None if parent is None else nodes[parent]["id"]
                nodes[key] = {"id": number, "parent": at, "turn": turn["turn"], "text": text, "attempts": []}
            nodes[key]["attempts"].append(member["id"])
            parent, told = key, turn["observation"]
    return {"attempts": members, "num_left_out": len(members) - len(shown), "nodes": list(nodes.values())}


def _same_seat(database: sqlite3.Connection, attempt_id: int, members: list[Json]) -> list[Json]:
    """A group has one seat only of a game whose two seats were both trained: each has its own baseline."""
    asked = "SELECT id, json_extract(labels, '$.seat') AS seat FROM run.trajectories WHERE id IN "
    ids = [member["id"] for member in members]
    seats = {row["id"]: row["seat"] for row in database.execute(f"{asked}({', '.join('?' * len(ids))})", ids)}
    return [member for member in members if seats[member["id"]] == seats[attempt_id]]


def _turn_rows(database: sqlite3.Connection, attempt_id: int) -> list[sqlite3.Row]:
    asked = "SELECT turn, reply, observation, sampled FROM run.turns WHERE trajectory_id = ? ORDER BY turn"
    return database.execute(asked, (attempt_id,)).fetchall()


def _short(messages: Sequence[Message]) -> str:
    texts = [message.content or " ".join(call.name for call in message.tool_calls) for message in messages]
    return " ".join(" ".join(texts).split())[:NODE_TEXT]
