"""How fast this machine samples from a model and trains it, measured once in at most ten seconds and then kept.

A record is kept in `$TURNWISE_HOME/speeds`. It stands for one model (its config and the sizes and times of its files),
one version of our code and of torch, one device, one number of threads, one dtype and one load. Loading the model is
not part of the ten seconds: it is measured too, because a run loads the model as well.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from turnwise.client.local_clients import LocalSamplingClient, LocalTrainingClient
from turnwise.config.config import Config
from turnwise.engine.device_info import choose_device
from turnwise.engine.threads import find_threads
from turnwise.models.config import expert_options
from turnwise.models.directories import home
from turnwise.training.setup import find_model, make_service
from turnwise.types import AdamParams, Datum, ModelInput, SampleRequest, SamplingParams

log = logging.getLogger(__name__)

METHOD = 1
"""Changes when this file measures in another way, so that older records are not used."""
READ_S, DRAW_S, TRAIN_S = 2.0, 3.0, 4.0
"""Seconds for each part; a part ends after the first round that is over its time."""
PROMPT_TOKENS = 512
"""Most tokens of a prompt that is read."""
TRIAL_TOKENS = 64
"""Tokens of the first training pass, which says how many dialogues there is time for."""
ROUND_TOKENS = 8
"""Tokens that each row draws in a round, at most."""
NO_STEP = AdamParams(learning_rate=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedLoad:
    """The load to measure: rows at a time and lengths of passes, as in the run."""

    rows: int
    """Sequences that are drawn at the same time."""
    context: int
    """Tokens that a row has read before it draws."""
    reply_tokens: int
    """Tokens of a reply."""
    datums: int
    """Dialogues that one optimizer step learns from."""
    datum_tokens: int
    """Tokens of each of these dialogues."""
    group_size: int
    """Dialogues that begin alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast this machine reads, draws and trains."""

    read_tokens_per_s: float
    """Prompt tokens that the sampler had not seen before."""
    sample_tokens_per_s: float
    train_tokens_per_s: float
    """Tokens of dialogues, those that are shared by several counted in each of them."""
    update_s: float
    """One optimizer step, and handing the new weights to the sampler."""
    load_s: float
    """Loading the model."""


def find_speed(config: Config, load: SpeedLoad, report: Callable[[str], None]) -> Speed:
    """The record of this load; measured now if there is none."""
    facts = _facts(config, load)
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    file = home() / "speeds" / f"{key}.json"
    try:
        return Speed(**json.loads(file.read_text(encoding="utf-8"))["speed"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as cause:
        log.info("%s cannot be read and is measured again: %s", file, cause)
    report("measuring the speed of this machine, once for this model and load (--no-time leaves it out)")
    speed = measure_speed(config, load)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"facts": facts, "speed": asdict(speed)}, indent=1), encoding="utf-8")
    except OSError as cause:
        log.info("the measured speed was not kept: %s", cause)
    return speed


def _facts(config: Config, load: SpeedLoad) -> dict[str, object]:
    from turnwise.engine.passed_tests import computing_facts  # loads torch

    engine = config.engine_in_use
    return {
        **computing_facts(find_model(config), *choose_device(engine)),
        "method": METHOD,
        "threads": find_threads().count,
        "engine": engine.model_dump(mode="json", exclude={"seed"}),
        "trained": {"train": config.model.train, "rank": config.model.rank, **_targets(config)},
        "load": asdict(load),
    }


def _targets(config: Config) -> dict[str, bool]:
    model = config.model
    return {"train_mlp": model.train_mlp, "train_attn": model.train_attn, "train_unembed": model.train_unembed}


def measure_speed(config: Config, load: SpeedLoad) -> Speed:
    """Load the model, and read, draw and train for a few seconds. Nothing is saved."""
    started_s = time.perf_counter()
    with make_service(config, None) as service:
        model = config.model
        trainer = (
            service.create_full_training_client(model.name)
            if model.train == "full"
            else service.create_lora_training_client(
                model.name, rank=model.rank, seed=0, **_targets(config), **expert_options(model)
            )
        )
        assert isinstance(trainer, LocalTrainingClient)
        sampler = trainer.save_weights_and_get_sampling_client_submit().result()
        sampler.submit(_request([5, 6, 7], 1)).result()  # kernels are built, the cache is made
        load_s = time.perf_counter() - started_s
        bench = _Bench(load, len(trainer.get_tokenizer()))
        read, drawn = bench.sample(sampler)
        trained, update_s = bench.train(trainer)
    return Speed(
        read_tokens_per_s=read,
        sample_tokens_per_s=drawn,
        train_tokens_per_s=trained,
        update_s=update_s,
        load_s=load_s,
    )


class _Bench:
    """Random ids of the load's shape."""

    def __init__(self, load: SpeedLoad, num_ids: int) -> None:
        self._load = load
        self._num_ids = num_ids
        self._rng = np.random.default_rng(0)

    def sample(self, sampler: LocalSamplingClient) -> tuple[float, float]:
        """Tokens read and tokens drawn, each per second."""
        load = self._load
        read, read_s = 0, 0.0
        rows: list[list[int]] = []
        length = max(1, min(load.context, PROMPT_TOKENS))
        while len(rows) < load.rows and read_s < READ_S:
            few = [self._ids(length) for _ in range(min(8 if rows else 1, load.rows - len(rows)))]
            read_s += _timed(lambda few=few: _draw(sampler, few, 1))
            read += sum(map(len, few))
            rows += few
        rows = [rows[index % len(rows)] for index in range(load.rows)]
        _draw(sampler, rows, 1)
        drawn, drawn_s = 0, 0.0
        each = max(1, min(load.reply_tokens, ROUND_TOKENS))
        while not drawn or (drawn_s < DRAW_S and drawn < 8 * load.rows * each):
            began_s = time.perf_counter()
            replies = _draw(sampler, rows, each)
            drawn_s += time.perf_counter() - began_s
            drawn += sum(map(len, replies))
        return read / read_s, drawn / drawn_s

    def train(self, trainer: LocalTrainingClient) -> tuple[float, float]:
        """Tokens trained per second, and seconds of an update. The learning rate is 0."""
        load = self._load
        length = max(2, load.datum_tokens)
        small = [self._datum(self._ids(min(length, TRIAL_TOKENS) + 1))]

        def learn(datums: Sequence[Datum]) -> None:
            trainer.forward_backward(list(datums), "importance_sampling").result()

        def update() -> None:
            trainer.optim_step(NO_STEP).result()
            trainer.save_weights_and_get_sampling_client_submit().result()

        learn(small)
        update()
        small_s = _timed(lambda: learn(small))
        most = max(1, int(TRAIN_S / 2 / small_s * small[0].model_input.length / length))
        batch = self._dialogues(min(load.datums, most), length)
        passes: list[float] = []
        while not passes or (sum(passes) + passes[-1] < TRAIN_S and len(passes) < 3):
            passes.append(_timed(lambda: learn(batch)))
        return len(batch) * length / min(passes), _timed(update)

    def _dialogues(self, count: int, length: int) -> list[Datum]:
        """Dialogues of which the first half is the same in a group."""
        found: list[Datum] = []
        shared: list[int] = []
        for index in range(count):
            if index % self._load.group_size == 0:
                shared = self._ids(length // 2)
            found.append(self._datum([*shared, *self._ids(length + 1 - len(shared))]))
        return found

    def _datum(self, ids: Sequence[int]) -> Datum:
        count = len(ids) - 1
        mask = (np.arange(count) >= count // 2).astype(np.float32)
        values = {"mask": mask, "logprobs": -5.0 * mask, "advantages": mask}
        return Datum(ModelInput.from_ints(list(ids[:-1])), {"target_tokens": np.asarray(ids[1:]), **values})

    def _ids(self, count: int) -> list[int]:
        return self._rng.integers(self._num_ids // 2, self._num_ids, count).tolist()


def _request(ids: Sequence[int], count: int) -> SampleRequest:
    return SampleRequest(ids, SamplingParams(max_tokens=count, stop=[]))


def _draw(sampler: LocalSamplingClient, rows: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    futures = [sampler.submit(_request(row, count)) for row in rows]
    return [future.result().sequences[0].tokens for future in futures]


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return max(1e-9, time.perf_counter() - began_s)
