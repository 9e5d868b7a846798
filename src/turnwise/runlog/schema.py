"""The tables of `run.db`, and the Python types of their rows.

A version that is newer than this code is refused. An older one is migrated before it is written to (`MIGRATIONS`), and
read as it is. `step` is the number of optimizer batches done before the row: 0 before training, `train.steps` at the
end. Token arrays are NULL after the size rule has dropped them (`writer.py`); metrics, events and evaluations stay. An
attempt is stored as it was played; the method's results (`mask`, `advantages`, `credited_parts`) have separate columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.trajectory import Branch, Failure, Message, Trajectory

SCHEMA_VERSION = 11
DATABASE = "run.db"
POOL_SINCE = 4
"""The first version that has the table `pool`."""
AS_PLAYED_SINCE = 5
"""The first version in which a turn's rewards and `is_trained` are stored as played, not as the method changed them."""

Phase = Literal["train", "eval"]

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE metrics (
    key TEXT NOT NULL, step INTEGER NOT NULL, value REAL, time REAL NOT NULL, PRIMARY KEY (key, step)
) WITHOUT ROWID;

CREATE TABLE tasks (id TEXT PRIMARY KEY, split TEXT NOT NULL, data TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    phase TEXT NOT NULL,             -- train, eval
    outcome TEXT NOT NULL,           -- trained, evaluated, failed, or why its group was dropped
    task_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    stop_reason TEXT NOT NULL,
    party TEXT,                      -- of a failed attempt: who failed
    detail TEXT,
    is_success INTEGER,
    reward REAL NOT NULL,
    num_turns INTEGER NOT NULL,
    num_sampled_tokens INTEGER NOT NULL,
    duration_s REAL NOT NULL,
    metrics TEXT NOT NULL,           -- JSON, the env's numbers
    start BLOB,                      -- the env's first messages
    has_tokens INTEGER NOT NULL,
    time REAL NOT NULL,
    branch TEXT,                     -- JSON: where it leaves the dialogue that its group shares
    is_as_played INTEGER,            -- NULL: written before version 5, with shaped rewards and the method's own mask
    traceback TEXT,                  -- of a failed attempt: the exception with its frames; NULL: none was raised
    labels TEXT,                     -- JSON, the env's words, such as who the opponent was
    failure_facts TEXT               -- JSON, what a program may want to know of a failure; NULL: it did not fail
);
CREATE INDEX trajectories_by_step ON trajectories (phase, step);

CREATE TABLE turns (
    trajectory_id INTEGER NOT NULL REFERENCES trajectories (id) ON DELETE CASCADE,
    turn INTEGER NOT NULL,
    policy_version INTEGER NOT NULL,
    temperature REAL NOT NULL,
    reward REAL NOT NULL,
    reward_parts TEXT NOT NULL,      -- JSON, what the env gave
    is_trained INTEGER NOT NULL,     -- 0: the play itself leaves it out, as an unparsable reply
    is_cut INTEGER NOT NULL,
    env_state TEXT,
    reply BLOB NOT NULL,             -- messages
    observation BLOB NOT NULL,
    num_shared INTEGER NOT NULL,     -- leading prompt ids that are the turn before: its prompt and sampled ids
    prompt BLOB,                     -- ids after those
    sampled BLOB,                    -- ids [S]
    logprobs BLOB,                   -- [S] the sampler's
    trainer_logprobs BLOB,           -- [S] the trainer's, where the turn was trained
    mask BLOB,                       -- [S] what the loss saw
    advantages BLOB,                 -- [S]
    potential REAL,                  -- what the env called the state before the turn
    next_potential REAL,             -- and after it
    credited_parts TEXT,             -- JSON, the rewards after shaping; NULL where the method did not see the attempt
    critic_values BLOB,              -- [S] the critic's value of the state before each token; NULL without a critic
    is_unparsable INTEGER,           -- the env could not read the reply; NULL: written before version 7
    token_versions TEXT,             -- JSON [S]: the weights that drew each id; NULL: policy_version drew them all
    is_action INTEGER                -- the env read the reply as a command or a call; NULL: written before version 11
);
CREATE INDEX turns_by_trajectory ON turns (trajectory_id, turn);

CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    label TEXT NOT NULL,             -- start, warm-up, step, end
    num_tasks INTEGER NOT NULL,
    num_attempts INTEGER NOT NULL,
    num_failed INTEGER NOT NULL,
    success REAL, success_low REAL, success_high REAL,
    reward REAL, reward_low REAL, reward_high REAL,
    time REAL NOT NULL
);

CREATE TABLE certificates (step INTEGER PRIMARY KEY, is_exact INTEGER NOT NULL, content TEXT NOT NULL);

CREATE TABLE checkpoints (
    step INTEGER PRIMARY KEY, warmup_steps INTEGER NOT NULL, path TEXT NOT NULL, time REAL NOT NULL,
    state TEXT                       -- JSON: where the parts of the loop stood
);

CREATE TABLE pool (                  -- of each checkpoint: the groups that were dealt and not yet learned from
    step INTEGER NOT NULL,
    number INTEGER NOT NULL,         -- of the deal, from 0
    task_id TEXT NOT NULL,
    admitted INTEGER NOT NULL,       -- the step at which it came into the pool
    outcome TEXT,                    -- JSON; NULL: it was not done, and is played again from its start
    trajectories BLOB,
    failed BLOB,
    PRIMARY KEY (step, number)
) WITHOUT ROWID;

