"""A forum: boards, threads, replies, votes, following, reports, private messages and a profile."""

from __future__ import annotations

import random
import sqlite3
from typing import ClassVar

from turnwise.envs.browser.expert import PlanStep, choose, click, fill
from turnwise.envs.browser.gateway import WebRequest, WebResponse
from turnwise.envs.browser.sites.markup import area, choice, field, form, heading, link, paragraph, table, text, tick
from turnwise.envs.browser.sites.site import Chore, RefusedError, Site, redirect, required, route

_BOARDS = ("Gardening", "Cooking", "Cycling", "Astronomy", "Woodwork", "Music")
_USERS = ("amber", "basil", "coral", "dusty", "ember", "flint", "ginger", "heron")
_STARTS = ("How do I", "When should I", "Has anybody tried to", "What is the best way to", "Why can I not")
_ENDS = (
    "start in spring",
    "fix a leak",
    "store tools",
    "plan a trip",
    "choose a shop",
    "learn the basics",
    "save money",
)
_REPLIES = ("Try it slowly.", "I would wait.", "Ask a neighbour.", "It worked for me.", "Read the manual.", "Use less.")
_WORDS = ("Thank you all", "This helped me", "I disagree", "Please explain more", "See my older post", "Well said")
REASONS = ("Spam", "Rude", "Off topic")


