"""What a real vLLM server samples for us: the trainer's own logprobs, our stops, our limits, exact versions."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import turnwise as tw
from turnwise.backends import BackendSetup
from turnwise.backends.servers.dialect import ServedWeights
from turnwise.backends.servers.vllm_dialect import VllmDialect
from turnwise.backends.vllm import VllmPublisher
from turnwise.client.checkpoints import CheckpointStore
from turnwise.engine.config import EngineConfig
from turnwise.errors import DataError
from turnwise.rollout.config import RolloutConfig
from turnwise.types import Datum, ModelInput, SampledSequence, SampleRequest, SampleResponse, SamplingParams
from vllm_server import RANK, Served

pytestmark = pytest.mark.timeout(900)  # the first one installs vLLM, and a server takes a minute to start

PROMPT = (1, *range(40, 90))
CLOSE = 1e-3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def service(data: Path) -> Iterator[tw.ServiceClient]:
    with tw.ServiceClient(data_dir=data, engine=EngineConfig(device="cpu", dtype="float32")) as service:
        yield service


@asynccontextmanager
async def talking(served: Served, **options: Any) -> AsyncIterator[VllmDialect]:
    dialect = VllmDialect(served.url, served.use(**options))
    await dialect.facts()
    try:
        yield dialect
    finally:
        await dialect.close()


def trained(service: tw.ServiceClient, model: Path, data: Path, num_steps: int = 2) -> tuple[Any, Path]:
    """A trainer that has moved, output head included, and its adapter's files."""
    trainer = service.create_lora_training_client(str(model), rank=RANK, seed=1)
    datum = Datum(
        ModelInput.from_ints(PROMPT[:-1]), {"target_tokens": PROMPT[1:], "weights": [1.0] * (len(PROMPT) - 1)}
    )
    for _ in range(num_steps):
        trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(tw.types.AdamParams(learning_rate=3e-2)).result()
    path = trainer.save_weights_for_sampler(f"after-{num_steps}").result().path
    return trainer, CheckpointStore(data).directory(path)


def trainer_logprobs(trainer: Any, sequence: SampledSequence, temperature: float) -> list[float]:
    """The trainer's logprobs of a reply to `PROMPT`."""
    ids = [*PROMPT, *sequence.tokens]
    num_drawn = len(sequence.tokens)
    inputs = {
        "target_tokens": ids[1:],
        "weights": [0.0] * (len(PROMPT) - 1) + [1.0] * num_drawn,
        "temperature": [temperature] * (len(ids) - 1),
    }
    output = trainer.forward([Datum(ModelInput.from_ints(ids[:-1]), inputs)], "cross_entropy").result()
    return output.loss_fn_outputs[0]["logprobs"].tolist()[-num_drawn:]


async def test_logprobs_are_the_trainers_for_the_base_and_for_an_adapter_at_every_temperature(
    vllm: Served, service: tw.ServiceClient, data: Path
) -> None:
    trainer, adapter = trained(service, vllm.model, data)
    fresh, untrained = trained(service, vllm.model, data, num_steps=0)
    first, moved = ServedWeights(version=0, adapter=untrained), ServedWeights(version=1, adapter=adapter)
    async with talking(vllm, temperature=0.7) as dialect:
        await asyncio.gather(dialect.load(first), dialect.load(moved))
        drawn = {}
        for temperature in (1.0, 0.7, 0.0):
            request = SampleRequest(PROMPT, SamplingParams(max_tokens=24, temperature=temperature, seed=5))
            for weights, ours in ((first, fresh), (moved, trainer)):
                (sequence,) = (await dialect.generate(request, weights)).sequences
                expected = trainer_logprobs(ours, sequence, temperature or 1.0)
                assert sequence.logprobs == pytest.approx(expected, abs=CLOSE)
                drawn[temperature, weights.version] = sequence
        assert drawn[0.0, 0].tokens != drawn[0.0, 1].tokens, "the adapter changes what is drawn"
        again = await dialect.generate(SampleRequest(PROMPT, SamplingParams(max_tokens=24, seed=5)), moved)
        assert again.sequences[0].tokens == drawn[1.0, 1].tokens, "the same seed draws the same tokens"
        base, plain = ServedWeights(version=0), SampleRequest(PROMPT, SamplingParams(max_tokens=24, stop=[]))
        beside = await asyncio.gather(*(dialect.generate(plain, one) for one in (base, moved, base, moved)))
        for answer, ours in zip(beside, (fresh, trainer, fresh, trainer), strict=True):
            expected = trainer_logprobs(ours, answer.sequences[0], 1.0)
            assert answer.sequences[0].logprobs == pytest.approx(expected, abs=CLOSE), "the base is no adapter's"
        await asyncio.gather(dialect.unload(first), dialect.unload(moved))
        await dialect.unload(moved)  # nobody minds
        (alone,) = (await dialect.generate(plain, base)).sequences
        assert alone.logprobs == pytest.approx(trainer_logprobs(fresh, alone, 1.0), abs=CLOSE)


