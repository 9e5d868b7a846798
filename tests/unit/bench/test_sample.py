"""The dialogue load: every dialogue plays all its turns, each on top of what came before."""

from __future__ import annotations

from pathlib import Path

from turnwise.bench.sample import play_all
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine


def test_dialogues_grow_by_what_is_sampled_and_what_is_seen_turn_by_turn(tiny_dir: Path) -> None:
    engine = Engine(tiny_dir, EngineConfig(device="cpu", kv_cache_gib=0.01, prefill_tokens=32, seed=1), name="tiny")
    starts = [[20 + i] * 12 for i in range(5)]
    seen = [[[60 + turn, 70 + i] for i in range(5)] for turn in range(3)]
    histories = play_all(engine, starts, seen, 4, engine.base_policy)
    for index, history in enumerate(histories):
        assert history[:12] == starts[index]
        assert len(history) == 12 + 3 * (4 + 2)
        assert [history[12 + 6 * turn + 4 : 12 + 6 * (turn + 1)] for turn in range(3)] == [s[index] for s in seen]
