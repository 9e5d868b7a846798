"""Pages that misbehave in a real Chromium: they end as notes or as the env's failure, and leave nothing behind."""

from __future__ import annotations

import asyncio
import http.server
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.browser_load import processes_below
from turnwise.envs.browser import PageOptions, PageSession, WebRequest, WebResponse
from turnwise.envs.browser.pool import close_pools
from turnwise.envs.screen import ScreenAction
from turnwise.errors import AttemptFailed, Party

pytest.importorskip("playwright", reason="run by tests/contract/test_browser_packages.py")
pytestmark = pytest.mark.slow

QUICK = PageOptions(deadline_s=6.0)
CLICK = ScreenAction(kind="click", element=1)


class OnePage:
    """An app whose only page is this HTML."""

    def __init__(self, body: str) -> None:
        self._body = f"<!doctype html><title>t</title>{body}"
        self.paths: list[str] = []

    def respond(self, request: WebRequest) -> WebResponse:
        self.paths.append(request.path)
        if request.path == "/file":
            headers = {"Content-Disposition": "attachment; filename=../../evil.txt"}
            return WebResponse(body=b"data", content_type="text/plain", headers=headers)
        if request.path == "/broken":
            raise RuntimeError("the app is broken")
        return WebResponse(body=self._body.encode())


@pytest.fixture(autouse=True, scope="module")
def _browsers_end() -> Iterator[None]:
    yield
    close_pools()


