"""A run's own SGLang server: how it is started, killed, started again and stopped. The server itself is a small one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from turnwise.backends.sglang import SglangPublisher
from turnwise.config.files import load_config
from turnwise.errors import ConfigError
from turnwise.types import ModelInput, SamplingParams
from unit.backends.conftest import backend_setup

LAUNCH_SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HERE = os.path.dirname(__file__)
META = {"finish_reason": {"type": "length", "length": 1}, "output_token_logprobs": [[-0.5, 4, None]]}

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        said = {"/model_info": {"model_path": "m", "is_generation": True}, "/health": {},
                "/generate": {"output_ids": [4], "meta_info": META}}.get(self.path)
        body = json.dumps(said).encode()
        self.send_response(404 if said is None else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *args):
        pass

with open(os.path.join(HERE, "starts"), "a") as log:
    log.write(json.dumps([os.getpid(), sys.argv[1:], os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB")]) + "\\n")
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
SERVER_ARGS = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--schedule-policy")
        parser.add_argument("--host")
        parser.add_argument("--tp-size", "--tensor-parallel-size", "-tp", type=int)
        parser.add_argument("--seed", type=int)
        parser.add_argument("--capture-sizes", nargs="+")
        parser.add_argument("--quiet", action="store_true")
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that has a package `sglang`."""
    package = tmp_path / "site" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(LAUNCH_SERVER)
    (package / "srt" / "__init__.py").write_text("")
    (package / "srt" / "server_args.py").write_text(SERVER_ARGS)
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = "-I" ] && shift\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


async def test_a_run_starts_its_own_server_starts_it_again_when_it_is_killed_and_stops_it(
    tmp_path: Path, python: Path, tiny_dir: Path
) -> None:
    sizes = ("rollout.gpu_memory_utilization=0.7", "rollout.max_num_seqs=256", "rollout.tensor_parallel_size=2")
    options = (
        "generator.backend=sglang",
        f"rollout.server_python={python}",
        "rollout.max_trajectory_tokens=64",
        *sizes,
    )
    config = load_config("guess_number", [*options, "rollout.server_args=--schedule-policy lpm", "engine.device=cpu"])
    SglangPublisher.check_options(config.rollout)
    setup = backend_setup(config, tiny_dir, tmp_path)
    starts = tmp_path / "site" / "sglang" / "starts"
    async with SglangPublisher(setup) as publisher:
        sampler = await publisher.serve(None)
        prompt, params = ModelInput.from_ints([1, 2, 3]), SamplingParams(max_tokens=1)
        assert (await sampler.sample_async(prompt, 1, params)).sequences[0].tokens == [4]
        (pid, arguments, raw) = json.loads(starts.read_text())
        said = " ".join(arguments)
        for part in (
            f"--model-path {tiny_dir}",
            "--host 127.0.0.1",
            "--dtype float32",
            "--max-lora-rank 16",
            "--enable-lora",
            "--mem-fraction-static 0.7 --max-running-requests 256 --tp-size 2 --schedule-policy lpm",
        ):
            assert part in said
        assert raw == "0"
        os.kill(pid, signal.SIGKILL)
        assert (await sampler.sample_async(prompt, 1, params)).sequences[0].tokens == [4], "started again"
        pids = [json.loads(line)[0] for line in starts.read_text().splitlines()]
        assert len(pids) == 2
    await asyncio.sleep(0)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[-1], 0)
    assert "--max-running-requests 256" in (tmp_path / "sglang.log").read_text(), "the log stays"


def test_a_server_that_gets_whole_weights_is_started_with_the_newest_and_without_adapters(
    tmp_path: Path, python: Path, tiny_dir: Path
) -> None:
    options = [f"rollout.server_python={python}", "rollout.publish=weights", "rollout.server_args=--dtype bfloat16"]
    config = load_config("guess_number", ["rollout.backend=sglang", "model.train=full", "engine.device=cpu", *options])
    publisher = SglangPublisher(backend_setup(config, tiny_dir, tmp_path))
    said = " ".join(publisher.server_command().arguments(1))
    assert f"--model-path {tiny_dir}" in said
    assert "lora" not in said
    assert said.endswith("--dtype bfloat16")
    assert publisher.dtype == "bfloat16", "the certificate allows for its rounding"
    assert publisher.fleet_times().load_s == 600, "as long as it may take to start"
    adapters = load_config("guess_number", ["rollout.backend=sglang", f"rollout.server_python={python}"])
    assert SglangPublisher(backend_setup(adapters, tiny_dir, tmp_path)).fleet_times().load_s == 120


def test_what_the_server_does_not_take_is_refused_by_name_before_anything_starts(python: Path) -> None:
    def check(*options: str) -> None:
        SglangPublisher.check_options(load_config("guess_number", ["rollout.backend=sglang", *options]).rollout)

    mine = f"rollout.server_python={python}"
    wrong = {
        "cannot import sglang; install it there, or name a Python that has it": [],
        "server_args has --schedul-policy, which sglang does not take; did you mean '--schedule-policy'": [
            mine,
            "rollout.server_args=--schedul-policy lpm",
        ],
        "server_args has --host, which the run sets itself": [mine, "rollout.server_args=--host 0.0.0.0"],
        "server_args has --max-lora-rank, which the run": [mine, "rollout.server_args=--max_lora_rank=4"],
        "SGLang would keep prefixes that older weights left in its cache": [
            mine,
            "rollout.publish=weights",
            "rollout.kv_across_updates=keep",
            "train.max_staleness=1",
        ],
        "server_args has -zz, which sglang does not take": [mine, "rollout.server_args=--seed 3 -zz 4"],
        "has -tp, which the run sets itself; set rollout.tensor_parallel_size": [mine, "rollout.server_args=-tp 2"],
        "has --tensor-parallel-size, which the run": [mine, "rollout.server_args=--tensor_parallel_size=2"],
        "server_args has '4', which belongs to no argument": [mine, "rollout.server_args=--quiet 4"],
        "server_args has 'other', which belongs to no": [mine, "rollout.server_args=--seed -3 other"],
        "server_args has '5', which belongs to no": [mine, "rollout.server_args=--seed=3 5"],
    }
    for message, options in wrong.items():
        with pytest.raises(ConfigError, match=message):
            check(*options)
    for fine in ("--schedule-policy lpm", "--seed -3 --capture-sizes 1 2 4 --quiet", "--seed=-3"):
        check(mine, f"rollout.server_args={fine}")
