"""What an attempt holds does not grow with it, where it has a memory."""

from __future__ import annotations

import pytest

from turnwise.bench.memory_use import MEMORIES, measure_use, table


@pytest.mark.slow
def test_with_a_window_an_attempt_of_three_times_the_length_holds_as_many_blocks() -> None:
    plain, windowed = ([measure_use(memory, cells, 1) for cells in (16, 48)] for memory in MEMORIES)
    assert plain[1].most_blocks > 2 * plain[0].most_blocks
    assert windowed[1].most_blocks <= windowed[0].most_blocks + 3
    assert windowed[1].longest_prompt < plain[1].longest_prompt / 2
    assert len(table([*plain, *windowed])) == 2 + 4
