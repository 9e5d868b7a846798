"""Captures: calls of any agent, recorded as the turns of a trajectory. The agent need not know about training.

An agent sends messages; a trajectory holds ids. When an agent's messages are those of an earlier call, that call's
reply and something new, the next prompt is the earlier prompt, the sampled ids as they are, and the new messages: no
reply is encoded again. Any other call is rendered from its messages, and starts a datum of its own in training.

Every turn is on disk before its reply is sent, so captures survive a restart of the server. If the server ended between
the two, the agent's client asks again; it gets the reply that was recorded, and the turn counts once.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from turnwise.envs.chat_api.messages import Reply, are_same, continues, with_call_text
from turnwise.renderers import Renderer
from turnwise.service.failures import HttpFailure, not_found
from turnwise.service.openai.schemas import CaptureBody, RewardBody
from turnwise.service.store.captures import CapturedTurnRow, CaptureRow, CaptureStore
from turnwise.trajectory import (
    EndReason,
    Message,
    ToolCall,
    Trajectory,
    Turn,
    messages_from_json,
    turn_from_json,
)

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

    def to_json(self) -> dict[str, Any]:
        # Ids as they are: `asdict` would copy them one by one.
        whole = {item.name: getattr(self.turn, item.name) for item in fields(self.turn)}
        turn = {**whole, "reply": asdict(self.turn.reply), "observation": []}
        return {"asked": [asdict(message) for message in self.asked], "reply": asdict(self.reply), "turn": turn}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> CapturedTurn:
        reply = values["reply"]
        calls = tuple(ToolCall(**call) for call in reply["calls"])
        return cls(
            asked=messages_from_json(values["asked"]),
            reply=Reply(reply["content"], calls),
            turn=turn_from_json(values["turn"]),
        )


@dataclass(slots=True, eq=False)
class Capture:
    """One trajectory in the making."""

    id: str
    owner: str
    settings: CaptureBody
    started_s: float
    """In seconds since 1970, like `used_s`: other clocks begin anew after a restart."""
    used_s: float
    store: CaptureStore
    turns: list[CapturedTurn] = field(default_factory=list[CapturedTurn])
    rewards: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    is_success: bool | None = None
    reward_keys: set[str] = field(default_factory=set[str])
    """The `Idempotency-Key` of each reward that had one."""
    untold: set[int] = field(default_factory=set[int])
    """Turns whose reply may not have reached the agent."""

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

    def add(self, asked: Sequence[Message], reply: Reply, turn: Turn) -> int:
        """Record a call, before its reply is sent; returns the turn's number."""
        captured, number = CapturedTurn(asked=tuple(asked), reply=reply, turn=turn), len(self.turns)
        content = json.dumps(captured.to_json(), separators=(",", ":"))
        row = CapturedTurnRow(capture_id=self.id, number=number, content=content, is_told=False)
        self.store.add_turn(row, self._row())
        self.turns.append(captured)
        self.untold.add(number)
        return number

    def told(self, number: int) -> None:
        """The reply of this turn has been sent."""
        self.store.mark_told(self.id, number)
        self.untold.discard(number)

    def take_unheard(self, asked: Sequence[Message]) -> int | None:
        """The latest turn that answered these very messages and whose reply may not have reached the agent.

        It is given out once; `told` writes that down when the reply is sent.
        """
        found = max((number for number in self.untold if are_same(asked, self.turns[number].asked)), default=None)
        if found is not None:
            self.untold.remove(found)
        return found

    def reward(self, body: RewardBody, key: str | None = None) -> None:
        """Add to a turn's reward; a reward with a key that was seen before is not added again."""
        if key is not None and key in self.reward_keys:
            return
        self._add_reward(body)
        if key is not None:
            self.reward_keys.add(key)
        self.save()

    def save(self) -> None:
        """Write everything but the turns."""
        self.store.put(self._row())

    def _row(self) -> CaptureRow:
        rewards = {"parts": self.rewards, "is_success": self.is_success, "keys": sorted(self.reward_keys)}
        return CaptureRow(
            capture_id=self.id,
            owner=self.owner,
            settings=self.settings.model_dump_json(),
            started_at=self.started_s,
            used_at=self.used_s,
            rewards=json.dumps(rewards),
        )

    @classmethod
    def load(cls, row: CaptureRow, store: CaptureStore) -> Capture:
        """The capture as it was written, without its turns."""
        settings, rewards = CaptureBody.model_validate_json(row.settings), json.loads(row.rewards)
        capture = cls(row.capture_id, row.owner, settings, row.started_at, row.used_at, store)
        capture.rewards = {int(turn): parts for turn, parts in rewards["parts"].items()}
        capture.is_success = rewards["is_success"]
        capture.reward_keys = set(rewards["keys"])
        return capture

    def _add_reward(self, body: RewardBody) -> None:
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
    """All captures of a data directory."""

    def __init__(self, store: CaptureStore) -> None:
        self._store = store
        self._captures = {row.capture_id: Capture.load(row, store) for row in store.captures()}
        for row in store.turns():
            capture = self._captures[row.capture_id]
            capture.turns.append(CapturedTurn.from_json(json.loads(row.content)))
            if not row.is_told:
                capture.untold.add(row.number)

    def create(self, owner: str, settings: CaptureBody) -> Capture:
        self._make_room(owner)
        now = time.time()
        capture = Capture(f"cap-{uuid.uuid4().hex}", owner, settings, now, now, self._store)
        capture.save()
        self._captures[capture.id] = capture
        return capture

    def get(self, capture_id: str, owner: str) -> Capture:
        capture = self._captures.get(capture_id)
        if capture is None or capture.owner != owner:
            raise not_found("capture")
        return capture

    def delete(self, capture_id: str, owner: str) -> None:
        self._remove(self.get(capture_id, owner))

    def of(self, owner: str) -> list[Capture]:
        return [capture for capture in self._captures.values() if capture.owner == owner]

    def _make_room(self, owner: str) -> None:
        before = time.time() - KEEP_S
        for capture in [capture for capture in self._captures.values() if capture.used_s < before]:
            self._remove(capture)
        own = sorted(self.of(owner), key=lambda capture: capture.used_s)
        for capture in own[: len(own) - MAX_CAPTURES + 1]:
            self._remove(capture)

    def _remove(self, capture: Capture) -> None:
        self._store.delete(capture.id)
        del self._captures[capture.id]