async def test_a_reply_ends_where_our_engine_would_end_it_and_holds_its_stop(vllm: Served) -> None:
    base, tokenizer = ServedWeights(version=0), AutoTokenizer.from_pretrained(vllm.model)

    async def ask(**params: Any) -> SampledSequence:
        params = {"max_tokens": 40, "seed": 11, **params}
        return (await dialect.generate(SampleRequest(PROMPT, SamplingParams(**params)), base)).sequences[0]

    async def ask_many(**params: Any) -> Sequence[SampledSequence]:
        """So many replies that some of them draw the model's end of sequence, which is 2."""
        return (await dialect.generate(SampleRequest(PROMPT, SamplingParams(seed=3, **params), 32), base)).sequences

    async with talking(vllm) as dialect:
        free = await ask_many(stop=[], max_tokens=100)
        assert {(len(one.tokens), one.stop_reason) for one in free} == {(100, "length")}, "stop=[] stops at nothing"
        assert any(2 in one.tokens for one in free)
        replies = await ask_many(max_tokens=100)
        assert {one.stop_reason for one in replies} == {"stop", "length"}
        for one in replies:  # without stops, at the model's end of sequence
            assert (2 in one.tokens, 2 in one.tokens[:-1]) == (one.stop_reason == "stop", False)
        plain = await ask(stop=[], max_tokens=40)
        named = await ask(stop_token_ids=[plain.tokens[7]])
        assert (named.tokens, named.stop_reason) == (plain.tokens[: plain.tokens.index(plain.tokens[7]) + 1], "stop")
        text = tokenizer.decode(plain.tokens[:30])
        stop = next(text[at : at + 3] for at in range(10, 27) if text[at : at + 3].isascii())
        by_text = await ask(stop=[stop])
        assert by_text.stop_reason == "stop"
        assert by_text.tokens == plain.tokens[: len(by_text.tokens)], "the tokens of the stop are there"
        assert stop in tokenizer.decode(by_text.tokens)
        assert stop not in tokenizer.decode(by_text.tokens[:-1])
        filled = SampleRequest(PROMPT * 19, SamplingParams(stop=[], max_tokens=None))
        (sequence,) = (await dialect.generate(filled, base)).sequences
        assert len(sequence.tokens) == 1024 - 19 * len(PROMPT), "None fills the context"
        with pytest.raises(DataError, match=r"the prompt has 1024 tokens.*holds 1024"):
            await dialect.generate(SampleRequest(PROMPT * 20 + PROMPT[:4]), base)
        with pytest.raises(DataError, match="top_p"):
            await ask(top_p=0.9)


