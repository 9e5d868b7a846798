"""A learner process: an engine of its own that does what rank 0 says. `group.LearnerGroup` starts it.

It ends when rank 0 closes the connection, and with rank 0 itself, however that ends: its standard input is a pipe that
nobody writes to.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from turnwise.engine.engine import Engine
from turnwise.engine.learners.calls import (
    CreateCall,
    DropCall,
    DropVersionsCall,
    KeepVersionCall,
    LearnerCall,
    LearnerSetup,
    MeetCall,
    RunCall,
    RunReply,
    ServeCall,
    ShardFilesCall,
    StepCall,
    TakeStateCall,
)
from turnwise.engine.learners.collective import MEET_S, LearnerCollective, join_store
from turnwise.engine.learners.portable import end_with_leader, portable
from turnwise.engine.learners.rounds import ExchangeError, ShardRounds
from turnwise.engine.model.sharded import ShardPlace
from turnwise.engine.samplers.host import SamplerHost, serve_samples
from turnwise.engine.training import shard_files
from turnwise.engine.training.objective import PassLoss
from turnwise.engine.training.sharded_weights import ShardedFullWeights
from turnwise.engine.training.trainable import Trainable
from turnwise.engine.training.trainer import FinishedJob, TrainingJob
from turnwise.engine.worker import EngineWorker

T = TypeVar("T")
Work = Generator[None, None, T]
"""Yields between passes, where the engine may sample."""


class LearnerProcess:
    """The engine of one rank, and its trainables by number."""

    def __init__(self, setup: LearnerSetup) -> None:
        self._rounds = ShardRounds(ShardPlace(setup.rank, setup.size)) if setup.is_sharded else None
        name, rounds = f"{setup.name} (learner {setup.rank})", self._rounds
        # The worker's thread owns the device: a learner may sample between the passes of its share.
        self._worker = EngineWorker(
            lambda: Engine(setup.model_dir, setup.engine, name=name, exchange=rounds), name=name
        )
        self._engine = self._worker.engine
        self._setup = setup
        self._met: LearnerCollective | None = None
        self._trainables: dict[int, Trainable] = {}

    @property
    def _ranks(self) -> LearnerCollective:
        assert self._met is not None, "rank 0 lets all meet before anything else"
        return self._met

    @property
    def num_base_bytes(self) -> int:
        """Bytes of the frozen weights that this process holds."""
        return self._engine.model.num_base_bytes

    def make_sampler(self) -> SamplerHost:
        """This learner as a sampler for the run."""
        return SamplerHost(self._worker)

    def answer(self, call: LearnerCall) -> object:
        return self._worker.run_steps("learner", lambda _: self._answer(call)).result()

    def _answer(self, call: LearnerCall) -> Work[object]:
        match call:
            case MeetCall():
                self._meet()
            case CreateCall(number, kind, lora):
                self._trainables[number] = create(self._engine, kind, lora, number)
            case TakeStateCall(number):
                take_state(self._ranks, self._trainables[number])
            case DropCall(number):
                self._engine.drop_adapter(self._trainables.pop(number))
            case RunCall():
                return (yield from self._run(call))
            case StepCall(number, params):
                trainable = self._trainables[number]
                return self._engine.optim_step(trainable, params, sum_gradients(self._ranks, trainable))
            case _:
                return (yield from self._answer_about_parts(call))
        return None

    def _meet(self) -> None:
        setup = self._setup
        store = join_store(setup.store_host, setup.store_port, setup.size)
        self._met = LearnerCollective(store, setup.rank, setup.size, setup.backend, deadline_s=setup.deadline_s)
        if self._rounds is not None:
            self._rounds.connect(self._met)

    def _answer_about_parts(self, call: LearnerCall) -> Work[object]:
        """Calls to learners that hold the weights in parts."""
        assert self._rounds is not None, "rank 0 knows how the weights are held"
        match call:
            case ServeCall():
                yield from self._exchange(_nothing())
            case KeepVersionCall(number, source):
                sharded(self._trainables[number]).keep_version(source)
            case DropVersionsCall(sources):
                for source in sources:
                    self._rounds.drop(source)
            case ShardFilesCall():
                do_shard_files(self._ranks, sharded(self._trainables[call.number]), call)
        return None

    def _exchange(self, work: Work[T]) -> Work[T]:
        """Do the work, and take part in the exchange of weights until all learners are done with theirs."""
        assert self._rounds is not None, "asked above"
        self._rounds.open()
        try:
            result = yield from work
            yield from self._rounds.finish()
        except ExchangeError:
            raise  # another one failed, and all know it
        except BaseException:
            self._rounds.fail()
            raise
        return result

    def _run(self, call: RunCall) -> Work[RunReply | None]:
        if self._rounds is None:
            return (yield from self._run_share(call))
        return (yield from self._exchange(self._run_part(call)))

    def _run_part(self, call: RunCall) -> Work[RunReply | None]:
        reply = (yield from self._run_share(call)) if call.datums else None
        finish_gradient(self._trainables[call.number])
        return reply

    def _run_share(self, call: RunCall) -> Work[RunReply]:
        return (yield from run_share(self._engine, self._trainables[call.number], call))


def _nothing() -> Work[None]:
    yield from ()


def create(engine: Engine, kind: str, lora: Any, number: int) -> Trainable:
    """Make a trainable of that kind."""
    if kind == "full":
        return engine.create_full(number)
    return engine.create_critic(lora) if kind == "critic" else engine.create_adapter(lora)


def make_job(trainable: Trainable, call: RunCall) -> tuple[PassLoss, TrainingJob]:
    """The loss and the datums of a share, or of a whole batch."""
    objective = trainable.objective
    loss = objective.make_loss(call.loss_fn, call.settings, is_learning=call.is_learning)
    return loss, TrainingJob(weights=trainable, datums=call.datums, objective=objective)


def run_share(engine: Engine, trainable: Trainable, call: RunCall) -> Work[RunReply]:
    """Run a share on the engine of its learner."""
    loss, job = make_job(trainable, call)
    if call.is_learning:
        (finished,) = yield from engine.learn_checked([trainable], [job], loss, call.settings)
    else:
        finished = yield from engine.read_checked(job, loss, call.loss_fn, call.settings)
    return reply_of(finished)


def take_state(ranks: LearnerCollective, trainable: Trainable) -> None:
    """Give every rank the weights and the optimizer state of rank 0; gradients are cleared."""
    steps = torch.tensor([float(trainable.num_steps)], dtype=torch.float64, device=trainable.flat.device)
    with torch.no_grad():
        ranks.copy_from_first([trainable.flat, trainable.exp_avg, trainable.exp_avg_sq, steps])
        trainable.grad.zero_()
    trainable.num_steps = int(steps.item())
    trainable.has_gradient = False
    if ranks.rank:
        trainable.weights_moved()


def sum_gradients(ranks: LearnerCollective, trainable: Trainable) -> float | None:
    """Make every rank's gradient that of the whole batch; returns its norm if each rank holds a part of it."""
    if not isinstance(trainable, ShardedFullWeights):
        ranks.sum(trainable.grad)
        return None
    square = torch.linalg.vector_norm(trainable.grad, dtype=torch.float64).square().reshape(1)
    ranks.sum(square)
    return math.sqrt(float(square)) if math.isfinite(float(square)) else float(square)


