"""Measure sampling over HTTP from a separate client process, against the same engine in process.

Server, client and the in-process engine are three processes. The two sides take turns with the same prompts, so that
noise affects both equally. The share is the ratio of the medians. On a busy machine, server and client both wait for
cores; there `share_of_in_process_cpu`, which compares the CPU time of the two engines' processes, shows the cost of
HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.bench.report import Timing, machine, make_engine, model_directory, peak_gib
from turnwise.engine.worker import EngineWorker
from turnwise.types import SampleRequest, SamplingParams


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=64, help="requests at the same time")
    parser.add_argument("--waves", type=int, default=4, help="number of rounds of these requests")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens in each prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to sample for each prompt")
    parser.add_argument("--client", choices=("http", "tinker"), default="http", help="plain HTTP, or the tinker SDK")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--vocab-size", type=int, default=0, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.url:
        asyncio.run(_serve_rounds(args))
        return {"bench": "service", "model": args.model, "machine": "client"}
    engine = make_engine(args)
    args.vocab_size = engine.vocab_size
    worker = EngineWorker(lambda: engine, name=args.model)
    try:
        with _server(args) as (url, pid), _client(args, url) as client:
            numbers = range(args.warmups + args.repeats)
            rounds = [_one_round(worker, client, pid, args, index) for index in numbers]
    finally:
        worker.close()
    kept = rounds[args.warmups :]
    local, remote = Timing([each.local_s for each in kept]), Timing([each.remote_s for each in kept])
    local_cpu, server_cpu = Timing([each.local_cpu_s for each in kept]), Timing([each.server_cpu_s for each in kept])
    num_requests = args.requests * args.waves
    tokens = num_requests * args.new_tokens
    return {
        "bench": "service",
        "model": args.model,
        "machine": machine(engine.device),
        "client": args.client,
        "load": f"{args.requests} in flight x {args.waves}, {args.prompt_tokens} + {args.new_tokens} tokens each",
        "http_tokens_per_s": tokens / remote.median,
        "in_process_tokens_per_s": tokens / local.median,
        "share_of_in_process": local.median / remote.median,
        "share_of_in_process_cpu": local_cpu.median / server_cpu.median,
        "http_cpu_ms_per_request": 1000 * (server_cpu.median - local_cpu.median) / num_requests,
        "peak_gib": peak_gib(engine.device),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Seconds of both sides with the same prompts."""

    local_s: float
    local_cpu_s: float
    remote_s: float
    server_cpu_s: float


def _one_round(worker: EngineWorker, client: _Client, pid: int, args: argparse.Namespace, index: int) -> _Round:
    cpu = time.process_time()
    local_s = _in_process(worker, args, index)
    local_cpu_s = time.process_time() - cpu
    cpu = _cpu_of(pid)
    remote_s = client.round(index)
    return _Round(local_s=local_s, local_cpu_s=local_cpu_s, remote_s=remote_s, server_cpu_s=_cpu_of(pid) - cpu)


def _cpu_of(pid: int) -> float:
    """CPU seconds of a process so far, over all threads."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


async def _round_of(sample: Callable[[list[int]], Awaitable[int]], args: argparse.Namespace, index: int) -> float:
    """Seconds until every request is answered. Each answer starts the next request."""
    shape = (args.requests, args.waves, args.prompt_tokens)  # new prompts each round, so that none is cached
    prompts = np.random.default_rng(index).integers(100, args.vocab_size, shape).tolist()

    async def one_after_the_other(mine: list[list[int]]) -> None:
        for prompt in mine:
            assert await sample(prompt) == args.new_tokens

    start = time.perf_counter()
    await asyncio.gather(*(one_after_the_other(mine) for mine in prompts))
    return time.perf_counter() - start


def _in_process(worker: EngineWorker, args: argparse.Namespace, index: int) -> float:
    params = SamplingParams(max_tokens=args.new_tokens, stop=[])

    async def sample(prompt: list[int]) -> int:
        reply = await asyncio.wrap_future(worker.sample(SampleRequest(prompt, params), worker.engine.base_policy))
        return len(reply.sequences[0].tokens)

    return asyncio.run(_round_of(sample, args, index))


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Run `turnwise serve` on a free port with an empty data directory. Yield its address and process id."""
    with tempfile.TemporaryDirectory() as data_dir:
        command = [sys.executable, "-m", "turnwise.cli", "serve", "--model", str(model_directory(args.model))]
        options = ["--port", "0", "--data-dir", data_dir, "--device", args.device, "--dtype", args.dtype]
        server = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        try:
            said: list[str] = []
            for line in server.stderr:
                said.append(line)
                found = re.search(r"at (http://[^ ]+) ", line)
                if found:
                    yield found[1], server.pid
                    return
            raise RuntimeError("the server did not start: " + "".join(said))
        finally:
            server.terminate()
            server.wait(30)
            server.stderr.close()