async def test_the_next_turn_finds_the_last_one_in_the_servers_cache_under_its_own_weights(
    vllm: Served, service: tw.ServiceClient, data: Path
) -> None:
    _, adapter = trained(service, vllm.model, data, num_steps=1)
    weights = ServedWeights(version=1, adapter=adapter)
    prompt = tuple((7 * index) % 400 + 3 for index in range(160))
    async with talking(vllm) as dialect:
        await dialect.load(weights)
        hits = num_hits(vllm)
        first = await dialect.generate(SampleRequest(prompt, SamplingParams(max_tokens=40, stop=[])), weights)
        assert first.num_cached_prompt_tokens == 0
        turn = (*prompt, *first.sequences[0].tokens, 5, 6)
        second = await dialect.generate(SampleRequest(turn, SamplingParams(max_tokens=4)), weights)
        assert second.num_cached_prompt_tokens >= 128
        assert num_hits(vllm) - hits == second.num_cached_prompt_tokens, "the server counts the same"
        other = await dialect.generate(SampleRequest(turn, SamplingParams(max_tokens=4)), ServedWeights(version=0))
        assert other.num_cached_prompt_tokens == 0, "other weights do not read these keys and values"
        await dialect.unload(weights)


def num_hits(served: Served) -> int:
    with urllib.request.urlopen(f"{served.url}/metrics") as page:
        found = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} ([0-9.e+]+)$", page.read().decode(), re.MULTILINE)
    return int(sum(map(float, found)))


async def test_prompts_are_scored_beside_other_requests(vllm: Served, service: tw.ServiceClient, data: Path) -> None:
    trainer, adapter = trained(service, vllm.model, data)
    local = trainer.save_weights_and_get_sampling_client()
    prompts = [PROMPT, tuple(reversed(PROMPT)), PROMPT[:20]]
    base = ServedWeights(version=3, adapter=adapter)
    async with talking(vllm) as dialect:
        await dialect.load(base)
        long = SampleRequest(PROMPT, SamplingParams(max_tokens=60, stop=[]))
        plain = [dialect.generate(long, base) for _ in range(3)]
        scoring = [SampleRequest(one, SamplingParams(max_tokens=1), 2, True, 3) for one in prompts]
        answers = await asyncio.gather(*plain, *(dialect.generate(one, base) for one in scoring))
        await dialect.unload(base)
    scored: list[Any] = answers[3:]
    for request, answer in zip(scoring, scored, strict=True):
        expected: Any = local.submit(request).result()
        assert answer.prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=CLOSE)
        assert len(answer.sequences) == 2
        for ours, theirs in zip(expected.topk_prompt_logprobs[1:], answer.topk_prompt_logprobs[1:], strict=True):
            assert [pair[1] for pair in ours] == pytest.approx([pair[1] for pair in theirs], abs=CLOSE)


async def test_another_run_can_start_on_the_same_server_beside_requests_of_the_first(
    vllm: Served, service: tw.ServiceClient, data: Path
) -> None:
    trainer, adapter = trained(service, vllm.model, data)
    weights = ServedWeights(version=1, adapter=adapter)
    rollout = RolloutConfig(backend="vllm", url=(vllm.url,), max_trajectory_tokens=1024)
    engine = EngineConfig(device="cpu", dtype="float32")
    setup = BackendSetup(rollout=rollout, model_directory=vllm.model, run_directory=data, engine=engine)
    async with talking(vllm) as dialect:
        await dialect.load(weights)
        long = SampleRequest(PROMPT, SamplingParams(max_tokens=300, stop=[]))
        answers: list[SampleResponse] = []

        async def go_on_asking() -> None:
            while True:
                answers.append(await dialect.generate(long, weights))

        running = [asyncio.create_task(go_on_asking()) for _ in range(3)]
        await asyncio.sleep(0.3)
        async with VllmPublisher(setup) as publisher:
            sampler = await publisher.publish(trainer, 0)
            reply = await sampler.sample_async(ModelInput.from_ints(PROMPT), 1, SamplingParams(max_tokens=4))
            assert not any(task.done() for task in running), "the first run's requests go on"
        expected = trainer_logprobs(trainer, reply.sequences[0], 1.0)
        assert reply.sequences[0].logprobs == pytest.approx(expected, abs=CLOSE)
        while len(answers) < 3:
            await asyncio.sleep(0.1)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert all(len(answer.sequences[0].tokens) == 300 for answer in answers)
        await dialect.unload(weights)
