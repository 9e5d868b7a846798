"""The one facade over the device: create_adapter, forward_backward, optim_step, publish, sample, save, load.

Nothing here is thread-safe; `worker.EngineWorker` is the one thread that calls it. Methods that take long are
generators: they check everything first, yield between passes, and return their result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turnwise.engine.budget import MemorySplit, split_memory
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import choose_device, find_device
from turnwise.engine.memory import keep_freed_memory, spare_imports_from_collection
from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import Adapter, AnyPolicy, BasePolicy, Policy, target_shapes
from turnwise.engine.ops import for_device
from turnwise.engine.sampling.sampler import Sampler
from turnwise.engine.training import adapter_files
from turnwise.engine.training.columns import AnyLoss, DatumColumns, datums_to_columns
from turnwise.engine.training.critic import (
    CriticAdapter,
    CriticTrainer,
    ValueColumns,
    ValueLoss,
    create_critic,
    make_value_loss,
    value_columns,
)
from turnwise.engine.training.losses import make_loss
from turnwise.engine.training.optim import adamw_step
from turnwise.engine.training.preference_losses import DEFAULTS as PREFERENCE_LOSSES
from turnwise.engine.training.preference_losses import PreferenceLoss, check_pairs, make_preference_loss
from turnwise.engine.training.trainer import Job, Trainer, outputs_of
from turnwise.errors import CheckpointError, ConfigError, DataError
from turnwise.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, TensorData

log = logging.getLogger(__name__)

LossConfig = Mapping[str, float | str] | None
CustomLoss = Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]]

CROSS_ENTROPY = make_loss("cross_entropy", None)


class Engine:
    """One base model on one device, its adapters, and a sampler over their published versions."""

    def __init__(self, model_dir: Path, config: EngineConfig, *, name: str) -> None:
        self.name = name
        self.model_dir = Path(model_dir)
        self.config = config
        self.device, self.dtype = choose_device(config)
        for_device(self.device).prepare_process()
        spare_imports_from_collection()
        keep_freed_memory()
        self.model = CausalModel(self.model_dir, self.device, self.dtype)
        self.arch = self.model.arch
        self.vocab_size = self.model.vocab_size
        self.max_context_length = self.model.max_context_length
        self.base_policy = BasePolicy()
        self.memory = self._split_memory()
        """What the sampler and the trainer may take beside the weights."""
        if self.model.fused is not None:
            self.model.fused.most_kept_bytes = self.memory.training_bytes
        self.trainer = Trainer(self.model, self.memory.limit, share_prefixes=config.share_prefixes)
        self.critics = CriticTrainer(self.model, self.memory.limit, share_prefixes=config.share_prefixes)
        self.sampler = Sampler(self.model, config, self.memory, self.model_dir)
        self._references: dict[str, AnyPolicy] = {}

    def create_adapter(self, lora: LoraConfig) -> Adapter:
        return Adapter(lora, target_shapes(self.model.linears, lora), self.device)

    def create_critic(self, lora: LoraConfig) -> CriticAdapter:
        """An adapter with a value head; `forward` and `forward_backward` give it the loss `value`."""
        return create_critic(self.model, lora)

    def drop_adapter(self, adapter: Adapter) -> None:
        """Free an adapter's tensors; its published policies live on."""
        for tensor in (adapter.flat, adapter.grad, adapter.exp_avg, adapter.exp_avg_sq):
            tensor.resize_(0)

    def forward(
        self, adapter: Adapter, datums: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Logprobs of every target, and the loss they give; no gradient. Of a critic: its values.

        `cross_entropy` with a `kl_reference` asks that reference in place of the adapter.
        """
        if isinstance(adapter, CriticAdapter):
            loss = make_value_loss(loss_fn, loss_fn_config, is_learning=False)
            return (yield from self.critics.forward(adapter, self._value_columns(datums, loss, is_learning=False)))
        loss = _make_loss(loss_fn, loss_fn_config)
        is_reference = loss_fn == "cross_entropy" and "kl_reference" in (loss_fn_config or {})
        weights = self._reference(loss_fn_config) if is_reference else adapter
        job = Job(weights=weights, datums=self._columns([_with_weights(d) for d in datums], loss))
        result = yield from self.trainer.logprobs(job, only_trained=False, with_entropy=loss.needs_entropy)
        reference = self._reference_for(loss, [job], loss_fn_config)
        if reference is not None:
            yield from self.trainer.add_reference(job, result, reference)
        metrics = loss.metrics(result.logprobs, result.entropies, result.columns)
        return ForwardBackwardOutput("ArrayRecord", outputs_of(job, result), metrics)

    def forward_backward(
        self, adapter: Adapter, datums: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Add the gradient of `loss_fn` to the adapter's; it stays until `optim_step`."""
        if isinstance(adapter, CriticAdapter):
            loss = make_value_loss(loss_fn, loss_fn_config, is_learning=True)
            columns = self._value_columns(datums, loss, is_learning=True)
            return (yield from self.critics.forward_backward(adapter, columns, loss))
        outputs = yield from self.forward_backward_many([(adapter, datums)], loss_fn, loss_fn_config)
        return outputs[0]

    def forward_backward_many(
        self, batches: Sequence[tuple[Adapter, Sequence[Datum]]], loss_fn: str, loss_fn_config: LossConfig
    ) -> Generator[None, None, list[ForwardBackwardOutput]]:
        """Batches of several adapters in shared passes; each adapter gets its own gradient."""
        for adapter, _ in batches:
            _refuse_critic(adapter, "shared passes compute logprobs")
        loss = _make_loss(loss_fn, loss_fn_config)
        jobs = [Job(weights=adapter, datums=self._columns(datums, loss)) for adapter, datums in batches]
        reference = self._reference_for(loss, jobs, loss_fn_config)
        before = [adapter.grad.clone() for adapter, _ in batches]
        try:
            return (yield from self.trainer.forward_backward(jobs, loss, reference))
        except BaseException:
            # A pass that failed must leave no half gradient behind.
            for (adapter, _), grad in zip(batches, before, strict=True):
                adapter.grad.copy_(grad)
            raise

    def forward_backward_custom(
        self, adapter: Adapter, datums: Sequence[Datum], loss_fn: CustomLoss
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """The caller's own loss over logprobs, one tensor per datum; its gradient is carried through the model."""
        _refuse_critic(adapter, "a custom loss reads logprobs")
        job = Job(weights=adapter, datums=self._columns([_with_weights(d) for d in datums], CROSS_ENTROPY))
        result = yield from self.trainer.logprobs(job, only_trained=False)
        outputs = outputs_of(job, result)
        leaves = [out["logprobs"].to_torch().requires_grad_(True) for out in outputs]
        with torch.enable_grad():
            loss, metrics = loss_fn(list(datums), leaves)
        if loss.dim() != 0 or not torch.isfinite(loss):
            raise DataError(f"the custom loss returned {loss}; expected one finite number as a torch scalar")
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        flat = torch.zeros(int(result.offsets[-1]), device=self.device)
        for datum, start, stop, grad in zip(job.datums, result.offsets, result.offsets[1:], grads, strict=False):
            if grad is not None:
                flat[int(start) + datum.target_start : int(stop)] = grad.to(self.device)
        if not torch.isfinite(flat).all():
            raise DataError("the custom loss has a gradient that is not finite")
        everything = Job(weights=adapter, datums=[_train_all(d) for d in job.datums])
        yield from self.trainer.backward_from(everything, flat)
        numbers = {key if ":" in key else f"{key}:mean": float(value) for key, value in metrics.items()}
        known = {"loss:sum": float(loss.detach()), "num_trained_tokens:sum": float(sum(len(leaf) for leaf in leaves))}
        return ForwardBackwardOutput("ArrayRecord", outputs, {**numbers, **known})

    def optim_step(self, adapter: Adapter, params: AdamParams) -> dict[str, float]:
        return adamw_step(adapter, params)

    def publish(self, adapter: Adapter) -> Policy:
        """A frozen copy of the adapter for sampling, under a version of its own."""
        _refuse_critic(adapter, "sampling needs a policy")
        policy = adapter.publish(self.dtype)
        self.sampler.get_ready(policy)
        return policy

    def warm_up(self, policy: AnyPolicy, max_context: int) -> Generator[None, None, int]:
        """Make ready, before the first request, what sampling from `policy` would capture when it needs it."""
        return (yield from self.sampler.warm_up(policy, min(max_context, self.max_context_length)))

    def save_adapter(self, adapter: Adapter, directory: Path, *, with_optimizer: bool) -> None:
        adapter_files.write_adapter(adapter, directory, str(self.model_dir), with_optimizer=with_optimizer)

    def save_policy(self, policy: Policy, directory: Path) -> None:
        adapter_files.write_adapter(policy, directory, str(self.model_dir), with_optimizer=False)

    def load_adapter(self, adapter: Adapter, directory: Path, *, with_optimizer: bool) -> None:
        """Replace an adapter's weights; its gradient is cleared, and its optimizer starts anew or is restored."""
        flat = adapter_files.read_flat(directory, adapter.shapes, adapter.lora.rank, adapter.flat)
        if isinstance(adapter, CriticAdapter):
            head = adapter_files.read_head(directory, len(adapter.weight_H))
            flat[-len(head) :] = head
        elif adapter_files.is_critic(directory):
            raise CheckpointError(f"{directory} is a critic, not a policy; create a critic's client from it")
        if with_optimizer:
            adapter_files.read_optimizer(directory, adapter)
        else:
            adapter.num_steps = 0
            adapter.exp_avg.zero_()
            adapter.exp_avg_sq.zero_()
        adapter.flat.copy_(flat)
        adapter.grad.zero_()

    def load_policy(self, directory: Path) -> Policy:
        if adapter_files.is_critic(directory):
            raise CheckpointError(f"{directory} is a critic; there is nothing to sample from")
        lora = adapter_files.read_lora_config(directory)
        shapes = target_shapes(self.model.linears, lora)
        flat = adapter_files.read_flat(directory, shapes, lora.rank).to(self.device)
        return Policy(lora, shapes, flat, self.dtype)

    def wait(self) -> None:
        """Return when the device has done what was launched."""
        self.model.ops.transfer.wait()

    def close(self) -> None:
        """Drop everything that holds memory."""
        self._references.clear()
        del self.sampler, self.trainer, self.critics, self.model

    def _columns(self, datums: Sequence[Datum], loss: AnyLoss) -> list[DatumColumns]:
        if not datums:
            raise DataError("no datums; send at least one")
        sizes = {"vocab_size": self.vocab_size, "max_length": self.max_context_length}
        columns = datums_to_columns(datums, loss=loss, **sizes)
        if isinstance(loss, PreferenceLoss):
            check_pairs(columns)
        return columns

    def _value_columns(self, datums: Sequence[Datum], loss: ValueLoss, *, is_learning: bool) -> list[ValueColumns]:
        sizes = {"vocab_size": self.vocab_size, "max_length": self.max_context_length}
        return value_columns(datums, loss, **sizes, is_learning=is_learning)

    def _reference_for(self, loss: AnyLoss, jobs: Sequence[Job], config: LossConfig) -> AnyPolicy | None:
        """The policy that a KL term is measured against: the base, or an adapter's directory; None: no need of one."""
        if not loss.needs_reference or all(d.ref_logprobs is not None for job in jobs for d in job.datums):
            return None
        return self._reference(config)

    def _reference(self, config: LossConfig) -> AnyPolicy:
        where = str((config or {}).get("kl_reference", "base"))
        if where == "base":
            return self.base_policy
        if where not in self._references:
            self._references[where] = self.load_policy(Path(where))
        return self._references[where]

    def _split_memory(self) -> MemorySplit:
        split = split_memory(
            self.config,
            find_device(self.config),
            self.model.sizes,
            adapted_parameters=sum(linear.weight.numel() for linear in self.model.linears.values()),
            context_length=self.max_context_length,
        )
        log.info("memory of %s on %s beside its weights: %s", self.name, self.device, split.line())
        if split.kv_tokens < 2 * self.config.block_size:
            raise ConfigError(
                f"the KV cache would hold {split.kv_tokens} tokens, because kv_cache_gib={self.config.kv_cache_gib:g} "
                f"and gpu_memory_utilization={self.config.gpu_memory_utilization:g} leave {split.kv_bytes} bytes; "
                "raise one of them, or take a smaller model"
            )
        return split


def _make_loss(name: str, config: LossConfig) -> AnyLoss:
    settings = _without_reference(config)
    return make_preference_loss(name, settings) if name in PREFERENCE_LOSSES else make_loss(name, settings)


def _without_reference(config: LossConfig) -> dict[str, Any]:
    """`kl_reference` is the engine's to read; the loss sees the logprobs that come of it."""
    return {key: value for key, value in (config or {}).items() if key != "kl_reference"}


def _refuse_critic(adapter: Adapter, why: str) -> None:
    if isinstance(adapter, CriticAdapter):
        raise ConfigError(f"this client trains a critic: {why}; a critic has forward and forward_backward with 'value'")


def _with_weights(datum: Datum) -> Datum:
    """Reading logprobs needs no choice of what to train: a datum without weights or mask gets weights of one."""
    inputs = datum.loss_fn_inputs
    if "target_tokens" not in inputs or "weights" in inputs or "mask" in inputs:
        return datum
    ones = TensorData([1.0] * len(inputs["target_tokens"]))
    return Datum(model_input=datum.model_input, loss_fn_inputs={**inputs, "weights": ones})


def _train_all(datum: DatumColumns) -> DatumColumns:
    """The same datum with every target trained."""
    mask = np.arange(len(datum.input_ids)) >= datum.target_start
    return replace(datum, mask=mask, weights=mask.astype(np.float32))
