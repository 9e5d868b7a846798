"""The way back to the weights before a training step, for when learners are given up in the middle of it."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.engine.training.sharded_weights import ShardedFullWeights
from turnwise.engine.training.trainable import Trainable


class StepCopies:
    """Keeps, in the host's memory, what the optimizer steps of a training step change of adapters and critics.

    A training step may move them several times: in substeps, and the critic after the policy. All weights of a model
    are too large for a copy; once they have moved, there is no way back.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._before: dict[Trainable, tuple[list[Tensor], int] | None] = {}

    def begin(self) -> None:
        """Forget the step before. Until the first call nothing is kept."""
        self._is_open = True
        self._before.clear()

    def keep(self, trainable: Trainable) -> None:
        """Called before an optimizer step."""
        if not self._is_open or trainable in self._before:
            return
        copies = [one.detach().to("cpu", copy=True) for one in _state(trainable)] if trainable.lora else None
        self._before[trainable] = None if copies is None else (copies, trainable.num_steps)

    @torch.no_grad()
    def restore(self) -> bool:
        """Bring back what was before the step. False: something has moved that cannot be brought back."""
        if any(copies is None for copies in self._before.values()):
            return False
        for trainable, copies in self._before.items():
            assert copies is not None, "checked above"
            tensors, trainable.num_steps = copies
            for one, before in zip(_state(trainable), tensors, strict=True):
                one.copy_(before)
            trainable.grad.zero_()
            trainable.has_gradient = False
            trainable.weights_moved()
        self._before.clear()
        return True


def is_whole(trainable: Trainable) -> bool:
    """Whether this process has all of it."""
    return not isinstance(trainable, ShardedFullWeights)


def _state(trainable: Trainable) -> list[Tensor]:
    return [trainable.flat, trainable.exp_avg, trainable.exp_avg_sq]
