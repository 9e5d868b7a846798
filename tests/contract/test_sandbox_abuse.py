"""Whatever a program tries, it stays in the sandbox, and the policy is told in words what happened."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import marked_processes, processes_below
from turnwise.envs.sandbox import Limits, Sandbox, SandboxResult
from turnwise.envs.sandbox.pool import SandboxPool
from turnwise.errors import DataError

SMALL = Limits(
    wall_s=3.0,
    cpu_s=2,
    memory_bytes=256 << 20,
    processes=24,
    file_bytes=4 << 20,
    disk_bytes=8 << 20,
    output_bytes=100_000,
)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(limits=SMALL)


async def run_python(sandbox: Sandbox, source: str, limits: Limits = SMALL) -> SandboxResult:
    return await sandbox.run(["python3", "main.py"], files={"main.py": source}, limits=limits)


async def test_a_fork_bomb_runs_into_the_limit_on_processes(sandbox: Sandbox) -> None:
    source = "import os, time\nn = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            time.sleep(60)\n"
    source += "        n += 1\nexcept OSError as error:\n    print(n, error)"
    result = await run_python(sandbox, source)
    count, _, text = result.stdout.partition(" ")
    assert int(count) < SMALL.processes
    assert "Resource temporarily unavailable" in text


async def test_a_stubborn_fork_bomb_is_killed_at_the_deadline(sandbox: Sandbox) -> None:
    before = processes_below(os.getpid())
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    started = time.monotonic()
    result = await run_python(sandbox, bomb, Limits(wall_s=1.0, cpu_s=10, processes=24))
    assert time.monotonic() - started < 30
    assert result.to_text() == "[stopped: not done after 1 s; it was killed with all of its processes]"
    assert processes_below(os.getpid()) <= before


async def test_a_memory_hog_gets_a_memory_error(sandbox: Sandbox) -> None:
    result = await run_python(sandbox, "hog = []\nwhile True:\n    hog.append(bytearray(1 << 20))")
    assert "MemoryError" in result.to_text()
    assert result.exit_code == 1


async def test_hogs_that_share_the_memory_among_them_are_stopped(sandbox: Sandbox) -> None:
    source = "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        break\n"
    source += "hog = bytearray(os.urandom(1 << 20)) * 100\ntime.sleep(60)"
    result = await run_python(sandbox, source, Limits(wall_s=10, memory_bytes=256 << 20, processes=24))
    assert result.to_text() == "[stopped: more than 256 MB of memory]"


async def test_endless_output_is_cut_off(sandbox: Sandbox) -> None:
    result = await sandbox.run(["yes", "spam"])
    assert result.ending == "output_limit"
    assert len(result.stdout) == SMALL.output_bytes
    text = result.to_text(200)
    assert len(text) < 300
    assert text.endswith("[stopped: more than 100000 bytes of output]")


async def test_there_is_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(0.2)
        source = "import socket\nfor host in ('127.0.0.1', '10.0.0.1', '2001:db8::1'):\n    try:\n"
        source += f"        socket.create_connection((host, {port}), timeout=1)\n        print('connected')\n"
        source += "    except OSError as error:\n        print(error)"
        result = await run_python(sandbox, source)
        with pytest.raises(TimeoutError):
            server.accept()
    assert "connected" not in result.stdout
    assert "Connection refused" in result.stdout  # its own loopback, on which nobody listens
    assert result.stdout.count("Network is unreachable") == 2


async def test_home_and_environment_cannot_be_read(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    home = Path.home()
    script = f"env; cat /proc/1/environ; ls -A {home} /root /home /etc/shadow {Path(__file__).parent}; cat /etc/passwd"
    result = await sandbox.run(["bash", "-c", script])
    text = result.stdout + result.stderr
    assert "hunter2" not in text
    assert "SECRET_TOKEN" not in text
    for hidden in {str(home), "/root", "/home", "/etc/shadow", str(Path(__file__).parent)}:
        assert f"ls: cannot access '{hidden}': No such file or directory" in text
    assert [line.split(":")[0] for line in text.splitlines() if ":x:" in line] == ["root", "agent"]


async def test_the_program_is_nobody_with_no_rights(sandbox: Sandbox) -> None:
    result = await sandbox.run(["bash", "-c", "id -u; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status; ls /sys"])
    user, *rest = result.stdout.split()
    assert int(user) != 0
    assert rest == ["NoNewPrivs:", "1", "CapEff:", "0" * 16, "CapBnd:", "0" * 16] or set(rest) == {
        "NoNewPrivs:",
        "1",
        "CapEff:",
        "CapBnd:",
        "0" * 16,
    }
    assert "No such file" in result.stderr


async def test_nothing_can_be_written_outside(sandbox: Sandbox) -> None:
    places = ["/x", "/usr/x", "/etc/x", "/dev/x", "/opt/x", "/opt/bin/x", "/proc/sys/kernel/hostname", "/bin/ls"]
    result = await sandbox.run(["bash", "-c", f"for place in {' '.join(places)}; do echo hi > $place; done; ls /work"])
    refused = [line for line in result.stderr.splitlines() if "Read-only" in line or "Permission denied" in line]
    assert len(refused) == len(places)


async def test_tmp_and_work_are_its_own_and_new_each_time(sandbox: Sandbox) -> None:
    marker = f"turnwise-{os.getpid()}"
    first = await sandbox.run(["bash", "-c", f"touch /tmp/{marker} /work/{marker}; ls /tmp /work"])
    assert first.stdout.count(marker) == 2
    assert not Path("/tmp", marker).exists()
    assert marker not in (await sandbox.run(["ls", "/tmp", "/work"])).stdout


async def test_children_do_not_survive_their_program(sandbox: Sandbox) -> None:
    mark = f"66.{os.getpid()}"
    script = f"setsid sleep {mark} >/dev/null 2>&1 & nohup sleep {mark} >/dev/null 2>&1 & disown -a; echo started"
    result = await sandbox.run(["bash", "-c", script])
    assert (result.ending, result.stdout) == ("finished", "started\n")
    assert not marked_processes(mark)


async def test_a_child_that_holds_the_output_open_does_not_hold_up_the_result(sandbox: Sandbox) -> None:
    result = await sandbox.run(["bash", "-c", "(trap '' TERM HUP; sleep 300) & echo started"])
    assert result.ending == "finished"
    assert result.wall_s < 30


async def test_links_lead_nowhere_inside_and_are_not_followed_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2", encoding="utf-8")
    session = sandbox.open()
    try:
        await session.run(f"ln -s {secret} link; ln -s {tmp_path} folder; ln -s / root; mkfifo pipe; echo fine > real")
        assert "hunter2" not in (await session.run("cat link folder/secret root/etc/shadow")).stdout
        for name in ("link", "folder/secret", "root/etc/passwd", "pipe"):
            with pytest.raises(OSError, match=r"symbolic link|Not a directory|not a regular file"):
                session.files.read(name)
        with pytest.raises(DataError, match="expected the path of a file"):
            session.files.read("../../secret")
        assert session.files.read_all(max_bytes=10_000) == {"real": b"fine\n"}
        session.files.write("link", b"mine")  # takes the link's place
        with pytest.raises(OSError, match="Not a directory"):
            session.files.write("folder/secret", b"mine")
        assert secret.read_text(encoding="utf-8") == "hunter2"
        assert (await session.run("cat link")).stdout == "mine"
    finally:
        await session.close()


async def test_huge_files_are_refused_one_by_one_and_together(sandbox: Sandbox) -> None:
    one = await sandbox.run(["bash", "-c", "head -c 100M /dev/zero > big"])
    assert one.to_text().endswith("[stopped: a file larger than 4 MB]")
    many = await sandbox.run(["bash", "-c", "for i in {1..9}; do head -c 3M /dev/zero > $i || exit 7; done"])
    assert "No space left on device" in many.to_text()
    elsewhere = await sandbox.run(["bash", "-c", "for i in {1..9}; do head -c 3M /dev/zero > /tmp/$i || exit 7; done"])
    assert "No space left on device" in elsewhere.to_text()
    shared = await sandbox.run(["bash", "-c", "for i in {1..9}; do head -c 3M /dev/zero > /dev/shm/$i || exit 7; done"])
    assert "No space left on device" in shared.to_text()


async def test_signals_reach_nobody_outside(sandbox: Sandbox) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        source = f"import os, signal\nfor pid in (os.getppid(), {os.getpid()}, {bystander.pid}, 1, -1):\n    try:\n"
        source += "        os.kill(pid, signal.SIGTERM)\n        os.kill(pid, signal.SIGKILL)\n"
        source += "    except OSError as error:\n        print(pid, error)\nprint('still here')"
        result = await run_python(sandbox, source)
        assert bystander.poll() is None
        bystander.kill()
    assert "still here" in result.stdout
    assert f"{os.getpid()} [Errno 3] No such process" in result.stdout


async def test_cpu_time_is_limited(sandbox: Sandbox) -> None:
    result = await run_python(sandbox, "while True: pass", Limits(wall_s=20, cpu_s=1))
    assert result.to_text().endswith("[stopped: more than 1 s of CPU time]")


async def test_installed_packages_and_turnwise_are_not_there(sandbox: Sandbox) -> None:
    result = await run_python(sandbox, "import sys\nprint(sys.prefix)\nimport turnwise")
    assert "ModuleNotFoundError: No module named 'turnwise'" in result.stderr
    assert str(Path.home()) not in result.stdout + result.stderr


def test_a_parent_that_is_killed_takes_its_sandboxes_along_and_its_files_are_collected(tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from turnwise.envs.sandbox import Sandbox\n"
        "from turnwise.envs.sandbox.pool import SandboxPool\n"
        "async def main():\n"
        "    session = Sandbox(pool=SandboxPool(pathlib.Path(sys.argv[1]))).open(files={'a.txt': 'x'})\n"
        "    await session.run('echo started')\n"
        "    print('up', flush=True)\n"
        "    await session.run('sleep 300', deadline_s=300)\n"
        "asyncio.run(main())\n"
    )
    root = tmp_path / "pool"
    with subprocess.Popen([sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        below = processes_below(parent.pid)
        assert below
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while any(is_alive(pid) for pid in below):
        assert time.monotonic() < deadline, "processes of a killed parent live on"
        time.sleep(0.02)
    assert list(root.rglob("a.txt"))
    pool = SandboxPool(root)
    assert pool.num_collected == 1
    assert not list(root.rglob("a.txt"))
    pool.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
