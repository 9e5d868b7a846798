"""Sending to another process with a deadline: one that is stopped reads nothing, and a write would wait for ever."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

LONGEST = 0x7FFFFFFF
"""Bytes of a message whose length is told in four bytes."""


def send_within(connection: Connection, message: object, deadline_s: float) -> None:
    """`connection.send(message)`. Raises `TimeoutError` if the other side does not read it in time.

    Part of the message may have been sent then, so the connection is of no use any more.
    """
    content = memoryview(ForkingPickler.dumps(message))
    size = len(content)
    header = struct.pack("!i", size) if size <= LONGEST else struct.pack("!iQ", -1, size)
    ends_s = time.monotonic() + deadline_s
    with socket.socket(fileno=os.dup(connection.fileno())) as channel:
        for part in (memoryview(header), content):
            _send_all(channel, part, ends_s, deadline_s)


def _send_all(channel: socket.socket, part: memoryview, ends_s: float, deadline_s: float) -> None:
    has_room = select.poll()
    has_room.register(channel, select.POLLOUT)
    while part:
        left_s = ends_s - time.monotonic()
        if left_s <= 0 or not has_room.poll(1000 * left_s):
            raise TimeoutError(f"a message was not read within {deadline_s:g} s")
        try:
            part = part[channel.send(part, socket.MSG_DONTWAIT) :]  # the connection itself stays blocking, to be read
        except BlockingIOError:
            continue
