"""The one facade over the device: create_adapter, forward_backward, optim_step, publish, sample, save, load.

Nothing here is thread-safe; `worker.EngineWorker` is the one thread that calls it. Methods that take long are
generators: they check everything first, yield between passes, and return their result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from turnwise.engine.budget import MemorySplit, gathered_bytes, split_memory
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import choose_device, dtype_reason, find_device
from turnwise.engine.memory import keep_freed_memory, spare_imports_from_collection
from turnwise.engine.model.full import FullPolicy, ModelWeights
from turnwise.engine.model.kept import KeptRoom
from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import Policy, base_policy, target_shapes
from turnwise.engine.model.sharded import ShardExchange
from turnwise.engine.ops import bitwise_for_device, for_device
from turnwise.engine.ops.cuda_buffer import CudaBuffer
from turnwise.engine.sampling.sampler import Sampler
from turnwise.engine.self_test import SelfTest
from turnwise.engine.shared_weights import ExportedBuffer, WeightShare, WholeWeights
from turnwise.engine.training import adapter_files, full_files
from turnwise.engine.training.critic import CRITIC_HINT, CriticAdapter, create_critic
from turnwise.engine.training.full_weights import FullWeights
from turnwise.engine.training.losses import make_loss
from turnwise.engine.training.objective import TOKEN_LOGPROBS, LossSettings, PassLoss
from turnwise.engine.training.optim import adamw_step
from turnwise.engine.training.sharded_weights import ShardedFullWeights
from turnwise.engine.training.trainable import LoraAdapter, Trainable
from turnwise.engine.training.trainer import FinishedJob, Trainer, TrainingJob, outputs_by_datum
from turnwise.errors import CheckpointError, ConfigError, DataError
from turnwise.losses.outside import LossFunction
from turnwise.losses.table import is_imitation
from turnwise.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig

log = logging.getLogger(__name__)

CustomLoss = Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]]

CROSS_ENTROPY = make_loss("cross_entropy", None)


class Engine:
    """One base model on one device, its adapters, and a sampler over their published versions."""

    def __init__(
        self, model_dir: Path, config: EngineConfig, *, name: str, exchange: ShardExchange | None = None
    ) -> None:
        """With an `exchange`, this process holds a part of the weights, and `check_itself` is the caller's to call."""
        self.name = name
        self.model_dir = Path(model_dir)
        self.config = config
        self.device, self.dtype = choose_device(config)
        if why := dtype_reason(self.device, config):
            log.log(logging.WARNING if self.dtype is torch.float32 else logging.INFO, "%s: %s", name, why)
        ops = bitwise_for_device(self.device) if config.bitwise else for_device(self.device)
        ops.prepare_process()
        spare_imports_from_collection()
        keep_freed_memory()
        self._test = SelfTest(self.model_dir, self.device, self.dtype, config)
        self.exchange = exchange
        self.model = CausalModel(
            self.model_dir,
            ops,
            self.dtype,
            is_tested=self._test.is_due,
            wanted_context=config.context_length,
            exchange=exchange,
        )
        self.arch = self.model.arch
        self.vocab_size = self.model.vocab_size
        self.max_context_length = self.model.max_context_length
        self.base_policy = base_policy()
        self.memory = self._split_memory()
        """Memory that the sampler and the trainer may use beside the weights."""
        self.model.keep(KeptRoom(self.memory.training_bytes, config.activations, self.memory.limit.alone))
        self.trainer = Trainer(
            self.model,
            self.memory.limit,
            share_prefixes=config.share_prefixes,
            captures=config.capture_passes and not config.bitwise,
        )
        self.sampler = Sampler(self.model, config, self.memory, self.model_dir)
        self.trainer.routing = self.sampler.routing
        self._references: dict[str, Policy] = {}
        if exchange is None:
            self.check_itself()

    def check_itself(self) -> None:
        """Compare a few tokens with plain transformers; raises a `ModelError` if they differ."""
        self._test.check(self)

    def create_adapter(self, lora: LoraConfig) -> LoraAdapter:
        """Create an adapter: a policy in training."""
        return LoraAdapter(lora, target_shapes(self.model.shapes, lora), self.device)

    def create_critic(self, lora: LoraConfig) -> CriticAdapter:
        """Create an adapter with a value head; its only loss is `value`."""
        return create_critic(self.model, lora)

    def create_full(self, number: int = 0) -> FullWeights | ShardedFullWeights:
        """Create a trainable of all weights: a policy in training that starts as the base model.

        Of weights in parts, all learners create the same one, under the same `number`.
        """
        if self.model.ops.facts.has_own_memory and not self.config.full_weights:
            raise ConfigError(
                "this engine was loaded without memory for training all weights; load it with "
                "EngineConfig(full_weights=True), as a run with model.train=full does"
            )
        if self.model.fused is None and self.model.activation_dtype is not self.dtype:
            raise ConfigError(
                f"training all weights of {self.arch} runs transformers' layers, which cannot mix bfloat16 weights "
                "with the float32 activations of a CPU; use engine.dtype=float32"
            )
        if self.model.shards is not None and self.exchange is not None:
            return ShardedFullWeights(self.model.shards, self.exchange, number)
        return FullWeights(self.model.layout, self.device, self.dtype, is_fused=self.model.fused is not None)

    def create_saved(self, directory: Path, lora: LoraConfig | None) -> Trainable:
        """Create a trainable of the same kind as the one in `directory`; `load_adapter` fills it."""
        if lora is None:
            return self.create_full()
        return self.create_critic(lora) if adapter_files.is_critic(directory) else self.create_adapter(lora)

    def drop_adapter(self, adapter: Trainable) -> None:
        """Free an adapter's tensors; its published policies stay usable."""
        adapter.free()

    def forward(
        self, adapter: Trainable, datums: Sequence[Datum], loss_fn: str | LossFunction, loss_fn_config: LossSettings
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Compute the objective's numbers (logprobs of targets, or values) and their loss, without a gradient.

        With `cross_entropy` and a `kl_reference`, the numbers are the reference's, not the adapter's.
        """
        return (yield from self.read_job(adapter, datums, loss_fn, loss_fn_config)).output()

    def read_job(
        self, adapter: Trainable, datums: Sequence[Datum], loss_fn: str | LossFunction, loss_fn_config: LossSettings
    ) -> Generator[None, None, FinishedJob]:
        """`forward`, before its result is made ready for the client."""
        loss, (job,) = self.make_jobs([(adapter, datums)], loss_fn, loss_fn_config, is_learning=False)
        return (yield from self.read_checked(job, loss, loss_fn, loss_fn_config))

    def read_checked(
        self, job: TrainingJob, loss: PassLoss, loss_fn: str | LossFunction, loss_fn_config: LossSettings
    ) -> Generator[None, None, FinishedJob]:
        """`read_job` of datums that are checked."""
        if is_imitation(loss_fn) and "kl_reference" in (loss_fn_config or {}):
            job = replace(job, weights=self._reference(loss_fn_config), replays=False)
        result = yield from self.trainer.read(job, only_trained=False, with_entropy=loss.needs_entropy)
        reference = self._reference_for(loss, [job], loss_fn_config)
        if reference is not None:
            yield from self.trainer.add_reference(job, result, reference)
        return FinishedJob(job, result, loss)

    def score(self, policy: Policy, datums: Sequence[Datum]) -> Generator[None, None, ForwardBackwardOutput]:
        """Compute the logprobs of every target under published weights."""
        loss = TOKEN_LOGPROBS.make_loss("cross_entropy", None, is_learning=False)
        checked = TOKEN_LOGPROBS.read_datums(datums, loss, self.model, is_learning=False)
        job = TrainingJob(weights=policy, datums=checked, objective=TOKEN_LOGPROBS)
        result = yield from self.trainer.read(job, only_trained=False, with_entropy=False)
        return FinishedJob(job, result, loss).output()

    def forward_backward(
        self, adapter: Trainable, datums: Sequence[Datum], loss_fn: str | LossFunction, loss_fn_config: LossSettings
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Add the gradient of `loss_fn` to the adapter's; it stays until `optim_step`."""
        outputs = yield from self.forward_backward_many([(adapter, datums)], loss_fn, loss_fn_config)
        return outputs[0]

    def forward_backward_many(
        self,
        batches: Sequence[tuple[Trainable, Sequence[Datum]]],
        loss_fn: str | LossFunction,
        loss_fn_config: LossSettings,
    ) -> Generator[None, None, list[ForwardBackwardOutput]]:
        """Run the batches of several adapters in shared passes; each adapter gets its own gradient."""
        finished = yield from self.learn_jobs(batches, loss_fn, loss_fn_config)
        return [one.output() for one in finished]

    def learn_jobs(
        self,
        batches: Sequence[tuple[Trainable, Sequence[Datum]]],
        loss_fn: str | LossFunction,
        loss_fn_config: LossSettings,
    ) -> Generator[None, None, list[FinishedJob]]:
        """`forward_backward_many`, before its results are made ready for the clients."""
        loss, jobs = self.make_jobs(batches, loss_fn, loss_fn_config, is_learning=True)
        return (yield from self.learn_checked([adapter for adapter, _ in batches], jobs, loss, loss_fn_config))

    def learn_checked(
        self,
        adapters: Sequence[Trainable],
        jobs: Sequence[TrainingJob],
        loss: PassLoss,
        loss_fn_config: LossSettings,
    ) -> Generator[None, None, list[FinishedJob]]:
        """`learn_jobs` of datums that are checked."""
        reference = self._reference_for(loss, jobs, loss_fn_config)
        with _whole_gradients(adapters):
            results = yield from self.trainer.forward_backward(jobs, loss, reference)
        return [FinishedJob(job, result, loss) for job, result in zip(jobs, results, strict=True)]

    def forward_backward_custom(
        self, adapter: Trainable, datums: Sequence[Datum], loss_fn: CustomLoss
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Run the caller's own loss over logprobs, one tensor per datum, and propagate its gradient through the
        model."""
        if adapter.objective is not TOKEN_LOGPROBS:
            raise ConfigError(f"this client trains a critic: a custom loss reads logprobs; {CRITIC_HINT}")
        columns = TOKEN_LOGPROBS.read_datums(datums, CROSS_ENTROPY, self.model, is_learning=False)
        job = TrainingJob(weights=adapter, datums=columns)
        result = yield from self.trainer.read(job, only_trained=False)
        outputs = outputs_by_datum(job, result)
        leaves = [out["logprobs"].to_torch().requires_grad_(True) for out in outputs]
        with torch.enable_grad():
            loss, metrics = loss_fn(list(datums), leaves)
        if loss.dim() != 0 or not torch.isfinite(loss):
            raise DataError(f"the custom loss returned {loss}; expected one finite number as a torch scalar")
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        flat = torch.zeros(int(result.offsets[-1]), device=self.device)
        for datum, start, stop, grad in zip(columns, result.offsets, result.offsets[1:], grads, strict=False):
            if grad is not None:
                flat[int(start) + datum.target_start : int(stop)] = grad.to(self.device)
        if not torch.isfinite(flat).all():
            raise DataError("the custom loss has a gradient that is not finite")
        everything = TrainingJob(weights=adapter, datums=[datum.with_all_trained() for datum in columns])
        with _whole_gradients([adapter]):
            yield from self.trainer.backward_from(everything, flat)
        numbers = {key if ":" in key else f"{key}:mean": float(value) for key, value in metrics.items()}
        known = {"loss:sum": float(loss.detach()), "num_trained_tokens:sum": float(sum(len(leaf) for leaf in leaves))}
        return ForwardBackwardOutput("ArrayRecord", outputs, {**numbers, **known})

    def optim_step(self, adapter: Trainable, params: AdamParams, norm: float | None = None) -> dict[str, float]:
        """Take an optimizer step. `norm` is that of the whole gradient, where this process holds a part of it."""
        return adamw_step(adapter, params, norm)

    def publish(self, adapter: Trainable) -> Policy:
        """Make a frozen copy of the adapter for sampling, with its own version."""
        policy = adapter.publish(self.model.activation_dtype)
        self.sampler.get_ready(policy)
        return policy

    def publish_whole(self, adapter: Trainable) -> WholeWeights:
        """Make a frozen version of all weights, with the adapter added, for a sampler in another process."""
        return WholeWeights(self.model, adapter.publish(self.model.activation_dtype))

    def share(self, weights: WholeWeights, make_buffer: Callable[[int], ExportedBuffer] | None = None) -> WeightShare:
        """Begin to hand whole weights to another process; `make_buffer` gives the memory that it can open."""
        size = weights.buffer_bytes()
        return WeightShare(weights, CudaBuffer(size, self.device) if make_buffer is None else make_buffer(size))

    def sample_step(self) -> None:
        """Advance all requests of the sampler by one forward pass."""
        self.sampler.step()

    def warm_up(self, policy: Policy, max_context: int) -> Generator[None, None, int]:
        """Capture the graphs for sampling from `policy` before the first request needs them."""
        return (yield from self.sampler.warm_up(policy, min(max_context, self.max_context_length)))

    def save_adapter(self, adapter: Trainable, directory: Path, *, with_optimizer: bool) -> None:
        adapter.save(directory, str(self.model_dir), with_optimizer=with_optimizer)

    def save_policy(self, policy: Policy, directory: Path) -> None:
        if policy.full is not None:
            full_files.write_weights(directory, policy.full.weights.tensors, self.model_dir)
            return
        adapter_files.write_adapter(policy, directory, str(self.model_dir))

    def load_adapter(self, adapter: Trainable, directory: Path, *, with_optimizer: bool) -> None:
        """Replace an adapter's weights; its gradient is cleared, and its optimizer starts again or is restored."""
        adapter.load(directory, with_optimizer=with_optimizer)

    def load_policy(self, directory: Path) -> Policy:
        if adapter_files.is_critic(directory):
            raise CheckpointError(f"{directory} is a critic; there is nothing to sample from")
        if full_files.is_full(directory):
            weights = ModelWeights(self.model.layout, torch.zeros(self.model.layout.size, dtype=self.dtype))
            full_files.read_weights(directory, weights.tensors)
            return FullPolicy(ModelWeights(self.model.layout, weights.flat.to(self.device)))
        lora = adapter_files.read_lora_config(directory)
        shapes = target_shapes(self.model.shapes, lora)
        flat = adapter_files.read_flat(directory, shapes, lora).to(self.device)
        return Policy(lora, shapes, flat, self.model.activation_dtype)

    def wait(self) -> None:
        """Wait until the device has finished all launched work."""
        self.model.ops.transfer.wait()

    def close(self) -> None:
        """Drop everything that holds memory."""
        self._references.clear()
        self.sampler.close()
        del self.sampler, self.trainer, self.model

    def make_jobs(
        self,
        batches: Sequence[tuple[Trainable, Sequence[Datum]]],
        loss_fn: str | LossFunction,
        settings: LossSettings,
        *,
        is_learning: bool,
    ) -> tuple[PassLoss, list[TrainingJob]]:
        """The loss and the checked batches. All trainables must have the same objective, because they share passes."""
        objective = batches[0][0].objective
        if any(adapter.objective is not objective for adapter, _ in batches):
            raise ConfigError("policies and critics cannot share passes; send their batches one by one")
        if len(batches) > 1 and any(adapter.lora is None for adapter, _ in batches):
            raise ConfigError("a trainable of all weights shares its passes with no other; send the batches one by one")
        loss = objective.make_loss(loss_fn, settings, is_learning=is_learning)
        jobs = []
        for adapter, datums in batches:
            checked = objective.read_datums(datums, loss, self.model, is_learning=is_learning)
            jobs.append(TrainingJob(weights=adapter, datums=checked, objective=objective))
        return loss, jobs

    def _reference_for(self, loss: PassLoss, jobs: Sequence[TrainingJob], config: LossSettings) -> Policy | None:
        """The reference policy of a KL term; None if the loss needs none or the datums bring its logprobs."""
        if not loss.needs_reference or all(d.has_reference for job in jobs for d in job.datums):
            return None
        return self._reference(config)

    def _reference(self, config: LossSettings) -> Policy:
        where = str((config or {}).get("kl_reference", "base"))
        if where == "base":
            return self.base_policy
        if where not in self._references:
            self._references[where] = self.load_policy(Path(where))
        return self._references[where]

    def _split_memory(self) -> MemorySplit:
        device, num_parameters, shards = find_device(self.config), self.model.layout.size, self.model.shards
        if shards is not None:
            gathered = gathered_bytes(shards.largest_unit, device, is_full=self.config.full_weights)
            device = replace(device, free_bytes=max(0, device.free_bytes - gathered))
            num_parameters = shards.size
        split = split_memory(
            self.config,
            device,
            self.model.sizes,
            adapted_parameters=sum(shape.num_values for shape in self.model.shapes.values()),
            context_length=self.max_context_length,
            num_parameters=num_parameters,
        )
        log.info("memory of %s on %s beside its weights: %s", self.name, self.device, split.line())
        if split.kv_tokens < 2 * self.config.block_size:
            raise ConfigError(
                f"the KV cache would hold {split.kv_tokens} tokens, because kv_cache_gib={self.config.kv_cache_gib:g} "
                f"and gpu_memory_utilization={self.config.gpu_memory_utilization:g} leave {split.kv_bytes} bytes; "
                "raise one of them, or take a smaller model"
            )
        return split


@contextmanager
def _whole_gradients(trainables: Sequence[Trainable]) -> Iterator[None]:
    """Put the gradients back if a pass fails, so that no partial gradient stays."""
    before = [one.grad.clone() if one.has_gradient else None for one in trainables]
    try:
        yield
    except BaseException:
        for one, grad in zip(trainables, before, strict=True):
            _ = one.grad.zero_() if grad is None else one.grad.copy_(grad)
        raise
    for one in trainables:
        one.has_gradient = True
