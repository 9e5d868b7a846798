"""What a run that waits tells its observers."""

from __future__ import annotations

import time

from turnwise.runtime.pending_calls import PendingCall, PendingCalls
from turnwise.training.heartbeat import waiting_text


def test_a_wait_is_told_once_and_with_a_readable_deadline() -> None:
    call = PendingCall(party="trainer", what="warm-up step", who="", since_s=time.monotonic(), deadline_s=1800.0)
    assert waiting_text("trainer: warm-up step", [call]) == "trainer: warm-up step, 0.0 s of at most 1800 s"
    assert waiting_text("", [call]) == "trainer: warm-up step, 0.0 s of at most 1800 s"
    assert waiting_text("a batch of groups", [call]).startswith("a batch of groups; longest: trainer: warm-up step, ")
    assert waiting_text("a batch of groups", []) == ""


def test_a_server_that_starts_is_named_as_the_reason_why_the_trainer_waits() -> None:
    calls = PendingCalls()
    with calls.listed("trainer", "publish the weights", 1800.0):
        with calls.listed("vLLM", "start (runs/a/vllm.log)", 600.0, is_reason=True):
            said = waiting_text("trainer: publish the weights", calls.oldest())
            assert said == "vLLM: start (runs/a/vllm.log), 0.0 s of at most 600 s"
        assert waiting_text("trainer: publish the weights", calls.oldest()).startswith("trainer: publish the weights, ")
