"""A session keeps its state from command to command, survives the death of its shell, and ends with its lease."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from processes import marked_processes
from turnwise.envs.sandbox import Limits, Sandbox, Session
from turnwise.envs.sandbox.pool import SandboxPool
from turnwise.errors import DataError, SessionClosedError

LIMITS = Limits(wall_s=5.0, memory_bytes=256 << 20, disk_bytes=4 << 20, output_bytes=50_000)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[SandboxPool]:
    pool = SandboxPool(tmp_path / "pool")
    yield pool
    pool.close()


@pytest.fixture
async def session(pool: SandboxPool) -> AsyncIterator[Session]:
    session = Sandbox(limits=LIMITS, pool=pool).open(files={"pkg/mod.py": "x = 1\n"})
    yield session
    await session.close()


async def output(session: Session, command: str, deadline_s: float | None = None) -> str:
    return (await session.run(command, deadline_s)).to_text()


async def test_folder_variables_and_files_stay_between_commands(session: Session) -> None:
    assert await output(session, "cd pkg; X=7; echo y = 2 >> mod.py") == "[no output]"
    assert await output(session, "echo $X in $PWD; cat mod.py") == "7 in /work/pkg\nx = 1\ny = 2"
    assert session.files.read("pkg/mod.py") == b"x = 1\ny = 2\n"


async def test_the_event_loop_goes_on_while_files_wait_for_a_command(session: Session) -> None:
    command = asyncio.ensure_future(session.run("sleep 0.5; echo x = 3 >> pkg/mod.py"))
    await asyncio.sleep(0)
    reading = asyncio.ensure_future(session.with_files(lambda files: files.read("pkg/mod.py")))
    rounds = 0
    while not reading.done():
        await asyncio.sleep(0.01)
        rounds += 1
    assert await reading == b"x = 1\nx = 3\n"
    assert rounds >= 10
    assert (await command).is_ok


async def test_exit_codes_and_errors_come_back_in_order(session: Session) -> None:
    assert await output(session, "echo one; ls nowhere; echo two; false") == (
        "one\nls: cannot access 'nowhere': No such file or directory\ntwo\n[exit code 1]"
    )


@pytest.mark.parametrize("command", ["echo 'open", "if true", "cat <<EOF\nno end", "((((", "a() {"])
async def test_broken_syntax_is_an_error_and_no_end(session: Session, command: str) -> None:
    result = await session.run(command)
    assert result.ending == "finished"
    assert await output(session, "echo fine") == "fine"


async def test_a_command_cannot_read_the_ones_that_follow(session: Session) -> None:
    assert await output(session, "cat; read line; echo got $line.") == "got ."
    assert await output(session, "echo fine") == "fine"


async def test_output_without_a_newline_at_its_end_is_kept_as_it_is(session: Session) -> None:
    assert (await session.run("printf 'a\\nb'")).stdout == "a\nb"
    assert (await session.run("printf 'a\\n\\n'")).stdout == "a\n\n"


async def test_background_processes_end_with_their_command(session: Session) -> None:
    mark = f"63.{os.getpid()}"
    assert await output(session, f"sleep {mark} & setsid sleep {mark} & echo started") == "started"
    assert not marked_processes(mark)
    assert await output(session, "jobs; echo fine") == "fine"


async def test_the_death_of_background_processes_is_never_told_later(pool: SandboxPool) -> None:
    async def told_in_the_next_command() -> str:
        session = Sandbox(limits=LIMITS, pool=pool).open()
        try:
            await session.run("sleep 60 & setsid sleep 60 &")
            return await output(session, "jobs; echo fine")
        finally:
            await session.close()

    for _ in range(10):  # side by side, because it is a matter of timing
        assert await asyncio.gather(*(told_in_the_next_command() for _ in range(8))) == ["fine"] * 8


async def test_a_late_command_is_stopped_and_the_shell_goes_on(session: Session) -> None:
    await session.run("X=7")
    result = await session.run("echo before; sleep 60", 0.3)
    assert result.to_text() == "before\n[stopped: not done after 0.3 s; it was killed with all of its processes]"
    assert await output(session, "echo $X") == "7"
    assert session.num_restarts == 0


async def test_every_part_of_a_late_command_is_stopped_and_the_shell_goes_on(session: Session) -> None:
    await session.run("X=7")
    late = "[stopped: not done after {} s; it was killed with all of its processes]"
    for deadline_s in (0.3, 0.001):  # with the short one the shell has not yet read what it is to do
        result = await session.run("sleep 60; sleep 60; sleep 60", deadline_s)
        assert result.to_text() == late.format(deadline_s)
    assert await output(session, "echo $X") == "7"
    assert session.num_restarts == 0


async def test_a_shell_that_ended_is_reported_and_replaced_with_its_files(session: Session) -> None:
    await session.run("cd pkg; X=7")
    gone = await session.run("echo bye; exit 3")
    assert gone.to_text() == (
        "bye\n[the shell ended with exit code 3; a new one was started: files are kept, variables are not]"
    )
    assert await output(session, "echo $X in $PWD; cat mod.py") == "in /work/pkg\nx = 1"
    assert session.num_restarts == 1


@pytest.mark.parametrize(
    ("command", "ending"),
    [
        ("while :; do :; done", "timeout"),
        ("while :; do echo spam; done", "output_limit"),
        ("kill -9 $$", "shell_died"),
        ("exec sleep 60", "timeout"),
        ("trap '' EXIT INT TERM; while :; do :; done", "timeout"),
    ],
)
async def test_a_shell_that_will_not_stop_is_replaced(session: Session, command: str, ending: str) -> None:
    result = await session.run(command, 0.3)
    assert result.ending == ending
    assert "files are kept, variables are not" in result.to_text()
    assert await output(session, "cat pkg/mod.py") == "x = 1"


async def test_closed_streams_and_marks_in_the_output_confuse_nobody(session: Session) -> None:
    await session.run("exec 1>&- 2>&-")
    assert await output(session, "echo fine") == "fine"
    assert await output(session, "IFS=0123456789") == "[no output]"
    await session.run("exec 251>&-; echo turnwise-0 0 /")
    assert (await session.run("echo fine", 1.0)).ending in ("finished", "timeout", "shell_died")
    assert await output(session, "echo fine") == "fine"


async def test_memory_and_files_of_a_session_are_watched(session: Session) -> None:
    hog = "for i in 1 2 3 4 5; do python3 -c 'x = bytearray(100 << 20); import time; time.sleep(60)' & done; wait"
    assert (await session.run(hog)).ending == "memory_limit"
    assert (await session.run("for i in {1..9}; do head -c 900K /dev/zero > f$i; done")).ending == "disk_limit"
    assert await output(session, "rm f*; echo room") == "room"


async def test_a_cancelled_command_is_killed(session: Session) -> None:
    mark = f"64.{os.getpid()}"
    running = asyncio.create_task(session.run(f"sleep {mark}", 60.0))
    while not marked_processes(mark):
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await output(session, "echo next") == "next"
    assert not marked_processes(mark)


async def test_commands_that_no_pipe_can_carry_are_refused(session: Session) -> None:
    with pytest.raises(DataError, match="write a file instead"):
        await session.run("x" * 100_000)


async def test_sessions_are_found_by_id_until_they_are_closed(pool: SandboxPool) -> None:
    session = Sandbox(limits=LIMITS, pool=pool).open()
    assert pool.get(session.id) is session
    await session.close()
    await session.close()
    with pytest.raises(SessionClosedError, match="it was closed"):
        await session.run("echo hi")
    with pytest.raises(SessionClosedError, match="no session"):
        pool.get(session.id)


async def test_a_forgotten_session_ends_with_its_lease_and_a_used_one_does_not(pool: SandboxPool) -> None:
    sandbox = Sandbox(limits=LIMITS, pool=pool)
    forgotten, used = sandbox.open(lease_s=2.0), sandbox.open(lease_s=2.0)
    await forgotten.run("echo hi")
    deadline = time.monotonic() + 120
    while not forgotten.is_closed:
        assert time.monotonic() < deadline
        await used.run("echo hi")
    assert not used.is_closed
    with pytest.raises(SessionClosedError, match=r"its lease of 2 s ran out"):
        await forgotten.run("echo hi")
    assert pool.ids == (used.id,)
    await used.close()


async def test_sessions_do_not_see_each_other(pool: SandboxPool) -> None:
    sandbox = Sandbox(limits=LIMITS, pool=pool)
    sessions = [sandbox.open(files={"name": str(number)}) for number in range(4)]
    assert await asyncio.gather(*(output(one, "cat name; touch /tmp/x; sleep 0.1; ls /tmp") for one in sessions)) == [
        f"{number}x" for number in range(4)
    ]
    shells = "for place in /proc/[0-9]*; do read name < $place/comm; [ $name = bash ] && echo bash; done; true"
    assert await asyncio.gather(*(output(one, shells) for one in sessions)) == ["bash"] * 4
    for one in sessions:
        await one.close()
