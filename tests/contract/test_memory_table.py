"""The memory table of docs/scale.md is the plan's arithmetic."""

from __future__ import annotations

from pathlib import Path

from turnwise.training.memory_table import facts_of_shape, memory_of, table

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def test_the_page_holds_the_table_that_the_plan_computes() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "run python -m turnwise.training.memory_table"


def test_all_weights_take_as_many_bytes_as_the_page_says() -> None:
    memory = memory_of("Qwen3 0.6B", "full", 131)
    assert memory.weights + memory.adapter == 22 * facts_of_shape("Qwen3 0.6B").num_parameters
