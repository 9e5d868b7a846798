"""An office app made of forms: leave, expenses, rooms, tickets and new colleagues, and requests to decide."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from turnwise.envs.browser.expert import PlanStep, choose, click, fill
from turnwise.envs.browser.gateway import WebRequest, WebResponse
from turnwise.envs.browser.sites.markup import area, choice, field, form, link, paragraph, table, text, tick
from turnwise.envs.browser.sites.site import Chore, RefusedError, Site, redirect, required, route

_STAFF = ("Anna Berg", "Bo Chen", "Cara Diaz", "Dina Ek", "Emil Fors", "Fay Grant", "Gus Holm", "Hana Ito", "Ivo Jung")
_DAYS = tuple(f"2031-0{month}-{day:02}" for month in (4, 5, 6) for day in (3, 9, 14, 17, 22, 28))
_NOTES = ("Client visit", "Family matter", "Team event", "Urgent repair", "Yearly check", "Training course")

Options = tuple[str, ...]
FORMS: Mapping[str, Mapping[str, str | Options]] = {
    "Leave": {
        "Employee": _STAFF,
        "Kind": ("Holiday", "Parental", "Unpaid", "Study"),
        "First day": "date",
        "Last day": "date",
        "Deputy": _STAFF,
        "Half days": "tick",
        "Reason": "area",
    },
    "Expense": {
        "Employee": _STAFF,
        "Day": "date",
        "Category": ("Travel", "Meals", "Hardware", "Books"),
        "Amount": "number",
        "Currency": ("EUR", "USD", "GBP", "SEK"),
        "Cost centre": ("1000 Sales", "2000 Research", "3000 Support"),
        "Receipt attached": "tick",
        "Purpose": "area",
    },
    "Room": {
        "Room": ("Ash", "Birch", "Cedar", "Dogwood", "Elm"),
        "Day": "date",
        "Start": ("09:00", "10:00", "11:00", "13:00", "14:00", "15:00"),
        "Hours": ("1", "2", "3", "4"),
        "People": "number",
        "Projector": "tick",
        "Title": "text",
    },
    "Ticket": {
        "Title": "text",
        "Device": ("Laptop", "Phone", "Printer", "Door", "Coffee machine"),
        "Priority": ("Low", "Normal", "High"),
        "Seen since": "date",
        "Call me back": "tick",
        "Details": "area",
    },
}
"""The forms: labels, and what each field takes."""
_TABLES = {name: f"{name.lower()}_entries" for name in FORMS}


def _column(label: str) -> str:
    return label.lower().replace(" ", "_")


def _create(name: str) -> str:
    columns = ", ".join(f"{_column(label)} TEXT" for label in FORMS[name])
    return f"CREATE TABLE {_TABLES[name]} (id INTEGER PRIMARY KEY, {columns});"


class Office(Site):
    """The site `office`."""

    name: ClassVar[str] = "office"
    title: ClassVar[str] = "Paper Mill"
    navigation = {**{name: f"/form/{name}" for name in FORMS}, "Requests": "/requests", "Staff": "/staff"}  # noqa: RUF012
    schema = (
        "".join(map(_create, FORMS))
        + """
        CREATE TABLE requests (id INTEGER PRIMARY KEY, name TEXT, kind TEXT, amount INTEGER, state TEXT, remark TEXT);
        CREATE TABLE staff (name TEXT PRIMARY KEY, phone TEXT, desk TEXT);
        """
    )
    facts = {  # noqa: RUF012
        **{name: f"SELECT {', '.join(map(_column, FORMS[name]))} FROM {_TABLES[name]}" for name in FORMS},
        "request": "SELECT id, state, remark FROM requests",
        "staff": "SELECT * FROM staff",
    }

    def fill(self, rng: random.Random, level: int) -> None:
        for name in _STAFF:
            self.change(
                "INSERT INTO staff VALUES (?, ?, ?)", name, str(rng.randint(100, 999)), f"A{rng.randint(1, 60)}"
            )
        kinds = [(name, kind) for name in _STAFF for kind in ("Laptop", "Course", "Flight", "Chair")]
        for name, kind in rng.sample(kinds, (3, 6, 9, 14, 20)[level - 1]):
            amount = rng.randint(1, 20) * 100
            self.change(
                "INSERT INTO requests (name, kind, amount, state, remark) VALUES (?, ?, ?, 'open', '')",
                name,
                kind,
                amount,
            )

    # --- what can be done

    def submit(self, name: str, values: Mapping[str, str]) -> None:
        """Store a form that is filled in. `values` has every label of the form."""
        for label, kind in FORMS[name].items():
            _check_field(label, kind, values[label])
        labels = list(FORMS[name])
        columns, places = ", ".join(map(_column, labels)), ", ".join("?" for _ in labels)
        sql = f"INSERT INTO {_TABLES[name]} ({columns}) VALUES ({places})"
        self.change(sql, *(values[label] for label in labels))

    def decide(self, request: int, state: str, remark: str) -> None:
        if state not in ("approved", "rejected"):
            raise RefusedError("Approve it or reject it.")
        self.change("UPDATE requests SET state = ?, remark = ? WHERE id = ?", state, remark, request)

    def change_staff(self, name: str, phone: str, desk: str) -> None:
        self.change("UPDATE staff SET phone = ?, desk = ? WHERE name = ?", phone, desk, name)

    # --- pages

    @route("/")
    def home(self, _: WebRequest) -> WebResponse:
        return self.show("Office", [paragraph("Choose a form above.")])

    @route("/form/<name>")
    def blank(self, _: WebRequest, name: str) -> WebResponse:
        if name not in FORMS:
            raise RefusedError("There is no such form.")
        fields = [_show_field(label, kind) for label, kind in FORMS[name].items()]
        return self.show(name, [form(f"/form/{name}", "Submit", *fields)])

    @route("/requests")
    def requests(self, _: WebRequest) -> WebResponse:
        rows = self.rows("SELECT * FROM requests ORDER BY id")
        cells = ((link(_request_title(row), f"/request/{row['id']}"), text(row["state"])) for row in rows)
        return self.show("Requests", [table(("Request", "State"), cells)])

    @route("/request/<number>")
    def request(self, _: WebRequest, number: str) -> WebResponse:
        row = self.found("SELECT * FROM requests WHERE id = ?", number)
        fields = [choice("Decision", "state", ("approved", "rejected")), field("Remark", "remark")]
        return self.show(_request_title(row), [form(f"/request/{number}", "Decide", *fields)])

    @route("/staff")
    def staff(self, _: WebRequest) -> WebResponse:
        rows = self.rows("SELECT * FROM staff ORDER BY name")
        cells = ((link(row["name"], f"/staff/{row['name']}"), text(row["phone"]), text(row["desk"])) for row in rows)
        return self.show("Staff", [table(("Name", "Phone", "Desk"), cells)])

    @route("/staff/<name>")
    def colleague(self, _: WebRequest, name: str) -> WebResponse:
        row = self.found("SELECT * FROM staff WHERE name = ?", name)
        fields = [field("Phone", "phone", row["phone"]), field("Desk", "desk", row["desk"])]
        return self.show(name, [form(f"/staff/{name}", "Save", *fields)])

    @route("/form/<name>")
    def post_form(self, request: WebRequest, name: str) -> WebResponse:
        if name not in FORMS:
            raise RefusedError("There is no such form.")
        self.submit(name, {label: request.form.get(_column(label), "").strip() for label in FORMS[name]})
        self.say(f"{name} was submitted.")
        return redirect(f"/form/{name}")

    @route("/request/<number>")
    def post_decision(self, request: WebRequest, number: str) -> WebResponse:
        self.decide(int(number), request.form.get("state", ""), request.form.get("remark", "").strip())
        return redirect("/requests")

    @route("/staff/<name>")
    def post_colleague(self, request: WebRequest, name: str) -> WebResponse:
        self.change_staff(name, *required(request, "phone", "desk"))
        return redirect("/staff")

    # --- what a task may ask for

    def chores(self, level: int, rng: random.Random) -> list[Chore]:
        decide, change = self._decide(rng), self._change_staff(rng)
        if level == 1:
            return [rng.choice((decide, change))]
        names = rng.sample(list(FORMS), len(FORMS))
        filled = [self._submit(name, rng) for name in names[: max(1, level - 2)]]
        return {2: filled, 3: [*filled, decide], 4: [*filled, decide, change], 5: [*filled, decide, change]}[level]

    def _submit(self, name: str, rng: random.Random) -> Chore:
        values = {label: _draw_value(kind, rng) for label, kind in FORMS[name].items()}
        steps = [step for label, kind in FORMS[name].items() for step in _fill_field(label, kind, values[label])]
        told = ", ".join(f"{label} {value or 'not ticked'}" for label, value in values.items())
        return Chore(
            text=f"Submit the form {name}: {told}.",
            steps=[click("link", name), *steps, click("button", "Submit")],
            effect=lambda site: site.submit(name, values),
        )

    def _decide(self, rng: random.Random) -> Chore:
        row = rng.choice(self.rows("SELECT * FROM requests ORDER BY id"))
        number, state, remark = row["id"], rng.choice(("approved", "rejected")), rng.choice(_NOTES)
        fields = [choose("Decision", state), fill("Remark", remark), click("button", "Decide")]
        return Chore(
            text=f"Mark the request '{_request_title(row)}' as {state} with the remark '{remark}'.",
            steps=[click("link", "Requests"), click("link", _request_title(row)), *fields],
            effect=lambda site: site.decide(number, state, remark),
        )

    def _change_staff(self, rng: random.Random) -> Chore:
        name, phone, desk = rng.choice(_STAFF), str(rng.randint(1000, 9999)), f"B{rng.randint(1, 60)}"
        fields = [fill("Phone", phone), fill("Desk", desk), click("button", "Save")]
        return Chore(
            text=f"Give {name} the phone {phone} and the desk {desk}.",
            steps=[click("link", "Staff"), click("link", name), *fields],
            effect=lambda site: site.change_staff(name, phone, desk),
        )


def _request_title(row: Any) -> str:
    return f"{row['kind']} for {row['name']}, {row['amount']} EUR"


def _show_field(label: str, kind: str | Options) -> str:
    name = _column(label)
    if isinstance(kind, tuple):
        return choice(label, name, ("", *kind))
    if kind == "tick":
        return tick(label, name)
    if kind == "area":
        return area(label, name)
    return field(label, name, kind="date" if kind == "date" else "text")


def _check_field(label: str, kind: str | Options, value: str) -> None:
    if kind == "tick":
        return
    is_known = value in kind if isinstance(kind, tuple) else bool(value)
    if not is_known or (kind == "number" and not value.isdigit()):
        raise RefusedError(f"Please fill in {label}" + (" with a number." if kind == "number" else "."))


def _draw_value(kind: str | Options, rng: random.Random) -> str:
    if isinstance(kind, tuple):
        return rng.choice(kind)
    if kind == "tick":
        return rng.choice(("on", ""))
    if kind == "number":
        return str(rng.randint(2, 60))
    return rng.choice(_DAYS if kind == "date" else _NOTES)


def _fill_field(label: str, kind: str | Options, value: str) -> list[PlanStep]:
    if isinstance(kind, tuple):
        return [choose(label, value)]
    if kind == "tick":
        return [click("checkbox", label)] if value else []
    return [fill(label, value)]
