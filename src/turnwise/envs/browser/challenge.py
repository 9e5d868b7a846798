"""What an attempt in a browser is about: the app that it gets, the goal, and the verdict on what was done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from turnwise.envs.browser.gateway import WebApp
from turnwise.envs.browser.page import PageOptions, PageSession
from turnwise.envs.browser.plain import PlainPage
from turnwise.envs.browser.sites.site import Site, progress

AnyPage = PageSession | PlainPage
"""A page in Chromium, or one of our own sites without a browser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageVerdict:
    """How an attempt ended."""

    reward: float
    is_success: bool


class Challenge(Protocol):
    """One attempt's problem. It is used once."""

    @property
    def app(self) -> WebApp: ...

    @property
    def path(self) -> str:
        """The first page."""
        ...

    def options(self, given: PageOptions) -> PageOptions:
        """The options of the page, for a world that was given these."""
        ...

    async def begin(self, page: AnyPage) -> str:
        """Prepare the open page, and return the goal in words."""
        ...

    async def verdict(self, page: AnyPage, *, says_done: bool) -> PageVerdict | None:
        """The end of the attempt, or None while it goes on."""
        ...

    def progress(self) -> float | None:
        """The share of the goal that is reached; None if nobody can tell."""
        ...

    def state(self) -> str | None:
        """A name of the app's state. None if the page itself holds a part of it."""
        ...

    def close(self) -> None: ...


class SiteChallenge:
    """A task at a site of our own."""

    path = "/"

    def __init__(self, site: type[Site], seed: int, level: int) -> None:
        self.app = site(seed, level)
        self._task = site.draw_task(seed, level)

    def options(self, given: PageOptions) -> PageOptions:
        return given

    async def begin(self, page: AnyPage) -> str:  # noqa: ARG002 - the site was filled when it was made
        return self._task.goal

    async def verdict(self, page: AnyPage, *, says_done: bool) -> PageVerdict | None:  # noqa: ARG002
        if not says_done:
            return None
        is_success = self.app.read_facts() == self._task.wanted
        return PageVerdict(reward=float(is_success), is_success=is_success)

    def progress(self) -> float:
        return progress(self._task, self.app.read_facts())

    def state(self) -> str:
        return self.app.digest()

    def close(self) -> None:
        self.app.close()
