"""Captures: calls of any agent, recorded as the turns of a trajectory. The agent need not know about training.

An agent sends messages; a trajectory holds ids. When an agent's messages are those of an earlier call, that call's
reply and something new, the next prompt is the earlier prompt, the sampled ids as they are, and the new messages: no
reply is encoded again. Any other call is rendered from its messages, and starts a datum of its own in training.

Captures live in memory: a restart of the server ends them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from turnwise.envs.chat_api.messages import Reply, are_same, continues, with_call_text
from turnwise.renderers import Renderer
from turnwise.service.failures import HttpFailure, not_found
from turnwise.service.openai.schemas import CaptureBody, RewardBody
from turnwise.trajectory import EndReason, Message, Trajectory, Turn

MAX_CAPTURES = 4096
"""Most captures of one key; the one that was unused for the longest time is removed first."""
MAX_TURNS = 1000
KEEP_S = 6 * 3600.0
"""A capture is removed after this many seconds without use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTurn:
    """One call: the messages that were sent, and the ids of prompt and reply."""

    asked: tuple[Message, ...]
    """With the tools described in them; an assistant's calls are beside its content."""
    reply: Reply
    turn: Turn


@dataclass(slots=True, eq=False)
class Capture:
    """One trajectory in the making."""

    id: str
    owner: str
    settings: CaptureBody
    started_s: float
    used_s: float
    turns: list[CapturedTurn] = field(default_factory=list[CapturedTurn])
    rewards: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    is_success: bool | None = None

    def prompt(self, renderer: Renderer, asked: Sequence[Message]) -> list[int]:
        """The ids of the next prompt."""
        if len(self.turns) >= MAX_TURNS:
            raise HttpFailure(400, f"this capture has {MAX_TURNS} turns already; start another one")
        found = self._before(asked)
        if found is None:
            return renderer.start([with_call_text(message) for message in asked])
        known = found.turn
        observation = asked[len(found.asked) + 1 :]
        history = [with_call_text(message) for message in found.asked]
        return renderer.extend(known.prompt_ids, known.sampled_ids, observation, history=history).ids

    def _before(self, asked: Sequence[Message]) -> CapturedTurn | None:
        """The latest call that these messages continue."""
        for known in reversed(self.turns):
            if continues(asked, known.asked, known.reply):
                return known
        return None

    def add(self, asked: Sequence[Message], reply: Reply, turn: Turn) -> None:
        """Record a call that was answered."""
        self.turns.append(CapturedTurn(asked=tuple(asked), reply=reply, turn=turn))

    def reward(self, body: RewardBody) -> None:
        """Add to a turn's reward."""
        if body.is_success is not None:
            self.is_success = body.is_success
        if body.reward is None:
            return
        count = len(self.turns)
        index = count - 1 if body.turn is None else body.turn + count if body.turn < 0 else body.turn
        if not 0 <= index < count:
            raise HttpFailure(400, f"turn {body.turn} of a capture with {count} turns")
        parts = self.rewards.setdefault(index, {})
        parts[body.part] = parts.get(body.part, 0.0) + body.reward

    def to_trajectory(self) -> Trajectory | None:
        """The trajectory so far; None before the first turn."""
        if not self.turns:
            return None
        return Trajectory(
            task_id=self.settings.task_id,
            attempt=self.settings.attempt,
            seed=self.settings.seed,
            start=tuple(with_call_text(message) for message in self.turns[0].asked),
            turns=tuple(self._finished(index) for index in range(len(self.turns))),
            end_reason=EndReason.TERMINATED,
            is_success=self.is_success,
            duration_s=self.used_s - self.started_s,
        )

    def _finished(self, index: int) -> Turn:
        """A turn with its reward and with what the agent said next in the same conversation."""
        known = self.turns[index]
        size = len(known.asked)
        later = (
            other.asked[size + 1 :]
            for other in self.turns[index + 1 :]
            if len(other.asked) > size + 1
            and known.reply.is_said_by(other.asked[size])
            and are_same(other.asked[:size], known.asked)
        )
        said: list[Message] = []
        for message in next(later, ()):
            if message.role == "assistant":
                break
            said.append(message)
        return replace(known.turn, observation=tuple(said), reward_parts=dict(self.rewards.get(index, {})))


class Captures:
    """All captures of the process."""

    def __init__(self) -> None:
        self._captures: dict[str, Capture] = {}

    def create(self, owner: str, settings: CaptureBody) -> Capture:
        self._make_room(owner)
        now = time.monotonic()
        capture = Capture(f"cap-{uuid.uuid4().hex}", owner, settings, now, now)
        self._captures[capture.id] = capture
        return capture

    def get(self, capture_id: str, owner: str) -> Capture:
        capture = self._captures.get(capture_id)
        if capture is None or capture.owner != owner:
            raise not_found("capture")
        return capture

    def delete(self, capture_id: str, owner: str) -> None:
        del self._captures[self.get(capture_id, owner).id]

    def of(self, owner: str) -> list[Capture]:
        return [capture for capture in self._captures.values() if capture.owner == owner]

    def _make_room(self, owner: str) -> None:
        before = time.monotonic() - KEEP_S
        for capture in [capture for capture in self._captures.values() if capture.used_s < before]:
            del self._captures[capture.id]
        own = sorted(self.of(owner), key=lambda capture: capture.used_s)
        for capture in own[: len(own) - MAX_CAPTURES + 1]:
            del self._captures[capture.id]
