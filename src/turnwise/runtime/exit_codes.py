"""The exit codes of every `turnwise` command, in one place."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a process tells the shell that started it."""

    OK = 0
    FAILED = 1
    """The command worked, and its answer is no: a certificate is not exact, or a run of a comparison failed."""
    USER_ERROR = 2
    """A mistake that the user can mend; one line on stderr says how."""
    STALLED = 75
    """A party of the run did not answer in time; the run can be resumed from its last checkpoint."""
    INTERRUPTED = 130
    """The command was stopped: by Ctrl-C, SIGTERM or `turnwise stop`."""
    BROKEN_PIPE = 141
    """The reader of the output has closed it, as `head` does."""