class Forum(Site):
    """The site `forum`."""

    name: ClassVar[str] = "forum"
    title: ClassVar[str] = "Village Forum"
    navigation = {"Boards": "/", "Profile": "/profile", "Messages": "/messages"}  # noqa: RUF012
    schema = """
        CREATE TABLE threads (id INTEGER PRIMARY KEY, board TEXT, title TEXT, author TEXT, is_followed INTEGER);
        CREATE TABLE posts (id INTEGER PRIMARY KEY, thread INTEGER, author TEXT, body TEXT, votes INTEGER,
            has_vote INTEGER DEFAULT 0, report TEXT DEFAULT '');
        CREATE TABLE letters (recipient TEXT, subject TEXT, body TEXT);
        CREATE TABLE profile (city TEXT, motto TEXT, digest TEXT, is_public INTEGER);
        INSERT INTO profile VALUES ('', '', 'Never', 1);
    """
    facts = {  # noqa: RUF012
        "thread": "SELECT board, title, author, is_followed FROM threads",
        "post": "SELECT title, p.author, body, has_vote, report FROM posts p JOIN threads t ON t.id = thread",
        "letter": "SELECT * FROM letters",
        "profile": "SELECT * FROM profile",
    }

    def fill(self, rng: random.Random, level: int) -> None:
        titles = [f"{start} {end}?" for start in _STARTS for end in _ENDS]
        for title in rng.sample(titles, (3, 8, 14, 20, 30)[level - 1]):
            thread = self.add_thread(rng.choice(_BOARDS[: 1 + level]), title, rng.choice(_USERS))
            for body in rng.sample(_REPLIES, rng.randint(1, 3)):
                self.add_post(thread, rng.choice(_USERS), body, votes=rng.randint(0, 9))

    # --- what can be done

    def add_thread(self, board: str, title: str, author: str) -> int:
        if board not in _BOARDS:
            raise RefusedError("There is no such board.")
        return self.change(
            "INSERT INTO threads (board, title, author, is_followed) VALUES (?, ?, ?, 0)", board, title, author
        )

    def add_post(self, thread: int, author: str, body: str, votes: int = 0) -> None:
        self.change("INSERT INTO posts (thread, author, body, votes) VALUES (?, ?, ?, ?)", thread, author, body, votes)

    def start_thread(self, board: str, title: str, body: str) -> int:
        thread = self.add_thread(board, title, "you")
        self.add_post(thread, "you", body)
        return thread

    def vote(self, post: int) -> None:
        self.change("UPDATE posts SET has_vote = 1 - has_vote WHERE id = ?", post)

    def follow(self, thread: int) -> None:
        self.change("UPDATE threads SET is_followed = 1 - is_followed WHERE id = ?", thread)

    def report(self, post: int, reason: str) -> None:
        if reason not in REASONS:
            raise RefusedError("Choose a reason.")
        self.change("UPDATE posts SET report = ? WHERE id = ?", reason, post)

    def write(self, recipient: str, subject: str, body: str) -> None:
        if recipient not in _USERS:
            raise RefusedError(f"There is no user {recipient}.")
        self.change("INSERT INTO letters VALUES (?, ?, ?)", recipient, subject, body)

    def set_profile(self, city: str, motto: str, digest: str, *, is_public: bool) -> None:
        self.change("UPDATE profile SET city = ?, motto = ?, digest = ?, is_public = ?", city, motto, digest, is_public)

    # --- pages

    def header(self) -> str:
        return form("/search", "Search", field("Find", "q"), method="get")

    @route("/")
    def boards(self, _: WebRequest) -> WebResponse:
        return self.show("Boards", [paragraph("Choose a board.")] + [link(b, f"/board/{b}") + "<br>" for b in _BOARDS])

    @route("/board/<name>")
    def board(self, _: WebRequest, name: str) -> WebResponse:
        new = form(f"/board/{name}", "Start thread", field("Title", "title"), area("Text", "body"))
        listing = self._listing("SELECT * FROM threads WHERE board = ? ORDER BY id", name)
        return self.show(name, [listing, heading("New thread"), new])

    @route("/search")
    def search(self, request: WebRequest) -> WebResponse:
        words = request.query.get("q", "").strip()
        return self.show(
            f"Results for {words}", [self._listing("SELECT * FROM threads WHERE title LIKE ?", f"%{words}%")]
        )

    @route("/thread/<number>")
    def thread(self, _: WebRequest, number: str) -> WebResponse:
        row = self.found("SELECT * FROM threads WHERE id = ?", number)
        follow = form(f"/follow/{number}", "Unfollow" if row["is_followed"] else "Follow")
        posts = self.rows("SELECT * FROM posts WHERE thread = ? ORDER BY id", number)
        answer = form(f"/reply/{number}", "Send reply", area("Reply", "body"))
        return self.show(row["title"], [follow, *map(_show_post, posts), answer])

    @route("/report/<number>")
    def report_form(self, _: WebRequest, number: str) -> WebResponse:
        row = self.found("SELECT * FROM posts WHERE id = ?", number)
        asked = form(f"/report/{number}", "Send report", choice("Reason", "reason", REASONS))
        return self.show("Report a post", [paragraph(f"{row['author']}: {row['body']}"), asked])

    @route("/profile")
    def profile(self, _: WebRequest) -> WebResponse:
        row = self.found("SELECT * FROM profile")
        fields = [field("City", "city", row["city"]), field("Motto", "motto", row["motto"])]
        fields.append(choice("Digest", "digest", ("Never", "Daily", "Weekly"), row["digest"]))
        fields.append(tick("Show my profile to everybody", "public", is_on=bool(row["is_public"])))
        return self.show("Profile", [form("/profile", "Save", *fields)])

    @route("/messages")
    def messages(self, _: WebRequest) -> WebResponse:
        sent = [(text(row["recipient"]), text(row["subject"])) for row in self.rows("SELECT * FROM letters")]
        fields = [field("To", "to"), field("Subject", "subject"), area("Text", "body")]
        return self.show("Messages", [form("/messages", "Send message", *fields), table(("To", "Subject"), sent)])

    @route("/board/<name>")
    def post_thread(self, request: WebRequest, name: str) -> WebResponse:
        return redirect(f"/thread/{self.start_thread(name, *required(request, 'title', 'body'))}")

    @route("/reply/<number>")
    def post_reply(self, request: WebRequest, number: str) -> WebResponse:
        (body,) = required(request, "body")
        self.add_post(int(number), "you", body)
        return redirect(f"/thread/{number}")

    @route("/vote/<number>")
    def post_vote(self, _: WebRequest, number: str) -> WebResponse:
        self.vote(int(number))
        return redirect(f"/thread/{self.found('SELECT thread FROM posts WHERE id = ?', number)['thread']}")

    @route("/follow/<number>")
    def post_follow(self, _: WebRequest, number: str) -> WebResponse:
        self.follow(int(number))
        return redirect(f"/thread/{number}")

    @route("/report/<number>")
    def post_report(self, request: WebRequest, number: str) -> WebResponse:
        self.report(int(number), *required(request, "reason"))
        self.say("Thank you for the report.")
        return redirect("/")

    @route("/profile")
    def post_profile(self, request: WebRequest) -> WebResponse:
        values = [request.form.get(name, "").strip() for name in ("city", "motto", "digest")]
        self.set_profile(values[0], values[1], values[2], is_public="public" in request.form)
        self.say("Saved.")
        return redirect("/profile")

    @route("/messages")
    def post_message(self, request: WebRequest) -> WebResponse:
        recipient, subject, body = required(request, "to", "subject", "body")
        self.write(recipient, subject, body)
        self.say("Sent.")
        return redirect("/messages")

    def _listing(self, sql: str, *values: object) -> str:
        rows = self.rows(sql, *values)
        cells = ((link(row["title"], f"/thread/{row['id']}"), text(row["author"])) for row in rows)
        return table(("Thread", "By"), cells) if rows else paragraph("There are no threads.")

    # --- what a task may ask for

    def chores(self, level: int, rng: random.Random) -> list[Chore]:
        threads = rng.sample(self.rows("SELECT * FROM threads ORDER BY id"), 3)
        reply, follow = self._reply(threads[0], rng), self._follow(threads[1])
        if level == 1:
            return [rng.choice((reply, follow))]
        if level == 2:
            return [reply, self._vote(threads[2], rng)]
        if level == 3:
            return [reply, follow, self._start(rng)]
        most = [reply, follow, self._start(rng), self._profile(rng), self._vote(threads[2], rng)]
        return most if level == 4 else [*most, self._letter(rng), self._report(threads[1], rng)]

    def _reply(self, thread: sqlite3.Row, rng: random.Random) -> Chore:
        words, number = rng.choice(_WORDS), thread["id"]
        return Chore(
            text=f"Reply to the thread '{thread['title']}' with '{words}'.",
            steps=[*_open(thread), fill("Reply", words), click("button", "Send reply")],
            effect=lambda site: site.add_post(number, "you", words),
        )

    def _follow(self, thread: sqlite3.Row) -> Chore:
        number = thread["id"]
        return Chore(
            text=f"Follow the thread '{thread['title']}'.",
            steps=[*_open(thread), click("button", "Follow")],
            effect=lambda site: site.follow(number),
        )

    def _some_post(self, thread: sqlite3.Row, rng: random.Random) -> sqlite3.Row:
        return rng.choice(self.rows("SELECT * FROM posts WHERE thread = ?", thread["id"]))

    def _vote(self, thread: sqlite3.Row, rng: random.Random) -> Chore:
        post = self._some_post(thread, rng)
        number, said = post["id"], post["body"]
        return Chore(
            text=f"In the thread '{thread['title']}' vote for the post '{said}'",
            steps=[*_open(thread), click("button", f"Vote for: {said}")],
            effect=lambda site: site.vote(number),
        )

    def _report(self, thread: sqlite3.Row, rng: random.Random) -> Chore:
        post, reason = self._some_post(thread, rng), rng.choice(REASONS)
        number, said = post["id"], post["body"]
        steps = [*_open(thread), click("link", f"Report: {said}"), choose("Reason", reason)]
        return Chore(
            text=f"In the thread '{thread['title']}' report the post '{said}' as {reason}.",
            steps=[*steps, click("button", "Send report")],
            effect=lambda site: site.report(number, reason),
        )

    def _start(self, rng: random.Random) -> Chore:
        board, title, body = rng.choice(_BOARDS), f"{rng.choice(_WORDS)} {rng.randint(2, 99)}", rng.choice(_REPLIES)
        steps = [click("link", "Boards"), click("link", board), fill("Title", title), fill("Text", body)]
        return Chore(
            text=f"Start a thread in {board} with the title '{title}' and the text '{body}'",
            steps=[*steps, click("button", "Start thread")],
            effect=lambda site: site.start_thread(board, title, body),
        )

    def _profile(self, rng: random.Random) -> Chore:
        city, motto = rng.choice(("Oslo", "Lyon", "Bath", "Turin")), rng.choice(_WORDS)
        digest = rng.choice(("Daily", "Weekly"))
        fields = [click("link", "Profile"), fill("City", city), fill("Motto", motto), choose("Digest", digest)]
        return Chore(
            text=f"In your profile set city {city}, motto '{motto}' and digest {digest}, and hide it from everybody.",
            steps=[*fields, click("checkbox", "Show my profile to everybody"), click("button", "Save")],
            effect=lambda site: site.set_profile(city, motto, digest, is_public=False),
        )

    def _letter(self, rng: random.Random) -> Chore:
        user, subject, body = rng.choice(_USERS), rng.choice(_WORDS), rng.choice(_REPLIES)
        fields = [click("link", "Messages"), fill("To", user), fill("Subject", subject), fill("Text", body)]
        return Chore(
            text=f"Write a message to {user} with the subject '{subject}' and the text '{body}'",
            steps=[*fields, click("button", "Send message")],
            effect=lambda site: site.write(user, subject, body),
        )


def _open(thread: sqlite3.Row) -> list[PlanStep]:
    return [click("link", "Boards"), click("link", thread["board"]), click("link", thread["title"])]


def _show_post(post: sqlite3.Row) -> str:
    body, number = post["body"], post["id"]
    label = "Take back the vote for" if post["has_vote"] else "Vote for"
    count = f"{post['author']}: {body} ({post['votes'] + post['has_vote']} votes)"
    if post["author"] == "you":
        return paragraph(count)
    return paragraph(count) + form(f"/vote/{number}", f"{label}: {body}") + link(f"Report: {body}", f"/report/{number}")
