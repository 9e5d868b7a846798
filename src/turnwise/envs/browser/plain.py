"""A site of our own without a browser: its pages are read as HTML, and links and forms do what they say.

Shop, forum and mail use plain HTML and no scripts, so a small reader shows the same elements by name as Chromium does,
and sends the same forms: `tests/e2e/test_browser_plain.py` compares the two. An attempt takes some milliseconds of CPU
time, which makes it a place to train in; a real browser is for evaluation and for every page that has scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import parse_qsl, urlencode, urlsplit

from turnwise.envs.browser.gateway import WebApp, WebRequest, WebResponse
from turnwise.envs.browser.names import named_observation
from turnwise.envs.browser.snapshot import Element, cut_window, start_before
from turnwise.envs.screen import ScreenAction

MAX_TEXT = 500
"""Most characters of a text that is typed, as in a browser."""
_MAX_REDIRECTS = 5


@dataclass(slots=True, kw_only=True)
class PlainForm:
    """A form of a page."""

    method: str
    action: str
    controls: list[PlainControl] = field(default_factory=list["PlainControl"])


@dataclass(slots=True, kw_only=True)
class PlainControl:
    """Something on a page that can be used."""

    role: str
    label: str = ""
    href: str = ""
    name: str = ""
    value: str = ""
    options: list[str] = field(default_factory=list[str])
    is_on: bool = False
    form: PlainForm | None = None

    def to_element(self, number: int) -> Element:
        has_value = self.role in ("textbox", "combobox")
        return Element(
            id=number,
            role=self.role,
            name=" ".join(self.label.split()),
            value=self.value if has_value else "",
            options=tuple(self.options),
            states=("checked",) if self.is_on else (),
        )


class PlainReader(HTMLParser):
    """Collects what can be used on a page, in the order of the page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.controls: list[PlainControl] = []
        self.title = ""
        self._form: PlainForm | None = None
        self._named: PlainControl | None = None
        """The link or button whose text is being read."""
        self._label = ""
        self._labelled: PlainControl | None = None
        self._is_in_label = self._is_in_title = self._is_in_option = self._is_in_area = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        match tag:
            case "title":
                self._is_in_title = True
            case "form":
                self._form = PlainForm(method=given.get("method", "get"), action=given.get("action", ""))
            case "label":
                self._is_in_label, self._label, self._labelled = True, "", None
            case "a" if "href" in given:
                self._named = self._add(PlainControl(role="link", href=given["href"]))
            case "button":
                self._named = self._add(PlainControl(role="button", form=self._form))
            case "input" if given.get("type") == "checkbox":
                is_on, name, value = "checked" in given, given.get("name", ""), given.get("value", "on")
                self._add(PlainControl(role="checkbox", name=name, value=value, is_on=is_on, form=self._form))
            case "input":
                value = given.get("value", "")
                self._add(PlainControl(role="textbox", name=given.get("name", ""), value=value, form=self._form))
            case "textarea":
                self._is_in_area = True
                self._add(PlainControl(role="textbox", name=given.get("name", ""), form=self._form))
            case "select":
                self._add(PlainControl(role="combobox", name=given.get("name", ""), form=self._form))
            case "option":
                self._is_in_option = True
                self.controls[-1].options.append("")
                self.controls[-1].is_on = "selected" in given
            case _:
                pass

    def handle_endtag(self, tag: str) -> None:
        match tag:
            case "title":
                self._is_in_title = False
            case "form":
                self._form = None
            case "label":
                if self._labelled is not None:
                    self._labelled.label = self._label
                self._is_in_label = False
            case "a" | "button":
                self._named = None
            case "textarea":
                self._is_in_area = False
            case "option":
                self._end_option()
            case _:
                pass

    def handle_data(self, data: str) -> None:
        if self._is_in_title:
            self.title += data
        elif self._named is not None:
            self._named.label += data
        elif self._is_in_option:
            self.controls[-1].options[-1] += data
        elif self._is_in_area:
            self.controls[-1].value += data
        elif self._is_in_label:
            self._label += data

    def _end_option(self) -> None:
        choice = self.controls[-1]
        if choice.is_on or len(choice.options) == 1:  # without a mark, the first one is chosen
            choice.value = choice.options[-1]
        choice.is_on = self._is_in_option = False

    def _add(self, control: PlainControl) -> PlainControl:
        self.controls.append(control)
        if control.form is not None:
            control.form.controls.append(control)
        if self._is_in_label:
            self._labelled = control
        return control


