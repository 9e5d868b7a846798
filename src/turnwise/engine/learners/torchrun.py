"""Learners that torchrun has started: rank 0 leads the run, the other ranks answer it over TCP.

Every rank finds the same store at the address that torchrun gives. Each of the others listens on a free port, writes
its address there, and serves as a learner from when rank 0 connects until it hangs up.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import socket
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
import torch.distributed

from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import choose_device, num_gpus
from turnwise.engine.learners.collective import START_DEADLINE_S
from turnwise.engine.learners.group import LearnerPeer, LearnerPlace
from turnwise.engine.learners.process import serve
from turnwise.engine.learners.send import send_within
from turnwise.engine.machine_share import MachineShare
from turnwise.errors import ConfigError, LearnerError
from turnwise.runtime.network import is_loopback
from turnwise.runtime.torchrun import TorchrunWorld

dist: Any = torch.distributed  # stores have no type stubs

_taken: set[int] = set()
"""Ranks that serve this process, or did."""


class TorchrunPeer:
    """A rank that torchrun has started. Only torchrun can end it or start it again."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self._connection = connection
        self._is_gone = False

    @property
    def name(self) -> str:
        return f"torchrun's rank {self.rank}"

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    def send(self, message: object, deadline_s: float) -> None:
        send_within(self._connection, message, deadline_s)

    def has_answer(self, wait_s: float = 0.0) -> bool:
        return self._connection.poll(wait_s)

    def receive(self) -> tuple[str, Any]:
        try:
            return self._connection.recv()
        except (OSError, EOFError):
            self._is_gone = True
            raise

    def why(self) -> str:
        return "ended" if self._is_gone else "does not answer"

    def hang_up(self) -> None:
        self._connection.close()

    def kill(self) -> None:
        self._connection.close()  # it ends by itself then

    def end(self) -> None:
        """Do nothing: torchrun waits for the process."""

    def sampler_link(self) -> None:
        """None: under torchrun a learner only trains, and `turnwise train` refuses `cluster.samplers`."""


def place_under_torchrun(world: TorchrunWorld) -> LearnerPlace:
    """The ranks that torchrun has started, as learners of this process."""

    def find_peer(rank: int) -> LearnerPeer:
        if rank in _taken:
            raise LearnerError(
                f"torchrun's rank {rank} has served this process before; only torchrun can start it again: use "
                "torchrun --max-restarts, and --resume"
            )
        _taken.add(rank)
        return TorchrunPeer(rank, _connect(world, rank))

    return LearnerPlace(find_own_host(world), find_peer)


def serve_leader(world: TorchrunWorld) -> None:
    """Be a learner of rank 0 until it hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which tells the others
    key = secrets.token_hex(16)
    host = find_own_host(world)
    with Listener((host if world.is_on_one_machine else "0.0.0.0", 0), authkey=key.encode()) as listener:
        _store(world).set(f"rank {world.rank}", f"{host} {listener.address[1]} {key}")
        with listener.accept() as connection:
            try:
                setup = connection.recv()
            except EOFError:  # rank 0 has no work for it
                return
            serve(connection, replace(setup, engine=own_engine(setup.engine, world, MachineShare())))


def release_others(world: TorchrunWorld) -> None:
    """Let the ranks end that rank 0 never needed."""
    for rank in range(1, world.size):
        if rank not in _taken:
            with contextlib.suppress(OSError, LearnerError):
                _connect(world, rank).close()


def _connect(world: TorchrunWorld, rank: int) -> Connection:
    store = _store(world)
    try:
        store.wait([f"rank {rank}"], timedelta(seconds=START_DEADLINE_S))
    except RuntimeError as cause:
        raise LearnerError(f"torchrun's rank {rank} did not come within {START_DEADLINE_S:g} s: {cause}") from cause
    host, port, key = store.get(f"rank {rank}").decode().split()
    return Client((host, int(port)), authkey=key.encode())


@functools.cache
def _store(world: TorchrunWorld) -> Any:
    """The store of all ranks; torchrun's own process holds it, or rank 0."""
    is_held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not port:
        raise ConfigError("torchrun --master-port 0 gives its processes no port to meet at; use torchrun --standalone")
    wait = timedelta(seconds=START_DEADLINE_S)
    is_master = world.rank == 0 and not is_held
    store = dist.TCPStore(host, port, world.size, is_master=is_master, timeout=wait, wait_for_workers=False)
    return dist.PrefixStore(f"turnwise {world.num_restarts}", store)


def find_own_host(world: TorchrunWorld) -> str:
    """The address at which ranks of all machines reach this one.

    The machine's name says nothing: on a default Debian it means 127.0.1.1. So it is the address from which packets to
    MASTER_ADDR leave. On MASTER_ADDR's own machine that is a loopback address, and others know it as MASTER_ADDR.
    """
    if world.is_on_one_machine:
        return "127.0.0.1"
    master = os.environ["MASTER_ADDR"]
    try:
        source = source_address(master)
    except OSError as cause:
        raise ConfigError(
            f"torchrun's MASTER_ADDR={master} is reached by no IPv4 route from this machine ({cause}); give torchrun "
            "--master-addr or --rdzv-endpoint an address that every machine reaches"
        ) from cause
    if not source.startswith("127."):
        return source
    if is_loopback(master):
        raise ConfigError(
            f"torchrun's MASTER_ADDR={master} is this machine alone, and its ranks are on several machines; give "
            "torchrun --master-addr or --rdzv-endpoint an address that every machine reaches"
        )
    return master


def source_address(host: str) -> str:
    """The IPv4 address from which packets to a host leave; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def own_engine(engine: EngineConfig, world: TorchrunWorld, share: MachineShare) -> EngineConfig:
    """The engine of a rank: on another machine than rank 0's it takes the GPU of its own number there, or a share."""
    gpus = num_gpus(choose_device(engine)[0].type)
    if world.is_on_one_machine or not gpus:
        return engine
    if gpus < world.local_size:
        share.take_gpu(world.local_size)
    return engine.model_copy(update={"device": f"cuda:{world.local_rank % gpus}"})
