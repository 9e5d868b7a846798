"""The memory tables of docs/scale.md are the plan's arithmetic."""

from __future__ import annotations

from pathlib import Path

from turnwise.training.memory_table import (
    GIB,
    MEASURED,
    facts_of_shape,
    long_memory,
    long_table,
    measured_table,
    memory_of,
    parts_table,
    pass_operations,
    planned_bytes,
    table,
)

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def test_the_page_holds_the_tables_that_the_plan_computes() -> None:
    for one in (table(), parts_table(), measured_table(), long_table()):
        assert one in PAGE.read_text(encoding="utf-8"), "run python -m turnwise.training.memory_table"


def test_long_attempts_take_the_first_way_that_fits_the_card() -> None:
    ways = [long_memory(num_tokens, "auto") for num_tokens in (4096, 65536, 131072)]
    assert [(one.is_recomputed, one.num_part_tokens > 0) for one in ways] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert all(one.total < 131 * GIB for one in ways)
    assert "in parts of" in ways[2].line()
    assert long_memory(131072, "recompute").training_pass > ways[2].training_pass


def test_all_weights_take_as_many_bytes_as_the_page_says() -> None:
    memory = memory_of("Qwen3 0.6B", "full", 131)
    assert memory.weights + memory.adapter == 22 * facts_of_shape("Qwen3 0.6B").num_parameters


def test_the_time_of_an_attempt_grows_with_the_square_of_its_attention() -> None:
    """32 k tokens have half the products and a quarter of the attention of 64 k."""
    short, long, longer = (pass_operations(tokens) for tokens in (32768, 65536, 131072))
    assert 2 < long / short < 4
    assert long / short < longer / long < 4


def test_what_is_planned_is_no_less_than_what_was_measured_and_at_most_a_tenth_more() -> None:
    for sequences, tokens, measured in MEASURED:
        assert 1 <= planned_bytes(sequences * tokens) / (measured * GIB) <= 1.1
