"""Every test runs with a model store of its own, no aliases, no way to a hub and nothing of the tests before it."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ordering import shuffled

# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("TURNWISE_ALIASES", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the numerics tests run their engines: cpu or cuda")
    parser.addoption("--screenshots-of", metavar="DIR", help="take the pictures of docs/view.md, of the runs in DIR")
    parser.addoption("--random-order", type=int, metavar="SEED", help="shuffle the modules, and the tests of each")


MODEL_WORK = ("unit/bench", "unit/service", "unit/engine/ops", "backends", "numerics", "e2e")
"""Folders whose tests load an engine or build kernels; elsewhere a module says so with the marker `model`."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if any(item.path.is_relative_to(Path(__file__).parent / folder) for folder in MODEL_WORK):
        item.add_marker("model")


@pytest.hookimpl(trylast=True)  # after pytest has put tests that share a fixture beside each other
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--random-order")
    if seed is not None:
        items[:] = shuffled(items, lambda item: item.path, seed)


@pytest.fixture(scope="session", autouse=True)
def turnwise_home(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Path]:
    """The session's `TURNWISE_HOME`; a test that changes the store takes `own_home` instead.

    Compiled kernels are shared by all sessions: a file's name is the hash of all that it is made of.
    """
    home = tmp_path_factory.mktemp("turnwise_home")
    kernels = pytestconfig.rootpath / ".pytest_cache" / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (home / "kernels").symlink_to(kernels, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_HOME", str(home))
        yield home


@pytest.fixture(scope="session", autouse=True)
def _threads_end_soon() -> None:
    """Many tests wait until no thread of an env is left."""
    from turnwise.envs import sync

    sync.IDLE_S = 0.05


@pytest.fixture(scope="session", autouse=True)
def _every_metric_is_in_the_catalogue() -> Iterator[None]:
    """Whatever a run of the tests writes down has a row in `watch/catalogue.py`."""
    from turnwise.runlog.writer import RunWriter
    from turnwise.watch.catalogue import check_names

    write = RunWriter.metrics

    def check_and_write(writer: RunWriter, step: int, values: Mapping[str, float]) -> None:
        check_names(values)
        write(writer, step, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunWriter, "metrics", check_and_write)
        yield


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """What a test draws does not depend on what ran before it."""
    random.seed(0)
    for name, seed in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            getattr(sys.modules[name], seed)(0)


@pytest.fixture(autouse=True)
def _no_env_keeps_its_thread() -> Iterator[None]:
    """The test that leaves an env behind fails, and not one of those after it, which count threads."""
    from turnwise.envs import sync

    def num_owned() -> int:
        return sum(thread.name == "turnwise-env" for thread in threading.enumerate()) - sync.num_idle_threads()

    before = num_owned()
    yield
    if hasattr(sys, "last_value"):  # the test failed: its traceback holds its env
        return
    end_s = time.monotonic() + 20
    while num_owned() > before and time.monotonic() < end_s:
        time.sleep(0.01)
    if (num_left := num_owned() - before) > 0:
        pytest.fail(f"{num_left} threads of envs outlive this test; close its envs and let go of calls that hang")


@pytest.fixture(autouse=True)
def _no_run_trains_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """A run in a thread that a test leaves behind, above all a test that fails, is stopped: later tests measure memory
    and time, and torch's profiler crashes beside a thread that trains."""
    before = set(threading.enumerate())
    yield
    left = [one for one in set(threading.enumerate()) - before if one.name == "turnwise-train"]
    if not left:
        return
    from turnwise.runlog.reader import is_run
    from turnwise.training.steer import give_order

    place: Path | None = request.node.funcargs.get("tmp_path")
    for directory in () if place is None else [one for one in place.rglob("*") if one.is_dir() and is_run(one)]:
        give_order(directory, stop="hard")
    for thread in left:
        thread.join(timeout=30)
    if num_left := sum(thread.is_alive() for thread in left):
        pytest.fail(f"{num_left} runs outlive this test; stop them and wait for them")


@pytest.fixture(scope="session")
def tiny_dir(turnwise_home: Path) -> Path:
    """The directory of `tiny`: two random layers and a real tokenizer. Read only."""
    from turnwise.models.store import fetch_model

    directory = fetch_model("tiny").directory
    assert turnwise_home in directory.parents
    return directory


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `TURNWISE_HOME` for one test."""
    home = tmp_path / "home"
    monkeypatch.setenv("TURNWISE_HOME", str(home))
    return home
