"""What servers and clients of this package need of the network."""

from __future__ import annotations

import socket
import ssl
from functools import cache


@cache
def tls_context() -> ssl.SSLContext:
    """Return the TLS context of all clients. It is made once, because reading the certificates is slow."""
    return ssl.create_default_context()


def open_port(host: str, port: int, backlog: int) -> socket.socket:
    """Listen at an address, IPv4 or IPv6. Raises the `OSError` of the system where that cannot be done."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener
