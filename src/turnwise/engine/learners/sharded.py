"""The engine of rank 0 when each learner holds a part of the weights (`cluster.shard`).

Batches are shared out as among learners with whole weights. A pass gathers one block at a time from all learners
(`rounds.py`). Adapters and critics are small: every learner has a copy, and rank 0 spreads its own. Of all weights in
training each learner holds a part of the masters and of the optimizer's state, so a learner that is lost takes its part
with it, and the run ends with its last checkpoint.

Sampling gathers block by block too, for every token: it works, and is slow. A run of some size samples with another
backend.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.device_info import find_device
from turnwise.engine.learners.calls import (
    DropVersionsCall,
    KeepVersionCall,
    RunCall,
    RunReply,
    ServeCall,
    ShardFilesCall,
)
from turnwise.engine.learners.process import do_shard_files, finish_gradient
from turnwise.engine.learners.replicated import ReplicatedEngine, finish_work
from turnwise.engine.learners.rounds import ExchangeError, ShardRounds
from turnwise.engine.model.lora import Policy
from turnwise.engine.model.sharded import ShardPlace
from turnwise.engine.training import full_files, shard_files
from turnwise.engine.training.adapter_files import new_directory
from turnwise.engine.training.objective import LossSettings, PassLoss
from turnwise.engine.training.sharded_weights import ShardedFullWeights
from turnwise.engine.training.trainable import Trainable
from turnwise.engine.training.trainer import TrainingJob
from turnwise.errors import CheckpointError, ConfigError, LearnerError, LearnerLostError
from turnwise.losses.outside import LossFunction
from turnwise.types import Datum, ForwardBackwardOutput

log = logging.getLogger(__name__)


class ShardedEngine(ReplicatedEngine):
    """Leads learners that hold the weights in parts."""

    def __init__(self, model_dir: Path, config: EngineConfig, cluster: ClusterConfig, *, name: str) -> None:
        if config.merge_adapter == "always":
            raise ConfigError(
                "engine.merge_adapter=always with cluster.shard=true: merged weights are a whole copy of the model; "
                "leave it out"
            )
        self._rounds = ShardRounds(ShardPlace(0, cluster.learners))
        self._versions = itertools.count(1)
        self._unread: list[int] = []
        """Published versions that nobody reads any more, to be dropped by all learners."""
        self._num_file_calls = itertools.count()
        super().__init__(model_dir, leader_config(config, name), cluster, name=name, exchange=self._rounds)
        self._places.peer_config = self._places.peer_config.model_copy(update={"self_test": False})

    def sample_step(self) -> None:
        """Sample; if a learner is lost meanwhile, the replies under way begin again when it was started again."""
        try:
            with self._served():
                super().sample_step()
        except LearnerLostError as lost:
            self.sampler.start_again()
            finish_work(self._recover(lost))
        except ExchangeError:  # a batch runs too: its next pass sees the same, and starts the learner again
            self.sampler.start_again()

    def score(self, policy: Policy, datums: Sequence[Datum]) -> Generator[None, None, ForwardBackwardOutput]:
        with self._served():
            return (yield from super().score(policy, datums))

    def publish(self, adapter: Trainable) -> Policy:
        if not isinstance(adapter, ShardedFullWeights):
            return super().publish(adapter)
        self._drop_unread()
        source = -next(self._versions)
        self._all_do(KeepVersionCall(self._created[adapter].number, source), "keep a version of the weights")
        adapter.keep_version(source)
        policy = adapter.version(source)
        weakref.finalize(policy, self._unread.append, source).atexit = False
        return policy

    def save_policy(self, policy: Policy, directory: Path) -> None:
        with self._served():
            super().save_policy(policy, directory)

    def save_adapter(self, adapter: Trainable, directory: Path, *, with_optimizer: bool) -> None:
        """Write the adapter; of all weights a Hugging Face directory, and the parts of every learner beside it."""
        if not isinstance(adapter, ShardedFullWeights):
            super().save_adapter(adapter, directory, with_optimizer=with_optimizer)
            return
        with new_directory(directory) as temporary:
            with self._served():
                adapter.fill(temporary, self.model_dir, with_optimizer=with_optimizer)
            if with_optimizer:
                self._do_files(adapter, temporary, is_saved=True)
                shard_files.write_num_steps(temporary, self.model.layout, adapter.num_steps)

    def load_adapter(self, adapter: Trainable, directory: Path, *, with_optimizer: bool) -> None:
        if not isinstance(adapter, ShardedFullWeights):
            super().load_adapter(adapter, directory, with_optimizer=with_optimizer)
            return
        self._learned.pop(adapter, None)
        self._do_files(adapter, directory, is_saved=False, with_optimizer=with_optimizer)

    def load_policy(self, directory: Path) -> Policy:
        self._refuse_whole(directory)
        return super().load_policy(directory)

    def gather(self, adapter: ShardedFullWeights, name: str) -> dict[str, Tensor]:
        """The `masters`, `grad`, `exp_avg` or `exp_avg_sq` of all learners by parameter, in the host's memory."""
        with self._served():
            return adapter.whole(name).tensors

    def make_jobs(
        self,
        batches: Sequence[tuple[Trainable, Sequence[Datum]]],
        loss_fn: str | LossFunction,
        settings: LossSettings,
        *,
        is_learning: bool,
    ) -> tuple[PassLoss, list[TrainingJob]]:
        reference = str((settings or {}).get("kl_reference", "base"))
        if reference != "base":
            self._refuse_whole(Path(reference))
        return super().make_jobs(batches, loss_fn, settings, is_learning=is_learning)

    def _refuse_whole(self, directory: Path) -> None:
        if full_files.is_full(directory):
            raise ConfigError(
                f"{directory} holds all weights of a model, and cluster.shard=true keeps the weights in parts: only "
                "adapters can be sampled from, or compared with, beside the base; use an adapter, or leave "
                "cluster.shard out"
            )

    def _do_files(
        self, adapter: ShardedFullWeights, directory: Path, *, is_saved: bool, with_optimizer: bool = True
    ) -> None:
        """Let all learners write or read their parts at the same time."""
        what = "write its part of a checkpoint" if is_saved else "read its part of a checkpoint"
        group, collective = self._learners()
        number, count = self._created[adapter].number, next(self._num_file_calls)
        call = ShardFilesCall(number, directory, count, is_saved=is_saved, with_optimizer=with_optimizer)
        self._tell_all(call)
        try:
            do_shard_files(collective, adapter, call)
        except CheckpointError:  # the others read the same files, and refuse them too
            finish_work(group.answers(what, allowed=(CheckpointError,)))
            raise
        except RuntimeError as cause:
            group.fail_all(what, cause)
        finish_work(group.answers(what))

    def _run_own(self, part: RunCall, adapter: Trainable) -> Generator[None, None, RunReply | None]:
        self._rounds.open()
        reply = (yield from super()._run_own(part, adapter)) if part.datums else None
        finish_gradient(adapter)
        yield from self._rounds.finish()
        return reply

    @contextmanager
    def _served(self) -> Iterator[None]:
        """In the block, this process may gather; the other learners take part."""
        if self._rounds.is_open:  # they do so already: a batch runs, and this is between two of its passes
            yield
            return
        group, _ = self._learners()
        what = "share its weights"
        self._tell_all(ServeCall())
        self._rounds.open()
        try:
            yield
            finish_work(self._rounds.finish())
        except ExchangeError as cause:
            finish_work(self._blame(what, cause))
        except Exception as cause:  # noqa: BLE001 - the others wait for this process, and cannot go on
            group.give_up(f"learner 0 failed while the others shared their weights: {cause!r}", cause)
        finish_work(group.answers(what))

    def _recover(self, lost: LearnerLostError) -> Generator[None, None, None]:
        if any(isinstance(trainable, ShardedFullWeights) for trainable in self._created):
            raise LearnerError(
                f"{lost}. It held a part of the weights in training, which nobody else has (cluster.shard=true with "
                "model.train=full): resume the run from its last checkpoint"
            ) from lost
        yield from super()._recover(lost)

    def _drop_unread(self) -> None:
        """Let all learners forget the versions that no policy reads any more."""
        sources, self._unread[:] = list(self._unread), []
        if sources:
            self._all_do(DropVersionsCall(sources), "drop versions of the weights")
            for source in sources:
                self._rounds.drop(source)

    def _start_learners(self) -> None:
        super()._start_learners()
        assert self._collective is not None, "started above"
        self._rounds.connect(self._collective)
        if self.model.references:
            with self._served():
                self.check_itself()


def leader_config(config: EngineConfig, name: str) -> EngineConfig:
    """How the first learner runs: without merged weights, and with the self-test where whole weights are on its device.

    They are on the host for a moment while they are cut. A GPU sees its own part of them alone.
    """
    is_tested = config.self_test and not find_device(config).facts.has_own_memory
    if config.self_test and not is_tested:
        log.warning(
            "%s is not tested at load: cluster.shard=true never puts the whole model on a GPU, where the self-test "
            "would run it. `turnwise sample --model %s` without cluster.shard tests it, if it fits one GPU",
            name,
            name,
        )
    return config.model_copy(update={"merge_adapter": "never", "self_test": is_tested})
