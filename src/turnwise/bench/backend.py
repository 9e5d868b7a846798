"""Measure one sampler backend as a run uses it: speed, time to publish, and drift from the trainer.

The trainer is our engine in this process. The backend gets its adapter, or its whole weights, through
`Publisher.publish`, exactly as in a run. Drift compares the logprobs that the backend returned with the trainer's.

Both sides do the same work: `--weights` says for both whether the adapter is added to the weights or stays apart, the
dtype is one, both warm up, and every batch has prompts that neither side has read before. One side may do at the first
request what the other does while it publishes, so publishing is timed up to the first token of the new weights too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.backends import LOCAL, BackendSetup, make_publisher
from turnwise.bench.report import machine, model_directory
from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.client.local import ServiceClient
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import choose_device
from turnwise.rollout.config import RolloutConfig
from turnwise.types import AdamParams, Datum, ModelInput, SampleRequest, SampleResponse, SamplingParams

NUM_PUBLISHED = 4
"""Versions to publish; the first one, which starts the server, is not timed."""
PATIENT_S = 3600.0
"""What a server gets for one reply: a slow one is measured, and not given up."""
FIRST_PROMPT = tuple(range(100, 108))
"""What the new weights are asked for their first token."""
MOVE = 1e-2
"""Learning rate of the update between two versions: far larger than a run's, so that the adapter matters."""


def run_backend(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of `--backend` alone."""
    return asyncio.run(_measure(args))


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    is_merged = args.weights == "merged"
    merge = "always" if is_merged else "never"
    engine = EngineConfig(device=args.device, dtype=args.dtype, seed=0, merge_adapter=merge)
    directory = model_directory(args.model)
    of_dialogue = args.dialogue_prompt + args.turns * (args.observed + args.sampled)
    rollout = RolloutConfig(
        backend=args.backend,
        max_turns=1,
        max_tokens_per_turn=args.new_tokens,
        max_trajectory_tokens=max(args.prompt_tokens + args.new_tokens, of_dialogue) + 8,
        url=tuple(args.server_url),
        server_args=tuple(args.server_arg),
        server_python=args.server_python,
        publish="weights" if is_merged and args.backend != LOCAL else "adapter",
        server_deadline_s=0.0 if args.backend == LOCAL else PATIENT_S,
    )
    with (
        tempfile.TemporaryDirectory(prefix="turnwise-bench-") as place,
        ServiceClient(data_dir=Path(place), engine=engine) as service,
    ):
        setup = BackendSetup(
            rollout=rollout,
            model_directory=directory,
            run_directory=Path(place),
            engine=engine,
            lora_rank=args.rank,
            service=service,
        )
        trainer = await service.create_lora_training_client_async(str(directory), rank=args.rank, seed=0)
        async with make_publisher(setup) as publisher:
            published_s: list[float] = []
            first_token_s: list[float] = []
            for version in range(NUM_PUBLISHED):
                started_s = time.perf_counter()
                client = await publisher.publish(trainer, version)
                published_s.append(time.perf_counter() - started_s)
                await _draw(client, FIRST_PROMPT, 1, seed=0)
                first_token_s.append(time.perf_counter() - started_s)
                if version + 1 < NUM_PUBLISHED:
                    await _move(trainer)
            figures = await _speed(args, client)
            drift = await _drift(args, client, trainer)
    device, dtype = choose_device(engine)
    publishing = {
        "publish_ms": statistics.median(published_s[1:]) * 1000,
        "publish_to_token_ms": statistics.median(first_token_s[1:]) * 1000,
    }
    return {"machine": machine(device), "dtype": str(dtype), **figures, **publishing, **drift}


async def _move(trainer: TrainingClient) -> None:
    """One update on arbitrary tokens."""
    ids = list(range(100, 140))
    datum = Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)})
    await trainer.forward_backward([datum], "cross_entropy")
    await trainer.optim_step(AdamParams(learning_rate=MOVE))


async def _speed(args: argparse.Namespace, client: SamplingClient) -> dict[str, float]:
    rng, size = np.random.default_rng(0), len(client.get_tokenizer())

    async def dialogue(history: list[int], seen: list[list[int]], seed: int) -> None:
        for observed in seen:
            reply = await _draw(client, history, args.sampled, seed=seed)
            history += [*reply.sequences[0].tokens, *observed]

    # New prompts every time: what one side had in its prefix cache, the other side may have forgotten.
    async def batch() -> None:
        prompts = rng.integers(100, size, (args.prompts, args.prompt_tokens)).tolist()
        await asyncio.gather(*(_draw(client, prompt, args.new_tokens, seed=1) for prompt in prompts))

    async def dialogues() -> None:
        starts = rng.integers(100, size, (args.dialogues, args.dialogue_prompt)).tolist()
        seen = rng.integers(100, size, (args.dialogues, args.turns, args.observed)).tolist()
        await asyncio.gather(*(dialogue(*both, seed) for seed, both in enumerate(zip(starts, seen, strict=True))))

    found = {"tokens_per_s": args.prompts * args.new_tokens / await _timed(batch, args)}
    if args.dialogues:
        found["dialogue_tokens_per_s"] = args.dialogues * args.turns * args.sampled / await _timed(dialogues, args)
    return found


async def _timed(work: Any, args: argparse.Namespace) -> float:
    seconds: list[float] = []
    for index in range(args.warmups + args.repeats):
        started_s = time.perf_counter()
        await work()
        if index >= args.warmups:
            seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


async def _draw(client: SamplingClient, prompt: Sequence[int], num_tokens: int, seed: int) -> SampleResponse:
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=seed, stop=[])
    return await client.submit(SampleRequest(list(prompt), params))


async def _drift(args: argparse.Namespace, client: SamplingClient, trainer: TrainingClient) -> dict[str, float]:
    """Sampler against trainer on the same weights, over one more batch."""
    rng, size = np.random.default_rng(7), len(client.get_tokenizer())
    gaps: list[float] = []
    for number, prompt in enumerate(rng.integers(100, size, (8, args.prompt_tokens)).tolist()):
        sequence = (await _draw(client, prompt, args.new_tokens, seed=number)).sequences[0]
        ids = [*prompt, *sequence.tokens]
        datum = Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)})
        output = await trainer.forward([datum], "cross_entropy")
        ours = output.loss_fn_outputs[0]["logprobs"].tolist()[-len(sequence.tokens) :]
        assert sequence.logprobs is not None, "a sampler of a run returns logprobs"
        gaps += [a - b for a, b in zip(ours, sequence.logprobs, strict=True)]
    sizes = np.abs(np.array(gaps))
    return {
        "drift_tokens": float(len(gaps)),
        "drift_k2": float((sizes**2).mean() / 2),
        "drift_abs_mean": float(sizes.mean()),
        "drift_abs_max": float(sizes.max()),
    }
