"""The office of the world `workspace`: its data, its portal of screens, its chores, and who can do them how.

A chore is asked for in words, done in the shell, in Python, in SQL or on the portal's screens, and checked on what is
there at the end: files, the database, and the reports that the portal received.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from turnwise.envs.browser.names import named_elements, read_named_reply
from turnwise.envs.browser.snapshot import Element
from turnwise.envs.screen import ScreenAction, ScreenElement, ScreenIds, read_screen_reply, screen_to_text
from turnwise.trajectory import Message

Interface = Literal["shell", "screen", "both"]

CUSTOMERS = ("Ann", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jack")
WORDS = ("invoice", "holiday", "printer", "meeting", "parcel", "garden")
ROWS = 8
"""Rows of orders on one screen."""
MAX_TEXT = 100
REPORTS = ("total", "count", "largest")
REPORT_BOX = "Report"
"""The one box of a form by name; it takes a name and a value."""
NOTHING_NEW = "(nothing new on the screen)"


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
        return self.kind in REPORTS

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

    def awk(self, *, has_name: bool = False) -> str:
        """The command that finds the answer of a report in orders.csv. With `has_name` it prints the name before it."""
        found, answer = {
            "total": ("{s+=$3}", "s"),
            "count": ("{n++}", "n"),
            "largest": (" && $3>m{m=$3}", "m"),
        }[self.kind]
        said = f'"{self.name}",{answer}' if has_name else answer
        rule = f'$2=="{self.name}"{found} END{{print {said}}}'
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

    def num_steps(self, *, by_name: bool) -> int:
        """How many of an expert's actions, the last ones before `done`, make the chores; the ones before only look."""
        by_form = 0 if self.interface == "shell" else sum(chore.is_report for chore in self.chores)
        return (2 if by_name else 3) * by_form + len(self.chores) - by_form

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
    rng: random.Random, sizes: tuple[int, int, int], interface: Interface, reports: Sequence[str], *, has_others: bool
) -> OfficeWork:
    """Draw data and chores. No two chores are about the same thing, so their order does not matter.

    Args:
        sizes: How many chores, orders, and different customers.
        reports: Kinds of reports to draw from.
        has_others: Draw also chores that are no reports.
    """
    num_chores, num_orders, num_customers = sizes
    orders = [(100 + n, rng.choice(CUSTOMERS[:num_customers]), rng.randrange(5, 100)) for n in range(num_orders)]
    if not has_others and len({name for _, name, _ in orders}) < num_chores:  # each chore needs a customer
        rare = rng.sample(CUSTOMERS[:num_customers], num_chores)
        names = [*rare, *(name for _, name, _ in orders[num_chores:])]
        orders = [(number, name, amount) for name, (number, _, amount) in zip(names, orders, strict=True)]
    balances = {name: rng.randrange(100) for name in CUSTOMERS}
    notes = {f"n{n}.txt": f"{rng.choice(WORDS)} {rng.choice(WORDS)}\n" for n in range(8)}
    kinds = ["report", "balance", "notes"] if has_others else ["report"]
    seen = sorted({name for _, name, _ in orders})
    words = [word for word in WORDS if any(word in text for text in notes.values())]
    names = {"report": seen, "balance": list(CUSTOMERS), "notes": words[:1]}
    free = [(kind, name) for kind in kinds for name in rng.sample(names[kind], len(names[kind]))]
    chosen = rng.sample(free, min(num_chores, len(free)))
    chores: list[OfficeChore] = []
    for kind, name in chosen:
        if kind == "balance":
            chores.append(OfficeChore(kind="balance", name=name, value=str(balances[name] + rng.randrange(1, 50))))
        elif kind == "notes":
            chores.append(OfficeChore(kind="notes", name=name))
        else:
            amounts = [amount for _, customer, amount in orders if customer == name]
            chores.append(_draw_report(rng, name, amounts, reports))
    return OfficeWork(orders=orders, balances=balances, notes=notes, chores=chores, interface=interface)


def _draw_report(rng: random.Random, name: str, amounts: Sequence[int], reports: Sequence[str]) -> OfficeChore:
    answers = {"total": sum(amounts), "count": len(amounts), "largest": max(amounts)}
    which: Any = rng.choice(sorted(reports))
    return OfficeChore(kind=which, name=name, value=str(answers[which]))


