"""A session forks and goes back to snapshots, with an overlay and without one; hostile programs stay in it."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from overlay_bubblewrap import bubblewrap_with_overlay
from processes import marked_processes, processes_below
from turnwise.envs.sandbox import Limits, Sandbox, SandboxWarning, Session
from turnwise.envs.sandbox.pool import SandboxPool
from turnwise.errors import DataError, SessionClosedError

LIMITS = Limits(
    wall_s=5.0, memory_bytes=256 << 20, processes=24, file_bytes=4 << 20, disk_bytes=2 << 20, output_bytes=50_000
)
FILES = {"pkg/mod.py": "x = 1\n", "pkg/old.py": "y = 2\n", "data/a.csv": "1,2\n", "data/b.csv": "3,4\n"}


@pytest.fixture(params=["overlay", "copies"])
def sandbox(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    pool = SandboxPool(tmp_path / "pool")
    if request.param == "copies":
        yield Sandbox(limits=LIMITS, pool=pool)
    else:
        with bubblewrap_with_overlay(monkeypatch):
            yield Sandbox(limits=LIMITS, pool=pool)
    pool.close()
    assert not list((tmp_path / "pool").iterdir())


@pytest.fixture
async def session(sandbox: Sandbox, request: pytest.FixtureRequest) -> AsyncIterator[Session]:
    session = sandbox.open(files=FILES)
    assert session.has_overlay == request.node.name.endswith("[overlay]")
    yield session
    await session.close()


async def output(session: Session, command: str) -> str:
    return (await session.run(command)).to_text()


LOOK = (
    "pwd; echo $X; f; ll; umask; find /work /tmp | sort; cat /work/pkg/mod.py /tmp/t; ls -l --time-style=+%s /work/pkg"
)
CHANGE = """cd pkg; X='two
lines "quoted"'; f() { echo fn $X; }; shopt -s expand_aliases; alias ll='echo alias'; umask 027
echo z >> mod.py; rm old.py; rm -r ../data; mkdir ../data; echo new > ../data/c.csv; chmod +x mod.py; ln -s mod.py link
echo tmp > /tmp/t; mkfifo pipe"""


async def test_a_fork_goes_on_from_the_same_point_and_each_goes_its_own_way(session: Session) -> None:
    await session.run(CHANGE)
    expected = await output(session, LOOK)
    fork = session.fork()
    try:
        assert await output(fork, LOOK) == expected
        await fork.run("rm -rf /work/data; echo other > mod.py; X=9; rm /tmp/t; cd /")
        assert await output(session, LOOK) == expected
        deeper = session.fork()
        await session.run("rm -rf /work/*; X=1")
        assert await output(deeper, LOOK) == expected
        await deeper.close()
        assert await output(fork, "cat /work/pkg/mod.py; pwd; echo $X") == "other\n/\n9"
    finally:
        await fork.close()


async def test_a_session_goes_back_to_its_snapshot_as_often_as_one_likes(session: Session) -> None:
    await session.run(CHANGE)
    expected = await output(session, LOOK)
    snapshot = session.snapshot()
    for _ in range(2):
        await session.run("rm -rf /work/* /tmp/*; X=1; cd /; unset -f f")
        session.restore(snapshot)
        assert await output(session, LOOK) == expected
        assert session.files.read("data/c.csv") == b"new\n"
        with pytest.raises(FileNotFoundError):
            session.files.read("data/a.csv")
    snapshot.close()


async def test_files_from_outside_and_commands_inside_see_the_same(session: Session) -> None:
    session.files.write("pkg/mod.py", b"from outside\n")
    assert await output(session, "cat pkg/mod.py; rm pkg/old.py") == "from outside"
    assert set(session.files.read_all(max_bytes=1000)) == set(FILES) - {"pkg/old.py"}
    fork = session.fork()
    assert fork.files.read("pkg/mod.py") == b"from outside\n"
    await fork.close()


async def test_a_fork_before_the_first_command_has_the_files(session: Session) -> None:
    fork = session.fork()
    again = fork.fork()
    assert await output(again, "cat pkg/mod.py; pwd") == "x = 1\n/work"
    await fork.close()
    await again.close()
    with pytest.raises(SessionClosedError):
        fork.fork()


async def test_a_session_that_locks_itself_out_gets_a_shell_again(session: Session) -> None:
    result = await session.run("chmod 000 /work /tmp; exit 3")
    assert (result.ending, result.exit_code) == ("shell_died", 3)
    assert await output(session, "cat pkg/mod.py; pwd") == "x = 1\n/work"
    session.files.write("pkg/mod.py", b"written\n")
    fork = session.fork()
    assert await output(fork, "cat pkg/mod.py") == "written"
    await fork.close()


async def test_a_snapshot_of_another_session_is_refused(session: Session, sandbox: Sandbox) -> None:
    other = sandbox.open()
    snapshot = other.snapshot()
    with pytest.raises(DataError, match="restore its own"):
        session.restore(snapshot)
    snapshot.close()
    await other.close()


async def test_without_walls_there_is_no_fork_and_it_says_so(tmp_path: Path) -> None:
    pool = SandboxPool(tmp_path / "pool")
    with pytest.warns(SandboxWarning):
        session = Sandbox("subprocess", pool=pool).open()
    with pytest.raises(DataError, match="use bubblewrap"):
        session.fork()
    await session.close()
    pool.close()


async def test_paths_that_lead_out_are_refused_and_links_are_not_followed(session: Session, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2", encoding="utf-8")
    await session.run(f"ln -s {tmp_path}/secret link; ln -s / root; ln -s /proc/self/root up")
    for name in ("../../secret", "/etc/passwd", f"{tmp_path}/secret", "a/../../b", ""):
        with pytest.raises(DataError):
            session.files.read(name)
        with pytest.raises(DataError):
            session.files.write(name, b"x")
    for name in ("link", f"root{tmp_path}/secret", "up/etc/passwd"):
        with pytest.raises(OSError, match=r"Too many levels|Not a directory|No such file"):
            session.files.read(name)
    assert "hunter2" not in await output(session, f"cat link root{tmp_path}/secret ../..{tmp_path}/secret")
    fork = session.fork()
    assert (await output(fork, "readlink link")) == f"{tmp_path}/secret"
    await fork.close()


async def test_nothing_is_written_outside_its_layers(session: Session) -> None:
    places = ["/x", "/usr/x", "/etc/x", "/opt/x", "/proc/sys/kernel/hostname", "/bin/ls"]
    text = await output(session, f"for p in {' '.join(places)}; do echo hi > $p; done; echo changed > data/a.csv")
    assert text.count("Read-only") + text.count("Permission denied") == len(places)
    fresh = session.fork()
    assert await output(fresh, "cat data/a.csv") == "changed"
    await fresh.close()


async def test_namespaces_and_mounts_cannot_be_made(session: Session) -> None:
    text = await output(
        session,
        "unshare -U true; unshare -rm true; mount -t tmpfs none /work; umount /work; echo $? $(cat data/a.csv)",
    )
    assert text.count("not permitted") + text.count("must be superuser") >= 3
    assert text.endswith(" 1,2")


async def test_a_fork_bomb_is_contained_and_the_session_goes_on(session: Session) -> None:
    before = processes_below(os.getpid())
    started = time.monotonic()
    await session.run("b() { b | b & }; b; b", deadline_s=2.0)
    assert time.monotonic() - started < 20
    assert await output(session, "echo alive") == "alive"
    await session.close()
    assert processes_below(os.getpid()) <= before


async def test_a_full_disk_stops_the_command_and_not_the_machine(session: Session, tmp_path: Path) -> None:
    fill = "n=0; while :; do n=$((n+1)); head -c 500000 /dev/zero > $D/f$n || break; done"
    for folder in ("/work", "/tmp"):
        result = await session.run(f"D={folder}; {fill}", deadline_s=5.0)
        assert result.to_text().endswith("[stopped: more than 2 MB in files]")
        used = sum(path.lstat().st_blocks * 512 for path in (tmp_path / "pool").rglob("*"))
        assert used < 2 << 30
        await session.run(f"rm -f {folder}/f*")
    result = await session.run("cd /work; mkdir many; i=0; while :; do : > many/$i; i=$((i+1)); done", deadline_s=20.0)
    assert result.ending == "disk_limit"
    await session.run("rm -rf many", deadline_s=20.0)  # a command that only removes files may go on
    assert "Operation not supported" in await output(session, "ls many; fallocate -l 1M big")


async def test_a_flood_of_output_is_cut_and_the_shell_goes_on(session: Session) -> None:
    result = await session.run("X=5; yes spam")
    assert result.ending == "output_limit"
    assert await output(session, "echo $X") == "5"


async def test_daemons_end_with_their_command(session: Session) -> None:
    mark = f"77.{os.getpid()}"
    script = (
        f"(setsid sleep {mark} &) ; nohup sleep {mark} >/dev/null 2>&1 & (trap '' HUP TERM; sleep {mark}) & echo on"
    )
    assert await output(session, script) == "on"
    deadline = time.monotonic() + 120  # one that was killed is seen until it is gone
    while marked_processes(mark):
        assert time.monotonic() < deadline
    fork = session.fork()
    assert not marked_processes(mark)
    await fork.close()


async def test_there_is_no_network_in_a_fork_either(session: Session) -> None:
    fork = session.fork()
    text = await output(fork, "(exec 3<>/dev/tcp/10.0.0.1/80) 2>&1; cat /proc/net/dev | tail -n +3 | cut -d: -f1")
    assert "Network is unreachable" in text
    assert text.split()[-1] == "lo"
    await fork.close()
