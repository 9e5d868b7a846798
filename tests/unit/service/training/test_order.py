"""Requests of one model run in the order of their numbers, once each, whatever the network makes of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import zstandard

from turnwise.service.training.queue import FairShare
from turnwise.service.wire.results import output_from_proto
from turnwise.service.wire.types import PROTOBUF
from unit.service.conftest import TOKENS, Serve, Wire, training_body, training_proto


async def losses_in_order(wire: Wire) -> list[float]:
    model = await wire.model()
    losses = []
    for step in range(3):
        output = await wire.result(await wire.train(model, 2 * step + 1))
        await wire.result(await wire.step(model, 2 * step + 2))
        losses.append(output["metrics"]["loss:sum"])
    return losses


async def test_requests_that_arrive_out_of_order_run_in_order(serve: Serve) -> None:
    async with serve() as wire:
        expected = await losses_in_order(wire)
        model = await wire.model()
        promises = {}
        for seq in (6, 4, 5, 2, 3, 1):
            promises[seq] = await (wire.step(model, seq) if seq % 2 == 0 else wire.train(model, seq))
        found = [(await wire.result(promises[seq]))["metrics"]["loss:sum"] for seq in (1, 3, 5)]
    assert found == expected


async def test_a_number_that_comes_again_gets_the_same_request_and_is_applied_once(serve: Serve) -> None:
    async with serve() as wire:
        model, twin = await wire.model(), await wire.model()
        first, again = await wire.train(model, 1), await wire.train(model, 1)
        assert first["request_id"] == again["request_id"]
        await wire.train(twin, 1)
        steps = [await wire.result(await wire.step(m, 2)) for m in (model, twin)]
    assert steps[0]["metrics"]["grad_norm"] == steps[1]["metrics"]["grad_norm"]


async def test_a_refused_request_leaves_no_gap(serve: Serve) -> None:
    async with serve(gap_s=600.0) as wire:
        model = await wire.model()
        bad = await wire.post("/optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": -1}})
        assert bad.status_code == 400
        broken = await wire.post("/optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"eps": "x"}})
        assert broken.status_code == 422
        output = await wire.result(await wire.train(model, 3))
    assert output["metrics"]["loss:sum"] > 0


async def test_a_number_that_never_comes_is_skipped_and_refused_when_it_comes_late(serve: Serve) -> None:
    async with serve(gap_s=0.2) as wire:
        model = await wire.model()
        assert (await wire.result(await wire.train(model, 3)))["metrics"]["loss:sum"] > 0
        late = await wire.result(await wire.train(model, 2))
    assert "not applied" in late["error"]
    assert late["category"] == "server"


async def test_a_request_says_which_number_it_waits_for(serve: Serve) -> None:
    async with serve(gap_s=600.0, hold_s=0.05) as wire:
        model = await wire.model()
        promise = await wire.train(model, 2)
        answer = await wire.post("/retrieve_future", {"request_id": promise["request_id"]})
    assert answer.status_code == 408
    assert answer.json()["queue_state"] == "active"
    assert "request 1" in answer.json()["queue_state_reason"]


async def test_protobuf_with_and_without_zstd_says_what_json_says(serve: Serve) -> None:
    async with serve() as wire:
        model = await wire.model()
        by_json = await wire.result(await wire.train(model, 1))
        body = training_proto(model, 2)
        plain = await wire.request("POST", "/forward_backward", content=body, headers={"content-type": PROTOBUF})
        frame = zstandard.ZstdCompressor(write_content_size=False).compress(training_proto(model, 3))
        unannounced = await wire.request("POST", "/forward_backward", content=frame, headers={"content-type": PROTOBUF})
        assert plain.status_code == 200
        assert unannounced.status_code == 400
        announced = await wire.request(
            "POST",
            "/forward_backward",
            content=frame,
            headers={"content-type": PROTOBUF, "content-encoding": "zstd"},
        )
        for accepted in (plain, announced):
            answer = await wire.post(
                "/retrieve_future", {"request_id": accepted.json()["request_id"]}, headers={"accept": PROTOBUF}
            )
            assert answer.headers["content-type"] == PROTOBUF
            output = output_from_proto(answer.content)
            assert output.metrics == pytest.approx(by_json["metrics"])
            assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(
                by_json["loss_fn_outputs"][0]["logprobs"]["data"]
            )


async def test_batches_of_several_clients_share_passes_and_keep_their_gradients(serve: Serve) -> None:
    async with serve() as wire:
        ranks = (2, 3, 4, 6, 8)
        together = [await wire.model(rank=rank, seed=rank) for rank in ranks]
        alone = [await wire.model(rank=rank, seed=rank) for rank in ranks]
        with busy_engine(wire) as sizes:
            for index, model in enumerate(together):
                await wire.train(model, 1, [5 + index, 6, 7, 8])
        shared = [await wire.result(await wire.step(model, 2)) for model in together]
        expected = []
        for index, model in enumerate(alone):
            await wire.result(await wire.train(model, 1, [5 + index, 6, 7, 8]))
            expected.append(await wire.result(await wire.step(model, 2)))
    assert sizes[:3] == [1, 1, 3], "two were with the engine already; the others rode together"
    for one, other in zip(shared, expected, strict=True):
        assert one["metrics"]["grad_norm"] == pytest.approx(other["metrics"]["grad_norm"], rel=1e-4)


@contextmanager
def busy_engine(wire: Wire) -> Iterator[list[int]]:
    """The engine is held until the block ends; gives the number of clients in each pass that follows."""
    worker = wire.service.models.find("tiny").loaded.worker
    engine, release, sizes = worker.engine, threading.Event(), []
    run_many = engine.forward_backward_many

    def counted(batches: Sequence[Any], *rest: Any) -> Any:
        sizes.append(len(batches))
        return run_many(batches, *rest)

    engine.forward_backward_many = counted  # pyright: ignore[reportAttributeAccessIssue]
    held = worker.run("test", lambda _: release.wait(30))
    try:
        yield sizes
    finally:
        release.set()
        held.result(30)


async def test_whoever_sends_a_bad_batch_fails_alone(serve: Serve) -> None:
    async with serve() as wire:
        models = [await wire.model(seed=seed) for seed in range(5)]
        with busy_engine(wire) as sizes:
            promises = [
                await wire.train(model, 1, [5, 6, 10**6] if index == 3 else None) for index, model in enumerate(models)
            ]
        outcomes = [await wire.result(promise) for promise in promises]
    assert "token id" in outcomes[3]["error"]
    assert outcomes[3]["category"] == "user"
    assert all("metrics" in outcome for i, outcome in enumerate(outcomes) if i != 3)
    assert 3 in sizes


def test_the_session_that_was_served_least_goes_next() -> None:
    share = FairShare()
    order = []
    waiting = {"busy": 8, "quick": 3}
    while any(waiting.values()):
        chosen = share.choose(name for name, count in waiting.items() if count)
        order.append(chosen)
        share.charge(chosen, 10.0)
        waiting[chosen] -= 1
    assert order[:6] in (["busy", "quick"] * 3, ["quick", "busy"] * 3)


def test_a_session_that_was_away_gets_no_credit_for_it() -> None:
    share = FairShare()
    for _ in range(100):
        share.charge(share.choose(["busy"]), 1.0)
    order = []
    for _ in range(6):
        chosen = share.choose(["busy", "new"])
        order.append(chosen)
        share.charge(chosen, 1.0)
    assert order.count("new") == 3


async def test_submissions_beyond_the_queue_are_told_to_come_back(serve: Serve) -> None:
    async with serve(max_queued_requests=2, gap_s=600.0) as wire:
        model = await wire.model()
        await wire.train(model, 2)
        await wire.train(model, 3)
        refused = await wire.post("/forward_backward", training_body(model, 4))
        assert refused.status_code == 429
        assert "waiting" in refused.json()["detail"]
        again = await wire.train(model, 3)
        assert again["request_id"], "what was accepted is still known"


async def test_request_bytes_that_wait_are_bounded(serve: Serve) -> None:
    async with serve(max_queued_bytes=2000, gap_s=600.0) as wire:
        model = await wire.model()
        answers = [await wire.post("/forward_backward", training_body(model, seq, TOKENS * 9)) for seq in range(2, 8)]
    assert answers[0].status_code == 200
    assert answers[-1].status_code == 429
