"""Where a rank of torchrun can be reached, and by whom."""

from __future__ import annotations

import socket

import pytest

from cases import for_each
from turnwise.engine.learners import torchrun
from turnwise.engine.learners.torchrun import find_own_host, source_address
from turnwise.errors import ConfigError
from turnwise.runtime.torchrun import TorchrunWorld

TWO_MACHINES = TorchrunWorld(rank=8, size=16, local_rank=0, local_size=8)


@for_each(("source", "found"), [("10.0.0.2", "10.0.0.2"), ("127.0.0.1", "node-1")])
def test_a_rank_is_reached_by_the_route_to_the_master_and_not_by_the_machines_name(source: str, found: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")  # as on a default Debian
        patch.setattr(torchrun, "source_address", lambda _: source)
        patch.setenv("MASTER_ADDR", "node-1")
        assert find_own_host(TWO_MACHINES) == found


@for_each(("master", "why"), [("localhost", "is this machine alone"), ("no-such-host.invalid", "by no IPv4 route")])
def test_a_master_that_other_machines_cannot_reach_is_refused(master: str, why: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", master)
        with pytest.raises(ConfigError, match=rf"MASTER_ADDR={master} {why}|MASTER_ADDR={master} is reached {why}"):
            find_own_host(TWO_MACHINES)


def test_packets_to_this_machine_leave_from_its_loopback_address() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