class _Client:
    """The process that sends the requests. A line to it starts a round; it answers with a line of seconds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def round(self, index: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{index}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


@contextlib.contextmanager
def _client(args: argparse.Namespace, url: str) -> Iterator[_Client]:
    passed = ("model", "requests", "waves", "prompt_tokens", "new_tokens", "client", "vocab_size")
    options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in passed]
    command = [sys.executable, "-m", "turnwise.bench.cli", "service", f"--url={url}"]
    process = subprocess.Popen([*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield _Client(process)
    finally:
        process.terminate()
        process.wait(30)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


async def _serve_rounds(args: argparse.Namespace) -> None:
    """Run in the client's process: play one round for every number that arrives."""
    sampler = await (_SdkSampler if args.client == "tinker" else _HttpSampler).create(args)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(await _round_of(sampler.sample, args, int(line)), flush=True)


class _HttpSampler:
    """Sends the same requests as the SDKs, without their other work."""

    def __init__(self, http: Any, sampler_id: str, new_tokens: int) -> None:
        self._http = http
        self._sampler_id = sampler_id
        self._new_tokens = new_tokens
        self._num_sent = 0

    @classmethod
    async def create(cls, args: argparse.Namespace) -> _HttpSampler:
        import httpx2

        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        http = httpx2.AsyncClient(base_url=f"{args.url}/api/v1", timeout=120, limits=limits)
        session = (await http.post("/create_session", json={})).json()["session_id"]
        capabilities = (await http.get("/get_server_capabilities")).json()
        base_model = capabilities["supported_models"][0]["model_name"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base_model}
        sampler = (await http.post("/create_sampling_session", json=body)).json()["sampling_session_id"]
        return cls(http, sampler, args.new_tokens)

    async def sample(self, prompt: list[int]) -> int:
        self._num_sent += 1
        body = {
            "sampling_session_id": self._sampler_id,
            "seq_id": self._num_sent,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {"max_tokens": self._new_tokens, "stop": []},
        }
        promise = (await self._http.post("/asample", json=body)).json()
        while True:
            answer = await self._http.post("/retrieve_future", json={"request_id": promise["request_id"]})
            if answer.status_code != 408:
                return len(json.loads(answer.content)["sequences"][0]["tokens"])


class _SdkSampler:
    """The tinker SDK, as a user would call it."""

    def __init__(self, client: Any, new_tokens: int) -> None:
        self._client = client
        self._new_tokens = new_tokens

    @classmethod
    async def create(cls, args: argparse.Namespace) -> _SdkSampler:
        import tinker

        service = tinker.ServiceClient(base_url=args.url, api_key="tml-bench")
        name = (await service.get_server_capabilities_async()).supported_models[0].model_name
        return cls(await service.create_sampling_client_async(base_model=name), args.new_tokens)

    async def sample(self, prompt: list[int]) -> int:
        from tinker import types

        params = types.SamplingParams(max_tokens=self._new_tokens, stop=[])
        reply = await self._client.sample_async(types.ModelInput.from_ints(prompt), 1, params)
        return len(reply.sequences[0].tokens)
