"""What leads to this machine, and what does not."""

from __future__ import annotations

from turnwise.runtime.network import is_loopback, is_on_this_machine


def test_loopback_is_told_from_the_rest() -> None:
    for host in ("127.0.0.1", "127.8.9.10", "localhost", "::1", "[::1]"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "", "[]", "10.0.0.1", "::", "localhost.example", "127.0.0.1.example"):
        assert not is_loopback(host), host


def test_an_address_is_a_url_or_a_host_with_or_without_a_port() -> None:
    for address in ("http://localhost:8000/v1", "https://[::1]", "http://127.0.0.2:1", "localhost:80", "[::1]:80"):
        assert is_on_this_machine(address), address
    for address in ("", "http://", "http://a.example/localhost", "a.example:80", "localhost@a.example", "http://[bad"):
        assert not is_on_this_machine(address), address
