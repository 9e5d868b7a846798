"""What servers and clients of this package need of the network."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from functools import cache
from urllib.parse import urlsplit


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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`, a name or an IP address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("[::1]"), is_loopback("10.0.0.1")
    (True, True, True, False)
    """
    name = host.removeprefix("[").removesuffix("]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_on_this_machine(address: str) -> bool:
    """Whether an address leads to this machine. It is a URL, or a host with or without a port.

    >>> is_on_this_machine("http://localhost:8000/v1"), is_on_this_machine("[::1]:8000"), is_on_this_machine("a.org:80")
    (True, True, False)
    """
    try:
        return is_loopback(urlsplit(address if "//" in address else f"//{address}").hostname or "")
    except ValueError:
        return False
