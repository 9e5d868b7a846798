"""`tiny`'s tokenizer and its renderer; nothing may be left running after a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from turnwise.renderers import get_renderer
from turnwise.renderers.base import Renderer
from unit.rollout.worlds import wait_for_threads


@pytest.fixture(scope="session")
def tokenizer(tiny_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_dir)


@pytest.fixture(scope="session")
def renderer(tokenizer: Any) -> Renderer:
    return get_renderer(tokenizer)


@pytest.fixture
async def no_leaks() -> AsyncIterator[None]:
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert wait_for_threads() == 0
