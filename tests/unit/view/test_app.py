"""Who gets answers from the viewer's server: whoever has the token, by a name of this machine, and nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from turnwise.training.steer import take_orders
from turnwise.view.app import create_view_app
from turnwise.view.pages import Pages
from turnwise.watch.status import run_lock
from view_runs import WrittenRun

TOKEN = {"X-Turnwise-Token": "secret"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return WrittenRun().write(tmp_path / "runs" / "a")


@pytest.fixture
async def client(run: Path) -> AsyncIterator[httpx2.AsyncClient]:
    pages = Pages(run.parent)
    transport = httpx2.ASGITransport(app=create_view_app(pages, "secret", is_local=True))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8642") as client:
        yield client
    pages.close()


async def test_answers_need_the_token_and_files_hold_no_data(client: httpx2.AsyncClient) -> None:
    for headers in ({}, {"X-Turnwise-Token": "wrong"}, {"Cookie": "token=secret"}):
        for method, path in (("GET", "/api/runs"), ("POST", "/api/stop"), ("GET", "/api/runs?token=secret")):
            answer = await client.request(
                method, path, headers=headers, json={"run": "a"} if method == "POST" else None
            )
            assert answer.status_code == 401, (headers, path)
    assert (await client.get("/api/runs", headers=TOKEN)).json()["runs"][0]["name"] == "a"
    page = await client.get("/")
    assert page.status_code == 200
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "set-cookie" not in page.headers


async def test_a_name_that_somebody_points_at_this_machine_is_refused(client: httpx2.AsyncClient) -> None:
    refused = ("evil.example:8642", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1", "[::2]:1", "")
    taken = ("localhost:8642", "localhost", "127.0.0.2:8642", "[::1]:8642")  # each is an address that --host may have
    for host, status in ((name, 403 if name in refused else 200) for name in (*refused, *taken)):
        assert (await client.get("/api/runs", headers={**TOKEN, "Host": host})).status_code == status, host


async def test_no_path_leads_out_of_the_files_or_the_runs(client: httpx2.AsyncClient, tmp_path: Path) -> None:
    WrittenRun().write(tmp_path / "elsewhere")
    for path in ("/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static//etc/passwd"):
        assert (await client.get(path)).status_code == 404, path
    for name in ("../elsewhere", str(tmp_path / "elsewhere"), ""):
        answer = await client.get("/api/run", params={"run": name}, headers=TOKEN)
        assert answer.status_code == 400, name
        assert "no run" in answer.json()["error"]


async def test_orders_reach_a_run_that_trains_and_mistakes_are_told(client: httpx2.AsyncClient, run: Path) -> None:
    answer = await client.post("/api/stop", json={"run": "a"}, headers=TOKEN)
    assert answer.status_code == 400
    assert "there is nothing to stop" in answer.json()["error"]
    with run_lock(run):
        assert (await client.post("/api/stop", json={"run": "a"}, headers=TOKEN)).status_code == 200
        assert (await client.post("/api/stop", json={"run": "a", "now": True}, headers=TOKEN)).status_code == 200
        steer = await client.post("/api/steer", json={"run": "a", "setting": "train.steps=9"}, headers=TOKEN)
        assert steer.json() == {"said": "asked: train.steps=9, from the next step on"}
        for body, words in (
            ({"run": "a", "setting": "env.name=x"}, "a run that is going on takes"),
            ({"run": "a", "setting": "train.steps=many"}, "train.steps"),
            ({"run": "b", "setting": "train.steps=9"}, "no run 'b'"),
            (["a"], ""),
        ):
            answer = await client.post("/api/steer", json=body, headers=TOKEN)
            assert answer.status_code == 400, body
            assert words in answer.json()["error"]
        again = await client.post("/api/resume", json={"run": "a"}, headers=TOKEN)
        assert "is training" in again.json()["error"]
        assert (await client.post("/api/delete", json={"run": "a"}, headers=TOKEN)).status_code == 400
    orders = take_orders(run)
    assert [(order.stop, dict(order.settings)) for order in orders] == [
        ("graceful", {}),
        ("hard", {}),
        (None, {"train.steps": 9}),
    ]


async def test_reading_never_writes_into_a_run(client: httpx2.AsyncClient, run: Path) -> None:
    before = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}
    for question in ("runs", "run", "findings", "attempts", "groups", "facets", "curves", "differences", "revisions"):
        answer = await client.get(f"/api/{question}", params={"run": "a", "runs": "a"}, headers=TOKEN)
        assert answer.status_code == 200, answer.text
    after = {file.name: file.read_bytes() for file in run.iterdir() if file.name in before}
    assert after == before
    assert {file.name for file in run.iterdir()} - set(before) <= {"run.db-shm", "run.db-wal"}  # SQLite's own
