"""The skeleton that our sites share. A site is a schema, its pages, its facts and its chores.

    class Shop(Site):
        schema = "CREATE TABLE ..."                    # a SQLite database in memory, filled from a seed
        facts = {"orders": "SELECT ..."}               # what counts in the end: rows without ids or times

        @route("/cart/add")                            # what a request does
        def post_cart(self, request): self.add_to_cart(...); return redirect("/cart")

        def chores(self, level, rng): yield Chore(...) # what a task may ask for

A chore has the words of the goal, the steps of the expert, and an effect: the same method of the site that its pages
call. The wanted end of a task is a second copy of the site, changed by the effects of its chores. An attempt succeeds
when the facts of its site equal the facts of that copy: everything that was asked for is there, and nothing else
changed. The text of a page is never judged.
"""

from __future__ import annotations

import hashlib
import random
import re
import sqlite3
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from turnwise.envs.browser.expert import PlanStep
from turnwise.envs.browser.gateway import WebRequest, WebResponse
from turnwise.envs.browser.sites.markup import link, links, paragraph, whole_page

LEVELS = (1, 2, 3, 4, 5)

PageMethod = Callable[..., WebResponse]
_ROUTE = "__turnwise_route__"


def route(path: str) -> Callable[[PageMethod], PageMethod]:
    """Mark a method as the answer to a path. `<word>` in the path is an argument; a `post_...` method takes forms."""
    pattern = re.compile(re.sub(r"<(\w+)>", r"(?P<\1>[^/]+)", path))

    def mark(method: PageMethod) -> PageMethod:
        kind = "POST" if method.__name__.startswith("post_") else "GET"
        setattr(method, _ROUTE, (kind, pattern))
        return method

    return mark


def redirect(path: str) -> WebResponse:
    return WebResponse(status=303, headers={"Location": path})


class RefusedError(Exception):
    """A form cannot be accepted; the sender is shown the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chore:
    """One thing that a task asks for."""

    text: str
    """A sentence of the goal."""
    steps: Sequence[PlanStep]
    """How the expert does it, from any page of the site."""
    effect: Callable[[Any], object]
    """Changes a site as if the chore had been done on its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTask:
    """A task at a site."""

    goal: str
    plan: tuple[PlanStep, ...]
    wanted: Counter[tuple[object, ...]]
    """The facts of a site where everything is done."""
    start: Counter[tuple[object, ...]]


