from __future__ import annotations

import threading
from pathlib import Path

import pytest

from turnwise.envs.base import assistant, user
from turnwise.errors import ConfigError
from turnwise.judges.cache import FileCache, MemoryCache, make_key


def test_a_key_names_model_roles_and_texts() -> None:
    key = make_key("m", [user("a"), assistant("b")])
    others = [
        make_key("n", [user("a"), assistant("b")]),
        make_key("m", [user("ab")]),
        make_key("m", [user("a"), user("b")]),
        make_key("m", [user("b"), assistant("a")]),
    ]
    assert key == make_key("m", [user("a"), assistant("b")])
    assert len({key, *others}) == 5


def test_memory_keeps_the_latest_answers() -> None:
    cache = MemoryCache(max_answers=2)
    for key in "abca":
        cache.put(key, key.upper())
    assert [cache.get(key) for key in "abc"] == ["A", None, "C"]
    assert MemoryCache(max_answers=0).get("a") is None


def test_a_file_keeps_answers_for_the_next_run(tmp_path: Path) -> None:
    first = FileCache(tmp_path / "judge.db")
    first.put("k", "Zwölf: Score: 3")
    first.put("k", "Score: 4")
    first.close()
    again = FileCache(tmp_path / "judge.db")
    assert (again.get("k"), again.get("other")) == ("Score: 4", None)
    again.close()
    again.close()


def test_threads_and_two_runs_share_a_file(tmp_path: Path) -> None:
    caches = [FileCache(tmp_path / "judge.db") for _ in range(2)]

    def write(cache: FileCache, start: int) -> None:
        for number in range(start, start + 50):
            cache.put(str(number), f"Score: {number}")

    threads = [threading.Thread(target=write, args=(caches[n % 2], 50 * n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(caches[0].get(str(number)) == f"Score: {number}" for number in range(200))
    for cache in caches:
        cache.close()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "judge.db").write_text("my notes\n" * 500, encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be used as the judge's cache"):
        FileCache(tmp_path / "judge.db")
    assert (tmp_path / "judge.db").read_text(encoding="utf-8").startswith("my notes")
    with pytest.raises(ConfigError, match="there is no folder"):
        FileCache(tmp_path / "none" / "judge.db")
