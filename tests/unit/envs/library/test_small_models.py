"""The shipped worlds suit a small model: replies fit into `max_tokens`, dialogues into a short context."""

from __future__ import annotations

from typing import Any

import pytest

from cases import plain_world_names
from turnwise.envs.registry import get_world
from turnwise.models.tiny import MAX_POSITIONS, build_tokenizer

pytestmark = pytest.mark.model

SHORTER: dict[str, dict[str, Any]] = {
    "customer_service": {"level": 0, "protocol": "line"},  # a tool call in JSON has 40 tokens
    "swe": {"hint": "line"},  # a whole function is long
    "negotiate": {"max_turns": 2},  # four turns of free text on each side are long
}
LONG = {"browser", "household", "phone", "repository", "workflow", "workspace"}
"""Worlds of long attempts. Their presets for `tiny` choose short tasks, or a memory."""
IN_SANDBOX = {"code", "swe"}
"""Worlds whose demonstrations start a sandbox each."""
WORLDS: list[tuple[str, dict[str, Any]]] = [
    *((name, SHORTER.get(name, {})) for name in plain_world_names() if name not in LONG),
    ("calculator", {"protocol": "tool_call"}),
]
NUM_TEMPLATE_TOKENS = 8
"""At most, around each message."""


@pytest.mark.parametrize(("name", "options"), WORLDS)
def test_demonstrated_replies_and_dialogues_fit_the_tiny_model(name: str, options: dict[str, Any]) -> None:
    world, tokenizer = get_world(name, **options), build_tokenizer()

    def count(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    dialogues = world.demonstrations(12 if name in IN_SANDBOX else 60, 0)
    replies = [message.content for dialogue in dialogues for message in dialogue if message.role == "assistant"]
    assert max(count(reply) + 1 for reply in replies) <= world.max_tokens  # with the token that ends the turn
    lengths = [sum(count(message.content) + NUM_TEMPLATE_TOKENS for message in dialogue) for dialogue in dialogues]
    assert max(lengths) <= MAX_POSITIONS // 2