class PlainPage:
    """One page of a site, from `open` to `close`, with the methods of a `PageSession` that a site's env needs."""

    def __init__(self, app: WebApp, max_chars: int) -> None:
        self._app = app
        self._max_chars = max_chars
        self._history: list[str] = []
        self._controls: Sequence[PlainControl] = ()
        self._notes: list[str] = []
        self._first_line = 0

    @classmethod
    def open(cls, app: WebApp, max_chars: int, path: str = "/") -> PlainPage:
        page = cls(app, max_chars)
        page._visit(WebRequest(method="GET", path=path), path)
        return page

    @property
    def elements(self) -> list[Element]:
        """All elements, also those that did not fit into the last observation."""
        return [control.to_element(number) for number, control in enumerate(self._controls, start=1)]

    @property
    def place(self) -> str:
        """The path of the page, and the first line of it that was shown."""
        return f"{self._history[-1]}:{self._first_line}"

    async def observe(self) -> str:
        elements = self.elements
        self._first_line = min(self._first_line, max(0, len(elements) - 1))
        window = cut_window(elements, self._first_line, self._max_chars)
        notes, self._notes = [f"note: {note}" for note in self._notes], []
        return "\n".join([*notes, named_observation(elements, window.first, window.end)])

    async def act(self, action: ScreenAction) -> str:
        """Do something and return the observation."""
        control = self._controls[action.element - 1] if action.element is not None else None
        if control is None:
            self._turn_page(action)
        elif action.kind == "click":
            self._click(control)
        elif action.kind == "type":
            self._type(control, action.text[:MAX_TEXT])
        else:
            self._select(control, action.text)
        return await self.observe()

    async def close(self) -> None:
        pass

    def _click(self, control: PlainControl) -> None:
        if control.role == "link":
            self._get(control.href)
        elif control.role == "checkbox":
            control.is_on = not control.is_on
        elif control.role == "button" and control.form is not None:
            self._send(control.form)

    def _type(self, control: PlainControl, text: str) -> None:
        if control.role == "textbox":
            control.value = text
        else:
            self._notes.append("this element takes no text")

    def _select(self, control: PlainControl, text: str) -> None:
        found = next((option for option in control.options if option.strip().lower() == text.lower()), None)
        if found is None:
            listed = ", ".join(control.options[:20]) or "none"
            self._notes.append(f"no option {text[:40]!r}; the options are {listed}")
        else:
            control.value = found

    def _turn_page(self, action: ScreenAction) -> None:
        if action.kind == "scroll":
            self._scroll(action.text)
        elif action.kind == "back" and len(self._history) < 2:
            self._notes.append("there is no page to go back to")
        elif action.kind == "back":
            self._history.pop()
            self._get(self._history.pop())

    def _scroll(self, direction: str) -> None:
        elements = self.elements
        window = cut_window(elements, self._first_line, self._max_chars)
        if direction == "down" and window.end < window.total:
            self._first_line = window.end
        elif direction == "down":
            self._notes.append("this is the end of the page")
        else:
            self._first_line = start_before(elements, self._first_line, self._max_chars)

    def _get(self, href: str) -> None:
        parts = urlsplit(href)
        self._visit(WebRequest(method="GET", path=parts.path, query=dict(parse_qsl(parts.query))), href)

    def _send(self, form: PlainForm) -> None:
        sent = {
            control.name: control.value
            for control in form.controls
            if control.name and (control.role != "checkbox" or control.is_on)
        }
        if form.method == "get":
            self._get(f"{form.action}?{urlencode(sent)}")
        else:
            self._visit(WebRequest(method="POST", path=form.action, form=sent), form.action)

    def _visit(self, request: WebRequest, address: str) -> None:
        answer = self._app.respond(request)
        for _ in range(_MAX_REDIRECTS):
            if "Location" not in answer.headers:
                break
            address = answer.headers["Location"]
            parts = urlsplit(address)
            answer = self._app.respond(WebRequest(method="GET", path=parts.path, query=dict(parse_qsl(parts.query))))
        if not self._history or self._history[-1] != address:
            self._history.append(address)
            self._first_line = 0
        self._controls = _read_page(answer)


def _read_page(answer: WebResponse) -> Sequence[PlainControl]:
    reader = PlainReader()
    reader.feed(answer.body.decode("utf-8"))
    reader.close()
    return reader.controls
