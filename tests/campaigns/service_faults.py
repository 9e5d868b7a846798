"""A server that is killed again and again under load, and one whose disk is full: nothing is lost, doubled or broken.

    make campaign NAME=service_faults ARGS="kill --kills 20"
    make campaign NAME=service_faults ARGS="disk"

`kill` sends SIGKILL at random moments while clients of the real tinker SDK train, sample and save. After each kill, and
before the restart, everything on disk is checked against its checksums. `disk` gives the server a disk of a few MiB (a
tmpfs in a mount namespace of its own) and fills it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from campaigns.service_load import SDK, LoadReport, client_process, reports, run_alone, tell, wait_until_ready
from service_process import ServerProcess, sdk_python
from turnwise.client.checkpoints import verify
from turnwise.errors import CheckpointError

SETTLE_S = 5.0
"""How long clients go on after the last restart."""
END_S = 120.0


@dataclass(slots=True)
class DiskReport:
    """What the data directory of a server that does not run holds."""

    num_checkpoints: int = 0
    num_snapshots: int = 0
    num_published: int = 0
    damaged: list[str] = field(default_factory=list)


def check_disk(data_dir: Path) -> DiskReport:
    """Read the database and verify every directory that it, or its name, says is whole."""
    report = DiskReport()
    database = sqlite3.connect(data_dir / "service.sqlite3")
    try:
        if database.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            report.damaged.append("service.sqlite3")
        rows = list(database.execute("SELECT model_id, kind, name FROM checkpoints"))
        snapshots = list(database.execute("SELECT model_id, snapshot FROM runs WHERE snapshot IS NOT NULL"))
        published = list(database.execute("SELECT directory FROM samplers WHERE directory IS NOT NULL"))
    finally:
        database.close()
    named = [data_dir / "checkpoints" / model.replace(":", "-") / kind / name for model, kind, name in rows]
    found = [path for path in (data_dir / "checkpoints").glob("*/*/*") if not path.name.startswith(".")]
    states = [data_dir / "state" / model.replace(":", "-") / name for model, name in snapshots]
    sampled = [data_dir / "published" / name for (name,) in published]
    report.num_checkpoints, report.num_snapshots = len(rows), len(states)
    report.num_published = len(sampled)
    for directory in {*named, *found, *states, *sampled}:
        try:
            verify(directory)
        except CheckpointError as error:
            report.damaged.append(f"{directory.relative_to(data_dir)}: {error}")
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class KillReport:
    load: LoadReport
    disks: list[DiskReport]
    num_unreadable: int
    """Checkpoints that a client was told of and cannot load."""

    def problems(self) -> list[str]:
        damaged = [f"after kill {index + 1}: {line}" for index, disk in enumerate(self.disks) for line in disk.damaged]
        lost = [f"{self.num_unreadable} saved checkpoints are gone"] if self.num_unreadable else []
        return [*damaged, *lost, *self.load.problems()]


def run_kills(
    data_dir: Path,
    *,
    kills: int,
    clients: int,
    processes: int,
    seed: int,
    autosave: int = 3,
    settle_s: float = SETTLE_S,
    max_reference: int = 1000,
) -> KillReport:
    """Kill a server under load `kills` times; returns what was on disk each time, and what the clients saw."""
    moments = random.Random(seed)
    python = sdk_python(*SDK)
    share = -(-clients // processes)
    disks: list[DiskReport] = []
    with ServerProcess(data_dir, "--autosave", str(autosave)) as server:
        options = {"clients": share, "seconds": 3600, "sample_every": 2, "save_every": 4}
        running = [client_process(python, server.url, first=i * share, **options) for i in range(processes)]
        for process in running:
            wait_until_ready(process)
        for process in running:
            tell(process, "go")
        for _ in range(kills):
            time.sleep(moments.uniform(0.2, 4.0))  # the moment is what is drawn
            server.kill()
            disks.append(check_disk(data_dir))
            server.start()
        time.sleep(settle_s)
        for process in running:
            tell(process, "stop")
        found = [report for process in running for report in reports(process, END_S)]
        most = min(max(len(report["losses"]) for report in found), max_reference)
        alone = run_alone(python, server.url, clients, most)
        unreadable = _count_unreadable(server.url, found)
        load = LoadReport(clients=found, alone=alone, log="".join(server.log))
    disks.append(check_disk(data_dir))
    return KillReport(load=load, disks=disks, num_unreadable=unreadable)


def _count_unreadable(url: str, found: list[dict[str, Any]]) -> int:
    with httpx2.Client(base_url=f"{url}/api/v1", timeout=30) as http:
        paths = [path for client in found for path in client["saved"].values()]
        return sum(http.post("/weights_info", json={"tinker_path": path}).status_code != 200 for path in paths)


def kill_main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as directory:
        report = run_kills(
            Path(directory),
            kills=options.kills,
            clients=options.clients,
            processes=options.processes,
            seed=options.seed,
        )
    problems = report.problems()
    if options.keep is not None:
        options.keep.write_text(json.dumps([*report.load.clients, report.load.alone]))
    summary = {
        "kills": options.kills,
        **{key: value for key, value in report.load.summary().items() if key != "problems"},
        "checkpoints": report.disks[-1].num_checkpoints,
        "directories_verified": sum(d.num_checkpoints + d.num_snapshots + d.num_published for d in report.disks),
        "problems": problems,
    }
    print(json.dumps(summary, indent=2))
    return 1 if problems else 0


# a full disk


class Filler:
    """A client that trains and saves until the disk is full."""

    def __init__(self, url: str) -> None:
        self.http = httpx2.Client(base_url=f"{url}/api/v1", timeout=60)
        self.seq = 0
        self.num_steps = 0
        session = self.http.post("/create_session", json={}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8, "seed": 1}}
        created = self.http.post("/create_model", json=body).json()
        self.model = created["model_id"]
        assert "error" not in self.result(created)

    def result(self, promise: dict[str, Any]) -> dict[str, Any]:
        while True:
            answer = self.http.post("/retrieve_future", json={"request_id": promise["request_id"]})
            if answer.status_code != 408:
                assert answer.status_code == 200, answer.text
                return answer.json()

    def send(self, endpoint: str, **body: Any) -> dict[str, Any]:
        """One numbered request; a failure is returned, with its status if it was refused."""
        answer = self.http.post(endpoint, json={"model_id": self.model, "seq_id": self.seq + 1, **body})
        if answer.status_code != 200:
            return {"error": answer.json()["detail"], "status": answer.status_code}
        self.seq += 1
        return self.result(answer.json())

    def step(self) -> dict[str, Any]:
        datum = {
            "model_input": {"chunks": [{"tokens": [5, 6, 7, 8]}]},
            "loss_fn_inputs": {"target_tokens": {"data": [6, 7, 8, 9], "dtype": "int64"}},
        }
        output = self.send("/forward_backward", forward_backward_input={"data": [datum], "loss_fn": "cross_entropy"})
        if "error" in output:
            return output
        taken = self.send("/optim_step", adam_params={"learning_rate": 1e-2})
        if "error" not in taken:
            self.num_steps += 1
            assert taken["metrics"]["optimizer_step"] == self.num_steps, "a step was lost or taken twice"
        return taken


def run_full_disk(data_dir: Path) -> dict[str, Any]:
    """Fill the disk that `data_dir` is on, look at what the client is told, make room, and go on."""
    problems: list[str] = []
    ballast = data_dir.parent / "ballast"
    with ServerProcess(data_dir, "--autosave", "2") as server:
        client = Filler(server.url)
        for _ in range(3):
            assert "error" not in client.step()
        saved = client.send("/save_weights", path="before")
        with ballast.open("wb") as file:
            _fill(file.fileno(), leave=shutil.disk_usage(data_dir).free // 8)
        errors = _push_until_refused(client)
        _check_words(errors, data_dir, problems)
        server.kill()
        disk = check_disk(data_dir)
        start_error = _start_while_full(server)
        ballast.unlink()
        server.start()
        found = client.send("/load_weights", path=saved["path"], optimizer=True)
        client.num_steps = 3  # that is what the checkpoint holds
        for _ in range(3):
            outcome = client.step()
            if "error" in outcome:
                problems.append(f"after room was made: {outcome}")
        again = client.send("/save_weights", path="after")
        if "error" in found or "error" in again:
            problems.append(f"after room was made: {found} {again}")
        client.http.close()
        if "Traceback" in "".join(server.log):
            problems.append("a traceback in the log: " + "".join(server.log)[-3000:])
    problems += disk.damaged + check_disk(data_dir).damaged
    return {"errors": errors, "start_on_full_disk": start_error, "problems": problems}


def _fill(descriptor: int, leave: int) -> None:
    """Write until only `leave` bytes are free."""
    block = b"\1" * 4096
    while os.fstatvfs(descriptor).f_bavail * os.fstatvfs(descriptor).f_frsize > leave + len(block):
        os.write(descriptor, block)


def _push_until_refused(client: Filler) -> list[str]:
    """Everything the client is told on the way, until both training and saving are refused."""
    errors: dict[str, None] = {}
    for index in range(200):
        trained = client.step()
        kept = client.send("/save_weights", path=f"full-{index}")
        for outcome in (trained, kept):
            if "error" in outcome:
                errors[f"{outcome.get('status', 200)} {outcome['error']}"] = None
        if "error" in trained and "error" in kept:
            return list(errors)
    raise AssertionError(f"the disk never filled up; errors so far: {list(errors)}")


def _check_words(errors: list[str], data_dir: Path, problems: list[str]) -> None:
    for error in errors:
        if "disk" not in error:
            problems.append(f"an error that does not name the disk: {error}")
        if str(data_dir) in error or "Traceback" in error or error.startswith("500"):
            problems.append(f"an error that says too much: {error}")


def _start_while_full(server: ServerProcess) -> str:
    """What a server says that is started on the full disk; it may also just start."""
    known = len(server.log)
    try:
        server.start()
    except AssertionError:
        return "".join(server.log[known:])
    server.kill()
    return "it starts"


def disk_main(options: argparse.Namespace) -> int:
    if not options.is_inside:
        command = [sys.executable, "-m", "campaigns.service_faults", "disk", "--size-kib", str(options.size_kib)]
        return subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", *command, "--is-inside"], check=False
        ).returncode
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={options.size_kib}k", "tmpfs", directory], check=True)
        try:
            report = run_full_disk(Path(directory) / "data")
        finally:
            subprocess.run(["umount", directory], check=True)
    print(json.dumps(report, indent=2))
    return 1 if report["problems"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    campaigns = parser.add_subparsers(dest="campaign", required=True)
    kill = campaigns.add_parser("kill", help="kill -9 at random moments under load")
    kill.add_argument("--kills", type=int, default=20)
    kill.add_argument("--clients", type=int, default=4)
    kill.add_argument("--processes", type=int, default=2)
    kill.add_argument("--seed", type=int, default=0, help="of the moments")
    kill.add_argument("--keep", type=Path, help="write what every client saw to this file")
    disk = campaigns.add_parser("disk", help="a full disk")
    disk.add_argument("--size-kib", type=int, default=8192)
    disk.add_argument("--is-inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    return kill_main(options) if options.campaign == "kill" else disk_main(options)


if __name__ == "__main__":
    sys.exit(main())
