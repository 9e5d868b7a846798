"""Where the parts of a loop stood at a checkpoint, besides weights and optimizer: enough to go on as if nothing had
happened. There is no random generator in it: every seed follows from the run's seed and a number (`rollout.seeds`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from turnwise.rollout.group import QuarantineState
from turnwise.runlog.schema import CheckpointRow, PoolRow
from turnwise.training.plateau import PlateauState
from turnwise.watch.alarms import AlarmState


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The run after some steps."""

    version: int = 0
    """Of the policy: updates that moved its weights."""
    num_dealt: int = 0
    """Tasks that the deck has given out."""
    num_empty_steps: int = 0
    """In a row, up to now."""
    why_empty: Mapping[str, int] = field(default_factory=dict[str, int])
    num_consumed_groups: int = 0
    num_consumed_tokens: int = 0
    quarantine: QuarantineState | None = None
    alarms: AlarmState | None = None
    critic_path: str = ""
    """Where the critic was saved; empty where the method has none."""
    critic_pretrained: int = 0
    """Batches that the critic had learned alone."""
    critic_plateau: PlateauState | None = None
    """How long they had not helped; None where the method has no critic."""
    pool: tuple[PoolRow, ...] = ()
    """Groups that were dealt and not yet learned from."""

    def to_json(self) -> str:
        """All but the pool, which has rows of its own."""
        return json.dumps({key: value for key, value in asdict(self).items() if key != "pool"})


def read_state(row: CheckpointRow, pool: list[PoolRow], *, tasks_per_step: int) -> RunState:
    """The state that was saved with a checkpoint; one without any was made between two synchronous steps."""
    if row.state is None:
        return RunState(version=row.step, num_dealt=row.step * tasks_per_step)
    return RunState(**json.loads(row.state), pool=tuple(pool))
