"""A learner process: an engine of its own that does what rank 0 says. `group.LearnerGroup` starts it.

It ends when rank 0 closes the connection, and with rank 0 itself, however that ends: its standard input is a pipe that
nobody writes to.
"""

from __future__ import annotations

import os
import pickle
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
    LearnerCall,
    LearnerSetup,
    RunCall,
    RunReply,
    StepCall,
    TakeStateCall,
)
from turnwise.engine.learners.collective import LearnerCollective, join_store
from turnwise.engine.training.trainable import Trainable
from turnwise.engine.training.trainer import FinishedJob

T = TypeVar("T")


class LearnerProcess:
    """The engine of one rank, and its trainables by number."""

    def __init__(self, setup: LearnerSetup) -> None:
        self._engine = Engine(setup.model_dir, setup.engine, name=f"{setup.name} (learner {setup.rank})")
        store = join_store(setup.store_host, setup.store_port, setup.size, deadline_s=setup.deadline_s)
        self._ranks = LearnerCollective(store, setup.rank, setup.size, setup.backend, deadline_s=setup.deadline_s)
        self._trainables: dict[int, Trainable] = {}

    def answer(self, call: LearnerCall) -> object:
        match call:
            case CreateCall(number, kind, lora):
                self._trainables[number] = create(self._engine, kind, lora)
            case TakeStateCall(number):
                take_state(self._ranks, self._trainables[number])
            case DropCall(number):
                self._engine.drop_adapter(self._trainables.pop(number))
            case RunCall():
                return self._run(call)
            case StepCall(number, params):
                trainable = self._trainables[number]
                self._ranks.sum(trainable.grad)
                return self._engine.optim_step(trainable, params)
        return None

    def _run(self, call: RunCall) -> RunReply:
        trainable, arguments = self._trainables[call.number], (call.loss_fn, call.settings)
        if call.is_learning:
            (finished,) = _finish(self._engine.learn_jobs([(trainable, call.datums)], *arguments))
        else:
            finished = _finish(self._engine.read_job(trainable, call.datums, *arguments))
        return reply_of(finished)


def create(engine: Engine, kind: str, lora: Any) -> Trainable:
    """Make a trainable of that kind."""
    if kind == "full":
        return engine.create_full()
    return engine.create_critic(lora) if kind == "critic" else engine.create_adapter(lora)


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


def _finish(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def _end_with_leader() -> None:
    sys.stdin.buffer.read()  # returns when rank 0 has closed its end, or is dead
    os._exit(0)


def serve(connection: Connection) -> None:
    """Answer calls until rank 0 hangs up; an error is an answer too."""
    setup: LearnerSetup = connection.recv()
    try:
        process = LearnerProcess(setup)
        connection.send(("ready", None))
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


def portable(error: Exception) -> Exception:
    """The error, or its text where it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what was just written
    except Exception:  # noqa: BLE001 - whatever cannot travel goes as text
        return RuntimeError(repr(error))
    return error


def main() -> None:
    threading.Thread(target=_end_with_leader, daemon=True).start()
    with Connection(int(sys.argv[1])) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
