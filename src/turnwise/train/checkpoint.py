"""Checkpoints of a run: weights, optimizer state, and how far the run had come.

They live in the run's directory (`checkpoints/<model id>/weights/<name>`), so a run can be moved as a whole. Tasks and
seeds depend on the step alone; with the state below a resumed run does what an uninterrupted one would have done.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from turnwise.client.base import TrainingClient
from turnwise.errors import CheckpointError
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import CheckpointRow
from turnwise.runlog.writer import RunWriter

NOTHING_DONE = CheckpointRow(step=0, warmup_steps=0, path="")


class Checkpoints:
    """Saves the latest few states of one run."""

    def __init__(self, trainer: TrainingClient, writer: RunWriter, kept: list[CheckpointRow], *, max_kept: int) -> None:
        """`kept` are those of the run so far, oldest first."""
        self._trainer = trainer
        self._writer = writer
        self._kept = list(kept)
        self._max_kept = max_kept

    async def save(self, step: int, warmup_steps: int) -> CheckpointRow:
        """Write the state after `step` steps; the oldest beyond `max_kept` goes."""
        name = f"step-{step:06d}" if step or not warmup_steps else f"warmup-{warmup_steps:06d}"
        saved = await self._trainer.save_state(name, overwrite=True)
        row = CheckpointRow(step=step, warmup_steps=warmup_steps, path=saved.path)
        self._kept = [other for other in self._kept if other.path != row.path]
        self._kept.append(row)
        self._writer.checkpoint(row)
        for old in self._kept[: -self._max_kept]:
            self._remove(old)
        self._kept = self._kept[-self._max_kept :]
        self._writer.commit(step)
        return row

    def _remove(self, old: CheckpointRow) -> None:
        shutil.rmtree(checkpoint_directory(self._writer.directory, old.path), ignore_errors=True)
        if all(row.step != old.step for row in self._kept[-self._max_kept :]):
            self._writer.forget_checkpoint(old.step)


def checkpoint_directory(data_dir: Path, path: str) -> Path:
    """Where the files of a `tinker://` path are."""
    return data_dir / "checkpoints" / path.partition("://")[2]


def last_checkpoint(run: RunReader) -> CheckpointRow:
    """The state to go on from: the latest whose files are there."""
    for row in reversed(run.checkpoints()):
        if checkpoint_directory(run.directory, row.path).is_dir():
            return row
    raise CheckpointError(f"{run.directory} has no checkpoint yet; start again with a new run.dir")


def find_checkpoint(run: RunReader, step: int | None) -> CheckpointRow:
    """The checkpoint of a step, or the latest."""
    if step is None:
        return last_checkpoint(run)
    rows = {row.step: row for row in run.checkpoints()}
    if step not in rows:
        known = ", ".join(str(known) for known in rows) or "none"
        raise CheckpointError(f"{run.directory} has no checkpoint of step {step}; there are: {known}")
    return rows[step]
