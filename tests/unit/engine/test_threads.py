"""How many threads: the cores that affinity allows and a cgroup's quota pays for, unless the user says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from turnwise.engine import threads
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.threads import Cores, choose_threads, find_cores


def test_threads_follow_cores_quota_and_the_users_choice() -> None:
    many = {"num_online": 64, "num_allowed": 16, "num_physical": 8}
    for quota, environment, count, words in (
        (None, {}, 8, "16 of 64 CPUs allowed by affinity (on 8 cores), no cgroup quota"),
        (2.0, {}, 2, "a cgroup quota of 2"),
        (1.5, {}, 2, "a cgroup quota of 1.5"),
        (0.25, {}, 1, "a cgroup quota of 0.25"),
        (32.0, {}, 8, "a cgroup quota of 32"),
        (2.0, {"OMP_NUM_THREADS": "4"}, 4, "OMP_NUM_THREADS=4"),
        (None, {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "3"}, 3, "MKL_NUM_THREADS=3"),
        (None, {"OMP_NUM_THREADS": "2,1"}, 2, "OMP_NUM_THREADS=2"),
        (None, {"OMP_NUM_THREADS": "100"}, 8, "OMP_NUM_THREADS=100"),
        (None, {"OMP_NUM_THREADS": "many"}, 8, "no cgroup quota"),
    ):
        chosen = choose_threads(Cores(**many, quota=quota), environment)
        assert (chosen.count, words in chosen.why) == (count, True), (quota, environment, chosen)


def test_the_tightest_quota_of_all_cgroups_around_a_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    v1, v2 = "5:cpu,cpuacct:/a/b\n4:memory:/a\n", "0::/a/b\n"
    for index, (membership, files, quota) in enumerate(
        (
            (v2, {}, None),
            (v2, {"cpu.max": "max 100000"}, None),
            (v2, {"cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3.0),
            (v2, {"a/cpu.max": "150000 100000", "a/b/cpu.max": "400000 100000"}, 1.5),
            (v1, {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, None),
            (v1, {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
            # The path is the host's; a container sees its own group at the mount.
            (v1, {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 2.0),
            (v1, {"cpu.max": "100000 100000", "memory/a/cpu.max": "100000 100000"}, None),
        )
    ):
        root = tmp_path / str(index)
        topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        siblings = {topology.format(cpu): f"{cpu % 4},{cpu % 4 + 4}" for cpu in (0, 1, 4, 5)}
        groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
        for name, text in {"proc/self/cgroup": membership, **siblings, **groups}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"{text}\n")
        assert find_cores(root) == Cores(num_online=8, num_allowed=4, num_physical=2, quota=quota), (membership, files)


def test_an_engine_on_the_cpu_uses_no_more_threads_than_the_quota_pays_for(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in threads.USERS_CHOICES:
        monkeypatch.delenv(name, raising=False)
    cores = Cores(num_online=2, num_allowed=2, num_physical=2, quota=0.5)
    monkeypatch.setattr(threads, "find_cores", lambda: cores)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        Engine(tiny_dir, EngineConfig(device="cpu", kv_cache_gib=0.01), name="tiny").close()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
