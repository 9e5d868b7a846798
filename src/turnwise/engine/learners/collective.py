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
from turnwise.engine.ops import for_device

dist: Any = torch.distributed  # stores and groups have no type stubs

Backend = Literal["nccl", "gloo"]
START_DEADLINE_S = 300.0
"""Seconds for a learner to load its model."""
MEET_S = 60.0
"""Seconds for learners that have loaded their models to find each other."""
MAX_ELEMENTS = 1 << 26
"""Numbers in one message, so that no backend needs a second copy of a large tensor."""


class LearnerCollective:
    """The ranks of one group of learners. Every call has a deadline and raises `RuntimeError` after it."""

    def __init__(self, store: Any, rank: int, size: int, backend: Backend, *, deadline_s: float) -> None:
        self.rank, self.size, self.backend = rank, size, backend
        self.deadline_s = deadline_s
        self._deadline = timedelta(seconds=deadline_s)
        prefixed = dist.PrefixStore(backend, store)
        make = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
        meet = timedelta(seconds=MEET_S)
        self._group: Any = make(prefixed, rank, size, meet)
        self._store = store
        self._messages: Any = None  # numbers on the host, while the group moves tensors of the device
        if backend == "nccl":
            self._messages = dist.ProcessGroupGloo(dist.PrefixStore("messages", store), rank, size, meet)
        for group in (self._group, self._messages):
            if group is not None:
                group._set_default_timeout(self._deadline)  # a group's own limit would end a longer call

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor on every rank by the sum of all ranks'; every rank gets the same bits."""
        for part in tensor.split(MAX_ELEMENTS):
            self._wait(self._group.allreduce([part]))

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors on every rank by those of rank 0."""
        for tensor in tensors:
            for part in tensor.split(MAX_ELEMENTS):
                self._wait(self._group.broadcast(part, 0))

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """Tell all ranks a few numbers; returns those of every rank."""
        own = torch.tensor(list(numbers), dtype=torch.int64)
        told = torch.zeros(self.size * len(own), dtype=torch.int64)
        self._wait((self._messages or self._group)._allgather_base(told, own))
        return told.view(self.size, -1).tolist()

    def gather(self, whole: Tensor, part: Tensor) -> None:
        """Fill `whole` with the parts of all ranks, one after the other."""
        if self._is_direct(part):
            self._wait(self._group._allgather_base(whole, part))
            return
        on_host = torch.empty(whole.shape, dtype=whole.dtype)
        self._wait(self._group._allgather_base(on_host, part.cpu()))
        whole.copy_(on_host)

    def reduce(self, part: Tensor, whole: Tensor) -> None:
        """Fill `part` with this rank's part of the sum of all ranks' `whole`."""
        if self._is_direct(part):
            self._wait(self._group._reduce_scatter_base(part, whole))
            return
        on_host = torch.empty(part.shape, dtype=part.dtype)
        self._wait(self._group._reduce_scatter_base(on_host, whole.cpu()))
        part.copy_(on_host)

    def new_store(self, name: str) -> Any:
        """A store under a new name, at which the ranks can meet again."""
        return dist.PrefixStore(name, self._store)

    def _is_direct(self, tensor: Tensor) -> bool:
        """Whether the backend moves tensors of this device; gloo moves those of the host."""
        return self.backend == "nccl" or not for_device(tensor.device).facts.has_own_memory

    def _wait(self, work: Any) -> None:
        work.wait(self._deadline)


def choose_backend(device: torch.device, size: int, *, is_on_one_machine: bool) -> Backend:
    """What all ranks use; rank 0 chooses. Several learners on one GPU cannot use NCCL, and this process does not see
    which GPUs a cluster manager gives to others: gloo copies through the host."""
    has_own = is_on_one_machine and num_gpus(str(device).partition(":")[0]) >= size
    return "nccl" if has_own and dist.is_nccl_available() else "gloo"


def lead_store(host: str, size: int) -> Any:
    """The place where the ranks of a group find each other; rank 0 makes it, on a port that is free."""
    wait = timedelta(seconds=START_DEADLINE_S)
    return dist.TCPStore(host, 0, size, is_master=True, timeout=wait, wait_for_workers=False)


def join_store(host: str, port: int, size: int) -> Any:
    """The place that rank 0 has made."""
    return dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=START_DEADLINE_S))
