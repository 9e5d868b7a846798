"""Simulators that are written for Java: attempts share one Java process of a package, or each has its own.

    with_java = JavaHost.of("textworld-express", jar)              # starts the process, or takes the one that runs
    with_java = JavaHost.of("scienceworld", jar, is_shared=False)  # takes one that nobody holds, or starts another
    simulator = with_java.make("scienceworld.runtime.pythonapi.PythonInterface")
    with_java.call(simulator, "step", "look around")
    with_java.release()

A simulator that keeps its state in Java's global objects is not shared: one attempt would change another's world.
`JavaGame` is one game in such a simulator.

The process belongs to whoever holds it. It ends some seconds after the last attempt, when this process ends, and when
this process is killed: it reads a pipe of ours and ends with it. If it dies, or does not answer, every attempt that it
held fails, the env is to blame, and the next attempt starts a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from turnwise.envs.adapters.peers import import_peer
from turnwise.envs.adapters.text_adventure import Scene
from turnwise.errors import ConfigError

IDLE_S = 20.0
"""How long a process waits for the next attempt."""
CALL_S = 60.0
"""A call that takes longer ends the process."""
_START_S = 120.0
_MEMORY = "-Xmx1g"


class JavaDiedError(RuntimeError):
    """The Java process is gone, or does not answer. The attempt is played again in a new one."""


def find_java() -> str:
    """The Java that starts simulators; `ConfigError` says what is missing."""
    home = os.environ.get("JAVA_HOME", "")
    own = shutil.which(str(Path(home) / "bin" / "java")) if home else None
    found = own or shutil.which("java")
    if found is None:
        raise ConfigError(
            "no `java` was found on PATH or in JAVA_HOME; this world runs in Java 8 or newer: install one, for example "
            "with `apt-get install default-jre-headless`"
        )
    return found


class JavaHost:
    """A Java process with a gateway to it. `of` and `release` count who holds it."""

    _hosts: ClassVar[list[JavaHost]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, extra: str, jar: Path) -> None:
        self._py4j = import_peer("py4j.java_gateway", extra=extra)
        self._extra = extra
        self._holders = 0
        self._closing: threading.Timer | None = None
        bridge = self._py4j.find_jar_path()
        if not bridge:
            raise ConfigError(
                "py4j is installed without its Java part, py4j.jar; install it again with: pip install py4j"
            )
        classes = os.pathsep.join([bridge, str(jar)])
        options = ["--die-on-broken-pipe", "--enable-auth", "0"]
        self.process = subprocess.Popen(
            [find_java(), _MEMORY, "-XX:+UseSerialGC", "-cp", classes, "py4j.GatewayServer", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=jar.parent,
            start_new_session=True,  # Ctrl-C is for the run, which closes its attempts first
        )
        atexit.register(self.close)
        port, token = self._read_greeting()
        threading.Thread(target=self._drain, name="turnwise-java-output", daemon=True).start()
        parameters = self._py4j.GatewayParameters(port=port, auth_token=token, read_timeout=CALL_S)
        self._gateway: Any = self._py4j.JavaGateway(gateway_parameters=parameters)

    @classmethod
    def of(cls, extra: str, jar: Path, *, is_shared: bool = True) -> JavaHost:
        """A running process of a package, or a new one. Whoever calls this calls `release` once.

        Args:
            is_shared: Others may hold the process too.
        """
        with cls._lock:
            for host in cls._hosts:
                if host._extra == extra and host.is_alive and (is_shared or not host._holders):
                    return host._hold()
            if is_shared:  # the others wait for this one
                cls._hosts.append(host := cls(extra, jar))
                return host._hold()
        host = cls(extra, jar)
        with cls._lock:
            cls._hosts.append(host)
            return host._hold()

    def _hold(self) -> JavaHost:
        self._holders += 1
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        return self

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def make(self, java_class: str) -> Any:
        """A new object of a Java class."""

        def ask() -> Any:
            maker = self._gateway.jvm
            for name in java_class.split("."):
                maker = getattr(maker, name)  # every step asks the process
            return maker()

        return self._answer(ask, java_class)

    def call(self, target: Any, method: str, *arguments: object) -> Any:
        """Call a method of a Java object."""
        return self._answer(lambda: getattr(target, method)(*arguments), method)

    def release(self) -> None:
        """This attempt does not need the process any more."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            self._closing = threading.Timer(IDLE_S if self.is_alive else 0.0, self._close_if_idle)
            self._closing.daemon = True
            self._closing.start()

    def close(self) -> None:
        """End the process, even if attempts still use it."""
        atexit.unregister(self.close)
        if self._closing is not None:
            self._closing.cancel()
        with contextlib.suppress(AttributeError, OSError, self._py4j.Py4JError):
            self._gateway.close()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()

    @classmethod
    def close_all(cls) -> None:
        """End all processes."""
        with cls._lock:
            hosts = list(cls._hosts)
            cls._hosts.clear()
        for host in hosts:
            host.close()

    def _close_if_idle(self) -> None:
        with self._lock:
            if self._holders:
                return
            if self in self._hosts:
                self._hosts.remove(self)
        self.close()

    def _answer(self, ask: Callable[[], Any], what: str) -> Any:
        try:
            return ask()
        except self._py4j.Py4JJavaError:
            raise  # the simulator's own error; the process is well
        except (self._py4j.Py4JError, OSError) as cause:
            is_alive = self.is_alive
            self.process.kill()  # it may hang; whoever holds it fails, and the next attempt starts a new one
            state = f"gave no good answer ({cause})" if is_alive else f"ended with {self.process.wait()}"
            raise JavaDiedError(f"the Java process {state} at {what}") from cause

    def _read_greeting(self) -> tuple[int, str]:
        """The port and the token, which the gateway prints first."""
        assert self.process.stdout is not None
        watch = threading.Timer(_START_S, self.process.kill)
        watch.daemon = True
        watch.start()
        began = time.monotonic()
        try:
            lines = [self.process.stdout.readline().decode("utf-8", "replace").strip() for _ in range(2)]
        finally:
            watch.cancel()
        if not lines[0].isdigit():
            self.close_failed_start()
            raise JavaDiedError(
                f"the Java process said {lines[0]!r:.80} after {time.monotonic() - began:.0f} s; expected a port"
            )
        return int(lines[0]), lines[1]

    def close_failed_start(self) -> None:
        self.process.kill()
        self.process.wait()

    def _drain(self) -> None:
        """Read what the simulator prints, so that it never waits for a full pipe."""
        assert self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while self.process.stdout.read(1 << 16):
                pass


