"""The phone itself: its data, its screens, and what an action changes. Plain state, no randomness, no clock.

    home > settings                switches, and boxes to choose from
         > contacts > a contact    its number, delete
                    > new contact
         > messages > a thread     what was said, a box to write in, send
         > notes    > a note       its text, delete
                    > new note

A list shows eight rows; `scroll` shows the others. `press Home` leads home, `press Enter` sends a message that is
written. Text in boxes that have a button beside them (send, save) is lost when the screen is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from turnwise.envs.screen import ScreenAction, ScreenElement, ScreenIds

SWITCHES = ("Wi-Fi", "Bluetooth", "Dark mode", "Flight mode", "Location", "Alarm", "Battery saver", "Torch")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "Ringtone": ("Bell", "Chime", "Waves"),
    "Language": ("English", "German", "French"),
    "Text size": ("Small", "Normal", "Large"),
}
APPS = ("Settings", "Contacts", "Messages", "Notes")
ROWS = 8
"""Rows of a list that fit on the screen."""
MAX_TEXT = 200


@dataclass
class PhoneData:
    """What the phone remembers. Tasks are about this, and nothing else is judged."""

    switches: dict[str, bool]
    choices: dict[str, str]
    contacts: dict[str, str]
    """Numbers by name, in the order of the list."""
    threads: dict[str, list[str]]
    """What was said to and by each contact, in order; a line of the phone's owner begins with `You: `."""
    notes: dict[str, str]
    """Texts by title."""

    def copy(self) -> PhoneData:
        threads = {name: list(said) for name, said in self.threads.items()}
        return PhoneData(dict(self.switches), dict(self.choices), dict(self.contacts), threads, dict(self.notes))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Something on a screen that can be used or read."""

    key: str
    """Which one it is, such as `switch:Wi-Fi`. Empty for text."""
    role: str
    name: str
    value: str | None = None
    states: tuple[str, ...] = ()


@dataclass
class PhoneDevice:
    """A phone that somebody uses. `copy` gives an independent one."""

    data: PhoneData
    path: tuple[str, ...] = ()
    """The screens from home to here: `("contacts", "contact:Ann")`."""
    drafts: dict[str, str] = field(default_factory=dict[str, str])
    """Text in boxes of this screen that is not saved or sent yet, by key."""
    offset: int = 0
    """How many rows of a list are above the screen."""
    ids: ScreenIds = field(default_factory=ScreenIds)

    def copy(self) -> PhoneDevice:
        return PhoneDevice(self.data.copy(), self.path, dict(self.drafts), self.offset, self.ids.copy())

    @property
    def title(self) -> str:
        if not self.path:
            return "Home"
        kind, _, name = self.path[-1].partition(":")
        return name or kind.replace("_", " ").capitalize()

    def elements(self) -> list[ScreenElement]:
        """What is on the screen now."""
        return [
            ScreenElement(
                role=control.role,
                name=control.name,
                id=self.ids.number(control.key) if control.key else None,
                value=control.value,
                states=control.states,
            )
            for control in self.controls()
        ]

    def id_of(self, key: str) -> int | None:
        """The id of a control that is on the screen, by its key."""
        return self.ids.number(key) if any(control.key == key for control in self.controls()) else None

    def act(self, action: ScreenAction) -> str:
        """Do what the action says. Return what went wrong, or empty text."""
        match action.kind:
            case "click" | "type" | "select":
                return self._use(action)
            case "scroll":
                return self._scroll(1 if action.text == "down" else -1)
            case "press":
                return self._press(action.text)
            case "back":
                self._go(self.path[:-1])
            case "wait" | "done":
                pass
        return ""

    def controls(self) -> list[Control]:
        """What is on the screen, in order."""
        kind, _, name = self.path[-1].partition(":") if self.path else ("home", "", "")
        match kind:
            case "home":
                return [Control(key=f"app:{app.lower()}", role="button", name=app) for app in APPS]
            case "settings":
                return self._settings()
            case "contacts":
                links = [Control(key=f"contact:{name}", role="link", name=name) for name in self.data.contacts]
                return self._list("new_contact", links)
            case "messages":
                return self._list("", [Control(key=f"thread:{n}", role="link", name=n) for n in self.data.contacts])
            case "notes":
                return self._list("new_note", [Control(key=f"note:{n}", role="link", name=n) for n in self.data.notes])
            case "contact":
                number = Control(key=f"number:{name}", role="textbox", name="Number", value=self.data.contacts[name])
                return [number, Control(key=f"delete_contact:{name}", role="button", name="Delete")]
            case "note":
                text = Control(key=f"text:{name}", role="textbox", name="Text", value=self.data.notes[name])
                return [text, Control(key=f"delete_note:{name}", role="button", name="Delete")]
            case "thread":
                said = [Control(key="", role="text", name=line) for line in self.data.threads.get(name, [])[-4:]]
                send = Control(key=f"send:{name}", role="button", name="Send")
                return [*said, self._box(f"message:{name}", "Message"), send]
            case _:
                boxes = ("Name", "Number") if kind == "new_contact" else ("Title", "Text")
                return [
                    *(self._box(f"{kind}:{box}", box) for box in boxes),
                    Control(key=f"save:{kind}", role="button", name="Save"),
                ]

    def _settings(self) -> list[Control]:
        switches = [
            Control(key=f"switch:{name}", role="switch", name=name, states=("on" if is_on else "off",))
            for name, is_on in self.data.switches.items()
        ]
        choices = [
            Control(key=f"choice:{name}", role="combobox", name=name, value=value, states=(" / ".join(CHOICES[name]),))
            for name, value in self.data.choices.items()
        ]
        return self._list("", [*switches, *choices])

    def _list(self, new: str, rows: list[Control]) -> list[Control]:
        """The rows that fit, with what makes a new one above them and how many are hidden below them."""
        shown = rows[self.offset : self.offset + ROWS]
        below = len(rows) - self.offset - len(shown)
        above = [Control(key="", role="text", name=f"{self.offset} more above")] if self.offset else []
        add = [Control(key=new, role="button", name=new.replace("_", " ").capitalize())] if new else []
        more = [Control(key="", role="text", name=f"{below} more below")] if below > 0 else []
        return [*add, *above, *shown, *more]

    def num_rows(self) -> int:
        """How many rows the list of this screen has; 0 if it is no list."""
        kind = self.path[-1] if self.path else ""
        data = self.data
        lists = {
            "settings": len(data.switches) + len(data.choices),
            "contacts": len(data.contacts),
            "messages": len(data.contacts),
            "notes": len(data.notes),
        }
        return lists.get(kind, 0)

    def _box(self, key: str, name: str) -> Control:
        return Control(key=key, role="textbox", name=name, value=self.drafts.get(key, ""))

    def _go(self, path: tuple[str, ...]) -> None:
        self.path, self.drafts, self.offset = path, {}, 0

    def _scroll(self, direction: int) -> str:
        offset = self.offset + direction * ROWS
        if not 0 <= offset < self.num_rows():
            return "There is nothing more there."
        self.offset = offset
        return ""

    def _press(self, key: str) -> str:
        if key.lower() == "home":
            self._go(())
            return ""
        if key.lower() == "enter":
            kind, _, name = self.path[-1].partition(":") if self.path else ("", "", "")
            return self._send(name) if kind == "thread" else "Nothing happens."
        return "This phone has the keys Home and Enter."

    def _use(self, action: ScreenAction) -> str:
        control = next((c for c in self.controls() if c.key and self.ids.number(c.key) == action.element), None)
        if control is None:
            return f"There is no element {action.element} on this screen."
        if action.kind == "click":
            return self._click(control)
        if action.kind == "type":
            return self._type(control, action.text)
        if control.role != "combobox":
            return f"Element {action.element} is a {control.role}; select works on a combobox."
        name = control.key.partition(":")[2]
        found = next((option for option in CHOICES[name] if option.lower() == action.text.lower()), None)
        if found is None:
            return f"{name} can be {', '.join(CHOICES[name])}."
        self.data.choices[name] = found
        return ""

    def _click(self, control: Control) -> str:
        kind, _, name = control.key.partition(":")
        match kind:
            case "app":
                self._go((name,))
            case "contact" | "thread" | "note" | "new_contact" | "new_note":
                self._go((*self.path, control.key))
            case "switch":
                self.data.switches[name] = not self.data.switches[name]
            case "send":
                return self._send(name)
            case "save":
                return self._save(name)
            case "delete_contact":
                del self.data.contacts[name]
                self.data.threads.pop(name, None)
                self._go(self.path[:-1])
            case "delete_note":
                del self.data.notes[name]
                self._go(self.path[:-1])
            case "choice":
                return "Use select to choose an option."
            case _:
                return "Use type to write here."
        return ""

    def _type(self, control: Control, text: str) -> str:
        if control.role != "textbox":
            return f"{control.name} is a {control.role}; type works on a textbox."
        if len(text) > MAX_TEXT:
            return f"That is too long; {MAX_TEXT} characters fit."
        kind, _, name = control.key.partition(":")
        if kind == "number":
            self.data.contacts[name] = text
        elif kind == "text":
            self.data.notes[name] = text
        else:
            self.drafts[control.key] = text
        return ""

    def _send(self, name: str) -> str:
        text = self.drafts.pop(f"message:{name}", "")
        if not text:
            return "The message is empty."
        self.data.threads.setdefault(name, []).append(f"You: {text}")
        return ""

    def _save(self, kind: str) -> str:
        first, second = ("Name", "Number") if kind == "new_contact" else ("Title", "Text")
        name, value = self.drafts.get(f"{kind}:{first}", ""), self.drafts.get(f"{kind}:{second}", "")
        kept = self.data.contacts if kind == "new_contact" else self.data.notes
        if not name or ":" in name:
            return f"{first} is empty." if not name else f"{first} may not hold a colon."
        if name in kept:
            return f"{name} is there already."
        kept[name] = value
        self._go(self.path[:-1])
        return ""