@pytest.fixture
def neighbour() -> Iterator[tuple[int, list[str]]]:
    """Another service of this machine; its port, and what it was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port, asked
    server.shutdown()
    server.server_close()


async def look_and_click(body: str, options: PageOptions = QUICK) -> tuple[str, OnePage]:
    app = OnePage(body)
    page = await PageSession.open(app, options)
    try:
        await page.observe()
        return await page.act(CLICK), app
    finally:
        await page.close()


async def test_an_endless_script_is_the_envs_failure_and_the_next_page_works() -> None:
    with pytest.raises(AttemptFailed) as failure:
        await look_and_click("<button onclick='while (true) {}'>Go</button>")
    assert failure.value.party is Party.ENV
    seen, _ = await look_and_click("<button onclick='document.title=\"clicked\"'>Go</button>")
    assert "clicked" in seen


async def test_a_page_that_crashes_is_the_envs_failure() -> None:
    page = await PageSession.open(OnePage("<p>fine</p>"), QUICK)
    try:
        for pid, line in processes_below(os.getpid()).items():
            if "--type=renderer" in line:
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(AttemptFailed, match=r"died|crash|closed") as failure:
            await page.observe()
        assert failure.value.party is Party.ENV
    finally:
        await page.close()


async def test_a_script_that_takes_all_memory_is_the_envs_failure() -> None:
    page = await PageSession.open(OnePage("<p>fine</p>"), QUICK)
    try:
        with pytest.raises(AttemptFailed) as failure:
            await page.evaluate(
                "() => { const all = []; while (true) all.push(new Array(1e6).fill('x' + all.length)) }"
            )
        assert failure.value.party is Party.ENV
    finally:
        await page.close()


async def test_an_app_that_raises_is_the_envs_failure_with_its_error() -> None:
    page = await PageSession.open(OnePage("<p>fine</p>"), QUICK)
    try:
        with pytest.raises(AttemptFailed, match="the app is broken"):
            await page.goto("/broken")
    finally:
        await page.close()


async def test_alerts_windows_and_downloads_become_notes(tmp_path: Path) -> None:
    seen, _ = await look_and_click("<button onclick='alert(\"hello\")'>Go</button>")
    assert "note: the page said: hello" in seen
    seen, _ = await look_and_click("<button onclick='for (let i = 0; i < 50; i++) window.open(\"/\")'>Go</button>")
    assert '[1] button "Go"' in seen
    seen, app = await look_and_click("<a href='/' target='_blank'>Go</a>")
    assert app.paths.count("/") == 2  # in the same page
    seen, _ = await look_and_click("<a href='/file'>Go</a>")
    assert "was refused" in seen
    assert list(tmp_path.iterdir()) == []


async def test_a_download_lands_in_its_folder_and_nowhere_else(tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    seen, _ = await look_and_click("<a href='/file'>Go</a>", PageOptions(deadline_s=6.0, downloads=folder))
    (file,) = folder.iterdir()
    assert f"downloaded {file.name}" in seen
    assert file.read_text() == "data"
    assert [entry.name for entry in tmp_path.iterdir()] == ["inside"]


async def test_only_files_of_the_folder_can_be_sent(tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    app = OnePage("<label>File <input type=file onchange='document.title=this.files[0].name'></label>")
    page = await PageSession.open(app, PageOptions(deadline_s=6.0, uploads=folder, every_id=True))
    try:
        await page.observe()
        for name in ("../secret.txt", str(tmp_path / "secret.txt"), "link.txt", "a\0b", "a" * 400, "inside/" * 60):
            assert "there is no file" in await page.act(ScreenAction(kind="type", element=1, text=name))
        assert "mine.txt" in (await page.act(ScreenAction(kind="type", element=1, text="mine.txt")))
    finally:
        await page.close()


async def test_an_element_that_hides_after_it_was_shown_is_a_note_at_once() -> None:
    hide = "setTimeout(() => document.querySelector('button').style.display = 'none', 500)"
    page = await PageSession.open(OnePage("<button>Go</button>"), QUICK)
    try:
        assert '[1] button "Go"' in await page.observe()
        await page.evaluate(f"() => {{ {hide} }}")
        await asyncio.sleep(1.0)
        begun = time.monotonic()
        seen = await page.act(CLICK)
        assert "note: element 1 is hidden now" in seen
        assert time.monotonic() - begun < QUICK.deadline_s
    finally:
        await page.close()


async def test_a_huge_page_is_cut_and_a_monstrous_one_is_not_read() -> None:
    loop = 'for (let i = 0; i < {}; i++) document.body.append(document.createElement("button"), i)'
    fill = f"<button onclick='{loop}'>Go</button>"
    seen, _ = await look_and_click(fill.format(3000), PageOptions(deadline_s=20.0, max_chars=500))
    assert len(seen) < 800
    assert "more below: scroll down" in seen
    seen, _ = await look_and_click(fill.format(50_000), PageOptions(deadline_s=20.0))
    assert "too many to show" in seen


async def test_nothing_leaves_the_site(neighbour: tuple[int, list[str]]) -> None:
    port, asked = neighbour
    addresses = [
        f"http://127.0.0.1:{port}/a",
        f"http://localhost:{port}/b",
        "https://example.com/",
    ]
    script = ";".join(f"fetch('{one}', {{mode: 'no-cors'}}).then((r) => r.text()).catch(() => 0)" for one in addresses)
    images = "".join(f"<img src='{one}'>" for one in addresses)
    seen, _ = await look_and_click(f"{images}<button onclick=\"{script}\">Go</button><a href='{addresses[0]}'>Away</a>")
    assert asked == []
    app = OnePage(f"<a href='{addresses[0]}'>Away</a>")
    page = await PageSession.open(app, QUICK)
    try:
        await page.observe()
        seen = await page.act(CLICK)
        assert "(another site)" in seen
        assert '[1] link "Away"' in await page.act(ScreenAction(kind="back"))
    finally:
        await page.close()
    assert asked == []


async def test_scripts_reach_no_socket_and_no_file_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        there, heard = (f"127.0.0.1:{one.getsockname()[1]}" for one in (tcp, udp))
        call = (
            f"const servers = [{{urls: 'stun:{heard}'}}, {{urls: 'turn:{heard}', username: 'a', credential: 'b'}},"
            f" {{urls: 'turn:{there}?transport=tcp', username: 'a', credential: 'b'}}];"
            "const call = new RTCPeerConnection({iceServers: servers});"
            "call.createDataChannel('x'); call.createOffer().then((offer) => call.setLocalDescription(offer));"
            "call.onicegatheringstatechange = () => { document.title = call.iceGatheringState; }"
        )
        ways = [
            f"new WebSocket('ws://{there}')",
            f"new EventSource('http://{there}')",
            f"navigator.sendBeacon('http://{there}', 'x')",
            f"new Worker(URL.createObjectURL(new Blob([`fetch('http://{there}'); new WebSocket('ws://{there}')`])))",
            call,
            "fetch('file:///etc/passwd').then((r) => r.text()).then((t) => document.body.append(t))",
        ]
        hints = "".join(f"<link rel={kind} href='http://{there}'>" for kind in ("preconnect", "prefetch", "preload"))
        tries = "".join(f"<script>try {{ {way} }} catch (error) {{}}</script>" for way in ways)
        body = f"<a href='file:///etc/passwd'>Go</a>{hints}<iframe src='http://{there}'></iframe>{tries}"
        page = await PageSession.open(OnePage(body), PageOptions(deadline_s=60.0))
        try:
            while await page.evaluate("() => document.title") != "complete":  # the call has looked for ways out
                await asyncio.sleep(0.05)
            assert "root:" not in await page.observe()
            assert "root:" not in await page.act(CLICK)
        finally:
            await page.close()
        for one in (tcp, udp):
            one.setblocking(False)
        with pytest.raises(BlockingIOError):
            tcp.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(100)


async def test_a_page_reaches_no_other_attempt_even_if_it_knows_its_host() -> None:
    victim = OnePage("<p>mine</p>")
    page = await PageSession.open(victim, QUICK)
    try:
        host = await page.evaluate("() => location.host")
        ways = [
            f"fetch('http://{host}/fetched', {{method: 'POST', mode: 'no-cors'}}).catch(() => 0)",
            f"new Image().src = 'http://{host}/seen'",
            f"new Worker(URL.createObjectURL(new Blob([`fetch('http://{host}/worked', {{mode: 'no-cors'}})`])))",
            f"new WebSocket('ws://{host}/opened')",
            f"navigator.sendBeacon('http://{host}/sent')",
        ]
        form = f"<form method=post action='http://{host}/posted'><button>Go</button></form>"
        hostile = OnePage(f"{form}<script>" + ";".join(ways) + "</script>")
        attacker = await PageSession.open(hostile, QUICK)
        try:
            await attacker.observe()
            assert "(another site)" in await attacker.act(CLICK)
        finally:
            await attacker.close()
        assert set(victim.paths) <= {"/", "/favicon.ico"}
        assert "mine" in await page.observe()
    finally:
        await page.close()


async def test_the_host_of_another_attempt_cannot_be_guessed() -> None:
    pages = [await PageSession.open(OnePage("<p>x</p>"), QUICK) for _ in range(2)]
    try:
        hosts = [await page.evaluate("() => location.host.split('.')") for page in pages]
        assert [len(one[0]) for one in hosts] == [16, 16]
        assert hosts[0][0] != hosts[1][0]
    finally:
        for page in pages:
            await page.close()


async def test_nothing_of_an_attempt_is_left_for_the_next_one() -> None:
    store = "document.cookie='a=1';localStorage.a=1;sessionStorage.a=1;window.name='a'"
    await look_and_click(f'<button onclick="{store}">Go</button>')
    app = OnePage("<p id=p></p>")
    page = await PageSession.open(app, QUICK)
    try:
        found = await page.evaluate("() => [document.cookie, localStorage.length, sessionStorage.length, window.name]")
        assert found == ["", 0, 0, ""]
        assert "no page to go back to" in await page.act(ScreenAction(kind="back"))
    finally:
        await page.close()


async def test_a_window_that_opens_while_its_page_is_given_back_does_not_stay_for_the_next_attempt() -> None:
    page = await PageSession.open(OnePage("<form id=f target=_blank action='/new'></form>"), QUICK)
    seat = page._seat
    assert seat is not None
    seat.context.remove_listener("page", page._on_popup)  # as `close` does at its beginning
    await page.evaluate("() => f.submit()")
    while len(seat.context.pages) < 2:
        await asyncio.sleep(0.01)
    await page.close()
    following = await PageSession.open(OnePage("<p>yours</p>"), QUICK)
    try:
        assert following._seat is not None
        assert len(following._seat.context.pages) == 1  # a window could lead the page away that opened it
        assert "yours" in await following.observe()
    finally:
        await following.close()
