"""What the numerics tests share: driving an engine without threads, and a naive model to compare with."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from turnwise.bench.family_samples import write_model
from turnwise.engine.engine import Engine
from turnwise.engine.model.lora import LoraWeights, Policy
from turnwise.engine.sampling.sampler import Sampler
from turnwise.engine.sampling.speculation import Costs, PassCosts
from turnwise.engine.training.trainable import LoraAdapter
from turnwise.types import Datum, LoraConfig, ModelInput, SampleRequest, SampleResponse, SamplingParams

T = TypeVar("T")
VOCAB = 97


def run(work: Generator[None, None, T]) -> T:
    """Drive an engine's generator to its result."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value


def with_ops(engine: Engine, **changes: Any) -> None:
    """Give the engine a sampler whose device does some things in another way."""
    engine.model.ops = replace(engine.model.ops, **changes)
    if engine.model.fused is not None and "attention" in changes:
        engine.model.fused.ops = replace(engine.model.fused.ops, attention=changes["attention"])
    engine.sampler = Sampler(engine.model, engine.config, engine.memory, engine.model_dir)


class FreeDrafts(PassCosts):
    """Costs by which every guess pays, however long the passes take."""

    def __init__(self) -> None:
        super().__init__(row=1e-9, draft=0.0)
        self.now = Costs(base=1.0, row=1e-9, draft=0.0)

    def add(self, num_rows: int, *, has_drafts: bool, seconds: float) -> None:
        pass


def draft_always(engine: Engine) -> Engine:
    """Let the sampler guess wherever it can."""
    assert engine.sampler.speculation is not None, "the engine has engine.speculation=suffix"
    engine.sampler.speculation.costs = FreeDrafts()
    engine.sampler.speculation.most_idle = 10**9
    return engine


def sample(engine: Engine, prompt: Sequence[int], policy: Policy, num_samples: int = 1, **params) -> SampleResponse:
    """One request, run alone."""
    return sample_many(engine, [(prompt, policy)], num_samples=num_samples, **params)[0]


def sample_many(
    engine: Engine, requests: Sequence[tuple[Sequence[int], Policy]], num_samples: int = 1, **params
) -> list[SampleResponse]:
    """All requests in one batch."""
    prompt_logprobs = bool(params.pop("prompt_logprobs", False))
    topk, num_drawn = int(params.pop("topk_prompt_logprobs", 0)), int(params.pop("prompt_alt_tokens_k", 0))
    replies: dict[int, SampleResponse] = {}
    for index, (prompt, policy) in enumerate(requests):

        def keep(reply: SampleResponse | BaseException, index: int = index) -> None:
            if isinstance(reply, BaseException):
                raise reply
            replies[index] = reply

        request = SampleRequest(
            prompt,
            SamplingParams(**{"stop": [], **params}),
            num_samples,
            prompt_logprobs,
            topk_prompt_logprobs=topk,
            prompt_alt_tokens_k=num_drawn,
        )
        engine.sampler.submit(request, policy, on_done=keep)
    for _ in range(10_000):
        if not engine.sampler.has_work:
            return [replies[i] for i in range(len(requests))]
        engine.sampler.step()
    raise AssertionError("the sampler did not finish")


def displaced_adapter(engine: Engine, rank: int = 4, seed: int = 5, size: float = 0.05, **targets: bool) -> LoraAdapter:
    """An adapter that has moved away from its zero start, as if trained."""
    adapter = engine.create_adapter(LoraConfig(rank=rank, seed=seed, **targets))
    move(adapter, size, seed)
    return adapter


def move(adapter: LoraAdapter, size: float, seed: int) -> None:
    """Add noise to an adapter's weights, the same on every device."""
    noise = torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(seed))
    adapter.flat.add_(size * noise.to(adapter.flat.device))


def random_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


def rl_datum(ids: Sequence[int], start: int, seed: int = 0, **columns: Sequence[float]) -> Datum:
    """Input ids[:-1], targets ids[1:]; targets from position `start` on are trained, with random q and A."""
    rng = np.random.default_rng(seed)
    length = len(ids) - 1
    mask = np.arange(length) >= start
    inputs = {
        "target_tokens": list(ids[1:]),
        "mask": mask.astype(float).tolist(),
        "logprobs": (np.where(mask, -4.5 + 0.3 * rng.standard_normal(length), 0.0)).tolist(),
        "advantages": (np.where(mask, rng.standard_normal(length), 0.0)).tolist(),
        **columns,
    }
    return Datum(model_input=ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def make_model(config: PretrainedConfig, directory: Path, spread: float = 0.12) -> Path:
    """A random model with logits of a healthy spread, saved like any Hugging Face model."""
    return write_model(config, directory, spread)


class NaiveModel:
    """transformers' own model in float32 with W + scale * B A written into its weights: no packing, no cache."""

    def __init__(self, directory: Path, weights: LoraWeights | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        self.leaves: dict[str, tuple[Tensor, Tensor]] = {}
        self.scale = 0.0 if weights is None else weights.scale
        self.expert_scale = 0.0 if weights is None else weights.expert_scale
        if weights is not None:
            self.leaves = {
                name: (
                    a.detach().float().cpu().clone().requires_grad_(),
                    b.detach().float().cpu().clone().requires_grad_(),
                )
                for name, (a, b) in weights.pairs.items()
            }

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[len(ids), V], differentiable in the adapter's A and B."""
        state = dict(self.model.named_parameters())
        if "lm_head.weight" not in state:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        changed = {}
        for name, (a, b) in self.leaves.items():
            if a.dim() == 3:  # of all experts of a layer
                delta = self.expert_scale * (b @ a)
                base = state[name].detach()
                changed[name] = base + (delta if base.shape == delta.shape else delta.transpose(1, 2))
            else:
                changed[f"{name}.weight"] = state[f"{name}.weight"].detach() + self.scale * (b @ a)
        head = changed.pop("lm_head.weight", state["lm_head.weight"])
        hidden = torch.func.functional_call(
            self.model.model,
            {key.removeprefix("model."): value for key, value in changed.items()},
            (torch.tensor([list(ids)]),),
        ).last_hidden_state[0]
        return hidden @ head.t()

    def logprobs(self, datum: Datum) -> Tensor:
        """Of every target, at the datum's temperatures."""
        inputs = datum.loss_fn_inputs
        logits = self.logits(datum.model_input.to_ints())
        if "temperature" in inputs:
            logits = logits / torch.tensor(inputs["temperature"].to_numpy())[:, None]
        targets = torch.tensor(inputs["target_tokens"].to_numpy())
        return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]

    def grads(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (_grad(a), _grad(b)) for name, (a, b) in self.leaves.items()}


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def assert_close(got: object, want: object, tolerance: float) -> None:
    got_a, want_a = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got_a.shape == want_a.shape, f"{got_a.shape} against {want_a.shape}"
    error = np.abs(got_a - want_a).max(initial=0.0)
    assert error <= tolerance, f"largest difference {error:.3g}, allowed {tolerance:.3g}"


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.cpu(), want.cpu()
    return float((got - want).norm() / want.norm().clamp_min(1e-12))
