"""Messages to other processes, with a deadline."""

from __future__ import annotations

import threading
import time
from multiprocessing import Pipe

import pytest

from turnwise.engine.learners import send
from turnwise.engine.learners.send import send_within

LARGE = bytes(3_000_000)
"""More than a socket holds."""


@pytest.mark.parametrize("longest", [send.LONGEST, 1000])
def test_the_other_side_receives_what_was_sent(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "LONGEST", longest)  # of a message that is longer the length takes eight bytes more
    own, other = Pipe()
    received: list[object] = []
    reader = threading.Thread(target=lambda: received.extend(other.recv() for _ in range(3)))
    reader.start()
    messages = [{"a": 1}, LARGE, None]
    for message in messages:
        send_within(own, message, 60.0)
    reader.join()
    assert received == messages


def test_nobody_waits_longer_than_the_deadline_for_a_side_that_does_not_read() -> None:
    own, _other = Pipe()
    started_s = time.monotonic()
    with pytest.raises(TimeoutError, match=r"not read within 0\.3 s"):
        send_within(own, LARGE, 0.3)
    assert 0.3 <= time.monotonic() - started_s < 60


def test_a_side_that_is_gone_is_told_at_once() -> None:
    own, other = Pipe()
    other.close()
    with pytest.raises(BrokenPipeError):
        send_within(own, LARGE, 60.0)
