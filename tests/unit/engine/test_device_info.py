"""What a process may take of a GPU that it shares."""

from __future__ import annotations

import pytest

from turnwise.engine.device_info import GPU_SHARE_VARIABLE, own_share
from turnwise.errors import ConfigError

GIB = 1 << 30


def test_a_process_alone_may_take_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GPU_SHARE_VARIABLE, raising=False)
    assert own_share(70 * GIB, 80 * GIB, 1 * GIB) == (70 * GIB, 80 * GIB)


def test_processes_that_share_a_gpu_plan_alike_whoever_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of eight finds an eighth of the card free, and may take as much of it as the first one."""
    monkeypatch.setenv(GPU_SHARE_VARIABLE, "0.125")
    first, last = own_share(79 * GIB, 80 * GIB, 1 * GIB), own_share(10 * GIB, 80 * GIB, 1 * GIB)
    assert first == last == (9 * GIB, 10 * GIB)
    assert own_share(4 * GIB, 80 * GIB, 1 * GIB)[0] == 4 * GIB, "more than is free nobody gets"


@pytest.mark.parametrize("text", ["0", "2", "-0.5", "half", "nan"])
def test_a_share_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPU_SHARE_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"TURNWISE_GPU_SHARE={text}; expected a share of the GPU"):
        own_share(GIB, GIB, 0)
