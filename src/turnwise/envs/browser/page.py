# Playwright is an extra and is not there where types are checked; its objects have no types then.
# pyright: basic
"""One page of a real Chromium for one attempt: open an app, look, act, look again.

    session = await PageSession.open(app)
    print(await session.observe())                 # page: / Shop ... [3] link "Cart" ...
    print(await session.act(ScreenAction(kind="click", element=3)))
    await session.close()

Every method may be awaited from any event loop. What goes wrong because of the policy (an element that is not there, a
button under another one) is a note in the observation. What goes wrong otherwise (the page or the browser died, the
page hangs, the app failed) raises `AttemptFailed` and blames the env.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from turnwise.envs.browser.gateway import WebApp, file_below
from turnwise.envs.browser.names import named_observation
from turnwise.envs.browser.pool import BrowserPool, PageSeat, shared_pool
from turnwise.envs.browser.snapshot import Element, PageElementIds, cut_window, read_snapshot, start_before
from turnwise.envs.screen import ScreenAction
from turnwise.errors import AttemptFailed, ConfigError, Party

Dialog = Download = Locator = Page = Any  # Playwright is an optional package

T = TypeVar("T")

LEAVING_S = 15.0
"""How long a page that said it is about to go may take to do so. Only a page that changes its mind takes that long."""
QUIET_S = 0.03
MAX_QUIET_S = 1.0
MAX_TEXT = 500
"""Most characters of a text that is typed."""
KEYS = ("Enter", "Tab", "Escape", "Backspace", "Delete", "ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Space")
MAX_DOWNLOAD = 20_000_000
MAX_ELEMENTS = 30_000
"""A page with more elements is not read."""

_SET_AT_ONCE = ("date", "time", "month", "week", "color", "range")
_KIND_OF_FIELD = """(one) => [
  one.tagName === 'INPUT' ? one.type : '',
  Boolean(one.disabled || one.readOnly) || ['checkbox', 'radio', 'submit', 'button', 'image'].includes(one.type)
    || !(['INPUT', 'TEXTAREA'].includes(one.tagName) || one.isContentEditable),
]"""
_OPTIONS = "(one) => one.disabled ? [] : [...(one.options || [])].filter((o) => !o.disabled).map((o) => o.label)"
_IS_ON_TOP = """(one) => {
  const box = one.getClientRects()[0];
  const hit = box && document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
  const label = hit && hit.closest('label');
  return Boolean(hit) && (one.contains(hit) || hit.contains(one) || Boolean(label) && label.control === one);
}"""
_STATE = """() => ({
  ready: document.readyState,
  leaving: window.__turnwise_leaving ? performance.now() - window.__turnwise_leaving : -1,
  count: document.getElementsByTagName('*').length,
})"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """How a page is shown and what it may do."""

    max_chars: int = 2000
    """Budget of an observation."""
    every_id: bool = False
    """Give plain boxes an id too, for pages that listen to clicks on them."""
    waits_until_quiet: bool = False
    """After an action wait until the page stops changing, for pages with scripts and timers."""
    has_address: bool = True
    """Begin an observation with path and title."""
    by_name: bool = False
    """Show only what can be used, each by a name of its own (`names.py`)."""
    deadline_s: float = 20.0
    """A page that does not answer for this long is given up."""
    downloads: Path | None = None
    """Folder for what a page downloads; without one, downloads are refused."""
    uploads: Path | None = None
    """Folder of the files that can be typed into a file field; without one, none can."""
    chromium: str | None = None
    """Path of a Chromium, instead of the one that is found."""

    def __post_init__(self) -> None:
        if self.max_chars < 100:
            raise ConfigError(f"max_chars={self.max_chars}; expected at least 100")
        if self.deadline_s <= 0:
            raise ConfigError(f"deadline_s={self.deadline_s}; expected more than 0")


class PageSession:
    """One page, from `open` to `close`."""

    def __init__(self, pool: BrowserPool, seat: PageSeat, host: str, options: PageOptions) -> None:
        """Use `PageSession.open`."""
        self._pool = pool
        self._seat: PageSeat | None = seat
        self._host = host
        self._options = options
        self._notes: list[str] = []
        self._first_line = 0
        self._elements: list[Element] = []
        self._ids = PageElementIds()
        self._is_good = True
        self._saving: set[asyncio.Task[None]] = set()
        self._has_download = False  # since the last action; the page stays where it is

    @classmethod
    async def open(
        cls, app: WebApp, options: PageOptions | None = None, *, path: str = "/", name: str = "site"
    ) -> PageSession:
        """Open a page of an app. The app gets a host of its own, of which `name` is a part."""
        options = options or PageOptions()
        pool = shared_pool(options.chromium)
        return await pool.run(cls._open(pool, app, options, path, name))

    @classmethod
    async def _open(cls, pool: BrowserPool, app: WebApp, options: PageOptions, path: str, name: str) -> PageSession:
        seat = await pool.lease()
        session = cls(pool, seat, pool.gateway.admit(app, name, seat.secret), options)
        try:
            seat.page.on("dialog", session._on_dialog)
            seat.page.on("download", session._on_download)
            seat.context.on("page", session._on_popup)
            await session._guarded("opening the page", session._goto(path))
        except BaseException:
            session._is_good = False
            await session._close()
            raise
        return session

    async def goto(self, path: str) -> str:
        """Open another page of the app, and return the observation."""
        return await self._call("opening the page", self._goto(path, observes=True))

    async def observe(self) -> str:
        """What is on the page: accessible elements as text, with the ids that actions take."""
        return await self._call("reading the page", self._observe())

    async def act(self, action: ScreenAction) -> str:
        """Do something, wait until the page has settled, and return the observation. `done` only looks."""
        return await self._call(f"action {action.kind}", self._act(action))

    async def evaluate(self, script: str, argument: object = None) -> Any:
        """The value of a JavaScript expression or function on the page."""
        return await self._call("a script", self._page.evaluate(script, argument))

    async def screenshot(self, quality: int = 60) -> bytes:
        """What the page looks like, as JPEG."""
        return await self._call("a screenshot", self._page.screenshot(type="jpeg", quality=quality))

    @property
    def elements(self) -> list[Element]:
        """All elements of the last observation, also those that did not fit into its budget."""
        return list(self._elements)

    @property
    def place(self) -> str:
        """The path of the page, and the first line of it that was shown."""
        return f"{self._path}:{self._first_line}"

    async def close(self) -> None:
        """Give the page back. May be called twice."""
        await self._pool.run(self._close())

    async def _close(self) -> None:
        seat, self._seat = self._seat, None
        if seat is None:
            return
        for event, listener in (("dialog", self._on_dialog), ("download", self._on_download)):
            seat.page.remove_listener(event, listener)
        seat.context.remove_listener("page", self._on_popup)
        for task in self._saving:
            task.cancel()
        try:
            await self._pool.give_back(seat, is_good=self._is_good)
        finally:
            self._pool.gateway.dismiss(self._host)

    @property
    def _page(self) -> Page:
        if self._seat is None:
            raise AttemptFailed(Party.ENV, "the page was closed")
        return self._seat.page

    async def _call(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        return await self._pool.run(self._guarded(what, work))

    async def _guarded(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` until it ends, the page dies or the deadline passes. Few pages work at the same time."""
        try:
            async with self._pool.working:
                return await self._watched(what, work)
        finally:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()  # it was never begun

    async def _watched(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        lost = asyncio.ensure_future(self._seat_now.lost.wait())
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it any more
        try:
            await asyncio.wait((task, lost), timeout=self._options.deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return self._result(what, task)
            why = "the page or its browser died" if lost.done() else f"no answer in {self._options.deadline_s:g} s"
            self._is_good = False
            raise AttemptFailed(Party.ENV, f"{what}: {why}")
        except asyncio.CancelledError:
            self._is_good = False
            raise
        finally:
            lost.cancel()
            task.cancel()

    def _result(self, what: str, task: asyncio.Future[T]) -> T:
        error = task.exception()
        if error is None and (problem := self._pool.gateway.problem(self._host)) is not None:
            raise AttemptFailed(Party.ENV, f"the site failed: {problem}")
        if error is None:
            return task.result()
        self._is_good = False
        if isinstance(error, AttemptFailed):
            raise error
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise AttemptFailed(Party.ENV, f"{what}: {first}") from error

    async def _goto(self, path: str, observes: bool = False) -> str:
        await self._page.goto(f"http://{self._host}{path}", wait_until="load", timeout=self._options.deadline_s * 1000)
        self._first_line = 0
        return await self._observe() if observes else ""

    async def _observe(self) -> str:
        await self._settle()
        text = await self._snapshot()
        if self._options.waits_until_quiet:
            text = await self._wait_until_quiet(text)
        elements = read_snapshot(text, self._ids, every_id=self._options.every_id)
        by_name = self._options.by_name
        self._elements = [one for one in elements if one.id is not None] if by_name else elements
        self._first_line = min(self._first_line, max(0, len(self._elements) - 1))
        window = cut_window(self._elements, self._first_line, self._options.max_chars)
        shown = named_observation(self._elements, window.first, window.end) if by_name else str(window)
        notes, self._notes = [f"note: {note}" for note in self._notes], []
        head = [f"page: {self._path} {await self._page.title()}"] if self._options.has_address else []
        return "\n".join([*notes, *head, shown]).strip() or "(the page is empty)"

    @property
    def _path(self) -> str:
        parts = urlsplit(self._page.url)
        if parts.hostname != self._host:
            return "(another site)"
        return parts.path + (f"?{parts.query}" if parts.query else "")

    async def _snapshot(self) -> str:
        count = (await self._page.evaluate(_STATE))["count"]
        if count > MAX_ELEMENTS:
            self._notes.append(f"the page has {count} elements, which is too many to show; go back")
            return ""
        return await self._page.aria_snapshot(mode="ai")

    async def _settle(self) -> None:
        """Wait until no new page is on its way and this one is loaded."""
        from playwright.async_api import Error  # pyright: ignore[reportMissingImports]

        deadline = time.monotonic() + self._options.deadline_s
        while time.monotonic() < deadline:
            try:
                state = await self._page.evaluate(_STATE)
            except Error as error:
                if "context was destroyed" not in str(error) and "navigat" not in str(error):
                    raise
            else:
                is_leaving = 0 <= state["leaving"] < LEAVING_S * 1000 and not self._has_download
                if state["ready"] == "complete" and not is_leaving:
                    break
            await asyncio.sleep(0.01)
        if self._saving:
            await asyncio.wait(set(self._saving), timeout=max(0.0, deadline - time.monotonic()))

    async def _wait_until_quiet(self, text: str) -> str:
        deadline = time.monotonic() + MAX_QUIET_S
        while time.monotonic() < deadline:
            await asyncio.sleep(QUIET_S)
            again = await self._snapshot()
            if again == text:
                break
            text = again
        return text

    async def _act(self, action: ScreenAction) -> str:
        from playwright.async_api import Error  # pyright: ignore[reportMissingImports]

        before = self._page.url
        self._has_download = False
        try:
            await self._perform(action)
        except _NoSuchElementError as error:
            self._notes.append(str(error))
        except Error as error:
            if self._seat is None or self._seat.lost.is_set() or not _is_about_element(error):
                raise
            self._notes.append(f"{action.to_text()[:60]} does not work")
        await self._settle()
        if self._page.url != before:
            self._first_line = 0
        return await self._observe()

    async def _perform(self, action: ScreenAction) -> None:
        page, number = self._page, action.element or 0
        if action.kind == "click":
            await self._click(await self._find(number))
        elif action.kind == "type":
            await self._type(await self._find(number), action.text[:MAX_TEXT])
        elif action.kind == "select":
            await self._select(await self._find(number), action.text)
        elif action.kind == "press":
            await page.keyboard.press(_key(action.text))
        elif action.kind == "scroll":
            await self._scroll(action.text)
        elif action.kind == "back":
            history = await self._seat_now.cdp.send("Page.getNavigationHistory")
            if history["currentIndex"] < 2:  # the first entry is the empty page
                self._notes.append("there is no page to go back to")
            else:
                await page.go_back(timeout=self._options.deadline_s * 1000)
        elif action.kind == "wait":
            await asyncio.sleep(0.5)

    @property
    def _seat_now(self) -> PageSeat:
        if self._seat is None:
            raise AttemptFailed(Party.ENV, "the page was closed")
        return self._seat

    async def _find(self, number: int) -> Locator:
        """An element that was shown and can be seen now. Playwright would wait for a hidden one until the deadline."""
        ref = self._ids.ref(number)
        if ref is None or not any(element.id == number for element in self._elements):
            raise _NoSuchElementError(f"there is no element {number} on the page")
        element = self._page.locator(f"aria-ref={ref}")
        if not await element.is_visible():
            raise _NoSuchElementError(f"element {number} is hidden now")
        return element

    async def _click(self, element: Locator) -> None:
        """Click where the element is, or say at once that something is in front of it."""
        await element.scroll_into_view_if_needed(timeout=self._most_ms)
        if not await element.evaluate(_IS_ON_TOP, timeout=self._most_ms):
            raise _NoSuchElementError("something is in front of this element, or it cannot be clicked")
        await element.click(timeout=self._most_ms, force=True)

    async def _type(self, field: Locator, text: str) -> None:
        kind, is_fixed = await field.evaluate(_KIND_OF_FIELD, timeout=self._most_ms)
        if is_fixed:
            raise _NoSuchElementError("this element takes no text")
        if kind == "file":
            await field.set_input_files(self._upload(text), timeout=self._most_ms)
        elif kind in _SET_AT_ONCE:
            await field.fill(text, timeout=self._most_ms)
        else:
            await field.fill("", timeout=self._most_ms)
            await field.press_sequentially(text, timeout=self._most_ms)  # pages may listen to keys

    async def _select(self, field: Locator, option: str) -> None:
        options = await field.evaluate(_OPTIONS, timeout=self._most_ms)
        found = next((label for label in options if label.strip().lower() == option.lower()), None)
        if found is None:
            raise _NoSuchElementError(f"no option {option[:40]!r}; the options are {', '.join(options[:20]) or 'none'}")
        await field.select_option(label=found, timeout=self._most_ms)

    @property
    def _most_ms(self) -> float:
        return self._options.deadline_s * 1000

    async def _scroll(self, direction: str) -> None:
        sign = 1 if direction == "down" else -1
        await self._page.evaluate("(sign) => window.scrollBy(0, sign * 0.8 * window.innerHeight)", sign)
        window = cut_window(self._elements, self._first_line, self._options.max_chars)
        if sign > 0 and window.end < window.total:
            self._first_line = window.end
        elif sign < 0:
            self._first_line = start_before(self._elements, self._first_line, self._options.max_chars)
        else:
            self._notes.append("this is the end of the page")

    def _upload(self, name: str) -> Path:
        folder = self._options.uploads
        if folder is None:
            raise _NoSuchElementError("no file can be sent from here")
        file = file_below(folder, name)
        if file is None:
            raise _NoSuchElementError(f"there is no file {name[:60]!r}")
        return file

    async def _on_dialog(self, dialog: Dialog) -> None:
        if len(self._notes) < 5:
            self._notes.append(f"the page said: {dialog.message[:200]}")
        await _quietly(dialog.dismiss() if dialog.type == "prompt" else dialog.accept())

    async def _on_popup(self, page: Page) -> None:
        if len(self._notes) < 5:
            self._notes.append("the page opened a window, which was closed")
        await _quietly(page.close())

    def _on_download(self, download: Download) -> None:
        self._has_download = True
        task = asyncio.ensure_future(_quietly(self._save(download)))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save(self, download: Download) -> None:
        folder, name = self._options.downloads, Path(download.suggested_filename).name
        if folder is None or not name or name.startswith("."):
            self._notes.append(f"the download of {name} was refused")
            await download.cancel()
        elif (await download.path()).stat().st_size > MAX_DOWNLOAD:
            self._notes.append(f"the download of {name} was refused: too large")
        else:
            await download.save_as(folder / name)
            self._notes.append(f"downloaded {name}")
        await download.delete()


class _NoSuchElementError(Exception):
    """The policy asked for something that is not there."""


def _key(name: str) -> str:
    found = next((key for key in KEYS if key.lower() == name.lower()), None)
    if found is None:
        raise _NoSuchElementError(f"no key {name[:20]!r}; expected {', '.join(KEYS)}")
    return found


def _is_about_element(error: Exception) -> bool:
    text = str(error)
    return not any(sign in text for sign in ("closed", "crashed", "Connection", "Target"))


async def _quietly(work: Coroutine[Any, Any, object]) -> None:
    """Await what may fail because the page went away meanwhile."""
    with contextlib.suppress(Exception):
        await work
