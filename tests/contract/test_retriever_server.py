"""POST /retrieve over real HTTP: the agreed bodies, every limit, and a client that blames the tool."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Response

from local_server import serving, unused_address
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.retriever.client import RetrieverClient
from turnwise.retriever.corpus import Corpus, Hit, write_corpus
from turnwise.retriever.fiction import draw_fiction
from turnwise.retriever.index import CorpusIndex, build_index
from turnwise.retriever.server import ServerLimits, make_app

FICTION = draw_fiction(0, num_people=40, num_towns=8)
ANNA = FICTION.people[0].name


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    index = build_index(Corpus.of(FICTION.documents), "bm25")
    limits = ServerLimits(default_topk=4, max_topk=5, max_queries=3, max_query_chars=50, max_body_bytes=2000)
    with serving(make_app(index, limits)) as url:
        yield url


def post(address: str, body: object) -> httpx2.Response:
    return httpx2.post(f"{address}/retrieve", json=body, timeout=120)


def test_one_query_gets_one_list_of_documents_with_scores(address: str) -> None:
    answer = post(address, {"query": ANNA, "topk": 3, "return_scores": True}).json()
    (hits,) = answer["result"]
    assert hits[0]["document"] == {"id": "0", "contents": FICTION.documents[0].contents}
    scores = [hit["score"] for hit in hits]
    assert scores == sorted(scores, reverse=True)
    assert len(hits) <= 3
    assert set(answer) == {"result"}


def test_several_queries_get_a_list_each_by_either_name(address: str) -> None:
    names = [person.name for person in FICTION.people[:3]]
    by_queries = post(address, {"queries": names, "topk": 1}).json()
    by_query = post(address, {"query": names, "topk": 1}).json()
    assert by_queries == by_query
    assert [hits[0]["document"]["id"] for hits in by_query["result"]] == ["0", "1", "2"]


def test_without_scores_the_documents_stand_alone(address: str) -> None:
    (hits,) = post(address, {"query": ANNA, "topk": 1, "return_scores": False}).json()["result"]
    assert hits == [{"id": "0", "contents": FICTION.documents[0].contents}]


def test_the_server_has_a_topk_for_requests_that_name_none(address: str) -> None:
    (hits,) = post(address, {"query": "born works"}).json()["result"]
    assert len(hits) == 4


def test_keys_of_other_clients_are_passed_over(address: str) -> None:
    assert post(address, {"query": ANNA, "topk": 1, "timeout": 30, "domain": "x"}).status_code == 200


def test_health_says_what_is_served(address: str) -> None:
    assert httpx2.get(f"{address}/health").json() == {"status": "ok", "index": "bm25", "documents": 48}


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({}, 'expected one of "query" .* and "queries"'),
        ({"query": "a", "queries": ["a"]}, "expected one of"),
        ({"query": " "}, "query: it is empty"),
        ({"query": []}, "queries: 0 came; expected 1 to 3"),
        ({"query": ["a"] * 4}, "queries: 4 came; expected 1 to 3"),
        ({"query": "x" * 51}, "query: 51 characters are too many; at most 50"),
        ({"query": "a", "topk": 6}, "topk: 6 is too many; at most 5"),
        ({"query": "a", "topk": 0}, "topk: .*greater than or equal to 1"),
        ({"query": "a", "topk": "many"}, "topk: .*valid integer"),
        ({"query": 3}, "query.*valid string"),
        (["query"], "body: "),
    ],
)
def test_what_is_refused_is_explained(address: str, body: object, detail: str) -> None:
    answer = post(address, body)
    assert answer.status_code == 422
    assert re.search(detail, answer.json()["detail"])


def test_text_that_is_not_json_is_refused(address: str) -> None:
    answer = httpx2.post(f"{address}/retrieve", content=b'{"query":', headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert "JSON" in answer.json()["detail"]


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_that_is_too_large_is_refused_announced_or_not(address: str, is_announced: bool) -> None:
    body = json.dumps({"query": ANNA, "padding": "x" * 4000}).encode()
    content: Any = body if is_announced else iter([body[:1500], body[1500:]])
    answer = httpx2.post(f"{address}/retrieve", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()) == (413, {"detail": "the body is too large; at most 2000 bytes"})


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/retrieve/../../etc/passwd"])
def test_nothing_else_is_served(address: str, path: str) -> None:
    assert httpx2.get(f"{address}{path}").status_code == 404
    assert httpx2.get(f"{address}/retrieve").status_code == 405


class StuckIndex(CorpusIndex):
    """Waits until it is released; counts its searches."""

    def __init__(self) -> None:
        super().__init__(Corpus.of(FICTION.documents), "bm25", [])
        self.release = threading.Event()
        self.num_searches = 0

    def search(self, query: str, topk: int) -> list[Hit]:  # noqa: ARG002
        self.num_searches += 1
        self.release.wait(10)
        return []


def test_a_request_past_its_deadline_gets_504_and_its_other_queries_are_not_run() -> None:
    index = StuckIndex()
    with serving(make_app(index, ServerLimits(deadline_s=0.2))) as address:
        answer = post(address, {"query": ["a", "b", "c"]})
        assert (answer.status_code, answer.json()) == (504, {"detail": "no answer within 0.2 s"})
        index.release.set()
    assert index.num_searches == 1


class BrokenIndex(StuckIndex):
    def search(self, query: str, topk: int) -> list[Hit]:
        raise OSError(f"/secret/place/{query}/{topk}")


def test_a_bug_in_the_server_tells_no_paths() -> None:
    with serving(make_app(BrokenIndex())) as address:
        answer = post(address, {"query": "a"})
    assert answer.status_code == 500
    assert "secret" not in answer.text


async def test_client_and_server_agree(address: str) -> None:
    hits = await RetrieverClient(url=address).search(ANNA, 2)
    local = build_index(Corpus.of(FICTION.documents), "bm25").search(ANNA, 2)
    assert [hit.document for hit in hits] == [hit.document for hit in local]
    assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in local])
    assert RetrieverClient(url=f"{address}/retrieve/").address == f"{address}/retrieve"


def answering(*statuses: int, body: str = '{"result": [[]]}') -> tuple[FastAPI, list[int]]:
    """A server that gives these statuses in turn, the last one for ever."""
    app, given = FastAPI(), []

    @app.post("/retrieve")
    async def retrieve() -> Response:
        given.append(statuses[min(len(given), len(statuses) - 1)])
        return Response(body, status_code=given[-1], media_type="application/json")

    return app, given


async def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.retriever.client.BACK_OFF_S", 0.01)
    app, given = answering(503, 429, 200)
    with serving(app) as address:
        assert await RetrieverClient(url=address).search("a", 1) == []
    assert given == [503, 429, 200]


@pytest.mark.parametrize(
    ("statuses", "body", "num_tries", "detail"),
    [
        ((500,), "boom", 3, "status 500: boom"),
        ((422,), '{"detail": "no"}', 1, "status 422"),
        ((200,), "<html>", 1, "it answered '<html>'; expected"),
        ((200,), '{"result": [[{"document": {"contents": 7}}]]}', 1, "expected"),
        ((200,), '{"result": [[], []]}', 1, "expected"),
    ],
)
async def test_a_server_that_fails_is_the_tools_fault(
    statuses: tuple[int, ...], body: str, num_tries: int, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise.retriever.client.BACK_OFF_S", 0.01)
    app, given = answering(*statuses, body=body)
    with serving(app) as address, pytest.raises(AttemptFailed, match=detail) as failed:
        await RetrieverClient(url=address).search("a", 1)
    assert failed.value.party is Party.TOOL
    assert len(given) == num_tries


async def test_a_server_that_hangs_costs_the_deadline_and_no_more() -> None:
    index = StuckIndex()
    with serving(make_app(index)) as address:
        began = asyncio.get_running_loop().time()
        with pytest.raises(AttemptFailed, match=r"retriever: .*(no answer within 0.3 s|Timeout)") as failed:
            await RetrieverClient(url=address, deadline_s=0.3).search("a", 1)
        assert asyncio.get_running_loop().time() - began < 9
        index.release.set()
    assert failed.value.party is Party.TOOL


async def test_a_server_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.retriever.client.BACK_OFF_S", 0.01)
    with pytest.raises(AttemptFailed, match=r"retriever: ConnectError at http://127.0.0.1:\d+/retrieve"):
        await RetrieverClient(url=unused_address()).search("a", 1)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://"])
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected an address such as"):
        RetrieverClient(url=url)


def test_the_command_serves_a_file_and_ends_cleanly(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", FICTION.documents)
    command = [sys.executable, "-m", "turnwise.cli", "retriever", "serve", "--port", "0", "--index", "hybrid"]
    with subprocess.Popen(
        [*command, "--corpus", str(tmp_path / "corpus.jsonl"), "--cache", str(tmp_path / "kept")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        said = re.fullmatch(r"retriever: 48 passages, hybrid \(indexed now\), on (http://127.0.0.1:\d+)\n", line)
        assert said, line
        transport = httpx2.HTTPTransport(retries=5)
        with httpx2.Client(transport=transport, timeout=120) as client:
            (hits,) = client.post(f"{said[1]}/retrieve", json={"query": ANNA, "topk": 1}).json()["result"]
        assert hits[0]["document"]["id"] == "0"
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert "Traceback" not in rest
    assert process.returncode in (0, 130, -signal.SIGINT), rest
