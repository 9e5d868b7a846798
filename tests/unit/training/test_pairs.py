"""Pairs in a Parquet file: exact both ways, with provenance, and refused when they are something else."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import turnwise
from local_server import serving, unused_address
from turnwise.credit.preferences import PreferencePair, best_and_worst
from turnwise.envs.base import user
from turnwise.errors import ConfigError, DataError
from turnwise.training.pairs import Provenance, StoredPair, push_pairs, read_pairs, read_provenance, write_pairs
from turnwise.trajectory import Message, ToolCall
from unit.credit.branches import make_branches
from unit.credit.groups import make_group


def make_pair(turn: int = 1) -> PreferencePair:
    pair = best_and_worst(make_branches([0.25, 1.0], turn=turn, probability=0.2))
    assert pair is not None
    return pair


def store(pair: PreferencePair, **fields: object) -> StoredPair:
    known: dict[str, object] = {
        "kind": "refuel",
        "world": "key_door",
        "model": "tiny",
        "task": {"rooms": [1, {"a": "é"}]},
    }
    return StoredPair(pair=pair, **{**known, **fields})  # pyright: ignore[reportArgumentType]


def test_pairs_come_back_exactly_as_they_were_played(tmp_path: Path) -> None:
    pair = make_pair()
    call = Message(role="assistant", content="", tool_calls=(ToolCall(name="f", arguments={"x": [1]}, id="7"),))
    odd = replace(
        pair.chosen.turns[0],
        sampler_logprobs=(-1e-17, -0.1, -30.000000000000004),
        temperature=0.7,
        reply=call,
        observation=(user("ja\nnein"), Message(role="tool", content="3", name="f")),
        reward_parts={"outcome": 0.1, "format": -0.2},
        env_state="room 1",
        is_cut=True,
        is_trained=False,
        potential=0.1,
        next_potential=-0.25,
    )
    sides = [replace(side, turns=(odd, *side.turns[1:]), start=(user("Hi"),)) for side in (pair.chosen, pair.rejected)]
    pair = replace(pair, chosen=replace(sides[0], is_success=True), rejected=sides[1])
    stored = [store(pair, run="runs/a", step=12), store(make_pair(0), kind="dpo")]
    write_pairs(tmp_path / "new" / "p.parquet", stored)
    assert read_pairs(tmp_path / "new" / "p.parquet") == stored
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["p.parquet"]


def test_any_parquet_reader_finds_the_provenance(tmp_path: Path) -> None:
    write_pairs(tmp_path / "p.parquet", [store(make_pair(), run="runs/a", step=12)])
    (row,) = pq.read_table(tmp_path / "p.parquet").to_pylist()
    assert {key: row[key] for key in ("kind", "world", "model", "run", "step", "task_id", "branch_turn")} == {
        "kind": "refuel",
        "world": "key_door",
        "model": "tiny",
        "run": "runs/a",
        "step": 12,
        "task_id": "t",
        "branch_turn": 1,
    }
    assert (row["branch_probability"], row["reward_difference"]) == (0.2, 0.75)
    assert (row["chosen"]["attempt"], row["chosen"]["seed"], row["chosen"]["reward"]) == (1, 7, 1.0)
    turn = row["chosen"]["turns"][1]
    assert turn["policy_version"] == 5
    assert len(turn["sampled_ids"]) == len(turn["logprobs"]) == 3


def test_a_file_says_how_all_of_it_was_made(tmp_path: Path) -> None:
    made = Provenance(policies=("runs/a",), config="env:\n  name: negotiate\n", samples=8, turn="", num_attempts=64)
    write_pairs(tmp_path / "p.parquet", [store(make_pair())], made)
    assert read_provenance(tmp_path / "p.parquet") == made
    told = json.loads(pq.read_schema(tmp_path / "p.parquet").metadata[b"turnwise.made"])
    assert (told["policies"], told["num_attempts"], told["turnwise"]) == (["runs/a"], 64, turnwise.__version__)
    assert read_pairs(tmp_path / "p.parquet") == [store(make_pair())]
    write_pairs(tmp_path / "q.parquet", [store(make_pair())])
    assert read_provenance(tmp_path / "q.parquet") is None


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there; make one with: turnwise pairs"):
        read_pairs(tmp_path / "none.parquet")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        read_pairs(tmp_path / "text")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="not of preference pairs"):
        read_pairs(tmp_path / "other.parquet")
    write_pairs(tmp_path / "old.parquet", [store(make_pair())])
    table = pq.read_table(tmp_path / "old.parquet")
    pq.write_table(table.replace_schema_metadata({b"turnwise.pairs": b"1"}), tmp_path / "old.parquet")
    with pytest.raises(ConfigError, match=r"has pairs of format 1; .* Make it again: turnwise pairs"):
        read_pairs(tmp_path / "old.parquet")
    write_pairs(tmp_path / "empty.parquet", [])
    with pytest.raises(DataError, match="holds no pairs"):
        read_pairs(tmp_path / "empty.parquet")


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_pairs(tmp_path / "file" / "p.parquet", [store(make_pair())])


def test_attempts_of_different_lengths_pair_at_the_first_turn() -> None:
    pair = best_and_worst(make_group([0.0, 1.0], [0.5]))
    assert pair is not None
    assert pair.branch_turn == 0
    assert not pair.is_identical


@dataclass
class Hub:
    """As much of the Hugging Face hub as one upload needs; it keeps what it was sent."""

    token: str
    repositories: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, is_more = b"", True
        while is_more:
            message = await receive()
            body, is_more = body + message.get("body", b""), message.get("more_body", False)
        given = dict(scope["headers"])
        is_known = given.get(b"authorization") == f"Bearer {self.token}".encode()
        place = f"http://{given[b'host'].decode()}/datasets/me/pairs"
        answer = self.answer(scope["path"], body, place) if is_known else {"error": "who are you"}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200 if is_known else 401, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def answer(self, path: str, body: bytes, place: str) -> dict[str, Any]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.repositories.append(f"{asked['type']} {asked.get('organization')}/{asked['name']}")
            return {"url": place, "name": "me/pairs"}
        if "/preupload/" in path:
            files = [{**one, "uploadMode": "regular", "shouldIgnore": False} for one in json.loads(body)["files"]]
            return {"files": files}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[f"{path} {line['value']['path']}"] = base64.b64decode(line["value"]["content"])
        return {"commitUrl": f"{place}/commit/1", "commitOid": "1", "success": True}


def test_a_file_is_pushed_to_a_hub_and_stays_where_no_hub_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "p.parquet"
    write_pairs(file, [store(make_pair(), run="runs/a", step=12)])
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # this hub is on this machine
    with serving(hub := Hub("secret")) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        push_pairs(file, "me/pairs")
        assert hub.repositories == ["dataset me/pairs"]
        assert hub.files == {"/api/datasets/me/pairs/commit/main data/p.parquet": file.read_bytes()}
        monkeypatch.setenv("HF_TOKEN", "wrong")
        with pytest.raises(ConfigError, match=r"was not pushed to me/pairs.*HF_TOKEN"):
            push_pairs(file, "me/pairs")
    monkeypatch.setenv("HF_ENDPOINT", unused_address())
    with pytest.raises(ConfigError, match=r"is written, and was not pushed to me/pairs.*HF_ENDPOINT"):
        push_pairs(file, "me/pairs")
    assert len(read_pairs(file)) == 1
