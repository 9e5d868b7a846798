"""Many clients of the real tinker SDK train and sample on one server at once; nothing is lost, doubled or starved.

    make campaign NAME=service_load ARGS="--clients 32 --seconds 60"

Every client trains the same datums in the same order from the same seed, so all must be told the same losses: a step
that was lost, or applied twice, shows in every loss after it. A client that runs alone afterwards says what they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service_process import ServerProcess, sdk_python

SDK = ("tinker", "0.36.0")
CLIENT = Path(__file__).parents[1] / "contract" / "sdk" / "load_client.py"
LOSS_TOLERANCE = 1e-4
"""Shared passes round differently from lone ones, and training carries the difference on."""
SLACK_S = 120.0
"""How long clients may take beyond the time they were given: to start, and to finish what they had sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What the clients saw."""

    clients: list[dict[str, Any]]
    alone: dict[str, Any]
    log: str

    @property
    def steps(self) -> list[int]:
        return [len(client["losses"]) for client in self.clients]

    @property
    def loss_gap(self) -> float:
        """The largest relative difference of a loss from the one that a lone client was told at that step."""
        reference = self.alone["losses"]
        return max(
            abs(loss - expected) / max(1.0, abs(expected))
            for client in self.clients
            for loss, expected in zip(client["losses"], reference, strict=False)
        )

    def problems(self) -> list[str]:
        """Everything that must not happen, in words."""
        found = []
        reference = self.alone["losses"]
        for client in [*self.clients, self.alone]:
            name = f"client {client['client']}"
            if client["error"]:
                found.append(f"{name}: {client['error']}")
            if client["counts"] != list(range(1, len(client["counts"]) + 1)):
                found.append(f"{name}: the server counted its steps as {client['counts'][:20]}...")
            for step, (loss, expected) in enumerate(zip(client["losses"], reference, strict=False)):
                if abs(loss - expected) > LOSS_TOLERANCE * max(1.0, abs(expected)):
                    found.append(f"{name}: step {step} has loss {loss}, alone it is {expected}")
                    break
        if max(self.steps) > 2 * min(self.steps):
            found.append(f"unfair: steps per client are {sorted(self.steps)}")
        found += [f"the server's log: {line}" for line in self.log.splitlines() if "ERROR" in line or "Trace" in line]
        return found

    def summary(self) -> dict[str, Any]:
        steps = sorted(self.steps)
        return {
            "clients": len(steps),
            "steps": sum(steps),
            "steps_min": steps[0],
            "steps_max": steps[-1],
            "max_over_min": steps[-1] / max(steps[0], 1),
            "samples": sum(client["num_samples"] for client in self.clients),
            "slowest_step_s": max(client["slowest_step_s"] for client in self.clients),
            "loss_gap": self.loss_gap,
            "errors": sum(1 for client in self.clients if client["error"]),
            "problems": self.problems(),
        }


def client_process(python: Path, url: str, **options: Any) -> subprocess.Popen[str]:
    """A process of SDK clients; it says `ready` and waits for a line."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-load",
        "TINKER_TELEMETRY": "0",
    }
    return subprocess.Popen(
        [str(python), str(CLIENT), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first == "ready\n", f"the clients did not start: {first!r}"


def tell(process: subprocess.Popen[str], word: str) -> None:
    """`go` starts the clients of a process, `stop` ends them after the step they are at."""
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def reports(process: subprocess.Popen[str], timeout_s: float) -> list[dict[str, Any]]:
    """What the clients of a process saw, once they are done."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return [json.loads(line) for line in output.splitlines()]


def run_alone(python: Path, url: str, index: int, steps: int) -> dict[str, Any]:
    """One client that has the server for itself."""
    process = client_process(python, url, first=index, seconds=SLACK_S, max_steps=steps, sample_every=0)
    wait_until_ready(process)
    tell(process, "go")
    (report,) = reports(process, 2 * SLACK_S)
    return report


def run_load(data_dir: Path, *, clients: int, seconds: float, processes: int, max_reference: int = 200) -> LoadReport:
    """Run `clients` at once for `seconds`, then one alone for as many steps as the fastest took."""
    python = sdk_python(*SDK)
    share = -(-clients // processes)
    with ServerProcess(data_dir) as server:
        running = [
            client_process(python, server.url, first=first, clients=min(share, clients - first), seconds=seconds)
            for first in range(0, clients, share)
        ]
        for process in running:
            wait_until_ready(process)
        for process in running:
            tell(process, "go")
        found = [report for process in running for report in reports(process, seconds + SLACK_S)]
        most = min(max(len(report["losses"]) for report in found), max_reference)
        alone = run_alone(python, server.url, clients, most)
    return LoadReport(clients=found, alone=alone, log="".join(server.log))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=4, help="that the clients are spread over")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = run_load(
            Path(directory), clients=options.clients, seconds=options.seconds, processes=options.processes
        )
    summary = report.summary()
    print(json.dumps(summary, indent=2))
    return 1 if summary["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