class JavaGame(ABC):
    """One running game: an object in a Java process, which is held from `start` to `close`."""

    def __init__(self, open_host: Callable[[], JavaHost], load: Callable[[JavaHost], Any]) -> None:
        """Start nothing yet.

        Args:
            load: Makes the simulator of this game.
        """
        self._open_host = open_host
        self._load = load
        self._host: JavaHost | None = None
        self._simulator: Any = None
        self.said: list[str] = []
        """The commands so far. A simulator shows less than decides what it does, so they are the game's state."""

    @abstractmethod
    def first_scene(self) -> Scene:
        """Begin the game in the simulator that was loaded."""

    @abstractmethod
    def next_scene(self, command: str) -> Scene:
        """Give the simulator a command."""

    def start(self) -> Scene:
        self._host = self._open_host()
        self._simulator = self._load(self._host)
        return self.first_scene()

    def act(self, command: str) -> Scene:
        self.said.append(command)
        return self.next_scene(command)

    def walkthrough(self) -> list[str]:
        return [str(command) for command in self.call("getGoldActionSequence")]

    def close(self) -> None:
        host, self._host, self._simulator = self._host, None, None
        if host is not None:
            host.release()

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the simulator."""
        assert self._host is not None, "start comes first"
        return self._host.call(self._simulator, method, *arguments)
