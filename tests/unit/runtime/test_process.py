"""What a command sets for its process, and puts back."""

from __future__ import annotations

import gc
import sys

from turnwise.runtime.process import SWITCH_INTERVAL_S, settled_process


def test_what_is_loaded_is_collected_no_more_until_the_command_ends() -> None:
    interval_s, frozen = sys.getswitchinterval(), gc.get_freeze_count()
    with settled_process():
        assert sys.getswitchinterval() <= SWITCH_INTERVAL_S + 1e-9
        assert gc.get_freeze_count() > frozen + 1000
    assert sys.getswitchinterval() == interval_s
    assert gc.get_freeze_count() == 0


def test_a_shorter_interval_that_somebody_chose_stays() -> None:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with settled_process():
            assert sys.getswitchinterval() < 2e-4
    finally:
        sys.setswitchinterval(before_s)
