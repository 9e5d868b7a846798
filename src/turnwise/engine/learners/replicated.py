"""The engine of rank 0 when several learners train: every operation on a trainable runs on all of them.

Each learner holds the model and a copy of every trainable. A batch is shared out, gradients are summed once per
optimizer step, and every learner takes the same step, so the copies stay equal bit for bit. Losses are sums whose
normalisers are part of the datums' weights, so the sum over learners is the gradient of the whole batch. Metrics are
computed here from the numbers of all shares, as one process would. Sampling, publishing and saving are rank 0's alone.

A learner that is lost is started again. Rank 0 has the state after the last step; it spreads it, forgets every gradient
since, and runs the batches of the step under way once more, so that nothing is lost and nothing counts twice.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import torch

from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.engine import CustomLoss, Engine
from turnwise.engine.learners.calls import (
    CreateCall,
    DropCall,
    LearnerCall,
    LearnerSetup,
    MeetCall,
    RunCall,
    RunReply,
    StepCall,
    TakeStateCall,
)
from turnwise.engine.learners.collective import MEET_S, LearnerCollective, choose_backend, lead_store
from turnwise.engine.learners.group import GONE_S, LearnerGroup
from turnwise.engine.learners.places import LearnerPlaces
from turnwise.engine.learners.process import make_job, run_share, sum_gradients, take_state
from turnwise.engine.learners.rounds import ExchangeError
from turnwise.engine.learners.shares import share_datums
from turnwise.engine.learners.step_copies import StepCopies, is_whole
from turnwise.engine.model.sharded import ShardExchange
from turnwise.engine.samplers.links import SamplerLink
from turnwise.engine.training.critic import CriticAdapter
from turnwise.engine.training.full_weights import FullWeights
from turnwise.engine.training.objective import LossSettings, PassLoss
from turnwise.engine.training.preference_losses import PreferenceLoss, pair_number
from turnwise.engine.training.sharded_weights import ShardedFullWeights
from turnwise.engine.training.trainable import LoraAdapter, Trainable
from turnwise.engine.training.trainer import FinishedJob, TrainingJob
from turnwise.errors import ConfigError, DataError, LearnerError, LearnerLostError
from turnwise.losses.outside import LossFunction
from turnwise.runtime.torchrun import read_world
from turnwise.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig

_log = logging.getLogger(__name__)

KEPT = "The last checkpoint is kept; resume the run"
"""The end of every error about learners that are given up: what to do now."""


class ReplicatedEngine(Engine):
    """Leads `cluster.learners` processes. They start with the first trainable."""

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        cluster: ClusterConfig,
        *,
        name: str,
        exchange: ShardExchange | None = None,
    ) -> None:
        self._cluster = cluster
        self._places = LearnerPlaces(config, cluster)
        try:
            super().__init__(model_dir, self._places.own_config, name=name, exchange=exchange)
        except BaseException:
            self._places.close()
            raise
        self._group: LearnerGroup | None = None
        self._collective: LearnerCollective | None = None
        self._size = cluster.learners
        self._num_restarts = 0
        self._news: list[str] = []
        self._copies = StepCopies()
        self.base_bytes: dict[int, int] = {}
        """Bytes of the frozen weights that each learner holds, by rank; known when the learners have started."""
        self._created: WeakKeyDictionary[Any, CreateCall] = WeakKeyDictionary()
        self._learned: WeakKeyDictionary[Any, list[RunCall]] = WeakKeyDictionary()
        """What each trainable has learned from since its last step."""
        self._next_number = itertools.count()

    @property
    def num_learners(self) -> int:
        """Learners that train now, this process among them."""
        return self._size

    def sampler_link(self, rank: int) -> SamplerLink | None:
        """The way to the sampler in another learner; None if that learner is gone. Any thread may ask."""
        group = self._group
        return group.sampler_link(rank) if group is not None else None

    @property
    def num_restarts(self) -> int:
        """How often learners were started again."""
        return self._num_restarts

    def take_news(self) -> list[str]:
        """What happened to learners since the last call. Any thread may ask."""
        news, self._news = self._news, []
        return news

    def begin_step(self) -> None:
        """From here on, remember what `undo_step` needs. No operation runs."""
        self._copies.begin()

    def undo_step(self) -> bool:
        """Bring all trainables back to where they were at `begin_step`; False if that cannot be done here."""
        return all(map(is_whole, self._created)) and self._copies.restore()

    def create_adapter(self, lora: LoraConfig) -> LoraAdapter:
        return self._mirror(super().create_adapter(lora), CreateCall(next(self._next_number), "adapter", lora))

    def create_critic(self, lora: LoraConfig) -> CriticAdapter:
        return self._mirror(super().create_critic(lora), CreateCall(next(self._next_number), "critic", lora))

    def create_full(self, number: int = 0) -> FullWeights | ShardedFullWeights:
        number = next(self._next_number)
        return self._mirror(super().create_full(number), CreateCall(number, "full"))

    def drop_adapter(self, adapter: Trainable) -> None:
        number = self._created.pop(adapter).number
        self._learned.pop(adapter, None)
        super().drop_adapter(adapter)
        if self._group is not None and not self._group.is_broken:
            self._all_do(DropCall(number), "drop a trainable")

    def load_adapter(self, adapter: Trainable, directory: Path, *, with_optimizer: bool) -> None:
        super().load_adapter(adapter, directory, with_optimizer=with_optimizer)
        self._learned.pop(adapter, None)
        try:
            self._spread(adapter)
        except LearnerLostError as lost:
            finish_work(self._recover(lost))

    def optim_step(self, adapter: Trainable, params: AdamParams, norm: float | None = None) -> dict[str, float]:
        """Sum the gradients of all learners; each then takes the same step."""
        what = "sum gradients"
        while True:
            try:
                norm = self._sum_gradients(adapter, params, what)
                break
            except LearnerLostError as lost:
                finish_work(self._recover(lost))
        self._copies.keep(adapter)
        try:
            metrics, allowed, refused = super().optim_step(adapter, params, norm), (), None
        except DataError as error:  # a gradient that is not finite: it is the same on all ranks, and all refuse it
            metrics, allowed, refused = {}, (DataError,), error
        self._learned.pop(adapter, None)
        try:
            finish_work(self._learners()[0].answers(what, allowed=allowed))
        except LearnerLostError as lost:  # this process has taken the step; others take it over
            finish_work(self._recover(lost))
        if refused is not None:
            raise refused
        return metrics

    def _sum_gradients(self, adapter: Trainable, params: AdamParams, what: str) -> float | None:
        group, collective = self._learners()
        group.check_alive(what)
        self._tell_all(StepCall(self._created[adapter].number, params))
        try:
            return sum_gradients(collective, adapter)
        except RuntimeError as cause:
            group.fail_all(what, cause)

    def read_job(
        self, adapter: Trainable, datums: Sequence[Datum], loss_fn: str | LossFunction, loss_fn_config: LossSettings
    ) -> Generator[None, None, FinishedJob]:
        _, (job,) = self.make_jobs([(adapter, datums)], loss_fn, loss_fn_config, is_learning=False)
        run = RunCall(self._created[adapter].number, job.datums, loss_fn, loss_fn_config, is_learning=False)
        return (yield from self._run_shares(run, adapter))

    def learn_jobs(
        self,
        batches: Sequence[tuple[Trainable, Sequence[Datum]]],
        loss_fn: str | LossFunction,
        loss_fn_config: LossSettings,
    ) -> Generator[None, None, list[FinishedJob]]:
        _, jobs = self.make_jobs(batches, loss_fn, loss_fn_config, is_learning=True)
        finished: list[FinishedJob] = []
        for (adapter, _), job in zip(batches, jobs, strict=True):
            run = RunCall(self._created[adapter].number, job.datums, loss_fn, loss_fn_config, is_learning=True)
            finished.append((yield from self._run_shares(run, adapter)))
        return finished

    def forward_backward_custom(
        self,
        adapter: Trainable,  # noqa: ARG002
        datums: Sequence[Datum],  # noqa: ARG002
        loss_fn: CustomLoss,  # noqa: ARG002
    ) -> Generator[None, None, ForwardBackwardOutput]:
        raise ConfigError(
            f"forward_backward_custom with cluster.learners={self._cluster.learners}: a loss over the whole batch "
            "cannot be shared out; use one learner, or forward_backward with a loss by name"
        )

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._collective = None
        super().close()
        self._places.close()

    def _run_shares(self, run: RunCall, adapter: Trainable) -> Generator[None, None, FinishedJob]:
        """Run every learner's share, again if a learner is lost, and put the numbers of all together."""
        while True:
            try:
                finished = yield from self._run_once(run, adapter)
            except LearnerLostError as lost:
                yield from self._recover(lost)
            else:
                if run.is_learning:
                    self._learned.setdefault(adapter, []).append(run)
                return finished

    def _run_once(self, run: RunCall, adapter: Trainable) -> Generator[None, None, FinishedJob]:
        what = "run its share of a batch"
        group, _ = self._learners()
        loss, job = make_job(adapter, run)
        shares = self._shares(loss, job)
        called = [rank for rank, members in enumerate(shares) if members or self._cluster.shard]
        busy = [rank for rank in called if rank]
        for rank in busy:
            group.call(rank, _part(run, shares[rank]))
        own: dict[int, RunReply | None] = {}
        if 0 in called:
            try:
                own[0] = yield from self._run_own(_part(run, shares[0]), adapter)
            except ExchangeError as cause:
                yield from self._blame(what, cause)
            except Exception as cause:  # noqa: BLE001 - the others have added their gradients, so none can go on
                group.give_up(f"learner 0 failed to {what}: {cause!r}", cause)
        if run.is_learning:
            adapter.has_gradient = True
        whole = FinishedJob(job, self.trainer.start_result(job, loss.needs_entropy), loss)
        replies = own | (yield from group.answers(what, busy))
        return _put_together(whole, {rank: (shares[rank], one) for rank, one in replies.items() if one is not None})

    def _blame(self, what: str, cause: ExchangeError) -> Generator[None, None, NoReturn]:
        """Find the learner that did not take part in an exchange of weights: it is gone, or it reports an error."""
        group, _ = self._learners()
        time.sleep(GONE_S)
        group.check_alive(what)
        yield from group.answers(what)
        group.fail_all(what, cause)

    def _recover(self, lost: LearnerLostError) -> Generator[None, None, None]:
        """Start learners in place of those that are lost, and bring them to where this process is."""
        while True:
            most = self._cluster.max_restarts
            if self._num_restarts >= most:
                raise LearnerLostError(
                    f"{lost}. {KEPT}; learners were started again {self._num_restarts} times, and "
                    f"cluster.max_restarts={most} is the most"
                ) from lost
            self._num_restarts += 1
            self._tell(f"{lost}. Learners are started again ({self._num_restarts} of {most}); the run goes on")
            try:
                self._restart_learners(lost)
                for trainable, create in list(self._created.items()):
                    self._all_do(create, "create a trainable")
                    self._spread(trainable)
                for trainable, runs in list(self._learned.items()):
                    for run in runs:
                        yield from self._run_once(run, trainable)
            except LearnerLostError as again:
                lost = again
            else:
                return

    def _tell(self, text: str) -> None:
        _log.warning("%s", text)
        self._news.append(text)

    def _restart_learners(self, lost: LearnerLostError) -> None:
        """Start all learners; fewer where that cannot be done and `cluster.min_learners` allows it."""
        fewest = self._cluster.min_learners or self._cluster.learners
        while True:
            if self._group is not None:
                self._group.close()
            self._group = self._collective = None
            try:
                return self._start_learners()
            except LearnerError as error:
                if isinstance(error, LearnerLostError) and self._num_restarts < self._cluster.max_restarts:
                    raise  # it died while it started: that is one more loss
                if self._size <= max(fewest, 1):
                    raise LearnerError(
                        f"{lost}. {KEPT}; it did not start again ({error}), and cluster.min_learners={fewest} is the "
                        "least"
                    ) from error
                self._size -= 1
                self._tell(f"a learner cannot be started again ({error}); going on with {self._size}")

    def _run_own(self, part: RunCall, adapter: Trainable) -> Generator[None, None, RunReply | None]:
        return (yield from run_share(self, adapter, part))

    def _shares(self, loss: PassLoss, job: TrainingJob) -> list[list[int]]:
        datums: Sequence[Any] = job.datums
        units = None
        if isinstance(loss, PreferenceLoss):
            units = [abs(pair_number(index, datum)) for index, datum in enumerate(datums)]
        sequences = [datum.input_ids for datum in datums]
        return share_datums(sequences, self._size, units, min_shared=self.trainer.min_shared)

    def _mirror(self, trainable: Any, create: CreateCall) -> Any:
        """Make the same trainable on every other learner, with this one's values."""
        self._learners()
        self._created[trainable] = create
        try:
            self._all_do(create, "create a trainable")
            self._spread(trainable)
        except LearnerLostError as lost:
            finish_work(self._recover(lost))
        return trainable

    def _spread(self, trainable: Trainable) -> None:
        if isinstance(trainable, ShardedFullWeights):
            return  # every learner has its own part, of the same base
        what = "take over weights"
        group, collective = self._learners()
        self._tell_all(TakeStateCall(self._created[trainable].number))
        try:
            take_state(collective, trainable)
        except RuntimeError as cause:
            group.fail_all(what, cause)
        finish_work(group.answers(what))

    def _tell_all(self, call: LearnerCall) -> None:
        group, _ = self._learners()
        for rank in range(1, self._size):
            group.call(rank, call)

    def _all_do(self, call: LearnerCall, what: str) -> None:
        group, _ = self._learners()
        self._tell_all(call)
        finish_work(group.answers(what))

    def _learners(self) -> tuple[LearnerGroup, LearnerCollective]:
        if self._group is None or self._collective is None:
            self._start_learners()
        assert self._group is not None, "started above"
        assert self._collective is not None, "started above"
        return self._group, self._collective

    def _start_learners(self) -> None:
        size, deadline_s = self._size, self._cluster.deadline_s
        place = self._places.find(size)
        world = read_world()
        is_near = not self._cluster.uses_ray and (world is None or world.is_on_one_machine)
        backend = choose_backend(self.device, max(size, self._cluster.num_devices), is_on_one_machine=is_near)
        store = lead_store(place.host, size)

        def make_setup(rank: int) -> LearnerSetup:
            return LearnerSetup(
                model_dir=self.model_dir,
                engine=self._places.config_of(rank),
                name=self.name,
                rank=rank,
                size=size,
                store_host=place.host,
                store_port=store.port,
                backend=backend,
                deadline_s=deadline_s,
                is_sharded=self._cluster.shard,
                samples=self._cluster.samples_too(rank),
            )

        group = LearnerGroup(make_setup, size, deadline_s=deadline_s, start_peer=place.start_peer)
        try:
            # They meet when all have loaded their models, so that one that dies before is missed at once.
            self.base_bytes = {0: self.model.num_base_bytes, **group.wait_until_ready()}
            for rank in range(1, size):
                group.call(rank, MeetCall())
            try:
                self._collective = LearnerCollective(store, 0, size, backend, deadline_s=deadline_s)
            except RuntimeError as cause:
                group.fail_all("meet", cause, deadline_s=MEET_S)
            finish_work(group.answers("meet"))
        except BaseException:
            group.close()
            raise
        self._group = group


def _part(run: RunCall, members: Sequence[int]) -> RunCall:
    return replace(run, datums=[run.datums[index] for index in members])


def _put_together(whole: FinishedJob, parts: Mapping[int, tuple[Sequence[int], RunReply]]) -> FinishedJob:
    """Write the numbers of the shares to their places in the whole batch."""
    result = whole.result
    columns = {"outputs": result.outputs, "is_known": result.is_known}
    if result.entropies is not None:
        columns["entropies"] = result.entropies
    if any(reply.references is not None for _, reply in parts.values()):
        columns["references"] = torch.zeros_like(result.outputs)
    for members, reply in parts.values():
        places = np.concatenate([np.arange(*result.offsets[index : index + 2]) for index in members])
        for name, column in columns.items():
            values = np.array(getattr(reply, name))  # what came through Ray is read-only
            column[torch.from_numpy(places).to(column.device)] = torch.from_numpy(values).to(column.device)
    if "references" in columns:
        result.columns = replace(result.columns, ref_logprobs_T=columns["references"])
    return whole


def finish_work(work: Generator[None, None, Any]) -> None:
    """Run a generator to its end."""
    for _ in work:
        pass
