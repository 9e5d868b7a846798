"""Whole weights on a real vLLM server: replaced while it samples, and every token says which ones drew it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import turnwise as tw
from turnwise.backends.servers.dialect import ServedWeights
from turnwise.backends.servers.http import JsonServer, ServerGoneError
from turnwise.backends.servers.vllm_dialect import VllmDialect
from turnwise.cli import main
from turnwise.client.checkpoints import CheckpointStore
from turnwise.engine.config import EngineConfig
from turnwise.engine.model.merge import write_merged
from turnwise.runlog.reader import RunReader, StoredAttempt
from turnwise.trajectory import EndReason
from turnwise.types import Datum, ModelInput, SampledSequence, SampleRequest, SamplingParams
from vllm_server import RANK, Served

pytestmark = pytest.mark.timeout(900)  # the first one installs vLLM, and a server takes a minute to start

PROMPT = (1, *range(40, 90))
NUM_DRAWN = 400
"""Tokens of a reply that takes some time, so that weights change in the middle of it."""
MAX_TRIES = 25
"""How often an update may miss the reply; how fast the server is depends on what else the machine does."""
ECHO = f"{Path(__file__).parents[1] / 'e2e' / 'echo_world.py'}:EchoWorld"


@asynccontextmanager
async def talking(served: Served, across_updates: str = "recompute") -> AsyncIterator[VllmDialect]:
    """A dialect that replaces whole weights, and puts back those that the server was started with."""
    dialect = VllmDialect(served.url, served.use(replaces_weights=True, across_updates=across_updates))
    await dialect.facts()
    try:
        yield dialect
    finally:
        await dialect.replace_weights(sorted(served.model.glob("*.safetensors")), 0)
        await dialect.close()
        await rename_weights(served, "default")


async def rename_weights(served: Served, name: str) -> None:
    server = JsonServer(served.url)
    await server.post("/update_weight_version", {"new_version": name}, deadline_s=10)
    await server.close()


def logprobs_by(trainer: Any, sequence: SampledSequence) -> list[float]:
    ids = [*PROMPT, *sequence.tokens]
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    output = trainer.forward([Datum(ModelInput.from_ints(ids[:-1]), inputs)], "cross_entropy").result()
    return output.loss_fn_outputs[0]["logprobs"].tolist()[len(PROMPT) - 1 :]


async def test_weights_that_are_replaced_under_a_reply_are_recorded_token_by_token(
    vllm: Served, tmp_path: Path
) -> None:
    with tw.ServiceClient(data_dir=tmp_path, engine=EngineConfig(device="cpu", dtype="float32")) as service:
        old = service.create_lora_training_client(str(vllm.model), rank=RANK, seed=1)
        new = service.create_lora_training_client(str(vllm.model), rank=RANK, seed=1)
        inputs = {"target_tokens": PROMPT[1:], "weights": [1.0] * (len(PROMPT) - 1)}
        for _ in range(2):
            new.forward_backward([Datum(ModelInput.from_ints(PROMPT[:-1]), inputs)], "cross_entropy").result()
            new.optim_step(tw.types.AdamParams(learning_rate=3e-2)).result()
        saved = CheckpointStore(tmp_path).directory(new.save_weights_for_sampler("new").result().path)
        write_merged(saved, vllm.model, tmp_path / "merged")
        files, own = sorted((tmp_path / "merged").glob("*.safetensors")), ServedWeights(version=4)
        base = sorted(vllm.model.glob("*.safetensors"))
        request = SampleRequest(PROMPT, SamplingParams(max_tokens=NUM_DRAWN, stop=[], seed=2))
        for choice in ("recompute", "keep", "end"):
            async with talking(vllm, choice) as dialect:
                await dialect.replace_weights(base, 4)
                wait_s = 0.2
                for _ in range(MAX_TRIES):  # until the update falls into the reply
                    await dialect.replace_weights(base, 4)
                    reply = asyncio.create_task(dialect.generate(request, own))
                    await asyncio.sleep(wait_s)
                    await dialect.replace_weights(files, 5)
                    (sequence,) = (await reply).sequences
                    if choice == "end" or (4 in (drawn := list(sequence.versions or ()))[1:] and 5 in drawn):
                        break
                    is_late = set(sequence.versions or ()) == {4}
                    wait_s = wait_s / 2 if is_late else wait_s * 1.6
                after = (await dialect.generate(SampleRequest(PROMPT, SamplingParams(max_tokens=8)), own)).sequences[0]
            assert after.versions is not None
            assert set(after.versions) == {5}, "the next reply is of the new weights"
            assert after.logprobs == pytest.approx(logprobs_by(new, after), abs=1e-3)
            versions = list(sequence.versions or ())
            assert len(versions) == len(sequence.tokens) == NUM_DRAWN
            if choice == "end":
                assert set(versions) == {4}, "the reply under way is finished first"
                continue
            at = versions.index(5)
            assert versions == [4] * at + [5] * (NUM_DRAWN - at)
            assert at > 1
            assert sequence.logprobs is not None
            assert sequence.logprobs[:at] == pytest.approx(logprobs_by(old, sequence)[:at], abs=1e-3)
            if choice == "recompute":
                assert sequence.logprobs[at + 1 :] == pytest.approx(logprobs_by(new, sequence)[at + 1 :], abs=1e-3)


async def test_weights_of_another_run_or_process_are_refused_and_so_is_what_they_left_in_the_cache(
    vllm: Served,
) -> None:
    prompt = tuple((7 * index) % 400 + 3 for index in range(160))
    request, own = SampleRequest(prompt, SamplingParams(max_tokens=2, stop=[])), ServedWeights(version=4)
    files = sorted(vllm.model.glob("*.safetensors"))
    async with talking(vllm, "keep") as first, talking(vllm, "keep") as second:
        await first.replace_weights(files, 4)
        assert (await first.generate(request, own)).num_cached_prompt_tokens == 0
        assert (await first.generate(request, own)).num_cached_prompt_tokens > 0
        await second.replace_weights(files, 4)  # a run that was resumed comes to version 4 again, by another way
        assert (await second.generate(request, own)).num_cached_prompt_tokens == 0
        with pytest.raises(ServerGoneError, match="other weights than this run needs"):
            await first.generate(request, own)
        with_adapters = VllmDialect(vllm.url, vllm.use())
        await with_adapters.facts()
        with pytest.raises(ServerGoneError, match="another run replaced them"):
            await with_adapters.generate(request, ServedWeights(version=0))
        await with_adapters.close()


def play_ahead(served: Served, directory: Path, across_updates: str) -> tuple[list[StoredAttempt], Counter[int]]:
    """A run that replaces whole weights while long replies are drawn: what it trained on, and tokens by lag."""
    small = ("train.steps=5", "train.tasks_per_step=1", "rollout.group_size=4", "warmup.steps=0", "eval.tasks=0")
    long = ("train.max_staleness=2", "rollout.max_turns=3", "rollout.max_tokens_per_turn=250", "run.dialogues=0")
    options = (f"rollout.url={served.url}", "rollout.publish=weights", "engine.dtype=float32", f"model.rank={RANK}")
    command = ["train", ECHO, f"model={served.model}", "rollout.backend=vllm", *small, *long, *options]
    try:
        assert main([*command, f"rollout.kv_across_updates={across_updates}", f"run.dir={directory}"]) == 0
    finally:
        asyncio.run(put_back(served))
    with RunReader(directory) as run:
        assert run.certificates()
        assert all(row.is_exact for row in run.certificates()), "each token has the logprob of the version it names"
        lags = {lag: sum(int(value) for _, value in run.metric(f"drift/lag_{lag}_tokens")) for lag in (1, 2)}
        return [run.attempt(row.id) for row in run.attempts(phase="train")], Counter(lags)


def test_a_run_that_plays_ahead_learns_from_replies_that_two_versions_drew_token_by_token(
    vllm: Served, tmp_path: Path
) -> None:
    attempts, lags = play_ahead(vllm, tmp_path / "recompute", "recompute")
    turns = [(one.row.step, turn) for one in attempts for turn in one.trajectory.turns]
    assert all(list(turn.versions) == sorted(turn.versions) for _, turn in turns)
    assert any(len(set(turn.versions)) > 1 for _, turn in turns), "an update fell into a reply"
    # What several versions drew is stale to its end, whatever its last tokens say.
    youngest = [(step, turn.versions, int(len(set(turn.versions)) > 1)) for step, turn in turns]
    stored = Counter(max(least, step - 1 - version) for step, versions, least in youngest for version in versions)
    assert {lag: stored[lag] for lag in (1, 2)} == lags, "the loss counts every token with its own age"
    ended, _ = play_ahead(vllm, tmp_path / "end", "end")
    assert all(len(set(turn.versions)) == 1 for one in ended for turn in one.trajectory.turns)
    assert any(one.trajectory.end_reason is EndReason.UPDATED for one in ended), "it ends after the turn under way"


SHARDED = ("cluster.learners=2", "cluster.shard=true")


@pytest.mark.parametrize("trained", [
    ("model.train=full",),
    ("model.rank=8", *SHARDED),
    ("model.train=full", *SHARDED),
])  # fmt: skip
def test_a_run_publishes_whole_weights_and_an_evaluation_does_not(
    vllm: Served, tmp_path: Path, trained: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    small = ("train.steps=2", "train.tasks_per_step=2", "rollout.group_size=6", "warmup.steps=2", "eval.tasks=0")
    options = (f"rollout.url={vllm.url}", "rollout.publish=weights", "engine.dtype=float32", "run.dialogues=0")
    command = ["train", ECHO, f"model={vllm.model}", "rollout.backend=vllm", *small, *options, *trained]
    try:
        assert main([*command, f"run.dir={directory}"]) == 0
        capsys.readouterr()
        assert main(["eval", str(directory), "eval.tasks=1"]) == 2, (
            "an evaluation leaves servers alone that a run may be using"
        )
        assert "would replace the weights of the servers" in capsys.readouterr().err
    finally:
        asyncio.run(put_back(vllm))
    with RunReader(directory) as run:
        assert [row.is_exact for row in run.certificates()] == [True, True]
        attempts = [run.attempt(row.id) for row in run.attempts(phase="train")]
    assert {(one.row.step, turn.versions[0]) for one in attempts for turn in one.trajectory.turns} == {(1, 0), (2, 1)}


async def put_back(served: Served) -> None:
    async with talking(served):
        pass
