"""What ends and what is bounded: sessions that are finished, memory that is full, engines that have stopped."""

from __future__ import annotations

import pytest

from turnwise.engine.config import EngineConfig
from turnwise.service.training.parked_adapters import DeviceLimit
from unit.service.conftest import Serve, training_body

PROMPT = {"chunks": [{"tokens": [5, 6, 7]}]}


async def test_a_finished_session_accepts_nothing_more_and_keeps_its_results(serve: Serve) -> None:
    async with serve() as wire:
        session = await wire.session()
        model = await wire.model(session)
        trained = await wire.train(model, 1)
        sampler = (
            await wire.ok(
                "/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
            )
        )["sampling_session_id"]
        other = await wire.model()
        await wire.ok(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
        create = {"session_id": session, "model_seq_id": 1, "base_model": "tiny"}
        refused = [
            await wire.post("/forward_backward", training_body(model, 2)),
            await wire.post("/optim_step", {"model_id": model, "seq_id": 3}),
            await wire.post("/create_model", create),
            await wire.post("/asample", {"sampling_session_id": sampler, "seq_id": 0, "prompt": PROMPT}),
            await wire.post(
                "/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"}
            ),
        ]
        kept = await wire.result(trained)
        again = await wire.train(model, 1)
        await wire.result(await wire.train(other, 1))
    assert [answer.status_code for answer in refused] == [400] * 5
    assert all("finished" in answer.json()["detail"] for answer in refused)
    assert "loss:sum" in kept["metrics"]
    assert again["request_id"] == trained["request_id"], "what was accepted before can be asked for again"


async def test_adapters_beyond_the_memory_bound_are_parked_and_come_back(serve: Serve) -> None:
    async with serve() as wire:
        await wire.model(rank=8)
        (model,) = wire.service.training
        one = model.adapter.num_bytes
        assert one > 4 * 4 * 1000, "weights, gradient and two moments of float32"
    async with serve(max_resident_bytes=2 * one) as wire:
        models = [await wire.model(rank=8) for _ in range(4)]
        losses = [(await wire.result(await wire.train(each, 1)))["metrics"]["loss:sum"] for each in models]
        wire.service.sweep()
        await wire.loss(models[3], 2)  # behind what the sweep had queued
        resident = sum(each.adapter.num_bytes for each in wire.service.training)
        seqs = (2, 2, 2, 3)
        again = [await wire.loss(each, seq) for each, seq in zip(models, seqs, strict=True)]
    assert resident <= 3 * one, "the bound, and what was brought back just now"
    assert again == pytest.approx(losses), "no step was taken, so the loss is the same"


def test_the_longest_idle_leave_first_until_the_rest_fits() -> None:
    sizes = {"a": 5, "b": 1, "c": 4, "d": 2}
    resident = list(sizes)
    assert DeviceLimit(10, 100).choose_to_park(resident, resident, sizes.__getitem__) == []
    assert DeviceLimit(2, 100).choose_to_park(resident, ["b", "c", "a"], sizes.__getitem__) == ["b", "c"]
    assert DeviceLimit(10, 7).choose_to_park(resident, ["a", "b"], sizes.__getitem__) == ["a"]
    assert DeviceLimit(10, 1).choose_to_park(resident, ["b"], sizes.__getitem__) == ["b"], "what is in use stays"


async def test_a_stopped_engine_is_said_and_nothing_is_taken_in(serve: Serve) -> None:
    async with serve(engine=EngineConfig(device="cpu", kv_cache_gib=0.04)) as wire:
        session = await wire.session()
        model = await wire.model(session)
        await wire.result(await wire.train(model, 1))
        (served,) = wire.service.models
        served.loaded.worker.close()
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler_id = (await wire.ok("/create_sampling_session", sampler))["sampling_session_id"]
        refused = [
            await wire.post("/forward_backward", training_body(model, 2)),
            await wire.post("/create_model", {"session_id": session, "model_seq_id": 1, "base_model": "tiny"}),
            await wire.post("/asample", {"sampling_session_id": sampler_id, "seq_id": 0, "prompt": PROMPT}),
        ]
        health = await wire.get("/healthz")
    assert [answer.status_code for answer in refused] == [503] * 3
    assert all("must be restarted" in answer.json()["detail"] for answer in refused)
    assert all(answer.headers["retry-after"] for answer in refused)
    assert health.status_code == 503
    async with serve() as wire:
        await wire.result(await wire.train(model, 2))