class Site(ABC):
    """A web app over a database. Subclasses say what is in it."""

    name: ClassVar[str]
    title: ClassVar[str]
    schema: ClassVar[str]
    facts: ClassVar[Mapping[str, str]]
    """Queries whose rows are compared at the end."""
    navigation: ClassVar[Mapping[str, str]] = {}

    def __init__(self, seed: int, level: int) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)  # the gateway locks
        self._database.row_factory = sqlite3.Row
        self._database.executescript(self.schema)
        self._note = ""
        self.fill(random.Random(f"{self.name}:{seed}"), level)
        self._database.commit()

    @abstractmethod
    def fill(self, rng: random.Random, level: int) -> None:
        """Put the seeded content into the empty tables. A higher level has more of it."""

    @abstractmethod
    def chores(self, level: int, rng: random.Random) -> list[Chore]:
        """What a task of this level asks for, in order. They do not contradict each other."""

    @classmethod
    def draw_task(cls, seed: int, level: int) -> SiteTask:
        """The task of a seed: its goal, the expert's plan, and the wanted end."""
        site, wanted = cls(seed, level), cls(seed, level)
        try:
            start = site.read_facts()
            chores = site.chores(level, random.Random(f"{cls.name}:task:{seed}:{level}"))
            for chore in chores:
                chore.effect(wanted)
            return SiteTask(
                goal=" ".join(chore.text for chore in chores),
                plan=tuple(step for chore in chores for step in chore.steps),
                wanted=wanted.read_facts(),
                start=start,
            )
        finally:
            site.close()
            wanted.close()

    # --- the database

    def rows(self, sql: str, *values: object) -> list[sqlite3.Row]:
        return self._database.execute(sql, values).fetchall()

    def row(self, sql: str, *values: object) -> sqlite3.Row | None:
        return self._database.execute(sql, values).fetchone()

    def change(self, sql: str, *values: object) -> int:
        """Run a statement that writes. Returns the id of a new row."""
        return self._database.execute(sql, values).lastrowid or 0

    def read_facts(self) -> Counter[tuple[object, ...]]:
        return Counter((name, *row) for name, sql in self.facts.items() for row in self.rows(sql))

    def digest(self) -> str:
        """A name of the whole state."""
        return hashlib.sha256("\n".join(self._database.iterdump()).encode()).hexdigest()[:16]

    def copy(self) -> Self:
        """An independent site in the same state."""
        other = type(self).__new__(type(self))
        other._database = sqlite3.connect(":memory:", check_same_thread=False)
        other._database.row_factory = sqlite3.Row
        self._database.backup(other._database)
        other._note = self._note
        return other

    def close(self) -> None:
        self._database.close()

    # --- the web

    def respond(self, request: WebRequest) -> WebResponse:
        """Find the page for a request. A form that is refused shows the page it came from, with the reason."""
        kind = "POST" if request.method == "POST" else "GET"
        for method in _routes(type(self)):
            wanted, pattern = getattr(method, _ROUTE)
            match = pattern.fullmatch(request.path)
            if match is None or wanted != kind:
                continue
            try:
                answer = method(self, request, **match.groupdict())
                self._database.commit()
            except RefusedError as error:
                self._database.rollback()
                return self.show("Not accepted", [paragraph(str(error)), link("Go on", "/")])
            return answer
        return self.show("Not found", [paragraph("There is no such page.")], status=404)

    def show(self, title: str, parts: Sequence[str], *, status: int = 200) -> WebResponse:
        """A page of this site."""
        note, self._note = self._note, ""
        return WebResponse(
            status=status, body=whole_page(self.title, title, links(self.navigation) + self.header(), parts, note)
        )

    def header(self) -> str:
        """HTML beside the navigation, such as a search field."""
        return ""

    def say(self, note: str) -> None:
        """Show a sentence on the next page."""
        self._note = note

    def found(self, sql: str, *values: object) -> sqlite3.Row:
        """The row of a query; refused if there is none."""
        row = self.row(sql, *values)
        if row is None:
            raise RefusedError("There is no such thing.")
        return row


def _routes(site: type[Site]) -> list[PageMethod]:
    members = (getattr(site, name) for name in dir(site))
    return [member for member in members if hasattr(member, _ROUTE)]


def progress(task: SiteTask, now: Counter[tuple[object, ...]]) -> float:
    """The share of the asked changes that are done, less for every change that nobody asked for. 1 is a success."""
    asked = (task.wanted - task.start) + _negative(task.start - task.wanted)
    made = (now - task.start) + _negative(task.start - now)
    union = (asked | made).total()
    return 1.0 if union == 0 else (asked & made).total() / union


def _negative(facts: Counter[tuple[object, ...]]) -> Counter[tuple[object, ...]]:
    """Facts that are gone, told apart from those that are new."""
    return Counter({("gone", *fact): count for fact, count in facts.items()})


def required(request: WebRequest, *names: str) -> list[str]:
    """Fields of a form that must not be empty."""
    values = [request.form.get(name, "").strip() for name in names]
    missing = [name for name, value in zip(names, values, strict=True) if not value]
    if missing:
        raise RefusedError(f"Please fill in: {', '.join(missing)}.")
    return values


def whole_number(text: str, low: int, high: int) -> int:
    if not re.fullmatch(r"\d{1,6}", text.strip()) or not low <= int(text) <= high:
        raise RefusedError(f"Expected a number from {low} to {high}.")
    return int(text)
