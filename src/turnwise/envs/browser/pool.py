# Playwright is an extra and is not there where types are checked; its objects have no types then.
# pyright: basic
"""Chromium processes and their pages, shared by all attempts of this process.

One thread has the event loop that Playwright lives in. A `PageSeat` is a page in a context of its own. A seat that was
left in good order is emptied and used again, up to `USES_PER_SEAT` times, because a fresh one costs a process of the
browser. A browser that died takes its seats with it; the next lease starts another one. When nobody has held a seat for
`IDLE_S`, everything is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from turnwise.envs.browser.gateway import CONTEXT_HEADER, SiteGateway
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.runtime.background_loop import BackgroundLoop

Browser = BrowserContext = CDPSession = Page = Playwright = Any  # Playwright is an optional package

T = TypeVar("T")

MAX_PAGES = 64
"""Pages at the same time in this process. Who wants another one waits."""
PAGES_PER_BROWSER = 16
"""A browser that dies fails this many attempts at most."""
OPENING_AT_ONCE = 4
"""New pages at the same time. Each starts a process; dozens of them at once would only slow each other down."""
WORKING_AT_ONCE = 8
"""Pages that do something at the same time; the others wait for their policy, or for their turn. So the deadline of a
page measures the page, not how many there are."""
USES_PER_SEAT = 50
IDLE_S = 20.0
CLOSE_S = 5.0
LAUNCH_S = 60.0
FOLDER = "tw-chromium-"
"""Begins the name of a browser's folder for temporary files; the id of this process and a random part follow."""
VIEWPORT = (1024, 768)
EXECUTABLES = (
    "/usr/lib/chromium/chromium-headless-shell",  # Debian's; the script in /usr/bin stays in front of the browser
    "headless_shell",
    *("chromium", "chromium-browser", "google-chrome"),
)
"""Places to look for a Chromium. The headless shell comes first: it has no windows, and takes half of the CPU time."""

FLAGS = (
    "--disable-gpu",
    "--mute-audio",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-features=Translate,MediaRouter,OptimizationHints,AutofillServerCommunication",
    # Calls would send datagrams around the proxy. A whole browser knows the first name of the option, a headless shell
    # the second.
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--js-flags=--max-old-space-size=256",
)

# A page tells when it is about to go away, so that nobody reads the old one; and it opens no windows.
_IN_EVERY_PAGE = """
(() => {
  const leave = () => { window.__turnwise_leaving = performance.now(); };
  addEventListener('beforeunload', leave);
  addEventListener('submit', (event) => { if (!event.defaultPrevented) leave(); });
  addEventListener('click', (event) => {
    const link = event.target instanceof Element ? event.target.closest('a[href]') : null;
    if (!link || event.defaultPrevented || !link.protocol.startsWith('http')) return;
    const [base, ...place] = link.href.split('#');
    if (!place.length || base !== location.href.split('#')[0]) leave();
  });
  addEventListener('click', (event) => {
    const link = event.target instanceof Element ? event.target.closest('a[target], form[target]') : null;
    if (link) link.target = '_self';
  }, true);
  window.open = () => null;
})();
"""


@cache
def find_chromium() -> str | None:
    """A Chromium of this machine. None if there is none, and Playwright must have its own."""
    return next(filter(None, map(shutil.which, EXECUTABLES)), None)