CREATE TABLE events (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, step INTEGER NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL
);
"""

MIGRATIONS = {
    1: ("ALTER TABLE trajectories ADD COLUMN branch TEXT",),
    2: ("ALTER TABLE checkpoints ADD COLUMN state TEXT",),
    3: (
        """CREATE TABLE pool (step INTEGER NOT NULL, number INTEGER NOT NULL, task_id TEXT NOT NULL,
        admitted INTEGER NOT NULL, outcome TEXT, trajectories BLOB, failed BLOB, PRIMARY KEY (step, number))
        WITHOUT ROWID""",
    ),
    4: (
        "ALTER TABLE trajectories ADD COLUMN is_as_played INTEGER",
        "ALTER TABLE turns ADD COLUMN potential REAL",
        "ALTER TABLE turns ADD COLUMN next_potential REAL",
        "ALTER TABLE turns ADD COLUMN credited_parts TEXT",
    ),
    5: ("ALTER TABLE turns ADD COLUMN critic_values BLOB",),
    6: (
        "ALTER TABLE trajectories ADD COLUMN traceback TEXT",
        "ALTER TABLE turns ADD COLUMN is_unparsable INTEGER",
    ),
    7: ("ALTER TABLE trajectories ADD COLUMN labels TEXT",),
    8: ("ALTER TABLE turns ADD COLUMN token_versions TEXT",),
    9: ("ALTER TABLE trajectories ADD COLUMN failure_facts TEXT",),
    10: ("ALTER TABLE turns ADD COLUMN is_action INTEGER",),
}
"""The statements that turn a version into the next one."""

TABLES_WITH_STEPS = ("metrics", "trajectories", "evaluations", "certificates", "checkpoints", "pool")
"""Tables whose rows after a step are deleted when a run continues from that step."""
START_WEIGHTS = "start_weights"
"""The entry of `meta` that names the weights from which the first step begins: those after the warm-up."""
OWN_COUNT = ("warmup", "critic")
"""Metrics whose `step` counts batches of a phase before the first step of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """A trajectory to write."""

    trajectory: Trajectory
    """The trajectory as it was played."""
    outcome: str
    """trained, evaluated, failed, or why its group was dropped."""
    advantages: tuple[float | NDArray[np.float64], ...] | None = None
    """One entry per turn: a number, or [S] one per token. None if the attempt was not trained on."""
    trainer_logprobs: tuple[NDArray[np.float32] | None, ...] | None = None
    """[S] per turn. None for a turn that was not trained on."""
    credited: Trajectory | None = None
    """The trajectory as the method saw it, with shaped rewards and its own `is_trained`. None if it did not see it."""
    critic_values: tuple[NDArray[np.float64], ...] | None = None
    """[S] per turn: the critic's value of the state before each token. None without a critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One line about a stored trajectory."""

    id: int
    step: int
    phase: Phase
    outcome: str
    task_id: str
    attempt: int
    end_reason: str
    is_success: bool | None
    reward: float
    num_turns: int
    num_sampled_tokens: int
    has_tokens: bool
    is_as_played: bool = True
    """False if an older turnwise wrote it; then a method may have changed rewards and `is_trained`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAttempt:
    """A stored trajectory as it was played, with the results of method and trainer."""

    row: AttemptRow
    trajectory: Trajectory
    masks: tuple[NDArray[np.bool_], ...]
    """[S] per turn: the tokens in the loss."""
    advantages: tuple[NDArray[Any], ...]
    """[S] per turn. All 0 if the attempt was not trained on."""
    trainer_logprobs: tuple[NDArray[np.float32] | None, ...]
    credited_parts: tuple[Mapping[str, float] | None, ...]
    """Per turn, the rewards after shaping, by part. None if the method did not see the attempt."""
    critic_values: tuple[NDArray[Any] | None, ...]
    """[S] per turn: the critic's value of the state before each token. None without a critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTurn:
    """What stays of a turn when its token arrays are dropped: the messages, and what was said about them."""

    reply: Message
    observation: tuple[Message, ...]
    policy_version: int
    temperature: float
    reward_parts: Mapping[str, float]
    credited_parts: Mapping[str, float] | None
    """The rewards after shaping. None if the method did not see the attempt."""
    is_trained: bool
    is_cut: bool
    is_unparsable: bool
    env_state: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDialogue:
    """A stored trajectory without its token arrays."""

    row: AttemptRow
    start: tuple[Message, ...]
    turns: tuple[StoredTurn, ...]
    seed: int
    duration_s: float
    metrics: Mapping[str, float]
    labels: Mapping[str, str]
    branch: Branch | None
    failure: Failure | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One evaluation, with 95 % intervals. nan if there was nothing to measure."""

    step: int
    label: str
    num_tasks: int
    num_attempts: int
    num_failed: int
    success: float
    success_low: float
    success_high: float
    reward: float
    reward_low: float
    reward_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One checkpoint: weights, optimizer state, and the progress of the run."""

    step: int
    warmup_steps: int
    path: str
    state: str | None = None
    """The state of the loop's parts as JSON. None if it was not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """One group that was drawn but not yet trained on when a checkpoint was made."""

    number: int
    task_id: str
    admitted: int
    outcome: str | None
    """JSON, for `training.pool`. None if the group must be played again."""
    trajectories: bytes | None = None
    failed: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateRow:
    step: int
    is_exact: bool
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    time: float
    step: int
    kind: str
    detail: Mapping[str, Any]
