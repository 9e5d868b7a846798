"""The sections `engine` and `cluster` of a run's config. Imports without torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from turnwise.runtime.section import Section

LOCAL = "local"
"""`cluster.address` of processes on this machine, without Ray."""

Activations = Literal["auto", "keep", "recompute", "split"]


class ClusterConfig(Section):
    """Which processes train together, and which play the envs (docs/scale.md)."""

    address: str = Field(
        default=LOCAL,
        min_length=1,
        description="Who starts the processes: `local` starts them on this machine; `auto`, `HOST:PORT` or "
        "`ray://HOST:PORT` is a Ray cluster, which spreads learners and env workers over its nodes.",
    )
    learners: int = Field(
        default=1,
        ge=1,
        description="Processes that train. Each holds the model (with `shard`, a part of it) and takes its share of a "
        "batch; gradients are summed.",
    )
    shard: bool = Field(
        default=False,
        description="Each learner holds a part of the base weights, and with `model.train=full` a part of the masters "
        "and of AdamW's state; a pass gathers one block at a time. Needs `cluster.learners` above 1.",
    )
    samplers: int = Field(
        default=1,
        ge=1,
        description="Engines that sample for the run. `placement` says where they are; rollouts go to them by "
        "conversation.",
    )
    placement: Literal["colocated", "separate"] = Field(
        default="colocated",
        description="Where the samplers are: `colocated` in the first `samplers` learners, which sample and train on "
        "one device; `separate` in processes of their own, each with its own GPU if there are enough.",
    )
    deadline_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds that learners wait for each other in one call, after which lost ones are started again, "
        "and that one of several samplers has for a reply, after which another one gets the request.",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="How often a run starts learners again that died or do not answer. They take over the state of the "
        "last step, and the step under way is run again. The next loss after that stops the run with an error.",
    )
    min_learners: int = Field(
        default=0,
        ge=0,
        description="The fewest learners to go on with, if lost ones cannot be started again; 0: all of them, or the "
        "run ends.",
    )
    env_workers: int | tuple[str, ...] = Field(
        default=0,
        description="Processes that play the envs: a number starts as many on this machine, addresses "
        "(`http://a:8100,http://b:8100`) use those of `turnwise env serve`; 0 plays the envs in the training process.",
    )
    envs_per_worker: int = Field(
        default=0,
        ge=0,
        description="Most envs at the same time in one worker that the run starts; 0 shares `rollout.max_concurrency` "
        "out.",
    )

    @property
    def has_own_samplers(self) -> bool:
        """Whether samplers are processes of their own."""
        return self.placement == "separate"

    @property
    def has_fleet(self) -> bool:
        """Whether more engines sample than the one that leads the run, or another one."""
        return self.has_own_samplers or self.samplers > 1

    def samples_too(self, learner: int) -> bool:
        """Whether this learner is one of several that sample."""
        return not self.has_own_samplers and 0 < learner < self.samplers

    @property
    def num_devices(self) -> int:
        """Engines of a run, each of which wants a GPU."""
        return self.learners + (self.samplers if self.has_own_samplers else 0)

    @property
    def uses_ray(self) -> bool:
        """Whether a Ray cluster starts the processes."""
        return self.address != LOCAL

    @field_validator("env_workers", mode="before")
    @classmethod
    def _addresses(cls, given: object) -> object:
        if isinstance(given, str) and "://" in given:
            return tuple(address.strip() for address in given.split(",") if address.strip())
        return given

    @field_validator("env_workers")
    @classmethod
    def _enough_workers(cls, given: int | tuple[str, ...]) -> int | tuple[str, ...]:
        if isinstance(given, int) and given < 0:
            raise ValueError(f"{given} processes; expected 0 or more, or addresses such as http://127.0.0.1:8100")
        return given

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        starts_workers = isinstance(self.env_workers, int) and self.env_workers > 0
        if self.envs_per_worker and not starts_workers:
            raise ValueError(
                f"envs_per_worker={self.envs_per_worker} is not read with env_workers={self.env_workers!r}: the run "
                "starts no worker; leave it out, or give --max-envs to turnwise env serve"
            )
        for name in ("deadline_s", "max_restarts", "min_learners"):
            is_read = self.learners > 1 or (name == "deadline_s" and self.has_own_samplers)
            if not is_read and name in self.changed_options():
                raise ValueError(f"{name}={getattr(self, name):g} is not read with learners=1; leave it out")
        if self.uses_ray and self.learners == 1 and not starts_workers and not self.has_own_samplers:
            raise ValueError(
                f"address={self.address} is not read: the run has no other learner, and starts no sampler and no env "
                "worker; set learners, placement=separate or env_workers, or leave it out"
            )
        self._check_samplers()
        if self.shard and self.learners == 1:
            raise ValueError("shard=true is not read with learners=1: one learner holds all weights; set learners")
        if self.shard and self.min_learners:
            raise ValueError(
                f"min_learners={self.min_learners} with shard=true: each learner holds a part of the weights, so a run "
                "cannot go on with fewer; leave it out, and resume with another cluster.learners if a learner is lost"
            )
        if self.min_learners > self.learners:
            raise ValueError(f"min_learners={self.min_learners} is more than learners={self.learners}")
        return self

    def _check_samplers(self) -> None:
        if self.has_own_samplers:
            return
        if self.samplers > self.learners:
            raise ValueError(
                f"samplers={self.samplers} with placement=colocated and learners={self.learners}: each sampler is one "
                "of the learners; set placement=separate, or fewer samplers"
            )
        if self.samplers > 1 and self.shard:
            raise ValueError(
                f"samplers={self.samplers} with shard=true: no learner holds the whole model to sample from; set "
                "placement=separate, or leave samplers out"
            )
        if self.samplers > 1 and self.min_learners:
            raise ValueError(
                f"min_learners={self.min_learners} with samplers={self.samplers} among the learners: a run with fewer "
                "learners would have fewer samplers; leave one of them out, or set placement=separate"
            )


class EngineConfig(Section):
    """How one engine uses its device; 0 means that the engine chooses for the device and the model."""

    device: str = Field(default="auto", description="`cpu`, `cuda` or `cuda:1`; `auto` takes the GPU if there is one.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of the frozen weights and the activations; `auto` is float32 on a CPU and bfloat16 on a GPU. "
        "On a CPU with dot products of bfloat16, `bfloat16` is the type of the weights alone; on another CPU it means "
        "float32 (docs/cpu.md). Adapters, losses and optimizer state are always float32.",
    )
    max_num_seqs: int = Field(
        default=256, ge=1, description="Most sequences to decode at the same time; the others wait."
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory for weights, KV cache and training; not used on a CPU.",
    )
    context_length: int = Field(
        default=0,
        ge=0,
        description="Tokens of the longest sequence; 0: what the model reads with one set of angles. A model with "
        "LongRoPE or dynamic NTK reads more if you say how many (docs/models.md).",
    )
    kv_cache_gib: float = Field(
        default=0.0,
        ge=0,
        description="Size of the KV cache in GiB; 0: 1 GiB on a CPU, half of what weights and their merged copy leave "
        "on a GPU, and 0.05 GiB in a process that trains while others sample.",
    )
    block_size: int = Field(default=16, ge=1, description="Tokens in one block of the KV cache, the unit of reuse.")
    prefix_cache: bool = Field(
        default=True, description="Reuse the KV blocks of earlier turns and sibling samples under the same weights."
    )
    prefill_tokens: int = Field(
        default=0, ge=0, description="Most prompt tokens read in one sampler step; 0: 512 on a CPU, 16384 on a GPU."
    )
    merge_adapter: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether to sample from a second copy of the adapted weights with the adapter added in, "
        "or with the adapter beside the weights; `auto` merges while only one policy uses the "
        "sampler and the copy fits.",
    )
    speculation: Literal["none", "suffix"] = Field(
        default="none",
        description="Guess next tokens and check several in one step: `suffix` takes them from where the last tokens "
        "of a sequence stood before, in its prompt, its reply, its siblings and earlier replies. Tokens and logprobs "
        "are those of the policy, whatever was guessed (docs/speculation.md).",
    )
    bitwise: bool = Field(
        default=False,
        description="Sampler and trainer compute the logprob of a token to the same bit, whatever the batch: every sum "
        "runs in one order, and adapters are never merged. Slower, and not for every model (docs/numerics.md).",
    )
    full_weights: bool = Field(
        default=False,
        description="Leave memory of a GPU for training all weights; a run with `model.train=full` sets it.",
    )
    routing_replay: bool = Field(
        default=False,
        description="Keep which experts the sampler chose, and train with them; a run with `model.routing_replay` "
        "sets it.",
    )
    share_prefixes: bool = Field(
        default=True,
        description="Train datums that share leading tokens as one tree, which computes the shared tokens once.",
    )
    micro_batch_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens in one training pass; datums that share a beginning may take four times as many. "
        "0: 2048 on a CPU (4096 if they share), as many as fit on a GPU, up to 32768. A pass that "
        "does not fit computes its activations twice instead of keeping them.",
    )
    activations: Activations = Field(
        default="auto",
        description="What a training pass keeps for its backward pass: everything (`keep`), the input of each layer, "
        "which is then computed again (`recompute`), or, of a datum that is longer than a pass, one part at a time "
        "(`split`; other passes recompute). `auto`: the first of them that fits (docs/scale.md).",
    )
    capture_passes: bool = Field(
        default=True,
        description="Capture short passes of the trainer on a GPU as graphs when their shape comes again, so that they "
        "do not wait for the host to launch them (docs/gpu.md).",
    )
    self_test: bool = Field(
        default=True,
        description="After a model is loaded, compare 32 tokens with plain transformers in trainer, prefill and "
        "decode, and refuse the model if a part differs (docs/models.md).",
    )
    seed: int | None = Field(
        default=None,
        description="Seed of requests that have none; null: `train.seed` in a run, random in a service.",
    )

    def for_sampling(self) -> Self:
        """The config of an engine that only samples: it leaves no memory for training all weights."""
        return self.model_copy(update={"full_weights": False, "merge_adapter": "never"}) if self.full_weights else self

    @model_validator(mode="after")
    def _merges_nothing_that_must_agree(self) -> Self:
        if self.bitwise and self.merge_adapter == "always":
            raise ValueError(
                "bitwise=true with merge_adapter=always: the trainer's adapter lies beside the weights, and merged "
                "weights are rounded once more; leave merge_adapter out"
            )
        return self