@dataclass(eq=False, kw_only=True)
class PageSeat:
    """A page for one attempt at a time."""

    chromium: Chromium
    context: BrowserContext
    page: Page
    cdp: CDPSession
    secret: str
    """The context sends it with every request, so that the gateway knows whose they are."""
    num_uses: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the page or its browser died."""


@dataclass(eq=False, kw_only=True)
class Chromium:
    """One browser process, from its launch on."""

    browser: asyncio.Future[Browser]
    folder: Path
    """Its temporary files."""
    num_taken: int = 0
    unused: list[PageSeat] = field(default_factory=list["PageSeat"])
    seats: set[PageSeat] = field(default_factory=set["PageSeat"])
    is_dead: bool = False

    def die(self) -> None:
        self.is_dead = True
        for seat in self.seats:
            seat.lost.set()
        shutil.rmtree(self.folder, ignore_errors=True)


class BrowserPool:
    """All browsers of this process. Its coroutines run in its own loop; `run` brings one there from any other."""

    def __init__(self, executable: str | None) -> None:
        self._executable = executable
        self._loop = BackgroundLoop("turnwise-browser")
        self._playwright: Playwright | None = None
        self._browsers: list[Chromium] = []
        self._free = asyncio.Semaphore(MAX_PAGES)
        self._starting = asyncio.Lock()
        self._opening = asyncio.Semaphore(OPENING_AT_ONCE)
        self.working = asyncio.Semaphore(WORKING_AT_ONCE)
        """Held while a page does something."""
        self._gateway: SiteGateway | None = None
        self._num_held = 0
        self._idle: asyncio.TimerHandle | None = None
        atexit.register(self.close)

    @property
    def gateway(self) -> SiteGateway:
        if self._gateway is None:
            self._gateway = SiteGateway()
        return self._gateway

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` in the loop of the browsers."""
        return await self._loop.run(work)

    async def lease(self) -> PageSeat:
        """A page at about:blank. Waits while `MAX_PAGES` are in use."""
        await self._free.acquire()
        self._num_held += 1
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        try:
            return await self._take_seat()
        except BaseException:
            self._let_go()
            raise

    async def give_back(self, seat: PageSeat, *, is_good: bool) -> None:
        """Return a page. One that is not in good order, or old, is closed."""
        chromium = seat.chromium
        try:
            is_good = is_good and not seat.lost.is_set() and seat.num_uses < USES_PER_SEAT
            if is_good and await _in_time(_empty(seat)):
                chromium.unused.append(seat)
                return
            chromium.seats.discard(seat)
            if not chromium.is_dead and not await _in_time(seat.context.close()):
                await self._end(chromium)  # a browser that cannot close a page is of no use
        finally:
            chromium.num_taken -= 1
            self._let_go()

    def close(self) -> None:
        """End all browsers and the thread."""
        atexit.unregister(self.close)
        with contextlib.suppress(Exception):
            self._loop.submit(self._shut_down()).result(2 * CLOSE_S)
        self._loop.close()

    def _let_go(self) -> None:
        self._num_held -= 1
        self._free.release()
        if self._num_held == 0:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._when_idle)

    def _when_idle(self) -> None:
        self._closing = asyncio.ensure_future(self._shut_down())

    async def _shut_down(self) -> None:
        async with self._starting:
            if self._num_held and self._idle is None:
                return  # somebody came meanwhile
            for chromium in list(self._browsers):
                await self._end(chromium)
            if self._playwright is not None:
                await _in_time(self._playwright.stop())
            if self._gateway is not None:
                self._gateway.close()
            self._playwright = self._gateway = None

    async def _take_seat(self) -> PageSeat:
        for is_last_try in (False, True):
            chromium = self._choose()
            chromium.num_taken += 1
            try:
                return await self._seat_in(chromium)
            except Exception as error:
                chromium.num_taken -= 1
                await self._end(chromium)
                if isinstance(error, ConfigError):
                    raise
                if is_last_try:
                    raise AttemptFailed(Party.ENV, f"Chromium did not start: {_first_line(error)}") from error
        raise AssertionError

    def _choose(self) -> Chromium:
        self._browsers = [one for one in self._browsers if not one.is_dead]
        open_ones = [one for one in self._browsers if one.num_taken < PAGES_PER_BROWSER]
        if open_ones:
            return max(open_ones, key=lambda one: (bool(one.unused), -one.num_taken))
        _sweep_folders()
        folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
        chromium = Chromium(browser=asyncio.ensure_future(self._launch(folder)), folder=folder)
        self._browsers.append(chromium)
        return chromium

    async def _seat_in(self, chromium: Chromium) -> PageSeat:
        browser = await asyncio.shield(chromium.browser)
        if chromium.num_taken == 1 and not chromium.seats:
            browser.on("disconnected", lambda _: chromium.die())
        while chromium.unused:
            seat = chromium.unused.pop()
            if not seat.lost.is_set():
                seat.num_uses += 1
                return seat
        async with self._opening, asyncio.timeout(LAUNCH_S):
            width, height = VIEWPORT
            secret = secrets.token_hex(16)
            context = await browser.new_context(
                viewport={"width": width, "height": height},
                service_workers="block",
                locale="en-US",
                timezone_id="UTC",
                extra_http_headers={CONTEXT_HEADER: secret},
            )
            await context.add_init_script(_IN_EVERY_PAGE)
            page = await context.new_page()
            cdp = await context.new_cdp_session(page)
        seat = PageSeat(chromium=chromium, context=context, page=page, cdp=cdp, secret=secret, num_uses=1)
        page.on("crash", lambda _: seat.lost.set())
        page.on("close", lambda _: seat.lost.set())
        chromium.seats.add(seat)
        return seat

    async def _launch(self, folder: Path) -> Browser:
        async with self._starting:
            playwright = self._playwright = self._playwright or await _start_playwright()
            try:
                browser = await playwright.chromium.launch(
                    executable_path=self._executable,
                    args=[*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])],
                    proxy={"server": self.gateway.address, "bypass": "<-loopback>"},
                    env={**os.environ, "TMPDIR": str(folder)},
                    timeout=LAUNCH_S * 1000,
                )
            except Exception:
                await _in_time(playwright.stop())  # its driver may be what died
                self._playwright = None
                raise
            return browser

    async def _end(self, chromium: Chromium) -> None:
        if chromium in self._browsers:
            self._browsers.remove(chromium)
        chromium.die()
        if chromium.browser.done() and not chromium.browser.cancelled() and chromium.browser.exception() is None:
            await _in_time(chromium.browser.result().close())
        shutil.rmtree(chromium.folder, ignore_errors=True)