def finish_gradient(trainable: Trainable) -> None:
    """Pass on what is left of a gradient in parts after a training pass."""
    if isinstance(trainable, ShardedFullWeights):
        trainable.finish_gradient()


def sharded(trainable: Trainable) -> ShardedFullWeights:
    """The trainable as weights in parts; it must be that."""
    assert isinstance(trainable, ShardedFullWeights), "rank 0 asks for nothing else"
    return trainable


def do_shard_files(ranks: LearnerCollective, trainable: ShardedFullWeights, call: ShardFilesCall) -> None:
    """Write or read this rank's parts of a checkpoint."""
    if not call.is_saved and not (call.with_optimizer and shard_files.has_shards(call.directory)):
        trainable.load(call.directory, with_optimizer=call.with_optimizer)
        return
    ranks.tell([call.round])  # a learner that is gone is missed here; the group below would wait for it
    meeting = shard_files.Meeting(ranks.new_store(f"files {call.round}"), MEET_S, ranks.deadline_s)
    parts, shards = trainable.parts(), trainable.shards
    if call.is_saved:
        shard_files.save_shards(call.directory, shards, parts, meeting)
        return
    num_steps = shard_files.read_num_steps(call.directory, shards.layout)
    shard_files.load_shards(call.directory, shards, parts, meeting)
    trainable.begin(num_steps)


def reply_of(finished: FinishedJob) -> RunReply:
    """The numbers of a finished share on the host."""
    result = finished.result
    references = getattr(result.columns, "ref_logprobs_T", None)
    return RunReply(
        result.outputs.cpu().numpy(),
        result.is_known.cpu().numpy(),
        None if result.entropies is None else result.entropies.cpu().numpy(),
        None if references is None else references.cpu().numpy(),
    )


def serve(connection: Connection, setup: LearnerSetup, samples: Connection | None = None) -> None:
    """Answer calls until rank 0 hangs up; an error is an answer too. Requests to sample come over `samples`."""
    try:
        process = LearnerProcess(setup)
        if samples is not None:
            threading.Thread(target=serve_samples, args=(samples, process.make_sampler()), daemon=True).start()
        connection.send(("ready", process.num_base_bytes))
    except Exception as error:  # noqa: BLE001 - rank 0 raises it
        connection.send(("error", portable(error)))
        return
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        try:
            answer = ("done", process.answer(call))
        except Exception as error:  # noqa: BLE001 - rank 0 raises it
            answer = ("error", portable(error))
        connection.send(answer)


def main() -> None:
    end_with_leader()
    connection, *others = (Connection(int(handle)) for handle in sys.argv[1:])
    with connection:
        serve(connection, connection.recv(), *others)


if __name__ == "__main__":
    main()
