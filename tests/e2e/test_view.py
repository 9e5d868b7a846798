"""`turnwise view` as a person meets it: the real command, real pages in a real Chromium, a run that trains meanwhile.

`pytest tests/e2e/test_view.py --screenshots-of DIR` also takes the pictures of docs/view.md, of the runs in DIR.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service_process import ROOT, check_names
from turnwise.cli import main
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runlog.schema import DATABASE
from turnwise.trajectory import EndReason
from turnwise.watch.status import is_training
from view_runs import HOSTILE, PICTURE, Play, WrittenRun
from viewer_process import BROWSER_SCRIPTS, START_S, find_chromium, in_browser, turnwise, viewer

CHECKS = BROWSER_SCRIPTS / "view_checks.py"
PLAYS = (
    Play(task_id="t1", attempt=0, replies=("8", "4", "call weather"), reward=1.0, answers="It rains in Paris."),
    Play(task_id="t1", attempt=1, replies=("8", "4", "6"), reward=0.0),
    Play(task_id="t1", attempt=2, replies=("8", "12"), reward=0.25, end_reason=EndReason.MAX_TURNS),
    Play(task_id="t2", attempt=0, replies=("1",), reward=-0.5),
    Play(task_id="t2", attempt=1, replies=("2",), reward=-0.5),
)
BRANCHED = tuple(
    Play(task_id="t1", attempt=index, replies=("same", reply), reward=float(index), branch_turn=1)
    for index, reply in enumerate(("stop", "star"))
)
MIXED = (
    Play(task_id="guess_number/t1", attempt=0, replies=("8",), labels={"screenshot.1": PICTURE}),
    Play(task_id="key_door/t1", attempt=0, replies=("open",), reward=1.0),
)
HOSTILE_PLAYS = tuple(
    Play(task_id=f"{HOSTILE}", attempt=index, replies=(HOSTILE, f"call {HOSTILE}{index}"), answers=HOSTILE)
    for index in range(2)
)
PICTURES = {
    "view_runs": "#/",
    "view_run": "#/run/guess-grpo-s0",
    "view_attempts": "#/attempts?run=guess-la&phase=train&view=groups",
    "view_attempt-dark": "#/attempt/guess-ppo/700?tokens=advantage",
}
"""Pictures of docs/view.md, which says how these runs are made."""
MAX_PICTURE_BYTES = 200_000


@pytest.fixture(scope="module")
def chromium() -> str:
    if found := find_chromium():
        return found
    pytest.skip("no Chromium on this machine; `make browser` installs it (as root on a Debian)")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("view") / "runs"
    for seed in (0, 1):
        WrittenRun(seed=seed, plays=PLAYS if seed == 0 else ()).write(place / f"grpo-s{seed}")
    WrittenRun(overrides=["train.learning_rate=0.5"]).write(place / "fast")
    WrittenRun(plays=BRANCHED, overrides=["train.steps=3"]).write(place / "branched")
    WrittenRun(plays=MIXED, overrides=["env.mix=guess_number=1,key_door=1"]).write(place / "mixed")
    WrittenRun(plays=HOSTILE_PLAYS, overrides=["run.name=hostile"], steps=2).write(place / "hostile")
    (place / "broken").mkdir()
    (place / "broken" / DATABASE).write_bytes(b"this is no database, and long enough to be read as one" * 9)
    return place


def has_stepped(directory: Path) -> bool:
    if not is_run(directory):
        return False
    with RunReader(directory) as run:
        return bool(run.metric("time/step_s"))


@contextmanager
def training(directory: Path) -> Iterator[None]:
    """A real run that goes on for as long as it is needed."""
    options = ("model=tiny", "warmup.steps=0", "eval.tasks=0", "train.steps=500", "train.tasks_per_step=2")
    command = turnwise("train", "guess_number", *options, "train.save_every=5", f"run.dir={directory}")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ends_s = time.monotonic() + START_S
        while not has_stepped(directory):
            assert process.poll() is None, "the run ended"
            assert time.monotonic() < ends_s, "the run made no step"
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(timeout=START_S)
        if is_training(directory):  # a process that the page's Resume button has started
            subprocess.run(turnwise("stop", directory, "--now"), check=False, capture_output=True)


@pytest.fixture(scope="module")
def outcomes(chromium: str, place: Path, tiny_dir: Path) -> dict[str, Any]:
    assert tiny_dir.is_dir()
    export = place.parent / "export.html"
    assert main(["view", str(place), "--export", str(export)]) == 0
    with training(place / "live"), viewer(place) as url:
        more = {"VIEW_EXPORT": str(export), "VIEW_LIVE": "live"}
        found = json.loads(in_browser(CHECKS, chromium, url=url, more=more).splitlines()[-1])
        found["is_over"] = not is_training(place / "live")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in check_names(CHECKS) if name != "main"])
def test_in_a_browser(name: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[name] is None, outcomes[name]


@pytest.mark.slow
def test_no_process_of_a_stopped_run_is_left(outcomes: dict[str, Any]) -> None:
    assert outcomes["is_over"]


def test_pictures_of_the_docs(chromium: str, tiny_dir: Path, request: pytest.FixtureRequest) -> None:
    assert tiny_dir.is_dir()
    runs = request.config.getoption("--screenshots-of")
    if runs is None:
        pytest.skip("takes pictures only with --screenshots-of DIR")
    out = ROOT / "docs" / "images"
    out.mkdir(exist_ok=True)
    with viewer(Path(Path(runs).name), folder=Path(runs).absolute().parent) as url:
        shots = [f"{name}={address}" for name, address in PICTURES.items()]
        in_browser(BROWSER_SCRIPTS / "view_screenshots.py", chromium, str(out), *shots, url=url)
    for name in PICTURES:
        size = (out / f"{name.removesuffix('-dark')}.png").stat().st_size
        assert size < MAX_PICTURE_BYTES, f"{name} has {size} bytes"


def test_a_place_without_runs_and_a_taken_port_are_told(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    for arguments, words in (
        ((tmp_path,), "holds no run; train one first: turnwise train"),
        ((tmp_path / "nowhere",), "is not there; give a run directory"),
        ((place, "--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
        ((place, "--port", taken.getsockname()[1]), "choose another --port"),
        ((place, "--export", tmp_path / "no" / "dir.html"), "cannot be written"),
    ):
        assert main(["view", *map(str, arguments)]) == 2
        assert words in capsys.readouterr().err
    taken.close()
