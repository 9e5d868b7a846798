"""What vLLM in the process of a run must do; run by a Python that can import vLLM, and by `test_vllm_in_process.py`.

`python in_process_claims.py MODEL TIED_MODEL DIRECTORY ECHO_WORLD` prints a line per claim that holds, and then waits
with an engine that runs: whoever started it ends it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import turnwise as tw
from turnwise.backends import BackendSetup
from turnwise.backends.servers.dialect import ServedWeights
from turnwise.backends.servers.http import ServerGoneError
from turnwise.backends.servers.vllm_dialect import VllmDialect, VllmUse
from turnwise.backends.vllm_in_process import NAME, VllmEngineCalls, VllmInProcessPublisher
from turnwise.cli import main
from turnwise.client.checkpoints import CheckpointStore
from turnwise.engine.config import EngineConfig
from turnwise.engine.model.merge import write_merged
from turnwise.rollout.config import RolloutConfig
from turnwise.runlog.reader import RunReader
from turnwise.types import Datum, ModelInput, SampledSequence, SampleRequest, SamplingParams

RANK = 8
PROMPT = (1, *range(40, 90))
NUM_DRAWN = 400
"""Tokens of a reply that takes some time, so that weights change in the middle of it."""
CLOSE = 1e-3
ENGINE = EngineConfig(device="cpu", dtype="float32")


def is_near(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(abs(a - b) < CLOSE for a, b in zip(one, other, strict=True))


def engine_cores(log: Path) -> list[int]:
    """Children of this process that write vLLM's log; Python's resource tracker is none of them."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            is_tracker = b"resource_tracker" in (link.parents[1] / "cmdline").read_bytes()
            if link.readlink() == log and int(link.parts[2]) != os.getpid() and not is_tracker:
                found.append(int(link.parts[2]))
        except OSError:
            continue
    return sorted(set(found))


def train_over_a_killed_engine(model: Path, directory: Path, echo: str) -> None:
    """A run goes on when its engine is killed, every step is of the version that it says, and nothing is left."""
    killed: list[int] = []

    def kill() -> None:
        while not killed and not is_over.wait(0.1):
            if (directory / "run.db").exists():
                with RunReader(directory) as run:
                    if run.metric("train/grad_norm"):
                        killed.extend(engine_cores(directory / "vllm.log"))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    is_over = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    small = ("train.steps=3", "train.tasks_per_step=2", "rollout.group_size=4", "rollout.max_turns=2", "warmup.steps=2")
    more = ("eval.tasks=0", "run.dialogues=0", "engine.dtype=float32", f"model.rank={RANK}", f"run.dir={directory}")
    backend = ("rollout.backend=vllm_in_process", "rollout.max_num_seqs=32", "rollout.server_args=--seed 3")
    try:
        assert main(["train", echo, f"model={model}", *small, *more, *backend, "train.max_empty_steps=9"]) == 0
    finally:
        is_over.set()
        killer.join()
    assert killed, "the engine was killed in the middle of the run"
    with RunReader(directory) as run:
        assert {1, 3} <= {row.step for row in run.certificates()}
        assert all(row.is_exact for row in run.certificates())
        attempts = [run.attempt(row.id) for row in run.attempts(phase="train")]
    drawn = {(one.row.step, version) for one in attempts for turn in one.trajectory.turns for version in turn.versions}
    assert {step - version for step, version in drawn} == {1}, "a step learns from the version before it"
    until_s = time.monotonic() + 60
    while engine_cores(directory / "vllm.log") and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not engine_cores(directory / "vllm.log"), "nothing is left"
    assert not (directory / "served").exists(), "what nobody uses any more is unloaded and deleted"


def logprobs_by(trainer: Any, sequence: SampledSequence, temperature: float = 1.0) -> list[float]:
    ids = [*PROMPT, *sequence.tokens]
    inputs = {
        "target_tokens": ids[1:],
        "weights": [1.0] * (len(ids) - 1),
        "temperature": [temperature] * (len(ids) - 1),
    }
    output = trainer.forward([Datum(ModelInput.from_ints(ids[:-1]), inputs)], "cross_entropy").result()
    return output.loss_fn_outputs[0]["logprobs"].tolist()[len(PROMPT) - 1 :]


def two_trainers(service: tw.ServiceClient, model: Path) -> tuple[Any, Any]:
    """One at the base model, and one that has moved, output head included."""
    old, new = (service.create_lora_training_client(str(model), rank=RANK, seed=1) for _ in range(2))
    inputs = {"target_tokens": PROMPT[1:], "weights": [1.0] * (len(PROMPT) - 1)}
    for _ in range(2):
        new.forward_backward([Datum(ModelInput.from_ints(PROMPT[:-1]), inputs)], "cross_entropy").result()
        new.optim_step(tw.types.AdamParams(learning_rate=3e-2)).result()
    return old, new


