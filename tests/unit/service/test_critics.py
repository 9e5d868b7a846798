"""Critics over the wire: an extension of ours that any SDK can ask for, through a training client's metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnwise.service.wire import proto as proto_schema
from unit.service.conftest import Serve, Wire

TOKENS = [5, 6, 7, 8, 9, 10]
RETURNS = [0.0, 0.5, 1.0, -0.5, 0.25, 2.0]
CRITIC = {"turnwise.kind": "critic"}


async def make_critic(wire: Wire, index: int = 0, session: str | None = None) -> str:
    body = {
        "session_id": session or await wire.session(),
        "model_seq_id": index,
        "base_model": "tiny",
        "lora_config": {"rank": 4, "seed": 1},
        "user_metadata": CRITIC,
    }
    created = await wire.ok("/create_model", body)
    await wire.result(created)
    return created["model_id"]


def value_body(model: str, seq: int, **inputs: list[float]) -> dict[str, Any]:
    tensors = {key: {"data": data, "dtype": "float32", "shape": [len(data)]} for key, data in inputs.items()}
    datum = {"model_input": {"chunks": [{"tokens": TOKENS}]}, "loss_fn_inputs": tensors}
    return {"model_id": model, "seq_id": seq, "forward_backward_input": {"data": [datum], "loss_fn": "value"}}


async def values(wire: Wire, model: str, seq: int) -> list[float]:
    body = value_body(model, seq)
    body["forward_input"] = body.pop("forward_backward_input")
    outcome = await wire.result(await wire.ok("/forward", body))
    return outcome["loss_fn_outputs"][0]["values"]["data"]


async def learn(wire: Wire, model: str, first_seq: int, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        seq = first_seq + 2 * step
        body = value_body(model, seq, mask=[1.0] * len(TOKENS), returns=RETURNS)
        outcome = await wire.result(await wire.ok("/forward_backward", body))
        await wire.result(await wire.step(model, seq + 1))
        losses.append(outcome["metrics"]["loss:sum"])
    return losses


async def test_a_critic_starts_at_zero_and_learns_the_returns(serve: Serve) -> None:
    async with serve() as wire:
        model = await make_critic(wire)
        before = await values(wire, model, 1)
        losses = await learn(wire, model, 2, 60)
        after = await values(wire, model, 122)
    assert before == [0.0] * len(TOKENS)
    assert losses[0] == pytest.approx(sum(r * r for r in RETURNS) / 2)
    assert losses[-1] < 0.05 * losses[0]
    assert after == pytest.approx(RETURNS, abs=0.5)


async def test_values_come_as_protobuf_too(serve: Serve) -> None:
    async with serve() as wire:
        model = await make_critic(wire)
        await learn(wire, model, 1, 3)
        body = value_body(model, 7, mask=[0.0, 1.0, 1.0, 1.0, 1.0, 1.0], returns=RETURNS)
        promise = await wire.ok("/forward_backward", body)
        as_json = await wire.result(promise)
        answer = await wire.post(
            "/retrieve_future", {"request_id": promise["request_id"]}, headers={"accept": "application/x-protobuf"}
        )
    message = proto_schema.message_class("ForwardBackwardOutput")()
    message.ParseFromString(answer.content)
    (record,) = message.loss_fn_outputs
    (entry,) = as_json["loss_fn_outputs"]
    for key in ("values", "mask"):
        assert np.frombuffer(record.fields[key].data, "<f4").tolist() == pytest.approx(entry[key]["data"])
    assert entry["mask"]["data"] == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("autosave", [1, 100])
async def test_a_critic_survives_a_restart(serve: Serve, autosave: int) -> None:
    async with serve(autosave=autosave) as wire:
        model = await make_critic(wire)
        await learn(wire, model, 1, 5)
        expected = await values(wire, model, 11)
    async with serve(autosave=autosave) as wire:
        found = await values(wire, model, 12)
    assert found == pytest.approx(expected, abs=1e-6)


async def test_a_critic_is_saved_loaded_and_made_from_its_checkpoint(serve: Serve) -> None:
    async with serve() as wire:
        session = await wire.session()
        model = await make_critic(wire, 0, session)
        await learn(wire, model, 1, 4)
        expected = await values(wire, model, 9)
        path = (await wire.result(await wire.ok("/save_weights", {"model_id": model, "seq_id": 10, "path": "v"})))[
            "path"
        ]
        other = await make_critic(wire, 1, session)
        await wire.result(await wire.ok("/load_weights", {"model_id": other, "seq_id": 1, "path": path}))
        loaded = await values(wire, other, 2)
        made = await wire.ok("/load_weights", {"session_id": session, "model_seq_id": 2, "path": path})
        await wire.result(made)
        created = await values(wire, made["model_id"], 1)
        policy = await wire.model(session, 3)
        refused = await wire.result(await wire.ok("/load_weights", {"model_id": policy, "seq_id": 1, "path": path}))
    assert loaded == expected
    assert created == expected
    assert "critic" in refused["error"]


async def test_a_critic_has_nothing_to_sample(serve: Serve) -> None:
    async with serve() as wire:
        model = await make_critic(wire)
        named = await wire.post("/save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "a"})
        unnamed = await wire.post(
            "/save_weights_for_sampler", {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}
        )
        policy_loss = await wire.post("/forward_backward", {**value_body(model, 3), "seq_id": 3})
        outcome = await wire.result(policy_loss.json())
    assert named.status_code == unnamed.status_code == 400
    assert "critic" in named.json()["detail"]
    assert "returns" in outcome["error"] or "mask" in outcome["error"], "it says what a critic needs"


async def test_an_unknown_kind_is_refused(serve: Serve) -> None:
    async with serve() as wire:
        body = {
            "session_id": await wire.session(),
            "model_seq_id": 0,
            "base_model": "tiny",
            "user_metadata": {"turnwise.kind": "judge"},
        }
        answer = await wire.post("/create_model", body)
    assert answer.status_code == 400
    assert "expected policy or critic" in answer.json()["detail"]