def _sweep_folders() -> None:
    """Remove what processes that were killed could not remove."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        owner = folder.name.removeprefix(FOLDER).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


async def _start_playwright() -> Playwright:
    try:
        from playwright.async_api import async_playwright  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("pages need Playwright: pip install 'turnwise[browser]'") from error
    return await async_playwright().start()


async def _empty(seat: PageSeat) -> None:
    """Leave no page, window, name, history or cookies. What is in storage belongs to a host that is not used again.

    A window that the page opened while it was given back could lead the page of the next attempt away, as its opener.
    """
    await seat.page.goto("about:blank")
    for window in seat.context.pages:
        if window is not seat.page:
            await window.close()
    await seat.page.evaluate("() => { window.name = ''; }")
    await seat.cdp.send("Page.resetNavigationHistory")
    await seat.context.clear_cookies()


async def _in_time(work: Coroutine[Any, Any, object]) -> bool:
    """Await something that may hang or fail. Returns whether it ended well."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await work
    except Exception:  # noqa: BLE001 - Playwright's errors; the caller goes another way
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


_pools: dict[str | None, BrowserPool] = {}
_lock = threading.Lock()


def shared_pool(executable: str | None = None) -> BrowserPool:
    """The pool of this process for a Chromium; the one that was found if none is named."""
    executable = executable or find_chromium()
    with _lock:
        if executable not in _pools:
            _pools[executable] = BrowserPool(executable)
        return _pools[executable]


def close_pools() -> None:
    """End all browsers now, not after `IDLE_S`, for a program that counts them. The next page starts new ones."""
    with _lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()


os.register_at_fork(after_in_child=_pools.clear)
