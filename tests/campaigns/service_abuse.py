"""Thousands of wrong requests to every endpoint: none ends in a 500, none is told a path, and the server works on.

    make campaign NAME=service_abuse ARGS="--requests 10000"

Two thirds come from schemathesis, which reads our OpenAPI document. The rest is made here: protobuf with broken bytes
or with lies in it, zstd bombs, bodies without end, JSON that is deep, huge or no JSON, and HTTP that is none.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import zstandard

from service_process import ROOT, ServerProcess, sdk_python
from turnwise.service.wire import proto as pb

SCHEMATHESIS = ("schemathesis", "4.32.5")
FUZZER = Path(__file__).parents[1] / "contract" / "sdk" / "fuzz_client.py"
FUZZ_S = 1800.0
PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}
MIB = 1 << 20


@dataclass(slots=True)
class AbuseReport:
    num_sent: int = 0
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    operations: int = 0
    log: str = ""


class Victim:
    """A server's client with objects of its own, which the wrong requests name."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.http = httpx2.Client(base_url=server.url, timeout=60)
        self.session = self.post("/create_session", {"tags": []})["session_id"]
        lora = {"rank": 4, "seed": 1}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        created = self.post("/create_model", body)
        self.result(created)
        self.model = created["model_id"]
        saved = self.post("/save_weights", {"model_id": self.model, "seq_id": 1, "path": "kept"})
        self.path = self.result(saved)["path"]
        sampler = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        self.sampler = self.post("/create_sampling_session", sampler)["sampling_session_id"]
        self.request_id = saved["request_id"]

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(f"/api/v1{path}", json=body)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def result(self, promise: dict[str, Any]) -> dict[str, Any]:
        outcome = self.post("/retrieve_future", {"request_id": promise["request_id"]})
        assert "error" not in outcome, outcome
        return outcome

    def live(self) -> dict[str, Any]:
        """What the fuzzer may name, what it must never read, and what it may."""
        ids = {
            "session_id": self.session,
            "model_id": self.model,
            "run_id": self.model,
            "sampling_session_id": self.sampler,
            "sampler_id": self.sampler,
            "request_id": self.request_id,
            "base_model": "tiny",
            "model": "tiny",
            "model_path": self.path,
            "tinker_path": self.path,
            "source_path": self.path,
            "reference_model_path": self.path,
            "source_paths": [self.path],
            "coefficients": [1.0],
            "target": {"sampling_session_id": self.sampler},
            "timeout": 0.05,
            "max_tokens": 4,
            "num_samples": 1,
            "kind": "weights",
        }
        return {"ids": ids, "forbidden": self.forbidden(), "told": self.told()}

    def forbidden(self) -> list[str]:
        data_dir = str(self.server.data_dir)
        return ["Traceback", "site-packages", 'File "', data_dir, str(ROOT), sys.prefix, "sqlite3."]

    def told(self) -> list[str]:
        """The tokenizer's directory, which a client on the same machine is told."""
        info = self.post("/get_info", {"model_id": self.model})
        return [info["model_data"]["tokenizer_id"]]

    def check_works(self) -> None:
        """A new client trains and samples as if nothing had happened."""
        session = self.post("/create_session", {})["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
        created = self.post("/create_model", body)
        self.result(created)
        losses = []
        for step in range(3):
            sent = self.http.post(
                "/api/v1/forward_backward", content=training_proto(created["model_id"], 2 * step + 1), headers=PROTOBUF
            )
            losses.append(self.result(sent.json())["metrics"]["loss:sum"])
            adam = {"model_id": created["model_id"], "seq_id": 2 * step + 2, "adam_params": {"learning_rate": 1e-2}}
            self.result(self.post("/optim_step", adam))
        assert losses[2] < losses[0], losses
        ask = {
            "sampling_session_id": self.sampler,
            "seq_id": 10**8,
            "prompt": {"chunks": [{"tokens": [5, 6, 7]}]},
            "sampling_params": {"max_tokens": 4},
        }
        assert self.result(self.post("/asample", ask))["sequences"]
        assert self.http.get("/api/v1/healthz").status_code == 200


def training_message(model: str, seq: int) -> Any:
    message = pb.message_class("ForwardBackwardRequest")(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(5, 11, dtype="<i4").tobytes()
    for key, values, dtype, code in (
        ("target_tokens", range(6, 12), "<i8", pb.DTYPE_INT64),
        ("weights", [1.0] * 6, "<f4", pb.DTYPE_FLOAT32),
    ):
        tensor = datum.loss_fn_inputs[key]
        tensor.dense, tensor.dtype = np.asarray(list(values), dtype=dtype).tobytes(), code
        tensor.shape.append(6)
    return message


def training_proto(model: str, seq: int) -> bytes:
    return training_message(model, seq).SerializeToString()


Request = tuple[str, str, dict[str, str], Any]
"""Method, path, headers, content."""


class Abuse:
    """Makes wrong requests by hand; endless, and the same for the same seed."""

    def __init__(self, victim: Victim, paths: list[tuple[str, str]], seed: int) -> None:
        self._victim = victim
        self._posts = [path for method, path in paths if method in ("POST", "PUT")]
        self._all = paths
        self._random = random.Random(seed)
        self._bomb = zstandard.ZstdCompressor(level=3).compress(bytes(512 * MIB))

    def requests(self) -> Iterator[Request]:
        kinds: list[tuple[int, Callable[[], Request]]] = [
            (30, self._broken_proto),
            (25, self._lying_proto),
            (5, self._broken_zstd),
            (20, self._broken_json),
            (10, self._wrong_type),
            (8, self._odd_path),
            (6, self._odd_headers),
        ]
        yield ("POST", "/api/v1/forward_backward", {**PROTOBUF, "content-encoding": "zstd"}, self._bomb)
        yield ("POST", "/api/v1/optim_step", {**JSON, "content-encoding": "zstd"}, self._bomb)
        yield ("POST", "/api/v1/create_session", JSON, bytes(65 * MIB))
        yield ("POST", "/api/v1/forward", JSON, (bytes(MIB) for _ in range(70)))
        yield ("POST", "/v1/chat/completions", JSON, b'{"messages": "' + b"a" * (20 * MIB) + b'"}')
        for path in self._posts:
            for opening in (b"[", b'{"a":', b'{"data":[', b'{"prompt":{"chunks":[{"tokens":['):
                yield ("POST", path, JSON, opening * 50_000)
        while True:
            yield self._random.choices([make for _, make in kinds], [weight for weight, _ in kinds])[0]()

    def _broken_proto(self) -> Request:
        data = bytearray(training_proto(self._model(), self._seq()))
        for _ in range(self._random.randint(1, 8)):
            at = self._random.randrange(len(data))
            match self._random.randrange(4):
                case 0:
                    data[at] = self._random.randrange(256)
                case 1:
                    data[at:at] = self._random.randbytes(self._random.randint(1, 20))
                case 2:
                    del data[at : at + self._random.randint(1, 20)]
                case _:
                    data[at] ^= 1 << self._random.randrange(8)
            if not data:
                break
        if self._random.random() < 0.1:
            data = bytearray(self._random.randbytes(self._random.randint(0, 300)))
        return "POST", "/api/v1/forward_backward", PROTOBUF, bytes(data)

    def _lying_proto(self) -> Request:
        """Protobuf that can be read, and says what cannot be."""
        message = training_message(self._model(), self._seq())
        datum = message.data[0]
        tensor = datum.loss_fn_inputs[self._random.choice(["target_tokens", "weights"])]
        match self._random.randrange(14):
            case 0:
                tensor.shape[:] = [self._random.choice([-1, 0, 2**62, 2**31, 5, 7])]
            case 1:
                tensor.shape[:] = [2**31, 2**31, 2]
            case 2:
                tensor.dtype = self._random.choice([0, 1, 2, 3, 4])
            case 3:
                tensor.dense = self._random.randbytes(self._random.randint(0, 60))
            case 4:
                tensor.sparse_csr.crow_indices = self._random.randbytes(8 * self._random.randint(0, 8))
                tensor.sparse_csr.col_indices = self._random.randbytes(8 * self._random.randint(0, 8))
                tensor.sparse_csr.values = self._random.randbytes(4 * self._random.randint(0, 8))
                tensor.shape[:] = [self._random.choice([6, 2**40]), self._random.choice([1, 2**30])]
            case 5:
                bad = self._random.choice([np.nan, np.inf, -np.inf, 3e38])
                datum.loss_fn_inputs["weights"].dense = np.full(6, bad, dtype="<f4").tobytes()
            case 6:
                datum.model_input[0].encoded_text.tokens = (
                    np.full(6, self._random.choice([-1, 2**31 - 1])).astype("<i4").tobytes()
                )
            case 7:
                datum.loss_fn_inputs["target_tokens"].dense = np.full(6, -(2**63)).astype("<i8").tobytes()
            case 8:
                message.loss_fn = self._random.choice(["", "x" * 1000, "ppo", "gspo", "value", "dpo", "__class__"])
            case 9:
                message.loss_fn_config[self._random.choice(["beta", "kl_coef", "x" * 2000])] = self._random.choice(
                    [np.nan, np.inf, -1.0, 1e308]
                )
            case 10:
                message.loss_fn_config_v2["kl_reference"].text = self._random.choice(
                    ["/etc/passwd", "tinker://a/weights/../../x", self._victim.path, "\0", "base"]
                )
                message.loss_fn_config_v2["kl_coef"].number = 0.1
            case 11:
                del message.data[:]
            case 12:
                del datum.model_input[:]
            case _:
                datum.loss_fn_inputs["k" * self._random.randint(1, 3000)].CopyFrom(tensor)
        return "POST", "/api/v1/forward_backward", PROTOBUF, message.SerializeToString()

    def _broken_zstd(self) -> Request:
        whole = zstandard.ZstdCompressor().compress(training_proto(self._model(), self._seq()))
        cut = whole[: self._random.randrange(len(whole))]
        body = self._random.choice([cut, whole + whole, b"\x28\xb5\x2f\xfd" + self._random.randbytes(40), b""])
        encoding = self._random.choice(["zstd", "zstd", "zstd", "gzip", "br", "zstd, zstd", "ZSTD", "x" * 500])
        return "POST", "/api/v1/forward_backward", {**PROTOBUF, "content-encoding": encoding}, body

    def _broken_json(self) -> Request:
        body = self._random.choice(
            [
                b"",
                b"null",
                b"[]",
                b"0",
                b'"x"',
                b"{",
                b"\xff\xfe{}",
                b'{"model_id": "\\ud800", "session_id": "\\ud800", "base_model": "\\ud800", "tags": ["\\ud800"]}',
                b'{"model_id": "\\u0000", "session_id": "\\u0000", "user_metadata": {"\\u0000": "\\u0000"}}',
                b'{"seq_id": ' + b"9" * 5000 + b', "model_id": "m", "num_samples": ' + b"9" * 5000 + b"}",
                b'{"seq_id": NaN, "temperature": Infinity, "learning_rate": -Infinity, "model_id": "m"}',
                b'{"seq_id": 1e400, "limit": 1e400, "ttl_seconds": 1e400}',
                json.dumps({"model_id": self._model(), "seq_id": self._seq(), "path": "../" * 50}).encode(),
                json.dumps({"model_id": self._model(), "seq_id": self._seq(), "path": "a" * 200}).encode(),
                json.dumps({"model_id": self._model(), "seq_id": 2**63 - 1}).encode(),
                json.dumps({"model_id": self._model(), "seq_id": self._seq(), "adam_params": {"beta1": 2}}).encode(),
                json.dumps({"session_id": self._victim.session, "model_seq_id": 2**63 - 1}).encode(),
                json.dumps({f"k{i}": i for i in range(20_000)}).encode(),
            ]
        )
        return "POST", self._random.choice(self._posts), JSON, body

    def _wrong_type(self) -> Request:
        kind = self._random.choice(["text/html", "multipart/form-data; boundary=x", "", "a" * 1000, "application/xml"])
        return "POST", self._random.choice(self._posts), {"content-type": kind}, self._random.randbytes(100)

    def _odd_path(self) -> Request:
        odd = self._random.choice(
            ["%00", "..%2f..%2fetc%2fpasswd", "%2e%2e/", "a" * 8000, "%ff%fe", "\\", "%0d%0aX: y"]
        )
        method, path = self._random.choice(self._all)
        head, brace, tail = path.partition("{")
        return method, f"{head}{odd}{tail.partition('}')[2] if brace else ''}", JSON, b"{}"

    def _odd_headers(self) -> Request:
        name, value = self._random.choice(
            [
                ("x-api-key", "eyJ" + "a" * 2000),
                ("x-api-key", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiAiMSIsICJleHAiOiAiOTk5OTk5OTk5OSJ9.AAAA"),
                ("x-api-key", "eyJ.eyJleHAiOiBbXX0.x"),
                ("authorization", "Bearer " + "x" * 5000),
                ("accept", "application/x-protobuf;q=zz, */*"),
                ("x-idempotency-key", "k" * 5000),
                ("range", "bytes=999999-1"),
                ("host", "evil.example"),
                ("expect", "200-maybe"),
            ]
        )
        method, path = self._random.choice(self._all)
        return method, path.replace("{", "").replace("}", ""), {**JSON, name: value}, b"{}"

    def _model(self) -> str:
        return self._random.choice(
            [self._victim.model, self._victim.model, "nobody:train:0", "", "x" * 300, "\U0001f4a5"]
        )

    def _seq(self) -> int:
        return self._random.choice([0, 1, 5, self._random.randrange(2, 100_000), 2**31 - 1])


def send_by_hand(victim: Victim, report: AbuseReport, count: int, seed: int) -> None:
    document = victim.http.get("/openapi.json").json()
    paths = [(method.upper(), path) for path, item in document["paths"].items() for method in item]
    forbidden, told = victim.forbidden(), victim.told()
    made = Abuse(victim, paths, seed).requests()
    for _ in range(count):
        method, path, headers, content = next(made)
        started = time.monotonic()
        label = f"{method} {path[:80]} {headers}"
        try:
            answer = victim.http.request(method, path, headers=headers, content=content)
        except httpx2.RemoteProtocolError as error:
            report.problems.append(f"{label}: {error}")
            continue
        except httpx2.WriteError:
            report.statuses["closed"] += 1  # a body that is too large is not read to its end
            report.num_sent += 1
            continue
        report.num_sent += 1
        report.slowest_s = max(report.slowest_s, time.monotonic() - started)
        report.statuses[str(answer.status_code)] += 1
        text = answer.text
        for word in told:
            text = text.replace(word, "")
        if answer.status_code >= 500:
            shown = content[:200] if isinstance(content, bytes) else ""
            report.problems.append(f"{label}: {answer.status_code} {text[:300]} after {shown}")
        report.problems += [f"{label}: the answer holds {word!r}: {text[:300]}" for word in forbidden if word in text]


RAW = (
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /api/v1/create_session HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /api/v1/create_session HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /api/v1/forward HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /api/v1/healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"\0" * 5000,
)


def send_raw(victim: Victim, report: AbuseReport) -> None:
    """What is no HTTP at all, on a socket."""
    for data in RAW:
        with socket.create_connection(("127.0.0.1", victim.server.port), timeout=10) as raw:
            raw.settimeout(2)
            answer = b""
            try:
                raw.sendall(data)
                answer = raw.recv(65536)
            except (TimeoutError, ConnectionError):
                pass  # hanging up, or waiting for the rest, is an answer
        report.num_sent += 1
        status = answer[9:12].decode("latin-1") or "closed"
        report.statuses[status] += 1
        if status.startswith("5") or b"Traceback" in answer:
            report.problems.append(f"raw {data[:60]!r}: {answer[:300]!r}")


def fuzz_by_schema(victim: Victim, report: AbuseReport, count: int, seed: int) -> None:
    python = sdk_python(*SCHEMATHESIS)
    command = [str(python), str(FUZZER), "--url", victim.server.url, "--requests", str(count), "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--live", json.dumps(victim.live())],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=FUZZ_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    report.num_sent += found["requests"]
    report.statuses.update(found["statuses"])
    report.problems += found["problems"]
    report.slowest_s = max(report.slowest_s, found["slowest_s"])
    report.operations = found["operations"]
    if found["operations_reached"] < found["operations"]:
        report.problems.append(f"only {found['operations_reached']} of {found['operations']} operations were reached")


def run_abuse(data_dir: Path, *, num_requests: int, seed: int) -> AbuseReport:
    report = AbuseReport()
    with ServerProcess(data_dir) as server:
        victim = Victim(server)
        send_raw(victim, report)
        send_by_hand(victim, report, num_requests // 3, seed)
        fuzz_by_schema(victim, report, num_requests - report.num_sent, seed)
        victim.check_works()
        victim.http.close()
    report.log = "".join(server.log)
    report.problems += [f"the server's log: {line}" for line in report.log.splitlines() if "ERROR" in line]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="write the server's log to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = run_abuse(Path(directory) / "data", num_requests=options.requests, seed=options.seed)
    if options.log is not None:
        options.log.write_text(report.log)
    summary = {
        "requests": report.num_sent,
        "operations": report.operations,
        "statuses": dict(sorted(report.statuses.items())),
        "slowest_s": report.slowest_s,
        "problems": report.problems,
    }
    print(json.dumps(summary, indent=2))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
