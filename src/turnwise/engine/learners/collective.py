"""Sums and copies of flat tensors between learner processes.

A group is an object of its own, not torch's global one, so that a process may have several and may use torch's
distributed functions for other things.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

from turnwise.engine.device_info import num_gpus

dist: Any = torch.distributed  # stores and groups have no type stubs

Backend = Literal["nccl", "gloo"]
START_DEADLINE_S = 300.0
"""Seconds for a learner to load its model."""
MAX_ELEMENTS = 1 << 26
"""Numbers in one message, so that no backend needs a second copy of a large tensor."""


class LearnerCollective:
    """The ranks of one group of learners. Every call has a deadline and raises `RuntimeError` after it."""

    def __init__(self, store: Any, rank: int, size: int, backend: Backend, *, deadline_s: float) -> None:
        self.rank, self.size, self.backend = rank, size, backend
        self._deadline = timedelta(seconds=deadline_s)
        prefixed = dist.PrefixStore(backend, store)
        make = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
        # To meet, the others must have loaded their models; each call then has the deadline.
        self._group: Any = make(prefixed, rank, size, max(self._deadline, timedelta(seconds=START_DEADLINE_S)))

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor on every rank by the sum of all ranks'; every rank gets the same bits."""
        for part in tensor.split(MAX_ELEMENTS):
            self._wait(self._group.allreduce([part]))

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors on every rank by those of rank 0."""
        for tensor in tensors:
            for part in tensor.split(MAX_ELEMENTS):
                self._wait(self._group.broadcast(part, 0))

    def _wait(self, work: Any) -> None:
        work.wait(self._deadline)


def choose_backend(device: torch.device, size: int, *, is_on_one_machine: bool) -> Backend:
    """What all ranks use; rank 0 chooses. Several learners on one GPU cannot use NCCL, and this process does not see
    which GPUs a cluster manager gives to others: gloo copies through the host."""
    has_own = is_on_one_machine and num_gpus(str(device).partition(":")[0]) >= size
    return "nccl" if has_own and dist.is_nccl_available() else "gloo"


def lead_store(host: str, size: int, *, deadline_s: float) -> Any:
    """The place where the ranks of a group find each other; rank 0 makes it, on a port that is free."""
    wait = timedelta(seconds=max(deadline_s, START_DEADLINE_S))
    return dist.TCPStore(host, 0, size, is_master=True, timeout=wait, wait_for_workers=False)


def join_store(host: str, port: int, size: int, *, deadline_s: float) -> Any:
    """The place that rank 0 has made."""
    wait = timedelta(seconds=max(deadline_s, START_DEADLINE_S))
    return dist.TCPStore(host, port, size, is_master=False, timeout=wait)
