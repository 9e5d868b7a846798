"""The shapes of published models that the speed measurements run."""

from __future__ import annotations

from turnwise.bench.shapes import random_model_directory
from turnwise.models.facts import read_facts


def test_the_8b_shape_reads_the_long_attempts_that_the_docs_measure() -> None:
    assert read_facts(random_model_directory("qwen3-8b")).context_length == 131_072
