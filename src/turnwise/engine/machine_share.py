"""What one engine of a run takes of its machine, where others of the same run work beside it.

Engines on other machines take nothing here. This file imports without torch, so that a plan can be made from it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import ClassVar

from turnwise.engine.config import ClusterConfig
from turnwise.engine.device_info import GPU_SHARE_VARIABLE, read_gpu_share
from turnwise.engine.threads import find_threads
from turnwise.runtime.torchrun import read_world


def count_here(count: int, cluster: ClusterConfig) -> int:
    """How many of `count` engines of a run are on the first learner's machine, itself among them.

    With Ray it is the first learner alone, as far as is known before the others are placed: each has a GPU of its own.
    """
    if cluster.uses_ray:
        return 1
    world = read_world()
    return count if world is None or world.is_on_one_machine else min(count, world.local_size)


def thread_share(num_engines: int) -> int:
    """Threads of each engine, if this number of engines shares this machine's cores."""
    return max(1, find_threads().count // num_engines)


def gpu_share(num_engines: int) -> str:
    """The share of a GPU that each engine may use, as the value of `GPU_SHARE_VARIABLE`.

    Another program may have left this process a share only; that share is divided.
    """
    return f"{read_gpu_share(MachineShare.variable_before()) / num_engines:.4f}"


@dataclass(slots=True, eq=False)
class MachineShare:
    """This process's part of the cores or of the GPU, for as long as an engine of it leaves room for others.

    Several engines may hold one; the smallest counts. When the last one gives it back, the process has what it had.
    """

    _num_on_cores: int = 1
    _num_on_gpu: int = 1

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _held: ClassVar[list[MachineShare]] = []
    _before: ClassVar[tuple[int, str | None]]

    @classmethod
    def variable_before(cls) -> str | None:
        """`GPU_SHARE_VARIABLE` as it is while no engine of this process leaves room for others."""
        return cls._before[1] if cls._held else os.environ.get(GPU_SHARE_VARIABLE)

    def take_threads(self, num_engines: int) -> None:
        """Use this engine's part of the cores, if `num_engines` engines share them."""
        self._num_on_cores = num_engines
        self._apply(is_held=True)

    def take_gpu(self, num_engines: int) -> None:
        """Use this engine's part of the GPU's memory, if `num_engines` share it; its processes do the same."""
        self._num_on_gpu = num_engines
        self._apply(is_held=True)

    def give_back(self) -> None:
        """Stop leaving room. Nothing happens if nothing was taken."""
        if self in self._held:
            self._apply(is_held=False)

    def _apply(self, *, is_held: bool) -> None:
        import torch

        with self._lock:
            if not self._held:
                MachineShare._before = torch.get_num_threads(), os.environ.get(GPU_SHARE_VARIABLE)
            self._held[:] = [one for one in self._held if one is not self] + [self] * is_held
            threads, whole = self._before
            most = max((one._num_on_cores for one in self._held), default=1)
            torch.set_num_threads(threads if most == 1 else min(threads, thread_share(most)))
            most = max((one._num_on_gpu for one in self._held), default=1)
            value = whole if most == 1 else gpu_share(most)
            if value is None:
                os.environ.pop(GPU_SHARE_VARIABLE, None)
            else:
                os.environ[GPU_SHARE_VARIABLE] = value
