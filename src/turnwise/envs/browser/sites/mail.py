"""A mail client: folders, stars, labels, replies, forwarding, contacts, filters and a vacation notice."""

from __future__ import annotations

import random
import sqlite3
from typing import ClassVar

from turnwise.envs.browser.expert import PlanStep, choose, click, fill
from turnwise.envs.browser.gateway import WebRequest, WebResponse
from turnwise.envs.browser.sites.markup import area, choice, field, form, heading, link, paragraph, table, text, tick
from turnwise.envs.browser.sites.site import Chore, RefusedError, Site, redirect, required, route

_PEOPLE = ("ida", "jonas", "karin", "leo", "mona", "nils", "olga", "piet", "quinn", "rosa")
_SUBJECTS = ("Invoice", "Meeting notes", "Holiday plans", "Broken printer", "New contract", "Lunch", "Train tickets")
_BODIES = (
    "Please have a look.",
    "Can we talk about it?",
    "The file is ready.",
    "I need it soon.",
    "See you soon.",
)
_ANSWERS = ("Yes, gladly", "No, sorry", "I will check", "Let us talk tomorrow", "Done already", "Please ask Rosa")
FOLDERS = ("Inbox", "Archive", "Trash")
LABELS = ("none", "work", "family", "bills", "travel")


def _address(person: str) -> str:
    return f"{person}@example.test"


