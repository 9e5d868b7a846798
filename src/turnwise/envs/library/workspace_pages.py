"""The portal of the world `workspace` as pages of a real browser: the same orders and reports, over HTTP.

A download lands in a folder of this attempt, and the env puts it into the working folder of the shell. The portal is
the only address that the page can reach; the shell can reach none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from turnwise.envs.browser.expert import PlanStep, click, fill, plan_player, random_player
from turnwise.envs.browser.gateway import WebRequest, WebResponse
from turnwise.envs.browser.page import PageOptions, PageSession
from turnwise.envs.browser.sites.markup import field, form, link, links, paragraph, whole_page
from turnwise.envs.library.workspace_office import MAX_TEXT, ROWS, OfficeWork
from turnwise.envs.screen import ScreenAction, read_screen_reply
from turnwise.envs.scripted import ScriptedPlayer
from turnwise.trajectory import Message

DOWNLOAD = "Download"

_NAVIGATION = {"Home": "/", "Orders": "/orders", "Reports": "/reports"}


class OfficeSite:
    """The portal as a web app."""

    def __init__(self, office: OfficeWork) -> None:
        self._office = office
        self.sent: dict[str, str] = {}
        """The reports that were sent, by customer. A later one replaces an earlier one."""

    def respond(self, request: WebRequest) -> WebResponse:
        match request.method, request.path:
            case "POST", "/reports":
                return self._take_report(request)
            case _, "/":
                return _show("Home", [])
            case _, "/orders":
                return self._orders(request)
            case _, "/reports":
                sent = [paragraph(f"sent: {name} {value}") for name, value in self.sent.items()]
                boxes = (field("Customer", "customer"), field("Value", "value"))
                return _show("Reports", [form("/reports", "Send", *boxes), *sent])
            case _, "/orders.csv" if self._office.interface == "both":
                headers = {"Content-Disposition": "attachment; filename=orders.csv"}
                return WebResponse(body=self._office.csv.encode(), content_type="text/csv", headers=headers)
            case _:
                return _show("Not found", [paragraph("There is no such page.")], status=404)

    def _orders(self, request: WebRequest) -> WebResponse:
        asked = request.query.get("from", "0")
        first = int(asked) if re.fullmatch(r"\d{1,6}", asked) else 0
        rows = [paragraph(", ".join(map(str, row))) for row in self._office.orders[first : first + ROWS]]
        before, after = max(0, first - ROWS), first + ROWS
        parts = [link(DOWNLOAD, "/orders.csv")] if self._office.interface == "both" else []
        parts += [link("Previous", f"/orders?from={before}")] if first else []
        parts += [link("Next", f"/orders?from={after}")] if after < len(self._office.orders) else []
        return _show("Orders", [*parts, *rows])

    def _take_report(self, request: WebRequest) -> WebResponse:
        name, value = (request.form.get(key, "").strip() for key in ("customer", "value"))
        if not name or not value:
            return _show("Not accepted", [paragraph("Fill in Customer and Value first.")])
        if max(len(name), len(value)) > MAX_TEXT:
            return _show("Not accepted", [paragraph(f"That is too long; {MAX_TEXT} characters fit.")])
        self.sent[name] = value
        return WebResponse(status=303, headers={"Location": "/reports"})


def _show(title: str, parts: Sequence[str], *, status: int = 200) -> WebResponse:
    return WebResponse(status=status, body=whole_page("Office", title, links(_NAVIGATION), parts))


class OfficePages:
    """The portal in a page of a real browser. It cannot be forked: whoever branches plays the replies again."""

    def __init__(self, office: OfficeWork, max_chars: int) -> None:
        self._site = OfficeSite(office)
        self._max_chars = max_chars
        self._folder: TemporaryDirectory[str] | None = None
        self._page: PageSession | None = None

    def read(self, reply: Message) -> ScreenAction | str:
        """Read the action of a reply. A text is what was wrong with it."""
        return read_screen_reply(reply, "text")

    @property
    def sent(self) -> Mapping[str, str]:
        return self._site.sent

    async def show(self) -> str:
        """Open the portal."""
        self._folder = TemporaryDirectory(prefix="tw-office-")
        options = PageOptions(max_chars=self._max_chars, downloads=Path(self._folder.name))
        self._page = await PageSession.open(self._site, options, name="office")
        return await self._page.observe()

    async def act(self, action: ScreenAction) -> tuple[str, dict[str, bytes]]:
        """Do what the action says. Return what is on the page, and what was downloaded."""
        if self._page is None or self._folder is None:
            raise RuntimeError("the portal was not opened, or is closed")
        seen = await self._page.act(action)
        files = sorted(Path(self._folder.name).iterdir())
        downloads = {file.name: file.read_bytes() for file in files}
        for file in files:
            file.unlink()
        return seen, downloads

    async def close(self) -> None:
        page, self._page = self._page, None
        try:
            if page is not None:
                await page.close()
        finally:
            if self._folder is not None:
                self._folder.cleanup()


def pages_expert(office: OfficeWork, chores: Sequence[str], forgets: int | None = None) -> ScriptedPlayer:
    """The expert of an office with pages.

    Args:
        chores: Commands for what is not a report, in the form of replies.
        forgets: A step of the chores to leave out, counted around from the last one.
    """
    reports = [chore for chore in office.chores if chore.is_report]
    plan: list[PlanStep | str] = []
    if reports:
        plan.append(click("link", "Orders"))
        if office.interface == "both":
            plan += [click("link", DOWNLOAD), "\n".join(f"$ {chore.awk()}" for chore in reports)]
        else:
            plan += [click("link", "Next")] * ((len(office.orders) - 1) // ROWS)
        plan.append(click("link", "Reports"))
    for chore in reports:
        plan += [fill("Customer", chore.name), fill("Value", chore.value), click("button", "Send")]
    left = [*plan, *chores, "done"]
    if forgets is not None:
        left.pop(-2 - forgets % office.num_steps(by_name=False))

    def reply(dialogue: Sequence[Message]) -> str:
        step = left.pop(0)
        return step if isinstance(step, str) else plan_player([step])([_last_page(dialogue)])

    return reply


def pages_random_player(rng: random.Random, commands: Sequence[str]) -> ScriptedPlayer:
    """Does anything on the page, or says any of the commands."""
    on_page = random_player(rng, ("Ann", "42"))

    def reply(dialogue: Sequence[Message]) -> str:
        use_shell = commands and rng.random() < 0.3
        return rng.choice(list(commands)) if use_shell else on_page([_last_page(dialogue)])

    return reply


def _last_page(dialogue: Sequence[Message]) -> Message:
    """The last observation of the page; an answer of the shell has none."""
    return next(message for message in reversed(dialogue) if re.search(r"^page: /", message.content, re.MULTILINE))
