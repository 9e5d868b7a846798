"""Who may call, and what one key can see of another's: nothing, not even that it is there."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from turnwise.errors import ConfigError
from turnwise.service.access import Access, create_key, revoke_key
from turnwise.service.config import ServeConfig
from turnwise.service.failures import HttpFailure, without_paths
from turnwise.service.store.store import Store
from unit.service.conftest import TOKENS, Serve, Wire, training_body


def test_keys_are_hashed_at_rest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    key = create_key(store, "alice")
    assert key.startswith("tml-")
    assert create_key(store, "bob", "sk").startswith("sk-")
    store.close()
    for file in tmp_path.iterdir():
        assert key.encode() not in file.read_bytes()
        assert key.removeprefix("tml-").encode() not in file.read_bytes()


def test_binding_where_others_can_reach_it_needs_a_key(tmp_path: Path) -> None:
    store = Store(tmp_path)
    access = Access(store, is_loopback=False, token_s=60)
    with pytest.raises(ConfigError, match="turnwise keys create"):
        access.check_bind()
    create_key(store, "alice")
    access.check_bind()
    store.close()


def test_revoking_an_unknown_key_names_those_there_are(tmp_path: Path) -> None:
    store = Store(tmp_path)
    create_key(store, "alice")
    with pytest.raises(ConfigError, match=r"1 \(alice\)"):
        revoke_key(store, 7)
    store.close()


async def test_loopback_needs_no_key_until_there_is_one(serve: Serve) -> None:
    async with serve() as wire:
        assert (await wire.post("/create_session")).status_code == 200
        key = create_key(wire.service.store, "alice")
        assert (await wire.post("/create_session")).status_code == 401
        assert (await wire.with_key("tml-wrong").post("/create_session")).status_code == 401
        assert (await wire.with_key(key).post("/create_session")).status_code == 200
        revoke_key(wire.service.store, 1)
        assert (await wire.with_key(key).post("/create_session")).status_code == 401
        assert (await wire.post("/create_session")).status_code == 401, "taking the last key away opens nothing"


async def test_a_token_stands_for_its_key_until_that_is_revoked(serve: Serve) -> None:
    async with serve() as wire:
        alice = wire.with_key(create_key(wire.service.store, "alice"))
        token = (await alice.ok("/auth/token"))["jwt"]
        assert token.startswith("eyJ")
        by_token = wire.with_key(token)
        session = await by_token.session()
        assert (await alice.get(f"/sessions/{session}")).status_code == 200
        head, claims, signature = token.split(".")
        for forged in (f"{head}.{claims}.AAAA", f"{head}.{claims}x.{signature}", "eyJ.eyJ."):
            assert (await wire.with_key(forged).post("/create_session")).status_code == 401
        with pytest.raises(HttpFailure):
            wire.service.access.caller("eyJ\xe9.x.\xe9")
        revoke_key(wire.service.store, 1)
        assert (await by_token.post("/create_session")).status_code == 401


async def make_objects(wire: Wire) -> dict[str, str]:
    """One of everything that a key can own."""
    session = await wire.session()
    model = await wire.model(session)
    promise = await wire.train(model, 1)
    await wire.result(promise)
    for seq, path, kind in ((2, "/save_weights", "w"), (3, "/save_weights_for_sampler", "s")):
        await wire.result(await wire.ok(path, {"model_id": model, "seq_id": seq, "path": kind}))
    sampler = await wire.ok(
        "/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    )
    return {
        "session": session,
        "model": model,
        "request": promise["request_id"],
        "sampler": sampler["sampling_session_id"],
    }


def calls(names: dict[str, str]) -> list[tuple[str, str, Any]]:
    """Every call that names an object."""
    model, weights = names["model"], f"tinker://{names['model']}/weights/w"
    of_run = f"/training_runs/{model}"
    checkpoint = f"{of_run}/checkpoints/weights/w"
    sample = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "seq_id": 9, "sampling_params": {"max_tokens": 1}}
    create = {"session_id": names["session"], "model_seq_id": 7, "base_model": "tiny"}
    sampling = {"session_id": names["session"], "sampling_session_seq_id": 5}
    kl = {
        "model_id": model,
        "reference_model_path": weights,
        "data": [
            {
                "student_input": {"chunks": [{"tokens": [5, 6]}]},
                "reference_input": {"chunks": [{"tokens": [5, 6]}]},
                "target_tokens": {"data": [6, 7]},
                "weights": {"data": [1.0, 1.0]},
            }
        ],
    }
    return [
        ("POST", "/session_heartbeat", {"session_id": names["session"]}),
        ("POST", f"/sessions/{names['session']}/finish", {}),
        ("GET", f"/sessions/{names['session']}", None),
        ("PUT", f"/sessions/{names['session']}/project", {"project_id": "p"}),
        ("GET", f"/sessions/{names['session']}/trace_export", None),
        ("POST", "/create_model", create),
        ("POST", "/create_sampling_session", {**sampling, "base_model": "tiny"}),
        ("POST", "/get_info", {"model_id": model}),
        ("POST", "/unload_model", {"model_id": model}),
        ("POST", "/forward_backward", training_body(model, 9)),
        ("POST", "/optim_step", {"model_id": model, "seq_id": 9}),
        ("POST", "/save_weights", {"model_id": model, "seq_id": 9, "path": "x"}),
        ("POST", "/save_weights_for_sampler", {"model_id": model, "seq_id": 9, "path": "x"}),
        ("POST", "/save_weights_external", {"model_id": model, "seq_id": 9, "path": "x"}),
        ("POST", "/load_weights", {"model_id": model, "seq_id": 9, "path": weights}),
        ("POST", "/mint/forward_backward_reverse_kl", kl),
        ("POST", "/mint/checkpoints/interpolate", {"source_paths": [weights], "coefficients": [1.0]}),
        ("POST", "/weights_info", {"tinker_path": weights}),
        ("POST", "/copy_weights", {"source_path": weights}),
        ("GET", of_run, None),
        ("GET", f"{of_run}/checkpoints", None),
        ("DELETE", checkpoint, None),
        ("POST", f"{checkpoint}/publish", {}),
        ("DELETE", f"{checkpoint}/publish", None),
        ("PUT", f"{checkpoint}/ttl", {"ttl_seconds": 60}),
        ("GET", f"{checkpoint}/archive", None),
        ("GET", f"{checkpoint}/external_weights_urls", None),
        ("GET", f"/samplers/{names['sampler']}", None),
        ("POST", "/asample", {**sample, "sampling_session_id": names["sampler"]}),
        ("POST", "/join_sampling_session", {"sampling_session_id": names["sampler"]}),
        ("POST", "/retrieve_futures", {"target": {"sampling_session_id": names["sampler"]}, "prev_cursor": 0}),
        ("POST", "/retrieve_future", {"request_id": names["request"]}),
        ("POST", "/cancel_future", {"request_id": names["request"]}),
    ]


async def test_what_belongs_to_another_key_answers_like_what_is_absent(serve: Serve) -> None:
    async with serve() as wire:
        alice, bob = (wire.with_key(create_key(wire.service.store, name)) for name in ("alice", "bob"))
        names = await make_objects(alice)
        life = names["request"].rpartition("-")[0]
        absent = {
            "session": "nobody",
            "model": "nobody:train:0",
            "sampler": "nobody:sample:0",
            "request": f"{life}-99999",
        }
        for (method, path, body), (_, absent_path, absent_body) in zip(calls(names), calls(absent), strict=True):
            seen = await bob.request(method, path, json=body)
            unseen = await bob.request(method, absent_path, json=absent_body)
            assert (seen.status_code, seen.content) == (404, unseen.content), (method, path, seen.text)
            assert unseen.status_code == 404
        for path, key in (
            ("/sessions", "sessions"),
            ("/training_runs", "training_runs"),
            ("/checkpoints", "checkpoints"),
        ):
            assert (await bob.get(path)).json()[key] == []
        assert (await bob.ok("/sessions/search"))["sessions"] == []
        assert await alice.loss(names["model"], 4) > 0, "and nothing of it happened"


async def test_a_published_checkpoint_may_be_read_by_others_and_changed_by_none(serve: Serve) -> None:
    async with serve() as wire:
        alice, bob = (wire.with_key(create_key(wire.service.store, name)) for name in ("alice", "bob"))
        names = await make_objects(alice)
        checkpoint = f"/training_runs/{names['model']}/checkpoints/weights/w"
        assert (await alice.post(f"{checkpoint}/publish")).status_code == 200
        weights = f"tinker://{names['model']}/weights/w"
        assert (await bob.ok("/weights_info", {"tinker_path": weights}))["lora_rank"] == 4
        mine = await bob.model()
        loaded = await bob.result(await bob.ok("/load_weights", {"model_id": mine, "seq_id": 1, "path": weights}))
        assert loaded["path"] == weights
        assert (await bob.request("DELETE", checkpoint)).status_code == 404
        assert (await bob.request("DELETE", f"{checkpoint}/publish")).status_code == 404


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "x" * 300, "a\0b", "ü", "..", "a b"])
async def test_a_name_that_is_no_name_is_refused(serve: Serve, name: str, tmp_path: Path) -> None:
    async with serve() as wire:
        model = await wire.model()
        answer = await wire.post("/save_weights", {"model_id": model, "seq_id": 1, "path": name})
        if answer.status_code == 200:
            assert "name" in (await wire.result(answer.json()))["error"]
        else:
            assert answer.status_code in (400, 422)
        found = await wire.post("/weights_info", {"tinker_path": f"tinker://{model}/weights/{name}"})
        assert found.status_code in (400, 404, 422)
    assert not list((tmp_path / "data").glob("checkpoints/*/*/*"))


async def test_bodies_are_bounded_before_and_after_decompression(serve: Serve) -> None:
    import zstandard

    async with serve(max_body_bytes=10_000) as wire:
        big = await wire.request("POST", "/telemetry", content=b"x" * 10_001)
        assert big.status_code == 413

        async def endless() -> Any:
            for _ in range(100):
                yield b"x" * 1000

        streamed = await wire.request("POST", "/telemetry", content=endless())
        assert streamed.status_code == 413
        bomb = zstandard.ZstdCompressor().compress(b"\0" * 10_000_000)
        headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
        assert (await wire.request("POST", "/forward_backward", content=bomb, headers=headers)).status_code == 413


async def test_without_keys_a_page_that_points_its_name_here_is_refused(serve: Serve) -> None:
    async with serve() as wire:
        answer = await wire.post("/create_session", headers={"host": "evil.example"})
        assert answer.status_code == 403
        assert (await wire.post("/create_session", headers={"host": "localhost:8000"})).status_code == 200


async def test_a_link_works_without_a_key_and_cannot_be_forged(serve: Serve) -> None:
    async with serve() as wire:
        alice = wire.with_key(create_key(wire.service.store, "alice"))
        names = await make_objects(alice)
        found = await alice.get(f"/training_runs/{names['model']}/checkpoints/weights/w/external_weights_urls")
        url = found.json()["urls"]["adapter_config.json"]
        assert (await wire.http.get(url)).json()["peft_type"] == "LORA"
        assert (await wire.http.get(url.replace("adapter_config.json", "checkpoint.json"))).status_code == 404
        token = url.split("/")[-2]
        assert (await wire.http.get(url.replace(token, token[:-2] + "AA"))).status_code == 404
        assert (await wire.http.get(url.replace(token, "x.y"))).status_code == 404


async def test_a_failing_store_answers_503_and_no_detail_of_it(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as wire:

        def broken(*_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full: /secret/place")

        monkeypatch.setattr(wire.service.store, "put", broken)
        answer = await wire.post("/create_session")
    assert answer.status_code == 503
    assert "secret" not in answer.text


def test_paths_of_this_machine_are_cut_out_of_messages() -> None:
    text = "cannot read /srv/data/checkpoints/a/adapter_model.safetensors; tinker://run/weights/a stays, 1/2 too"
    assert without_paths(text) == "cannot read adapter_model.safetensors; tinker://run/weights/a stays, 1/2 too"


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model"):
        ServeConfig(models=(), data_dir=tmp_path)
    with pytest.raises(ConfigError, match="port"):
        ServeConfig(models=("tiny",), data_dir=tmp_path, port=70000)