@dataclass
class OfficePortal:
    """The screens of the office: orders to read or download, and a form that sends reports."""

    orders: Sequence[Sequence[Any]]
    has_download: bool
    by_name: bool = False
    """For small models: one screen, elements by name, only new lines after an action, a report in one box."""
    place: Literal["home", "orders", "reports"] = "home"
    offset: int = 0
    form: dict[str, str] = field(default_factory=dict[str, str])
    sent: dict[str, str] = field(default_factory=dict[str, str])
    """The reports that were sent, by customer. A later one replaces an earlier one."""
    ids: ScreenIds = field(default_factory=ScreenIds)

    def copy(self) -> OfficePortal:
        return replace(self, form=dict(self.form), sent=dict(self.sent), ids=self.ids.copy())

    def id_of(self, name: str) -> int:
        return self.ids.number(name)

    def to_text(self, max_chars: int) -> str:
        if not self.by_name:
            return screen_to_text(self.place.capitalize(), self._elements(), max_chars)
        texts = [one.name for one in self._elements() if one.id is None]
        return "\n".join([*texts, *map(str, named_elements(self.usable()))])[:max_chars]

    def usable(self) -> list[Element]:
        """What can be clicked or written to, as elements of pages."""
        found = [one for one in self._elements() if one.id is not None]
        return [Element(id=one.id, role=one.role, name=one.name, value=one.value or "") for one in found]

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
                if not self._shows_orders or not 0 <= offset < len(self.orders):
                    return "There is nothing more there.", False
                self.offset = offset
                return "", False
            case "wait":
                return "", False
            case _:
                return f"{action.kind} does nothing here.", False

    @property
    def _shows_orders(self) -> bool:
        return self.place == "orders" or self.by_name

    def _go(self, place: Literal["home", "orders", "reports"]) -> None:
        self.place, self.offset, self.form = place, 0, {}

    def _elements(self) -> list[ScreenElement]:
        if self.place == "home" and not self.by_name:
            return [self._control("link", "Orders"), self._control("link", "Reports")]
        if self.place == "reports":
            return self._form("Customer", "Value")
        download = [self._control("button", "Download")] if self.has_download else []
        rows = self.orders[self.offset : self.offset + ROWS]
        shown = [" ".join(map(str, row[1:])) if self.by_name else ", ".join(map(str, row)) for row in rows]
        texts = [ScreenElement(role="text", name=row) for row in shown]
        below = len(self.orders) - self.offset - len(rows)
        more = [ScreenElement(role="text", name=f"{below} more below")] if below else []
        return [*texts, *more, *download, *self._form(REPORT_BOX)] if self.by_name else [*download, *texts, *more]

    def _form(self, *names: str) -> list[ScreenElement]:
        boxes = [self._control("textbox", name, self.form.get(name, "")) for name in names]
        sent = [ScreenElement(role="text", name=f"sent: {name} {value}") for name, value in self.sent.items()]
        return [*boxes, self._control("button", "Send"), *sent]

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
                name, value = self._written()
                if not name or not value:
                    return f"Fill in {'NAME VALUE' if self.by_name else 'Customer and Value'} first.", False
                self.sent[name] = value
                self.form = {}
            case _:
                return "Use type to write here.", False
        return "", False

    def _written(self) -> tuple[str, str]:
        """The name and the value in the form."""
        if self.by_name:
            name, _, value = self.form.get(REPORT_BOX, "").strip().partition(" ")
            return name, value.strip()
        return self.form.get("Customer", ""), self.form.get("Value", "")

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

    def __init__(self, office: OfficeWork, max_chars: int, *, by_name: bool = False) -> None:
        self._office = office
        self._max_chars = max_chars
        self._portal = OfficePortal(office.orders, office.interface == "both", by_name)

    def read(self, reply: Message) -> ScreenAction | str:
        """Read the action of a reply. A text is what was wrong with it."""
        if self._portal.by_name:
            return read_named_reply(reply.content, self._portal.usable())
        return read_screen_reply(reply, "text")

    @property
    def sent(self) -> Mapping[str, str]:
        return self._portal.sent

    async def show(self) -> str:
        return self._portal.to_text(self._max_chars)

    async def act(self, action: ScreenAction) -> tuple[str, dict[str, bytes]]:
        """Do what the action says. Return the screen, by name only its new lines, and what was downloaded."""
        before = self._portal.to_text(self._max_chars)
        problem, is_download = self._portal.act(action)
        screen = self._portal.to_text(self._max_chars)
        if self._portal.by_name:
            known = set(before.split("\n"))
            screen = "\n".join(line for line in screen.split("\n") if line not in known) or NOTHING_NEW
        downloads = {"orders.csv": self._office.csv.encode()} if is_download else {}
        return f"{problem}\n\n{screen}" if problem else screen, downloads

    async def close(self) -> None:
        pass

    def copy(self) -> OfficeScreens:
        other = OfficeScreens(self._office, self._max_chars)  # by name or not: that is the copied portal's
        other._portal = self._portal.copy()
        return other


def expert_replies(office: OfficeWork, *, by_name: bool = False) -> list[str]:
    """What an expert says, up to `done`."""
    portal = OfficePortal(office.orders, office.interface == "both", by_name)
    replies: list[str] = []

    def act(kind: Any, name: str = "", text: str = "") -> None:
        portal.to_text(10_000)  # elements get their ids when they are seen
        action = ScreenAction(kind=kind, element=portal.id_of(name) if name else None, text=text)
        portal.act(action)
        named = " ".join(word for word in (kind, name, f"= {text}" if name and text else text) if word)
        replies.append(named if by_name else action.to_text())

    reports = [chore for chore in office.chores if chore.is_report]
    if reports and office.interface != "shell":
        if not by_name:
            act("click", "Orders")
        if office.interface == "both":
            act("click", "Download")
        else:
            for _ in range((len(office.orders) - 1) // ROWS):
                act("scroll", text="down")
        if not by_name:
            act("back")
            act("click", "Reports")
        if office.interface == "both":  # just before it is written down
            replies.append("\n".join(f"$ {chore.awk(has_name=by_name)}" for chore in reports))
    for chore in reports if office.interface != "shell" else ():
        if by_name:
            act("type", REPORT_BOX, f"{chore.name} {chore.value}")
        else:
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
