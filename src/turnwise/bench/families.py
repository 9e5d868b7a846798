"""Compare a tiny random model of every family with transformers and PEFT: forward, prefill, decode, training, files.

Each number is the largest difference of a logprob, in nats. The peers run every sequence alone, without packing and
without a cache; we run sequences of different lengths together.

- `forward`: the trainer, on datums of different lengths that share a beginning.
- `prefill`: the sampler's logprobs of prompt tokens.
- `decode`: the sampler's logprobs of the tokens that it drew.
- `training`: logprobs after three AdamW steps from the same adapter, ours against transformers with PEFT.
- `peft`: our saved adapter read by PEFT, and what PEFT saves of it read by us.

`--write docs/models.md` renews the table on that page: the one of CPUs, or with a GPU the one of GPUs.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.bench.drive import finish, submit
from turnwise.bench.family_page import Differences, FamilyRow, replace_tables
from turnwise.bench.family_samples import VOCAB, FamilySample, family_samples, write_model
from turnwise.bench.report import machine
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import choose_device
from turnwise.engine.engine import Engine
from turnwise.engine.model.load import without_progress_bars, without_remarks
from turnwise.engine.model.pretrained import load_pretrained
from turnwise.engine.training.trainable import LoraAdapter
from turnwise.errors import ConfigError, ModelError
from turnwise.models.families import FAMILIES, has_stretched_angles
from turnwise.models.linears import linear_kind
from turnwise.types import AdamParams, Datum, LoraConfig, ModelInput, SampleRequest, SampleResponse, SamplingParams

MODEL = "model"
"""The folder of the model."""
RANK = 3
NUM_STEPS = 3
ADAM = AdamParams(learning_rate=1e-3, eps=1e-2)
"""With a large eps, a gradient that is zero but for rounding moves nothing."""
Ids = list[int]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=[], help="names of families; the others are left out")
    parser.add_argument("--write", type=Path, help="a page whose table of families on this kind of device is replaced")


def run(args: argparse.Namespace) -> dict[str, Any]:
    chosen = [s for s in family_samples() if not args.only or s.name in args.only or s.model_type in args.only]
    if not chosen:
        raise ConfigError(f"no family {' '.join(args.only)}; known: {', '.join(sorted(FAMILIES))}")
    if args.write is not None and args.only:
        raise ConfigError("--write renews the whole table; leave --only out")
    settings = EngineConfig(device=args.device, dtype="float32" if args.dtype == "auto" else args.dtype)
    device, _ = choose_device(settings)
    start = time.perf_counter()
    with quiet_transformers():
        rows, failures = compare_all(chosen, settings)
    if args.write is not None and failures:
        raise ModelError(f"the table is not written, because these failed: {failures}")
    if args.write is not None:
        page = args.write.read_text(encoding="utf-8")
        page = replace_tables(page, rows, machine(device), is_gpu=device.type == "cuda")
        args.write.write_text(page, encoding="utf-8")
    return {
        "bench": "families",
        "model": f"{len(rows)} tiny random models",
        "machine": machine(device),
        "dtype": settings.dtype,
        "seconds": round(time.perf_counter() - start, 1),
        "largest": max((row.differences.largest for row in rows), default=0.0),
        "failed": len(failures),
        **{name: f"failed: {reason}" for name, reason in failures.items()},
        **{row.name: " ".join(f"{k} {v:.1g}" for k, v in asdict(row.differences).items()) for row in rows},
    }


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without bars, and without remarks on configs that are too small to be true."""
    with without_remarks(), without_progress_bars():
        yield


def compare_all(samples: Sequence[FamilySample], settings: EngineConfig) -> tuple[list[FamilyRow], dict[str, str]]:
    """The rows of the models that ran, and why each of the others did not."""
    rows: list[FamilyRow] = []
    failures: dict[str, str] = {}
    for sample in samples:
        try:
            rows.append(compare(sample, settings))
        except Exception as cause:  # noqa: BLE001 - one family's failure must not hide what the others do
            failures[sample.name] = f"{type(cause).__name__}: {cause}"
    return rows, failures


