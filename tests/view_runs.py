"""Runs for tests of the viewer, written with the real writer: no model, milliseconds each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from turnwise.config.files import config_to_yaml, load_config
from turnwise.runlog.schema import AttemptRecord, EvaluationRow
from turnwise.runlog.writer import RunWriter
from turnwise.trajectory import Branch, EndReason, Message, ToolCall, Trajectory, Turn

HOSTILE = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'> & \"quoted\" </script>"
"""What an env may answer; a browser must show it and never run it."""


PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5Er"
    "kJggg=="
)
"""One red pixel, as a world keeps a screenshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One attempt to write: what was said in each turn, and what came of it."""

    task_id: str
    attempt: int
    replies: Sequence[str]
    reward: float = 0.0
    answers: str = "Lower."
    end_reason: EndReason = EndReason.TERMINATED
    branch_turn: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def record(self) -> AttemptRecord:
        turns: list[Turn] = []
        known: tuple[int, ...] = (1, 2, 3)
        for index, reply in enumerate(self.replies):
            ids = tuple(10 + (byte % 80) for byte in reply.encode()) or (10,)
            is_last = index == len(self.replies) - 1
            turns.append(
                Turn(
                    prompt_ids=known,
                    sampled_ids=ids,
                    sampler_logprobs=tuple(-0.1 * (1 + place % 7) for place in range(len(ids))),
                    policy_version=4,
                    reply=Message(role="assistant", content=reply, tool_calls=_calls(reply)),
                    observation=(Message(role="tool" if _calls(reply) else "user", content=self.answers),),
                    reward_parts={"outcome": self.reward, "format": 0.0} if is_last else {"outcome": 0.0},
                )
            )
            known = (*known, *ids, 4)
        trajectory = Trajectory(
            task_id=self.task_id,
            attempt=self.attempt,
            seed=7,
            start=(Message(role="system", content="Find the number."), Message(role="user", content="From 1 to 16?")),
            turns=tuple(turns),
            end_reason=self.end_reason,
            is_success=self.reward > 0.5,
            metrics={"guesses": float(len(turns))},
            labels=self.labels,
            duration_s=0.25,
            branch=None if self.branch_turn is None else Branch(turn=self.branch_turn, seed=3),
        )
        lengths = [len(turn.sampled_ids) for turn in turns]
        return AttemptRecord(
            trajectory=trajectory,
            credited=trajectory,
            outcome="trained",
            advantages=tuple(self.reward - 0.5 for _ in turns),
            trainer_logprobs=tuple(np.full(length, -0.2, np.float32) for length in lengths),
            critic_values=tuple(np.linspace(0.0, self.reward, length) for length in lengths),
        )


def _calls(reply: str) -> tuple[ToolCall, ...]:
    return (ToolCall(name="search", arguments={"query": reply[5:]}),) if reply.startswith("call ") else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRun:
    """A run to write."""

    seed: int = 0
    steps: int = 4
    overrides: Sequence[str] = ()
    plays: Sequence[Play] = ()
    """Attempts of the last step."""

    def write(self, directory: Path) -> Path:
        options = [f"train.seed={self.seed}", f"train.steps={self.steps}", *self.overrides]
        config = load_config("guess_number_tiny", options)
        writer = RunWriter.create(directory, config_to_yaml(config), max_size_mb=500)
        writer.set_meta("plan", "world        guess_number\nsteps        4")
        for step in range(self.steps + 1):
            if step:
                writer.metrics(step, _metrics(step, self.seed))
            if step % 2 == 0:
                writer.evaluation(_evaluation(step, self.seed))
            writer.commit(step)
        writer.task("t1", "train", {"secret": 5})
        writer.attempts(self.steps, "train", [play.record() for play in self.plays])
        writer.event(
            self.steps, "alarm", name="kl", value=0.02, bound=0.01, text="alarm: KL(sampler || trainer) is 0.02"
        )
        writer.commit(self.steps)
        writer.close()
        return directory


def _metrics(step: int, seed: int) -> dict[str, float]:
    return {
        "rollout/reward_mean": 0.1 * step + 0.05 * seed,
        "rollout/success_mean": 0.1 * step,
        "rollout/entropy_turn_1": 0.5 / step,
        "rollout/entropy_turn_2": 0.8 / step,
        "rollout/stop_terminated_share": 0.9,
        "rollout/stop_max_turns_share": 0.1,
        "time/step_s": 1.0,
        "time/sampling_share": 0.6,
        "time/env_share": 0.1,
        "time/training_share": 0.3,
        "pool/staleness_mean": 0.5,
        "drift/abs_mean": 1e-6 * step,
        "drift/abs_max": 1e-5 * step,
        "train/grad_norm": 1.0,
    }


def _evaluation(step: int, seed: int) -> EvaluationRow:
    success = 0.1 + 0.15 * step + 0.02 * seed
    bounds = {"success_low": success - 0.1, "success_high": success + 0.1}
    rewards = {"reward": success, "reward_low": success - 0.1, "reward_high": success + 0.1}
    return EvaluationRow(
        step=step, label="step", num_tasks=8, num_attempts=8, num_failed=0, success=success, **bounds, **rewards
    )
