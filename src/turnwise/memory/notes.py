"""Notes that the policy writes and recalls by tool. They live outside the prompt, for one attempt."""

from __future__ import annotations

from turnwise.envs.tools import ToolError, tool

MAX_NOTES = 64
"""A policy that writes more is told to overwrite one."""


class Notes:
    """The notes of one attempt."""

    def __init__(self, notes: dict[str, str] | None = None) -> None:
        self.by_name: dict[str, str] = dict(notes or {})

    @tool
    async def write_note(self, name: str, text: str) -> str:
        """Keep a text under a name; an older note of that name is replaced."""
        if name not in self.by_name and len(self.by_name) >= MAX_NOTES:
            raise ToolError(f"there are {MAX_NOTES} notes already; write to one of them: {', '.join(self.by_name)}")
        self.by_name[name] = text
        return f"noted: {name}"

    @tool
    async def recall_note(self, name: str) -> str:
        """Read a note."""
        if name not in self.by_name:
            raise ToolError(f"no note {name!r}; the notes are: {', '.join(self.by_name) or 'none'}")
        return self.by_name[name]