async def sample_with_adapters(calls: VllmEngineCalls, new: Any, adapter: Path) -> None:
    """Logprobs are the trainer's at every temperature; a stop is in the reply; an adapter goes when it is unloaded."""
    dialect = VllmDialect(NAME, VllmUse(end_ids=(2,), temperature=0.7), calls)
    await dialect.facts()
    weights = ServedWeights(version=1, adapter=adapter)
    await dialect.load(weights)
    for temperature in (1.0, 0.7):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, stop=[])
        answer = await dialect.generate(SampleRequest(PROMPT, params, 2), weights)
        for sequence in answer.sequences:
            assert is_near(sequence.logprobs, logprobs_by(new, sequence, temperature)), temperature
    stop = answer.sequences[0].tokens[4]
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=5, stop_token_ids=[stop])
    (ended,) = (await dialect.generate(SampleRequest(PROMPT, params), weights)).sequences
    assert (ended.tokens[-1], ended.stop_reason) == (stop, "stop")
    scored = await dialect.generate(
        SampleRequest((*PROMPT, *ended.tokens), SamplingParams(max_tokens=1), 1, True), weights
    )
    assert scored.prompt_logprobs is not None
    assert is_near(scored.prompt_logprobs[len(PROMPT) :], logprobs_by(new, ended))
    await dialect.unload(weights)
    with pytest.raises(ServerGoneError, match="has no adapter"):
        await dialect.generate(SampleRequest(PROMPT, params), weights)


async def replace_under_a_reply(calls: VllmEngineCalls, trainers: tuple[Any, Any], base: Path, merged: Path) -> None:
    """Every token says which weights drew it, and has their logprob, whatever happens to a reply under way."""
    old, new = trainers
    old_files, new_files = sorted(base.glob("*.safetensors")), sorted(merged.glob("*.safetensors"))
    request = SampleRequest(PROMPT, SamplingParams(max_tokens=NUM_DRAWN, stop=[], seed=2))
    for choice in ("recompute", "end"):  # "keep" asks less than "recompute" does
        use = VllmUse(end_ids=(2,), replaces_weights=True, across_updates=choice)
        dialect, weights = VllmDialect(NAME, use, calls), ServedWeights(version=4)
        await dialect.facts()
        wait_s = 0.2
        for _ in range(25):  # until the update falls into the reply
            await dialect.replace_weights(old_files, 4)
            reply = asyncio.create_task(dialect.generate(request, weights))
            await asyncio.sleep(wait_s)
            await dialect.replace_weights(new_files, 5)
            (sequence,) = (await reply).sequences
            if choice == "end" or (4 in (drawn := list(sequence.versions or ()))[1:] and 5 in drawn):
                break
            wait_s = wait_s / 2 if set(sequence.versions or ()) == {4} else wait_s * 1.6
        versions = list(sequence.versions or ())
        if choice == "end":
            assert set(versions) == {4}, "the reply under way is finished first"
            continue
        at = versions.index(5)
        assert versions == [4] * at + [5] * (NUM_DRAWN - at)
        assert at > 1
        assert sequence.logprobs is not None
        assert is_near(sequence.logprobs[:at], logprobs_by(old, sequence)[:at]), choice
        assert is_near(sequence.logprobs[at + 1 :], logprobs_by(new, sequence)[at + 1 :])


def merge_tied(service: tw.ServiceClient, tied: Path, directory: Path) -> tuple[Any, Path]:
    """A trainer of a model whose head shares the embedding, and what it learned as a whole model of its own."""
    _, trainer = two_trainers(service, tied)
    adapter = CheckpointStore(directory).directory(trainer.save_weights_for_sampler("tied").result().path)
    write_merged(adapter, tied, directory / "untied")
    return trainer, directory / "untied"


async def sample_merged(calls: VllmEngineCalls, trainer: Any) -> None:
    """A merged model that the engine was started with gives the trainer's logprobs, head and embedding included."""
    dialect = VllmDialect(NAME, VllmUse(end_ids=(2,)), calls)
    await dialect.facts()
    params = SamplingParams(max_tokens=24, seed=5, stop=[])
    (sequence,) = (await dialect.generate(SampleRequest(PROMPT, params), ServedWeights(version=0))).sequences
    assert is_near(sequence.logprobs, logprobs_by(trainer, sequence))


async def use_one_engine(tied: Path, directory: Path) -> None:
    with tw.ServiceClient(data_dir=directory, engine=ENGINE) as service:
        tied_trainer, model = merge_tied(service, tied, directory)
        rollout = RolloutConfig(backend="vllm_in_process", max_trajectory_tokens=1024)
        setup = BackendSetup(
            rollout=rollout, model_directory=model, run_directory=directory, engine=ENGINE, lora_rank=RANK
        )
        engine = VllmInProcessPublisher(setup).make_own()
        await engine.start()
        calls = VllmEngineCalls(engine)
        await sample_merged(calls, tied_trainer)
        print("CLAIM merged", flush=True)
        trainers = two_trainers(service, model)
        adapter = CheckpointStore(directory).directory(trainers[1].save_weights_for_sampler("new").result().path)
        write_merged(adapter, model, directory / "merged")
        await sample_with_adapters(calls, trainers[1], adapter)
        print("CLAIM adapters", flush=True)
        await replace_under_a_reply(calls, trainers, model, directory / "merged")
        print("CLAIM weights", flush=True)
    print("READY", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    model, tied, directory = map(Path, sys.argv[1:4])
    train_over_a_killed_engine(model, directory / "run", sys.argv[4])
    print("CLAIM run", flush=True)
    asyncio.run(use_one_engine(tied, directory / "engine"))
