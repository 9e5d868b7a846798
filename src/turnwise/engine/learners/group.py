"""The other learner processes, seen from rank 0: it starts them, calls them, and notices when one is gone.

A cluster manager that starts processes elsewhere needs the same four things: `call`, `answers`, `lead` and `close`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pickle import PicklingError
from typing import IO, TYPE_CHECKING, Any, NoReturn, Protocol

from turnwise.engine.learners.calls import LearnerCall, LearnerSetup
from turnwise.engine.learners.collective import START_DEADLINE_S
from turnwise.engine.learners.send import send_within
from turnwise.errors import ConfigError, LearnerError, LearnerLostError

if TYPE_CHECKING:
    from turnwise.engine.samplers.links import SamplerLink

POLL_S = 0.002
END_S = 5.0
"""Seconds for a process to end by itself."""
GONE_S = 0.2
"""Seconds until a process that was killed is seen as dead."""
TAIL_BYTES = 2000
LEARNER_MODULE = "turnwise.engine.learners.process"


class LearnerPeer(Protocol):
    """Another learner, wherever it runs. `OSError` and `EOFError` mean that it is gone."""

    @property
    def rank(self) -> int: ...

    @property
    def name(self) -> str:
        """Its name in messages, such as "process 123"."""
        ...

    @property
    def is_gone(self) -> bool: ...

    def send(self, message: object, deadline_s: float) -> None:
        """Send a message; `TimeoutError` if the learner does not take it in time."""
        ...

    def has_answer(self, wait_s: float = 0.0) -> bool:
        """Whether its answer is there, or comes before the timeout."""
        ...

    def receive(self) -> tuple[str, Any]: ...

    def why(self) -> str:
        """How it ended, with the last lines of its output."""
        ...

    def hang_up(self) -> None:
        """Tell the learner to end."""
        ...

    def kill(self) -> None: ...

    def end(self) -> None:
        """Wait until it has ended; kill it if it does not."""
        ...

    def sampler_link(self) -> SamplerLink | None:
        """The way to the sampler in this learner, if it samples; the same object while the learner lives."""
        ...


StartPeer = Callable[[int], LearnerPeer]


@dataclass(frozen=True, slots=True)
class LearnerPlace:
    """The address for a group's other learners, and how they are started."""

    host: str
    """The address at which they find this process."""
    start_peer: StartPeer
    num_here: int = 1
    """Learners on this machine, this process among them, where a cluster manager has placed the others."""


@dataclass(slots=True, eq=False)
class ProcessPeer:
    """A learner in a process of this machine."""

    rank: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    """What the process wrote to standard error."""
    connection: Connection
    samples: Connection | None = None
    """A second connection, for requests to sample; None if this learner only trains."""
    _link: SamplerLink | None = None

    def sampler_link(self) -> SamplerLink | None:
        if self._link is None and self.samples is not None:
            from turnwise.engine.samplers.links import PipeLink

            self._link = PipeLink(self.samples, self.name, why=lambda: f"{self.name} {self.why()}")
        return self._link

    @property
    def name(self) -> str:
        return f"process {self.process.pid}"

    @property
    def is_gone(self) -> bool:
        return self.process.poll() is not None

    def send(self, message: object, deadline_s: float) -> None:
        send_within(self.connection, message, deadline_s)

    def has_answer(self, wait_s: float = 0.0) -> bool:
        return self.connection.poll(wait_s)

    def receive(self) -> tuple[str, Any]:
        try:
            return self.connection.recv()
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)  # it needs a moment to be seen as dead
            raise

    def why(self) -> str:
        code = self.process.poll()
        state = f"ended with exit code {code}" if code is not None else "does not answer"
        self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, self.errors.tell() - TAIL_BYTES))
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"{state}{f'; its last words: {said[-1]}' if said else ''}"

    def hang_up(self) -> None:
        self.connection.close()
        if self.samples is not None:
            with contextlib.suppress(OSError):
                self.samples.close()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()


