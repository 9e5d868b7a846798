"""Where the entropy is measured: over all, by turn, and by the kind of reply."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from turnwise.client.fake import RecordingTrainer, ScriptedSampler
from turnwise.trajectory import Branch, EndReason, Message, ToolCall, Trajectory, TrajectoryGroup, Turn
from turnwise.watch.behaviour import MIN_TOKENS, NUM_TURNS, entropy_metrics, entropy_place
from unit.training.conftest import MakeRig

CALL = (ToolCall(name="add", arguments={}),)


def _turn(entropy: float, *, calls: tuple[ToolCall, ...] = (), count: int = MIN_TOKENS) -> Turn:
    return Turn(
        prompt_ids=(1,),
        sampled_ids=(2,) * count,
        sampler_logprobs=(-entropy,) * count,
        policy_version=0,
        reply=Message(role="assistant", content="", tool_calls=calls),
    )


def _group(*attempts: tuple[Turn, ...], branch: Branch | None = None) -> TrajectoryGroup:
    return TrajectoryGroup(
        task_id="t",
        trajectories=tuple(
            Trajectory(task_id="t", attempt=i, seed=0, turns=turns, end_reason=EndReason.TERMINATED, branch=branch)
            for i, turns in enumerate(attempts)
        ),
    )


def test_turns_and_kinds_of_replies_are_told_apart() -> None:
    group = _group((_turn(1.0, calls=CALL), _turn(2.0)), (_turn(3.0, calls=CALL), _turn(4.0), _turn(6.0)))
    assert entropy_metrics([group]) == pytest.approx(
        {
            "rollout/entropy_estimate": 16 / 5,
            "rollout/entropy_turn_1": 2.0,
            "rollout/entropy_turn_2": 3.0,
            "rollout/entropy_turn_3": 6.0,
            "rollout/entropy_tool_call": 2.0,
            "rollout/entropy_text": 4.0,
        }
    )
    assert entropy_metrics([]) == {}


def test_a_reply_that_the_env_read_as_an_action_is_a_tool_call() -> None:
    group = _group((replace(_turn(1.0), is_action=True), _turn(3.0)))
    metrics = entropy_metrics([group])
    assert (metrics["rollout/entropy_tool_call"], metrics["rollout/entropy_text"]) == (1.0, 3.0)


def test_late_turns_are_one_and_few_tokens_are_no_estimate() -> None:
    long = _group(tuple(_turn(float(i)) for i in range(NUM_TURNS + 2)))
    metrics = entropy_metrics([long])
    assert metrics["rollout/entropy_turn_later"] == pytest.approx(NUM_TURNS + 0.5)
    assert entropy_place("rollout/entropy_turn_later") == f" of turns after {NUM_TURNS}"
    few = entropy_metrics([_group((_turn(1.0, count=MIN_TOKENS - 1),))])
    assert few == {"rollout/entropy_estimate": pytest.approx(1.0)}


def test_what_a_group_shares_counts_once() -> None:
    shared = _turn(1.0)
    group = _group((shared, _turn(2.0)), (shared, _turn(4.0)), branch=Branch(turn=1, seed=0))
    metrics = entropy_metrics([group])
    assert metrics["rollout/entropy_estimate"] == pytest.approx(7 / 3)
    assert metrics["rollout/entropy_turn_2"] == pytest.approx(3.0)


def test_a_run_logs_the_entropy_of_turns_and_of_tool_calls(make_rig: MakeRig, tiny_dir: Path) -> None:
    loader: Any = AutoTokenizer
    call = loader.from_pretrained(str(tiny_dir)).encode('<tool_call>{"name": "flip", "arguments": {}}</tool_call>')
    rig = make_rig({"train": {"steps": 1}, "eval": {"tasks": 0}}, max_tokens=len(call) + 1)
    rig.trainer = RecordingTrainer(ScriptedSampler(lambda _: [*call, rig.renderer.stop_ids[0]]))
    asyncio.run(rig.loop().run())
    with rig.run() as run:
        assert run.metric("rollout/entropy_turn_1") == [(1, 1.0)]
        assert run.metric("rollout/entropy_tool_call") == [(1, 1.0)]
        assert run.metric("rollout/entropy_text") == []
