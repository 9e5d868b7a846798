"""What a restart keeps: results that were given, steps that were taken, files that are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unit.service.conftest import Serve, Wire


async def run_steps(wire: Wire, model: str, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        output = await wire.result(await wire.train(model, 2 * step + 1))
        await wire.result(await wire.step(model, 2 * step + 2))
        losses.append(output["metrics"]["loss:sum"])
    return losses


@pytest.mark.parametrize("autosave", [1, 2, 100])
async def test_training_goes_on_exactly_where_it_was(serve: Serve, autosave: int) -> None:
    async with serve(autosave=autosave) as wire:
        expected = await run_steps(wire, await wire.model(), 0, 6)
        model = await wire.model()
        found = await run_steps(wire, model, 0, 3)
        last = await wire.step(model, 6)
    async with serve(autosave=autosave) as wire:
        again = await wire.step(model, 6)
        assert again["request_id"] == last["request_id"], "a step that was taken is not taken again"
        assert (await wire.result(last))["metrics"]["optimizer_step"] == 3, "its result is still there"
        found += await run_steps(wire, model, 3, 3)
    # What is replayed may share its passes with other clients' batches, which rounds differently.
    assert found == pytest.approx(expected, rel=1e-5 if autosave == 100 else 0.0)


async def test_a_gradient_that_no_step_has_used_survives(serve: Serve) -> None:
    async with serve(autosave=1) as wire:
        model, twin = await wire.model(), await wire.model()
        for each in (model, twin):
            await wire.result(await wire.train(each, 1))
            await wire.result(await wire.step(each, 2))
            await wire.result(await wire.train(each, 3))
        expected = await wire.result(await wire.step(twin, 4))
    async with serve(autosave=1) as wire:
        found = await wire.result(await wire.step(model, 4))
    assert found["metrics"] == expected["metrics"]


async def test_weights_published_for_sampling_survive(serve: Serve) -> None:
    prompt = {"chunks": [{"tokens": [5, 6, 7]}]}
    async with serve() as wire:
        model = await wire.model()
        await run_steps(wire, model, 0, 2)
        body = {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 0}
        sampler = (await wire.result(await wire.ok("/save_weights_for_sampler", body)))["sampling_session_id"]
        ask = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 4, "seed": 1}}
        first = await wire.result(await wire.ok("/asample", {**ask, "seq_id": 0}))
        await wire.result(await wire.train(model, 6))
        await wire.result(await wire.step(model, 7))
    async with serve() as wire:
        again = await wire.result(await wire.ok("/asample", {**ask, "seq_id": 1}))
    assert first["sequences"] == again["sequences"]


async def test_without_autosave_what_is_lost_is_said(serve: Serve) -> None:
    async with serve(autosave=0) as wire:
        unsaved, saved = await wire.model(), await wire.model()
        await run_steps(wire, unsaved, 0, 1)
        await run_steps(wire, saved, 0, 1)
        body = {"model_id": saved, "seq_id": 3, "path": "kept"}
        path = (await wire.result(await wire.ok("/save_weights", body)))["path"]
    async with serve(autosave=0) as wire:
        for model, hint in ((unsaved, "no saved state"), (saved, path)):
            answer = await wire.post("/optim_step", {"model_id": model, "seq_id": 4})
            assert answer.status_code == 410
            assert hint in answer.json()["detail"]
            assert "lost" in answer.json()["detail"]
        fresh = await wire.model()
        loaded = await wire.result(await wire.ok("/load_weights", {"model_id": fresh, "seq_id": 1, "path": path}))
        assert loaded["path"] == path


async def test_a_sample_that_was_lost_is_gone_not_unknown(serve: Serve) -> None:
    async with serve() as wire:
        lost = wire.service.promises.new_id()
        assert (await wire.post("/retrieve_future", {"request_id": lost})).status_code == 404
    async with serve() as wire:
        assert (await wire.post("/retrieve_future", {"request_id": lost})).status_code == 410


async def test_idle_adapters_are_parked_and_come_back_as_they_were(serve: Serve) -> None:
    async with serve(max_resident_adapters=1) as wire:
        first, second = await wire.model(seed=1), await wire.model(seed=2)
        crowded: list[float] = []
        for step in range(3):
            for model in (first, second):
                output = await wire.result(await wire.train(model, 2 * step + 1))
                crowded.append(output["metrics"]["loss:sum"])
            for model in (first, second):  # each gradient waits on disk while the other trains
                await wire.result(await wire.step(model, 2 * step + 2))
        resident = [model.adapter.is_resident for model in wire.service.training]
    async with serve(max_resident_adapters=9) as wire:
        roomy: list[float] = []
        first, second = await wire.model(seed=1), await wire.model(seed=2)
        for step in range(3):
            for model in (first, second):
                output = await wire.result(await wire.train(model, 2 * step + 1))
                roomy.append(output["metrics"]["loss:sum"])
                await wire.result(await wire.step(model, 2 * step + 2))
    assert crowded == roomy
    assert sum(resident) <= 2


async def test_published_weights_beyond_the_room_are_parked_too(serve: Serve) -> None:
    async with serve(max_resident_policies=1, autosave=0) as wire:
        model = await wire.model()
        samplers = []
        for index in range(3):
            await wire.result(await wire.train(model, 3 * index + 1))
            await wire.result(await wire.step(model, 3 * index + 2))
            body = {"model_id": model, "seq_id": 3 * index + 3, "sampling_session_seq_id": index}
            done = await wire.result(await wire.ok("/save_weights_for_sampler", body))
            samplers.append(done["sampling_session_id"])
        scores = []
        for turn in range(2):
            for sampler in samplers:
                ask = {
                    "sampling_session_id": sampler,
                    "seq_id": turn,
                    "prompt": {"chunks": [{"tokens": [5, 6, 7, 8]}]},
                    "sampling_params": {"max_tokens": 1},
                    "prompt_logprobs": True,
                }
                scores.append((await wire.result(await wire.ok("/asample", ask)))["prompt_logprobs"][1:])
    assert scores[:3] == scores[3:]
    assert scores[0] != scores[1] != scores[2]


async def test_a_damaged_checkpoint_is_refused_and_nothing_changes(serve: Serve, tmp_path: Path) -> None:
    async with serve() as wire:
        model = await wire.model()
        await run_steps(wire, model, 0, 1)
        path = (await wire.result(await wire.ok("/save_weights", {"model_id": model, "seq_id": 3, "path": "a"})))[
            "path"
        ]
        before = await wire.loss(model, 4)
        (file,) = (tmp_path / "data" / "checkpoints").glob("*/weights/a/adapter_model.safetensors")
        damaged = bytearray(file.read_bytes())
        damaged[-1] ^= 1
        file.write_bytes(damaged)
        outcome = await wire.result(await wire.ok("/load_weights", {"model_id": model, "seq_id": 5, "path": path}))
        after = await wire.loss(model, 6)
    assert "checksum" in outcome["error"]
    assert str(tmp_path) not in json.dumps(outcome)
    assert before == after


async def test_what_was_never_finished_is_removed_at_start(serve: Serve, tmp_path: Path) -> None:
    root = tmp_path / "data" / "checkpoints"
    async with serve() as wire:
        model = await wire.model()
        await wire.result(await wire.ok("/save_weights", {"model_id": model, "seq_id": 1, "path": "whole"}))
    (whole,) = root.glob("*/weights/whole")
    for name in (".half.12345678", "orphan"):
        (whole.parent / name).mkdir()
    whole.rename(whole.parent / ".whole.12345678.replaced")  # killed in the middle of an overwrite
    async with serve() as wire:
        rows = (await wire.get(f"/training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [row["checkpoint_id"] for row in rows] == ["weights/whole"]
    assert sorted(path.name for path in whole.parent.iterdir()) == ["whole"]


async def test_a_full_disk_is_said_and_leaves_nothing_half_done(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    async with serve() as wire:
        model = await wire.model()
        sync = os.fsync

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        failed = await wire.result(await wire.ok("/save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))
        monkeypatch.setattr(os, "fsync", sync)
        assert "No space left" in failed["error"]
        assert failed["category"] == "server"
        assert not list((tmp_path / "data" / "checkpoints").glob("*/weights/*"))
        saved = await wire.result(await wire.ok("/save_weights", {"model_id": model, "seq_id": 2, "path": "a"}))
    assert saved["path"].endswith("/weights/a")