def compare(sample: FamilySample, settings: EngineConfig) -> FamilyRow:
    """Write the model, run it in both worlds, and compare."""
    with tempfile.TemporaryDirectory() as place:
        write_model(sample.config(), Path(place) / MODEL)
        own = {"kv_cache_gib": 0.01, "seed": 3, "context_length": sample.context_length}
        engine = Engine(Path(place) / MODEL, settings.model_copy(update=own), name=sample.name)
        try:
            pair = _Pair(engine, Path(place))
            differences = Differences(
                forward=pair.forward(),
                prefill=pair.prefill(),
                decode=pair.decode(),
                training=pair.training(),
                peft=pair.files(),
            )
            return FamilyRow(
                name=sample.name,
                layers="ours" if engine.model.fused is not None else "transformers",
                adapted=", ".join(sorted({linear_kind(name) for name in pair.adapter.shapes})),
                moved=pair.moved,
                differences=differences,
            )
        finally:
            engine.close()


def load_plain(directory: Path) -> Any:
    """transformers' own model."""
    return load_pretrained(directory, torch.float32, attn_implementation="eager").eval()


class _Pair:
    """One model in our engine and in transformers, and an adapter that both train."""

    def __init__(self, engine: Engine, place: Path) -> None:
        self.engine, self.place = engine, place
        self.plain = self._load_plain()
        config = self.plain.config.to_dict()
        is_stretched = has_stretched_angles(config, engine.max_context_length)
        self.angles = Angles(engine.model.angle_switch, engine.max_context_length if is_stretched else None)
        kinds = {linear_kind(name) for name in engine.model.shapes}
        self.lora = LoraConfig(rank=RANK, seed=1, train_mlp="mlp" in kinds, train_router="router" in kinds)
        self.adapter = engine.create_adapter(self.lora)
        noise = torch.randn(self.adapter.flat.shape, generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            self.adapter.flat.add_(0.05 * noise.to(self.adapter.flat.device))
        beginning = draw_ids(20, 1)
        self.sequences = [
            beginning + draw_ids(12, 2),
            beginning + draw_ids(5, 3),
            draw_ids(7, 4),
            draw_ids(150, 5),
        ]
        self.moved = 0.0

    def _load_plain(self) -> Any:
        return load_plain(self.place / MODEL).to(self.engine.device)

    def _plain(self, model: Any, ids: Ids) -> Tensor:
        return plain_logprobs(model, ids, self.angles)

    def forward(self) -> float:
        ours = self._ours(self.engine.create_adapter(self.lora))  # a new adapter changes nothing
        alone = self._ours(self.engine.create_adapter(self.lora), self.sequences[2:3])
        theirs = [self._plain(self.plain, ids) for ids in self.sequences]
        return max(_largest(ours, theirs), _largest(alone, theirs[2:3]))

    def prefill(self) -> float:
        replies = self._sample(max_tokens=1, scores=True)
        ours = [torch.tensor(reply.prompt_logprobs[1:]) for reply in replies if reply.prompt_logprobs is not None]
        return _largest(ours, [self._plain(self.plain, ids) for ids in self.sequences])

    def decode(self) -> float:
        ours, theirs = [], []
        for prompt, reply in zip(self.sequences, self._sample(max_tokens=12, scores=False), strict=True):
            (drawn,) = reply.sequences
            ours.append(torch.tensor(drawn.logprobs))
            theirs.append(self._plain(self.plain, [*prompt, *drawn.tokens])[len(prompt) - 1 :])
        return _largest(ours, theirs)

    def training(self) -> float:
        """Train both from the same files, and compare what they have become."""
        self.engine.save_adapter(self.adapter, self.place / "start", with_optimizer=False)
        theirs = self._load_peft(self.place / "start")
        trained = [p for name, p in theirs.named_parameters() if ".lora_" in name]
        for parameter in trained:
            parameter.requires_grad_(True)
        betas = ADAM.beta1, ADAM.beta2
        optimizer = torch.optim.AdamW(trained, ADAM.learning_rate, betas, ADAM.eps, ADAM.weight_decay)
        before = self._ours(self.adapter)
        for _ in range(NUM_STEPS):
            finish(self.engine.forward_backward(self.adapter, self._datums(), "cross_entropy", None))
            self.engine.optim_step(self.adapter, ADAM)
            optimizer.zero_grad()
            for ids in self.sequences:
                (-self._plain(theirs, ids).sum()).backward()
            optimizer.step()
        after = self._ours(self.adapter)
        self.moved = _largest(before, after)
        with torch.no_grad():
            return _largest(after, [self._plain(theirs, ids) for ids in self.sequences])

    def files(self) -> float:
        ours = self._ours(self.adapter)
        self.engine.save_adapter(self.adapter, self.place / "ours", with_optimizer=False)
        theirs = self._load_peft(self.place / "ours")
        with torch.no_grad():
            read = _largest([self._plain(theirs, ids) for ids in self.sequences], ours)
        with _without_remarks():
            theirs.save_pretrained(str(self.place / "theirs"))
        back = self.engine.create_adapter(self.lora)
        self.engine.load_adapter(back, self.place / "theirs", with_optimizer=False)
        return max(read, _largest(self._ours(back), ours))

    def _load_peft(self, directory: Path) -> Any:
        try:
            from peft import PeftModel
        except ImportError as cause:
            raise ConfigError("this bench compares with PEFT; install it: pip install 'turnwise[peft]'") from cause
        with _without_remarks():
            return PeftModel.from_pretrained(copy.deepcopy(self.plain), directory)

    def _datums(self, sequences: Sequence[Ids] | None = None) -> list[Datum]:
        chosen = self.sequences if sequences is None else sequences
        columns = [{"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)} for ids in chosen]
        inputs = [ModelInput.from_ints(ids[:-1]) for ids in chosen]
        return [Datum(one, own) for one, own in zip(inputs, columns, strict=True)]

    def _ours(self, adapter: LoraAdapter, sequences: Sequence[Ids] | None = None) -> list[Tensor]:
        output = finish(self.engine.forward(adapter, self._datums(sequences), "cross_entropy", None))
        return [columns["logprobs"].to_torch() for columns in output.loss_fn_outputs]

    def _sample(self, *, max_tokens: int, scores: bool) -> list[SampleResponse]:
        """All sequences in one batch."""
        replies: dict[int, SampleResponse] = {}
        params = SamplingParams(max_tokens=max_tokens, stop=[], seed=1, temperature=1.0)
        for index, ids in enumerate(self.sequences):
            submit(self.engine, SampleRequest(ids, params, 1, scores), self.engine.base_policy, replies, index)
        while self.engine.sampler.has_work:
            self.engine.sampler.step()
        return [replies[index] for index in range(len(self.sequences))]


@contextmanager
def _without_remarks() -> Iterator[None]:
    """PEFT warns about adapters on a head, which we mean."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def draw_ids(count: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


@dataclass(frozen=True, slots=True)
class Angles:
    """How the angles of a rotation follow from the length of a sequence."""

    switch: int | None = None
    """LongRoPE: a token behind this many is predicted with other angles."""
    context: int | None = None
    """Dynamic NTK: all sequences have the angles of one of this length."""


ONE_SET = Angles()


def plain_logprobs(model: Any, ids: Ids, angles: Angles = ONE_SET) -> Tensor:
    """[len(ids) - 1] of every token after the first, by a model of transformers that sees this sequence alone.

    With `angles.switch`, transformers runs the tokens up to it by themselves: it chooses by the length of what it runs.
    With `angles.context`, the sequence stands at the end of the context; rotations depend on distances alone.
    """
    tokens = torch.tensor([ids], device=model.device)
    read = tokens[:, :-1]
    first = 0 if angles.context is None else angles.context - read.shape[1]
    placed = {"position_ids": torch.arange(first, first + read.shape[1], device=model.device)[None]} if first else {}
    logits = model(read, use_cache=False, **placed).logits[0]
    if angles.switch is not None and read.shape[1] > angles.switch:
        start = model(read[:, : angles.switch], use_cache=False).logits[0]
        logits = torch.cat([start, logits[angles.switch :]])
    return torch.log_softmax(logits.float(), -1).gather(1, tokens[0, 1:, None])[:, 0]


def _largest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.detach().cpu() - b.detach().cpu()).abs().max()) for a, b in pairs)