class Mail(Site):
    """The site `mail`."""

    name: ClassVar[str] = "mail"
    title: ClassVar[str] = "Letterbox"
    navigation = {  # noqa: RUF012
        **{folder: f"/folder/{folder}" for folder in FOLDERS},
        "Sent": "/sent",
        "Write": "/write",
        "Contacts": "/contacts",
        "Settings": "/settings",
    }
    schema = """
        CREATE TABLE letters (id INTEGER PRIMARY KEY, sender TEXT, subject TEXT, body TEXT, folder TEXT,
            label TEXT DEFAULT 'none', is_starred INTEGER DEFAULT 0);
        CREATE TABLE sent (recipient TEXT, subject TEXT, body TEXT);
        CREATE TABLE contacts (name TEXT, address TEXT);
        CREATE TABLE filters (sender TEXT, label TEXT, folder TEXT);
        CREATE TABLE vacation (is_on INTEGER, until TEXT, notice TEXT);
        INSERT INTO vacation VALUES (0, '', '');
    """
    facts = {  # noqa: RUF012
        "letter": "SELECT id, folder, label, is_starred FROM letters",
        "sent": "SELECT * FROM sent",
        "contact": "SELECT * FROM contacts",
        "filter": "SELECT * FROM filters",
        "vacation": "SELECT * FROM vacation",
    }

    def fill(self, rng: random.Random, level: int) -> None:
        pairs = [(person, subject) for person in _PEOPLE for subject in _SUBJECTS]
        for person, subject in rng.sample(pairs, (3, 8, 16, 24, 36)[level - 1]):
            self.change(
                "INSERT INTO letters (sender, subject, body, folder) VALUES (?, ?, ?, 'Inbox')",
                _address(person),
                f"{subject} from {person}",
                rng.choice(_BODIES),
            )

    # --- what can be done

    def move(self, letter: int, folder: str) -> None:
        if folder not in FOLDERS:
            raise RefusedError("There is no such folder.")
        self.change("UPDATE letters SET folder = ? WHERE id = ?", folder, letter)

    def star(self, letter: int) -> None:
        self.change("UPDATE letters SET is_starred = 1 - is_starred WHERE id = ?", letter)

    def label(self, letter: int, label: str) -> None:
        if label not in LABELS:
            raise RefusedError("There is no such label.")
        self.change("UPDATE letters SET label = ? WHERE id = ?", label, letter)

    def send(self, recipient: str, subject: str, body: str) -> None:
        if "@" not in recipient:
            raise RefusedError(f"{recipient} is no address.")
        self.change("INSERT INTO sent VALUES (?, ?, ?)", recipient, subject, body)

    def add_contact(self, name: str, address: str) -> None:
        self.change("INSERT INTO contacts VALUES (?, ?)", name, address)

    def add_filter(self, sender: str, label: str, folder: str) -> None:
        if label not in LABELS or folder not in FOLDERS:
            raise RefusedError("Choose a label and a folder.")
        self.change("INSERT INTO filters VALUES (?, ?, ?)", sender, label, folder)

    def set_vacation(self, until: str, notice: str, *, is_on: bool) -> None:
        self.change("UPDATE vacation SET is_on = ?, until = ?, notice = ?", is_on, until, notice)

    # --- pages

    @route("/")
    def home(self, request: WebRequest) -> WebResponse:
        return self.folder(request, "Inbox")

    @route("/folder/<name>")
    def folder(self, _: WebRequest, name: str) -> WebResponse:
        rows = self.rows("SELECT * FROM letters WHERE folder = ? ORDER BY id", name)
        cells = ((link(row["subject"], f"/letter/{row['id']}"), _marks(row)) for row in rows)
        return self.show(name, [table(("Subject", ""), cells) if rows else paragraph("Nothing here.")])

    @route("/letter/<number>")
    def letter(self, _: WebRequest, number: str) -> WebResponse:
        row = self.found("SELECT * FROM letters WHERE id = ?", number)
        parts = [paragraph(f"From {row['sender']}"), paragraph(row["body"])]
        parts.append(form(f"/star/{number}", "Unstar" if row["is_starred"] else "Star"))
        parts.append(form(f"/label/{number}", "Set label", choice("Label", "label", LABELS, row["label"])))
        parts.append(form(f"/move/{number}", "Move", choice("Folder", "folder", FOLDERS, row["folder"])))
        parts += [heading("Answer"), form(f"/reply/{number}", "Send answer", area("Answer", "body"))]
        parts.append(form(f"/forward/{number}", "Forward", field("Forward to", "to")))
        return self.show(row["subject"], parts)

    @route("/sent")
    def outbox(self, _: WebRequest) -> WebResponse:
        rows = self.rows("SELECT * FROM sent")
        return self.show("Sent", [table(("To", "Subject"), ((text(r["recipient"]), text(r["subject"])) for r in rows))])

    @route("/write")
    def write(self, _: WebRequest) -> WebResponse:
        fields = [field("To", "to"), field("Subject", "subject"), area("Text", "body")]
        return self.show("Write", [form("/write", "Send", *fields)])

    @route("/contacts")
    def contacts(self, _: WebRequest) -> WebResponse:
        rows = self.rows("SELECT * FROM contacts")
        new = form("/contacts", "Add contact", field("Name", "name"), field("Address", "address"))
        return self.show("Contacts", [new, table(("Name", "Address"), ((text(a), text(b)) for a, b in rows))])

    @route("/settings")
    def settings(self, _: WebRequest) -> WebResponse:
        row = self.found("SELECT * FROM vacation")
        away = [tick("I am away", "on", is_on=bool(row["is_on"])), field("Until", "until", row["until"])]
        rule = [field("Sender", "sender"), choice("Label", "label", LABELS), choice("Folder", "folder", FOLDERS)]
        parts = [
            heading("Vacation"),
            form("/vacation", "Save vacation", *away, area("Notice", "notice", row["notice"])),
        ]
        parts += [heading("Filters"), form("/filters", "Add filter", *rule)]
        parts += [paragraph(f"{a}: {b}, {c}") for a, b, c in self.rows("SELECT * FROM filters")]
        return self.show("Settings", parts)

    @route("/star/<number>")
    def post_star(self, _: WebRequest, number: str) -> WebResponse:
        self.star(int(number))
        return redirect(f"/letter/{number}")

    @route("/label/<number>")
    def post_label(self, request: WebRequest, number: str) -> WebResponse:
        self.label(int(number), *required(request, "label"))
        return redirect(f"/letter/{number}")

    @route("/move/<number>")
    def post_move(self, request: WebRequest, number: str) -> WebResponse:
        self.move(int(number), *required(request, "folder"))
        return redirect("/folder/Inbox")

    @route("/reply/<number>")
    def post_reply(self, request: WebRequest, number: str) -> WebResponse:
        row = self.found("SELECT * FROM letters WHERE id = ?", number)
        self.send(row["sender"], f"Re: {row['subject']}", *required(request, "body"))
        self.say("Sent.")
        return redirect(f"/letter/{number}")

    @route("/forward/<number>")
    def post_forward(self, request: WebRequest, number: str) -> WebResponse:
        row = self.found("SELECT * FROM letters WHERE id = ?", number)
        (recipient,) = required(request, "to")
        self.send(recipient, f"Fwd: {row['subject']}", row["body"])
        self.say("Sent.")
        return redirect(f"/letter/{number}")

    @route("/write")
    def post_write(self, request: WebRequest) -> WebResponse:
        recipient, subject, body = required(request, "to", "subject", "body")
        self.send(recipient, subject, body)
        return redirect("/sent")

    @route("/contacts")
    def post_contact(self, request: WebRequest) -> WebResponse:
        self.add_contact(*required(request, "name", "address"))
        return redirect("/contacts")

    @route("/vacation")
    def post_vacation(self, request: WebRequest) -> WebResponse:
        values = request.form
        self.set_vacation(values.get("until", ""), values.get("notice", ""), is_on="on" in values)
        self.say("Saved.")
        return redirect("/settings")

    @route("/filters")
    def post_filter(self, request: WebRequest) -> WebResponse:
        self.add_filter(*required(request, "sender", "label", "folder"))
        return redirect("/settings")

    # --- what a task may ask for

    def chores(self, level: int, rng: random.Random) -> list[Chore]:
        letters = rng.sample(self.rows("SELECT * FROM letters ORDER BY id"), 3)
        if level == 1:
            return [rng.choice((self._star(letters[0]), self._answer(letters[0], rng)))]
        if level == 2:
            return [self._star(letters[0]), self._move(letters[1], rng)]
        some = [self._answer(letters[0], rng), self._label(letters[1], rng), self._move(letters[2], rng)]
        if level == 3:
            return [*some[:2], self._star(letters[2])]
        more = [*some, self._forward(letters[0], rng), self._write(rng)]
        return more if level == 4 else [*more, self._contact(rng), self._filter(rng), self._vacation(rng)]

    def _star(self, letter: sqlite3.Row) -> Chore:
        number = letter["id"]
        return Chore(
            text=f"Star the mail '{letter['subject']}'.",
            steps=[*_open(letter), click("button", "Star")],
            effect=lambda site: site.star(number),
        )

    def _answer(self, letter: sqlite3.Row, rng: random.Random) -> Chore:
        sender, subject, words = letter["sender"], f"Re: {letter['subject']}", rng.choice(_ANSWERS)
        return Chore(
            text=f"Answer the mail '{letter['subject']}' with '{words}'.",
            steps=[*_open(letter), fill("Answer", words), click("button", "Send answer")],
            effect=lambda site: site.send(sender, subject, words),
        )

    def _label(self, letter: sqlite3.Row, rng: random.Random) -> Chore:
        number, label = letter["id"], rng.choice(LABELS[1:])
        return Chore(
            text=f"Give the mail '{letter['subject']}' the label {label}.",
            steps=[*_open(letter), choose("Label", label), click("button", "Set label")],
            effect=lambda site: site.label(number, label),
        )

    def _move(self, letter: sqlite3.Row, rng: random.Random) -> Chore:
        number, folder = letter["id"], rng.choice(FOLDERS[1:])
        return Chore(
            text=f"Move the mail '{letter['subject']}' to {folder}.",
            steps=[*_open(letter), choose("Folder", folder), click("button", "Move")],
            effect=lambda site: site.move(number, folder),
        )

    def _forward(self, letter: sqlite3.Row, rng: random.Random) -> Chore:
        person, subject, body = _address(rng.choice(_PEOPLE)), f"Fwd: {letter['subject']}", letter["body"]
        return Chore(
            text=f"Forward the mail '{letter['subject']}' to {person}.",
            steps=[*_open(letter), fill("Forward to", person), click("button", "Forward")],
            effect=lambda site: site.send(person, subject, body),
        )

    def _write(self, rng: random.Random) -> Chore:
        person, subject, body = _address(rng.choice(_PEOPLE)), rng.choice(_SUBJECTS), rng.choice(_BODIES)
        fields = [fill("To", person), fill("Subject", subject), fill("Text", body)]
        return Chore(
            text=f"Write a mail to {person} with the subject '{subject}' and the text '{body}'",
            steps=[click("link", "Write"), *fields, click("button", "Send")],
            effect=lambda site: site.send(person, subject, body),
        )

    def _contact(self, rng: random.Random) -> Chore:
        person = rng.choice(_PEOPLE)
        name, address = person.capitalize(), _address(person)
        fields = [fill("Name", name), fill("Address", address)]
        return Chore(
            text=f"Add the contact {name} with the address {address}.",
            steps=[click("link", "Contacts"), *fields, click("button", "Add contact")],
            effect=lambda site: site.add_contact(name, address),
        )

    def _filter(self, rng: random.Random) -> Chore:
        sender, label, folder = _address(rng.choice(_PEOPLE)), rng.choice(LABELS[1:]), rng.choice(FOLDERS[1:])
        fields = [fill("Sender", sender), choose("Label", label), choose("Folder", folder)]
        return Chore(
            text=f"Add a filter: mail from {sender} gets the label {label} and goes to {folder}.",
            steps=[click("link", "Settings"), *fields, click("button", "Add filter")],
            effect=lambda site: site.add_filter(sender, label, folder),
        )

    def _vacation(self, rng: random.Random) -> Chore:
        until, notice = f"{rng.randint(1, 28)} {rng.choice(('May', 'June', 'July'))}", rng.choice(_ANSWERS)
        fields = [click("checkbox", "I am away"), fill("Until", until), fill("Notice", notice)]
        return Chore(
            text=f"Turn on the vacation notice until {until} with the words '{notice}'.",
            steps=[click("link", "Settings"), *fields, click("button", "Save vacation")],
            effect=lambda site: site.set_vacation(until, notice, is_on=True),
        )


def _open(letter: sqlite3.Row) -> list[PlanStep]:
    """Every chore looks for its mail in the inbox; a task moves a mail only after its other chores."""
    return [click("link", "Inbox"), click("link", letter["subject"])]


def _marks(letter: sqlite3.Row) -> str:
    marks = ["starred"] if letter["is_starred"] else []
    return text(", ".join([*marks, *([letter["label"]] if letter["label"] != "none" else [])]))
