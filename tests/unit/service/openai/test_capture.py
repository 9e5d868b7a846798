"""Captures: an agent's calls as a trajectory in the very ids that were sampled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnwise.credit.datums import trajectory_to_datums
from turnwise.service.access import create_key
from turnwise.trajectory import Trajectory, trajectory_from_json, trajectory_to_json
from unit.service.conftest import Serve, Wire

SYSTEM = {"role": "system", "content": "You find numbers."}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


async def create(wire: Wire, **body: Any) -> Any:
    answer = await wire.http.post("/v1/captures", json=body, headers=wire.headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def say(wire: Wire, capture: Any, messages: list[Any], **options: Any) -> Any:
    body = {"model": "any-name-will-do", "messages": messages, "max_tokens": 8, **options}
    return await wire.http.post(f"{capture['base_url']}/chat/completions", json=body, headers=wire.headers)


async def reply(wire: Wire, capture: Any, messages: list[Any], **options: Any) -> Any:
    answer = await say(wire, capture, messages, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


async def read(wire: Wire, capture: Any) -> Trajectory:
    answer = await wire.http.get(f"/v1/captures/{capture['id']}", headers=wire.headers)
    return trajectory_from_json(answer.json()["trajectory"])


async def reward(wire: Wire, capture: Any, **body: Any) -> Any:
    return await wire.http.post(f"/v1/captures/{capture['id']}/reward", json=body, headers=wire.headers)


async def test_a_conversation_is_one_datum_in_the_sampled_ids(serve: Serve) -> None:
    async with serve() as wire:
        capture = await create(wire, model="tiny", task_id="find", attempt=2)
        messages: list[Any] = [SYSTEM, {"role": "user", "content": "First?"}]
        for question in ("Second?", "Third?", None):
            messages.append(await reply(wire, capture, messages, seed=1))
            if question is not None:
                messages.append({"role": "user", "content": question})
        await reward(wire, capture, reward=1.0, is_success=True)
        await reward(wire, capture, reward=-0.25, part="penalty", turn=0)
        trajectory = await read(wire, capture)
    assert (trajectory.task_id, trajectory.attempt, trajectory.is_success) == ("find", 2, True)
    assert [turn.reward for turn in trajectory.turns] == [-0.25, 0.0, 1.0]
    assert [message.content for message in trajectory.start] == ["You find numbers.", "First?"]
    assert [[m.content for m in turn.observation] for turn in trajectory.turns] == [["Second?"], ["Third?"], []]
    for before, after in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        known = (*before.prompt_ids, *before.sampled_ids)
        assert after.prompt_ids[: len(known)] == known, "no reply is encoded again"
    (datum,) = trajectory_to_datums(trajectory, [1.0, 1.0, 1.0])
    assert sum(datum.loss_fn_inputs["mask"].data) == sum(len(turn.sampled_ids) for turn in trajectory.turns)
    assert all(turn.policy_version == trajectory.turns[0].policy_version for turn in trajectory.turns)


async def test_a_streamed_call_is_recorded_like_a_whole_one(serve: Serve) -> None:
    user = [{"role": "user", "content": "First?"}]
    async with serve() as wire:
        captures = [await create(wire, model="tiny") for _ in range(2)]
        await reply(wire, captures[0], user, seed=4)
        answer = await say(wire, captures[1], user, seed=4, stream=True)
        assert answer.text.endswith("data: [DONE]\n\n")
        one, other = [await read(wire, capture) for capture in captures]
    assert one.turns == other.turns


async def test_a_conversation_that_was_rewritten_starts_a_datum_of_its_own(serve: Serve) -> None:
    async with serve() as wire:
        capture = await create(wire, model="tiny")
        first = [{"role": "user", "content": "First?"}]
        said = await reply(wire, capture, first, seed=1)
        other = {"role": "assistant", "content": f"{said['content']} and more"}
        await reply(wire, capture, [*first, other, {"role": "user", "content": "Second?"}], seed=1)
        trajectory = await read(wire, capture)
    assert len(trajectory_to_datums(trajectory, [1.0, 1.0])) == 2
    assert trajectory.turns[0].observation == ()


async def test_a_branch_goes_on_from_the_call_that_it_left(serve: Serve) -> None:
    async with serve() as wire:
        capture = await create(wire, model="tiny")
        first = [{"role": "user", "content": "First?"}]
        said = await reply(wire, capture, first, seed=1)
        for question in ("Left?", "Right?"):
            await reply(wire, capture, [*first, said, {"role": "user", "content": question}], seed=1)
        trajectory = await read(wire, capture)
    root = trajectory.turns[0]
    known = (*root.prompt_ids, *root.sampled_ids)
    assert all(turn.prompt_ids[: len(known)] == known for turn in trajectory.turns[1:])


async def test_tools_are_part_of_the_prompt_and_of_the_match(serve: Serve) -> None:
    async with serve() as wire:
        capture = await create(wire, model="tiny")
        first = [{"role": "user", "content": "First?"}]
        said = await reply(wire, capture, first, seed=1, tools=[TOOL])
        again = [*first, said, {"role": "user", "content": "Second?"}]
        await reply(wire, capture, again, seed=1, tools=[TOOL])
        await reply(wire, capture, again, seed=1)
        with_tools, same, without = (await read(wire, capture)).turns
    known = (*with_tools.prompt_ids, *with_tools.sampled_ids)
    assert same.prompt_ids[: len(known)] == known
    assert without.prompt_ids[: len(known)] != known


async def test_an_exact_capture_refuses_a_cut_distribution_unless_it_sets_the_temperature(serve: Serve) -> None:
    user = [{"role": "user", "content": "First?"}]
    async with serve() as wire:
        plain, fixed = await create(wire, model="tiny"), await create(wire, model="tiny", temperature=0.7)
        refused = await say(wire, plain, user, top_p=0.9)
        many = await say(wire, plain, user, n=2)
        await reply(wire, fixed, user, top_p=0.9, temperature=0.1)
        (turn,) = (await read(wire, fixed)).turns
    assert refused.status_code == many.status_code == 400
    assert "top_p" in refused.json()["error"]["message"]
    assert turn.temperature == 0.7


async def test_a_capture_belongs_to_its_key(serve: Serve) -> None:
    async with serve() as wire:
        alice, bob = (wire.with_key(create_key(wire.service.store, name)) for name in ("alice", "bob"))
        capture = await create(alice, model="tiny")
        path = f"/v1/captures/{capture['id']}"
        statuses = [
            (await bob.http.get(path, headers=bob.headers)).status_code,
            (await reward(bob, capture, reward=1.0)).status_code,
            (await say(bob, capture, [{"role": "user", "content": "hi"}])).status_code,
            (await bob.http.delete(path, headers=bob.headers)).status_code,
            (await alice.http.get(path, headers=alice.headers)).status_code,
            (await alice.http.delete(path, headers=alice.headers)).status_code,
            (await alice.http.get(path, headers=alice.headers)).status_code,
        ]
        listed = (await bob.http.get("/v1/captures", headers=bob.headers)).json()["data"]
    assert statuses == [404, 404, 404, 404, 200, 200, 404]
    assert listed == []


@pytest.mark.parametrize("body", [{}, {"reward": 1.0}, {"reward": 1.0, "turn": 3}, {"reward": "inf"}, {"part": "x"}])
async def test_a_reward_without_a_turn_to_go_to_is_refused(serve: Serve, body: dict[str, Any]) -> None:
    async with serve() as wire:
        capture = await create(wire, model="tiny")
        answer = await reward(wire, capture, **body)
        empty = await wire.http.get(f"/v1/captures/{capture['id']}")
    assert answer.status_code == 400
    assert empty.json()["trajectory"] is None


async def test_a_capture_names_a_model_that_is_there(serve: Serve) -> None:
    async with serve() as wire:
        answer = await wire.http.post("/v1/captures", json={"model": "nope"})
    assert answer.status_code == 404


async def test_a_trajectory_survives_json_number_by_number(serve: Serve) -> None:
    async with serve() as wire:
        capture = await create(wire, model="tiny")
        await reply(wire, capture, [{"role": "user", "content": "First?"}], tools=[TOOL])
        trajectory = await read(wire, capture)
    again = trajectory_from_json(json.loads(json.dumps(trajectory_to_json(trajectory))))
    assert again == trajectory
