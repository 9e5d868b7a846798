"""The tables of a flywheel's file, `flywheel.db`.

Every sample can be traced: a row of a pool names its round and its attempt, an attempt names the model that played it,
and a verdict names who gave it. `sqlite3 flywheel.db 'SELECT * FROM sft'` works, and so does every other tool.
"""

from __future__ import annotations

DATABASE = "flywheel.db"
VERSION = "1"
POOLS = ("continued", "sft", "preference", "rl")
"""Each pool has a stage of the round that trains on it; the stages run in this order."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE held_out (               -- the tasks of every evaluation; drawn once, never played for training
    id TEXT PRIMARY KEY, difficulty INTEGER NOT NULL, data TEXT NOT NULL, content TEXT NOT NULL,
    UNIQUE (content, difficulty)      -- levels may share data: a board with another opponent is another task
) WITHOUT ROWID;

CREATE TABLE tasks (                  -- every task that was ever proposed
    id TEXT PRIMARY KEY,
    difficulty INTEGER NOT NULL,      -- level of the world's dial; -1: the world has none
    data TEXT NOT NULL,
    content TEXT NOT NULL,            -- hash of the data; without data, of the id
    proposed INTEGER NOT NULL,        -- the round before whose play it was proposed
    retired INTEGER                   -- the round after which it was solved; NULL: it is active
) WITHOUT ROWID;
CREATE TRIGGER no_leak BEFORE INSERT ON tasks
WHEN EXISTS (SELECT 1 FROM held_out WHERE id = NEW.id OR content = NEW.content)
BEGIN SELECT RAISE(ABORT, 'a held-out task must not be trained on'); END;

CREATE TABLE stages (                 -- what is done; a stage is here with everything that it made, or not at all
    round INTEGER NOT NULL, stage TEXT NOT NULL, detail TEXT NOT NULL, time REAL NOT NULL, PRIMARY KEY (round, stage)
) WITHOUT ROWID;

CREATE TABLE attempts (
    id INTEGER PRIMARY KEY,
    round INTEGER NOT NULL,
    model TEXT NOT NULL,              -- the weights that played: a checkpoint, or the base model's name
    task_id TEXT NOT NULL REFERENCES tasks (id),
    attempt INTEGER NOT NULL,         -- its number in the group, from 0
    seed INTEGER NOT NULL,
    is_success INTEGER,               -- the world's own verdict
    reward REAL NOT NULL,
    num_turns INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    end_reason TEXT NOT NULL,
    said TEXT NOT NULL,               -- hash of the task and of every reply
    duplicate_of INTEGER REFERENCES attempts (id),
    trajectory BLOB NOT NULL,         -- deflated JSON: exact ids and logprobs
    UNIQUE (round, task_id, attempt)
);
CREATE INDEX attempts_by_said ON attempts (said);

CREATE TABLE dropped (                -- groups that could not be played
    round INTEGER NOT NULL, task_id TEXT NOT NULL, why TEXT NOT NULL, detail TEXT NOT NULL, PRIMARY KEY (round, task_id)
) WITHOUT ROWID;

CREATE TABLE verdicts (
    attempt_id INTEGER PRIMARY KEY REFERENCES attempts (id),
    source TEXT NOT NULL,             -- verifier, judge, none, or an outcome model's directory
    score REAL NOT NULL,
    is_good INTEGER NOT NULL,
    reason TEXT NOT NULL
);

CREATE TABLE sft (attempt_id INTEGER PRIMARY KEY REFERENCES attempts (id), round INTEGER NOT NULL);
CREATE TABLE continued (attempt_id INTEGER PRIMARY KEY REFERENCES attempts (id), round INTEGER NOT NULL);
CREATE TABLE rl (
    round INTEGER NOT NULL, task_id TEXT NOT NULL REFERENCES tasks (id), good_share REAL NOT NULL,
    PRIMARY KEY (round, task_id)
) WITHOUT ROWID;
CREATE TABLE preference (
    chosen_id INTEGER NOT NULL REFERENCES attempts (id), rejected_id INTEGER NOT NULL REFERENCES attempts (id),
    round INTEGER NOT NULL, PRIMARY KEY (chosen_id, rejected_id)
) WITHOUT ROWID;

CREATE TABLE evaluations (            -- on the held-out tasks, after each round; round 0 is before the first
    round INTEGER NOT NULL,
    difficulty INTEGER NOT NULL,      -- -2: over all levels
    num_tasks INTEGER NOT NULL, num_attempts INTEGER NOT NULL, num_failed INTEGER NOT NULL,
    success REAL, success_low REAL, success_high REAL, reward REAL,
    model TEXT NOT NULL,
    PRIMARY KEY (round, difficulty)
) WITHOUT ROWID;

CREATE VIEW samples AS                -- every attempt with its verdict and the pools that it is in
SELECT a.id, a.round, a.model, a.task_id, t.difficulty, a.attempt, a.is_success, a.reward, a.num_turns, a.num_tokens,
       a.end_reason, a.duplicate_of, v.source AS verdict, v.score, v.is_good, v.reason,
       a.id IN (SELECT attempt_id FROM sft) AS in_sft,
       a.id IN (SELECT attempt_id FROM continued) AS in_continued,
       a.id IN (SELECT chosen_id FROM preference) AS is_chosen,
       a.id IN (SELECT rejected_id FROM preference) AS is_rejected
FROM attempts a JOIN tasks t ON t.id = a.task_id LEFT JOIN verdicts v ON v.attempt_id = a.id;
"""
OVERALL = -2
"""The `difficulty` of an evaluation over all levels."""