class LearnerGroup:
    """Learners 1 to N - 1."""

    def __init__(
        self,
        make_setup: Callable[[int], LearnerSetup],
        size: int,
        *,
        deadline_s: float,
        start_peer: StartPeer,
    ) -> None:
        """Start the others, and tell each what it is.

        Args:
            make_setup: what a rank starts with.
            size: learners, rank 0 among them.
            start_peer: starts one of the others.
        """
        self._deadline_s = deadline_s
        self._broken: LearnerError | None = None
        self._peers: list[LearnerPeer] = []
        try:
            for rank in range(1, size):
                self._peers.append(start_peer(rank))
                self._send(self._peers[-1], make_setup(rank))
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> dict[int, Any]:
        """Wait for every learner's model, and return what each says of it by rank."""
        work = self.answers("load the model", deadline_s=max(START_DEADLINE_S, self._deadline_s))
        while True:
            try:
                next(work)
            except StopIteration as done:
                return done.value

    def call(self, rank: int, call: LearnerCall) -> None:
        """Send a call to one learner; `answers` collects what all learners answer."""
        if self._broken is not None:
            raise self._broken
        self._send(self._peers[rank - 1], call)

    def _send(self, peer: LearnerPeer, message: object) -> None:
        try:
            peer.send(message, self._deadline_s)
        except OSError:
            self._fail(peer, "take a call")
        except (AttributeError, TypeError, ImportError, PicklingError) as cause:
            raise ConfigError(
                f"a call cannot be sent to learner {peer.rank}: {cause}; a loss of your own has to be in a module that "
                "every process can import"
            ) from cause

    def answers(
        self,
        what: str,
        ranks: Sequence[int] | None = None,
        *,
        deadline_s: float | None = None,
        allowed: tuple[type[Exception], ...] = (),
    ) -> Generator[None, None, dict[int, Any]]:
        """Yield until every called learner has answered; the answers by rank.

        An error of one ends the group, because its copies may now differ from the others'. `allowed` errors are
        answers.
        """
        ends_s = time.monotonic() + (deadline_s or self._deadline_s)
        waiting = [peer for peer in self._peers if ranks is None or peer.rank in ranks]
        found: dict[int, Any] = {}
        while waiting:
            for peer in list(waiting):
                if self._has_answer(peer, what):
                    waiting.remove(peer)
                    kind, found[peer.rank] = self._receive(peer, what)
                    if kind == "error" and not isinstance(found[peer.rank], allowed):
                        self._break(LearnerError(f"learner {peer.rank} failed to {what}: {found[peer.rank]!r}"))
            if waiting and time.monotonic() > ends_s:
                self._fail(waiting[0], what)
            if waiting:
                yield
                self._has_answer(waiting[0], what, POLL_S)
        return found

    def sampler_link(self, rank: int) -> SamplerLink | None:
        """The way to the sampler in a learner; None if it is gone. Any thread may ask."""
        peers = self._peers
        return peers[rank - 1].sampler_link() if rank <= len(peers) and self._broken is None else None

    def check_alive(self, what: str) -> None:
        """Raise the error of a learner that has ended."""
        for peer in self._peers:
            if peer.is_gone:
                self._fail(peer, what)

    def fail_all(self, what: str, cause: BaseException, *, deadline_s: float | None = None) -> NoReturn:
        """Give up after a collective failed: blame a learner that is gone, or all that did not come.

        Args:
            deadline_s: how long they had, if not `cluster.deadline_s`.
        """
        time.sleep(GONE_S)
        self.check_alive(what)
        had_s = self._deadline_s if deadline_s is None else deadline_s
        self._break(LearnerLostError(f"learners could not {what} together within {had_s:g} s: {cause}"))

    @property
    def is_broken(self) -> bool:
        """Whether a learner has failed, so that none of them works any more."""
        return self._broken is not None

    def give_up(self, message: str, cause: BaseException) -> NoReturn:
        """End all learners after an error of rank 0."""
        try:
            self._break(LearnerError(message))
        except LearnerError as error:
            raise error from cause

    def close(self) -> None:
        """End the learners: ask first, then kill."""
        for peer in self._peers:
            peer.hang_up()
        for peer in self._peers:
            peer.end()
        self._peers = []

    def _has_answer(self, peer: LearnerPeer, what: str, wait_s: float = 0.0) -> bool:
        try:
            return peer.has_answer(wait_s)
        except (OSError, EOFError):
            self._fail(peer, what)

    def _receive(self, peer: LearnerPeer, what: str) -> tuple[str, Any]:
        try:
            return peer.receive()
        except (OSError, EOFError):
            self._fail(peer, what)

    def _fail(self, peer: LearnerPeer, what: str) -> NoReturn:
        self._break(LearnerLostError(f"learner {peer.rank} ({peer.name}) was asked to {what} and {peer.why()}"))

    def _break(self, error: LearnerError) -> NoReturn:
        self._broken = error
        for peer in self._peers:
            peer.kill()
        raise error


def start_process(
    rank: int, environment: Mapping[str, str], *, module: str = LEARNER_MODULE, samples: bool = False
) -> ProcessPeer:
    """Start a learner on this machine, with variables beside those of this process.

    Args:
        samples: It gets a second connection, for requests to sample.
    """
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the group
    pipes = [multiprocessing.Pipe() for _ in range(2 if samples else 1)]
    handles = [other.fileno() for _, other in pipes]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, handles)],
        stdin=subprocess.PIPE,
        stdout=errors,
        stderr=errors,
        env={**os.environ, **environment},
        pass_fds=handles,
        start_new_session=True,  # Ctrl-C is for rank 0, which tells the others
    )
    for _, other in pipes:
        other.close()  # a connection ends when the process that holds its other end does
    connections = [own for own, _ in pipes]
    return ProcessPeer(rank, process, errors, connections[0], connections[1] if samples else None)
