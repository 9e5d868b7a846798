"""One prompt, one response, one reward: GRPO without environments, and three small tasks to start from."""

from turnwise.single_turn.adapter import AdapterError, RLAdapter
from turnwise.single_turn.chat import ChatAdapter
from turnwise.single_turn.code import CodeAdapter
from turnwise.single_turn.config import RLConfig
from turnwise.single_turn.grpo import RunResult, StepRecord, run_grpo
from turnwise.single_turn.math import MathAdapter

__all__ = [
    "AdapterError",
    "ChatAdapter",
    "CodeAdapter",
    "MathAdapter",
    "RLAdapter",
    "RLConfig",
    "RunResult",
    "StepRecord",
    "run_grpo",
]
