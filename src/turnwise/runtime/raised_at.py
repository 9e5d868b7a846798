"""The place at which an exception was raised, as a user wants to read it: the line of the user's own code."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))

MAX_FRAMES = 20
"""The last frames of an exception that are kept: a recursion without end has a thousand."""
MAX_TRACEBACK = 8000
"""The last characters of a traceback that are kept."""


def raised_at(error: BaseException) -> str:
    """`file.py:12` of the last frame that is neither ours nor a library's; else of the last frame; else nothing."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    own = [frame for frame in frames if not _is_inside(Path(frame.filename), (_PACKAGE, *_LIBRARIES))]
    outside = [frame for frame in frames if not _is_inside(Path(frame.filename), (_PACKAGE,))]
    chosen = (own or _worlds_of(frames) or outside)[-1:]
    return "".join(f"{_shortened(Path(frame.filename))}:{frame.lineno}" for frame in chosen)


def describe_error(error: BaseException) -> str:
    """The exception with its text, and where it was raised: `ValueError('no such row') at my_env.py:12`."""
    place = raised_at(error)
    return f"{error!r} at {place}" if place else repr(error)


def user_traceback(error: BaseException) -> str:
    """The exception as Python prints it, with the frames of the user's code alone; all frames if it has none."""
    shown: list[str] = []
    for one in _chain(error):
        frames = list(traceback.extract_tb(one.__traceback__))
        own = [frame for frame in frames if not _is_inside(Path(frame.filename), (_PACKAGE, *_LIBRARIES))]
        chosen = (own or _worlds_of(frames) or frames)[-MAX_FRAMES:]
        shown += ["Traceback (most recent call last):\n", *traceback.format_list(chosen)] if chosen else []
        shown += traceback.format_exception_only(one)
    return "".join(shown)[-MAX_TRACEBACK:].rstrip()


def _chain(error: BaseException) -> list[BaseException]:
    """The exceptions that led to this one, the first one first."""
    found = [error]
    while (
        before := found[0].__cause__ or (None if found[0].__suppress_context__ else found[0].__context__)
    ) is not None:
        if before in found:
            break
        found.insert(0, before)
    return found


def _worlds_of(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Frames in the worlds that we ship: code of a world, although it is in our own tree."""
    return [frame for frame in frames if _is_inside(Path(frame.filename), (_PACKAGE / "envs" / "library",))]


def _is_inside(path: Path, roots: tuple[Path, ...]) -> bool:
    return any(path.resolve().is_relative_to(root) for root in roots)


def _shortened(path: Path) -> str:
    """Relative to the working directory where it is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
