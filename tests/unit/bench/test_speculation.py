"""The benchmark of guessed tokens: both sides say the same."""

from __future__ import annotations

import argparse
from pathlib import Path

from turnwise.bench import report, speculation


def _arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    report.add_common_options(parser)
    speculation.add_options(parser)
    small = ["--model=tiny", "--device=cpu", "--repeats=2", "--tasks=2", "--attempts=2", "--reply=24"]
    return parser.parse_args([*small, *given])


def test_both_sides_sample_the_same_replies(tiny_dir: Path) -> None:  # noqa: ARG001
    found = speculation.run(_arguments("--temperature=0.2"))
    assert found["equal_share"] == 1.0
    assert found["speedup_least"] <= found["speedup"] <= found["speedup_most"]
    assert 0 < found["tokens_per_reply"] <= 24
    assert found["steps"] <= found["without_steps"]
    assert found["draft_tokens"] == 0, "the passes of such a small model are too short"
