"""The office of the world `workspace`: its data, its portal of screens, its chores, and who can do them how.

A chore is asked for in words, done in the shell, in Python, in SQL or on the portal's screens, and checked on what is
there at the end: files, the database, and the reports that the portal received.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from turnwise.envs.screen import ScreenAction, ScreenElement, ScreenIds, screen_to_text

Interface = Literal["shell", "screen", "both"]

CUSTOMERS = ("Ann", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jack")
WORDS = ("invoice", "holiday", "printer", "meeting", "parcel", "garden")
ROWS = 8
"""Rows of orders on one screen."""
MAX_TEXT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficeChore:
    """One thing to get done. JSON holds it as a dict."""

    kind: Literal["total", "count", "largest", "balance", "notes"]
    name: str
    """The customer, or the word that notes hold."""
    value: str = ""
    """The right answer of a report, or the new balance."""

    @property
    def is_report(self) -> bool:
        return self.kind in ("total", "count", "largest")

    def say(self) -> str:
        what = {
            "total": f"the sum of all amounts of {self.name}",
            "count": f"the number of orders of {self.name}",
            "largest": f"the largest amount of {self.name}",
        }
        if self.is_report:
            return f"Find {what[self.kind]} in the orders and report it."
        if self.kind == "balance":
            return f"In shop.db, set the balance of {self.name} to {self.value}."
        return f"Move all files in notes that hold the word {self.name} to the folder done."

    def awk(self) -> str:
        """The command that finds the answer of a report in orders.csv."""
        body = {
            "total": "{s+=$3} END{print s}",
            "count": "{n++} END{print n}",
            "largest": "$3>m{m=$3} END{print m}",
        }[self.kind]
        rule = f'$2=="{self.name}"' + (f" && {body}" if self.kind == "largest" else body)
        return f"awk -F, {shlex.quote(rule)} orders.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficeWork:
    """What a task begins with."""

    orders: Sequence[Sequence[Any]]
    """Rows of id, customer, amount."""
    balances: Mapping[str, int]
    notes: Mapping[str, str]
    chores: Sequence[OfficeChore]
    interface: Interface

    @property
    def csv(self) -> str:
        return "".join(f"{','.join(map(str, row))}\n" for row in (("id", "customer", "amount"), *self.orders))

    def files(self) -> dict[str, str]:
        """What lies in the working folder at the start. Orders on the portal have to be downloaded first."""
        has_database = any(chore.kind == "balance" for chore in self.chores)
        setup = {".setup.sql": self._database()} if has_database else {}
        notes = {f"notes/{name}": text for name, text in self.notes.items()}
        return {**notes, **setup, **({"orders.csv": self.csv} if self.interface == "shell" else {})}

    def _database(self) -> str:
        rows = "".join(f"INSERT INTO customers VALUES ('{name}', {value});\n" for name, value in self.balances.items())
        return f"CREATE TABLE customers (name TEXT PRIMARY KEY, balance INTEGER);\n{rows}"

    def balances_after(self) -> dict[str, int]:
        changed = {chore.name: int(chore.value) for chore in self.chores if chore.kind == "balance"}
        return {**self.balances, **changed}

    def to_json(self) -> dict[str, Any]:
        chores = [{"kind": chore.kind, "name": chore.name, "value": chore.value} for chore in self.chores]
        return {
            "orders": [list(row) for row in self.orders],
            "balances": dict(self.balances),
            "notes": dict(self.notes),
            "chores": chores,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], interface: Interface) -> OfficeWork:
        chores = tuple(OfficeChore(**chore) for chore in data["chores"])
        rest = {name: data[name] for name in ("orders", "balances", "notes")}
        return OfficeWork(chores=chores, interface=interface, **rest)


def draw_office(
    rng: random.Random, num_chores: int, num_orders: int, interface: Interface, *, reports_only: bool = False
) -> OfficeWork:
    """Draw data and chores. No two chores are about the same thing, so their order does not matter."""
    orders = [(100 + n, rng.choice(CUSTOMERS), rng.randrange(5, 100)) for n in range(num_orders)]
    balances = {name: rng.randrange(100) for name in CUSTOMERS}
    notes = {f"n{n}.txt": f"{rng.choice(WORDS)} {rng.choice(WORDS)}\n" for n in range(8)}
    kinds = ["report"] if reports_only or interface == "screen" else ["report", "balance", "notes"]
    seen = sorted({name for _, name, _ in orders})
    words = [word for word in WORDS if any(word in text for text in notes.values())]
    names = {"report": seen, "balance": list(CUSTOMERS), "notes": words[:1]}
    free = [(kind, name) for kind in kinds for name in rng.sample(names[kind], len(names[kind]))]
    chosen = rng.sample(free, min(num_chores, len(free)))
    chores = [_draw_chore(rng, kind, name, orders, balances) for kind, name in chosen]
    return OfficeWork(orders=orders, balances=balances, notes=notes, chores=chores, interface=interface)


def _draw_chore(
    rng: random.Random, kind: str, name: str, orders: Sequence[tuple[int, str, int]], balances: Mapping[str, int]
) -> OfficeChore:
    if kind == "balance":
        return OfficeChore(kind="balance", name=name, value=str(balances[name] + rng.randrange(1, 50)))
    if kind == "notes":
        return OfficeChore(kind="notes", name=name)
    amounts = [amount for _, customer, amount in orders if customer == name]
    answers = {"total": sum(amounts), "count": len(amounts), "largest": max(amounts)}
    which: Any = rng.choice(sorted(answers))
    return OfficeChore(kind=which, name=name, value=str(answers[which]))


@dataclass
class OfficePortal:
    """The screens of the office: orders to read or download, and a form that sends reports."""

    orders: Sequence[Sequence[Any]]
    has_download: bool
    place: Literal["home", "orders", "reports"] = "home"
    offset: int = 0
    form: dict[str, str] = field(default_factory=dict[str, str])
    sent: dict[str, str] = field(default_factory=dict[str, str])
    """The reports that were sent, by customer. A later one replaces an earlier one."""
    ids: ScreenIds = field(default_factory=ScreenIds)

    def copy(self) -> OfficePortal:
        form, sent = dict(self.form), dict(self.sent)
        return OfficePortal(self.orders, self.has_download, self.place, self.offset, form, sent, self.ids.copy())

    def id_of(self, name: str) -> int:
        return self.ids.number(name)

    def to_text(self, max_chars: int) -> str:
        return screen_to_text(self.place.capitalize(), self._elements(), max_chars)

    def act(self, action: ScreenAction) -> tuple[str, bool]:
        """Do what the action says. Return what went wrong, and whether the orders were downloaded."""
        match action.kind:
            case "click":
                return self._click(action.element)
            case "type":
                return self._type(action.element, action.text), False
            case "back":
                self._go("home")
                return "", False
            case "scroll":
                offset = self.offset + (ROWS if action.text == "down" else -ROWS)
                if self.place != "orders" or not 0 <= offset < len(self.orders):
                    return "There is nothing more there.", False
                self.offset = offset
                return "", False
            case "wait":
                return "", False
            case _:
                return f"{action.kind} does nothing here.", False

    def _go(self, place: Literal["home", "orders", "reports"]) -> None:
        self.place, self.offset, self.form = place, 0, {}

    def _elements(self) -> list[ScreenElement]:
        if self.place == "home":
            return [self._control("link", "Orders"), self._control("link", "Reports")]
        if self.place == "reports":
            boxes = [self._control("textbox", name, self.form.get(name, "")) for name in ("Customer", "Value")]
            sent = [ScreenElement(role="text", name=f"sent: {name} {value}") for name, value in self.sent.items()]
            return [*boxes, self._control("button", "Send"), *sent]
        download = [self._control("button", "Download")] if self.has_download else []
        rows = self.orders[self.offset : self.offset + ROWS]
        texts = [ScreenElement(role="text", name=", ".join(map(str, row))) for row in rows]
        below = len(self.orders) - self.offset - len(rows)
        more = [ScreenElement(role="text", name=f"{below} more below")] if below else []
        return [*download, *texts, *more]

    def _control(self, role: str, name: str, value: str | None = None) -> ScreenElement:
        return ScreenElement(role=role, name=name, id=self.ids.number(name), value=value)

    def _on_screen(self, number: int | None) -> ScreenElement | None:
        return next((one for one in self._elements() if one.id is not None and one.id == number), None)

    def _click(self, number: int | None) -> tuple[str, bool]:
        element = self._on_screen(number)
        if element is None:
            return f"There is no element {number} on this screen.", False
        match element.name:
            case "Orders":
                self._go("orders")
            case "Reports":
                self._go("reports")
            case "Download":
                return "", True
            case "Send":
                name, value = self.form.get("Customer", ""), self.form.get("Value", "")
                if not name or not value:
                    return "Fill in Customer and Value first.", False
                self.sent[name] = value
                self.form = {}
            case _:
                return "Use type to write here.", False
        return "", False

    def _type(self, number: int | None, text: str) -> str:
        element = self._on_screen(number)
        if element is None or element.role != "textbox":
            return f"There is no textbox {number} on this screen."
        if len(text) > MAX_TEXT:
            return f"That is too long; {MAX_TEXT} characters fit."
        self.form[element.name] = text
        return ""


class OfficeScreens:
    """The portal as screens of a state machine, with the methods of the one that is a real page."""

    def __init__(self, office: OfficeWork, max_chars: int) -> None:
        self._office = office
        self._max_chars = max_chars
        self._portal = OfficePortal(office.orders, has_download=office.interface == "both")

    @property
    def sent(self) -> Mapping[str, str]:
        return self._portal.sent

    async def show(self) -> str:
        return self._portal.to_text(self._max_chars)

    async def act(self, action: ScreenAction) -> tuple[str, dict[str, bytes]]:
        """Do what the action says. Return what is on the screen, and what was downloaded."""
        problem, is_download = self._portal.act(action)
        screen = self._portal.to_text(self._max_chars)
        downloads = {"orders.csv": self._office.csv.encode()} if is_download else {}
        return f"{problem}\n\n{screen}" if problem else screen, downloads

    async def close(self) -> None:
        pass

    def copy(self) -> OfficeScreens:
        other = OfficeScreens(self._office, self._max_chars)
        other._portal = self._portal.copy()
        return other


def expert_replies(office: OfficeWork) -> list[str]:
    """What an expert says, up to `done`."""
    portal = OfficePortal(office.orders, has_download=office.interface == "both")
    replies: list[str] = []

    def act(kind: Any, name: str = "", text: str = "") -> None:
        portal.to_text(10_000)  # elements get their ids when they are seen
        action = ScreenAction(kind=kind, element=portal.id_of(name) if name else None, text=text)
        portal.act(action)
        replies.append(action.to_text())

    reports = [chore for chore in office.chores if chore.is_report]
    if reports and office.interface != "shell":
        act("click", "Orders")
        if office.interface == "both":
            act("click", "Download")
        else:
            for _ in range((len(office.orders) - 1) // ROWS):
                act("scroll", text="down")
        act("back")
        if office.interface == "both":
            replies.append("\n".join(f"$ {chore.awk()}" for chore in reports))
        act("click", "Reports")
    for chore in reports if office.interface != "shell" else ():
        act("type", "Customer", chore.name)
        act("type", "Value", chore.value)
        act("click", "Send")
    return [*replies, *shell_replies(office), "done"]


def shell_replies(office: OfficeWork) -> list[str]:
    """What an expert says to the shell about chores that screens have no part in."""
    replies: list[str] = []
    for chore in office.chores:
        if chore.kind == "balance":
            replies.append(f"```sql\nUPDATE customers SET balance = {chore.value} WHERE name = '{chore.name}'\n```")
        elif chore.kind == "notes":
            replies.append(f"$ mkdir -p done && grep -l {chore.name} notes/* | xargs mv -t done")
        elif office.interface == "shell":
            replies.append(f"$ mkdir -p reports && {chore.awk()} > reports/{chore.name}.txt")
    return replies
