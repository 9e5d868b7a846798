"""How many tokens a run has sampled for training, from its metrics.

    rollout/tokens_drawn     per step: by the groups that it took, and by those that it dropped for their age
    critic/sampled_tokens    per batch of the critic's pre-training
    pool/tokens_drawn        after a step: by groups that no step has taken yet, those that are being played included

Evaluations are not counted. What a process drew after its last checkpoint is drawn again when the run goes on, with
the same tasks and seeds, and counts once.
"""

from __future__ import annotations

from turnwise.runlog.reader import RunReader


def num_taken_tokens(run: RunReader, step: int, *, critic_batches: int | None = None) -> int:
    """Tokens that the steps up to `step` took, and the critic's pre-training.

    Args:
        critic_batches: how many batches of the pre-training count; None: all that are on record.
    """
    steps = sum(value for at, value in run.metric("rollout/tokens_drawn") if at <= step)
    batches = run.metric("critic/sampled_tokens")
    critic = sum(value for at, value in batches if critic_batches is None or at <= critic_batches)
    return round(steps + critic)


def num_drawn_tokens(run: RunReader, step: int) -> int:
    """All tokens that were sampled for training by the time that `step` steps were done, learned from or not."""
    waiting = dict(run.metric("pool/tokens_drawn"))
    return num_taken_tokens(run, step) + round(waiting.get(step, 0.0))
