"""A flywheel without a verifier: a judge behind an address scores the attempts, or compares them two by two."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import turnwise as tw
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.judges import Rubric
from turnwise.rounds.config import FlywheelConfig
from turnwise.runlog.reader import RunReader

pytestmark = pytest.mark.usefixtures("tiny_dir")
WORLD = f"{Path(__file__).with_name('parity_world.py')}:ParityWorld"
RUBRIC = "Short is good."


def _score(text: str) -> int:
    """What the stub says about a text: 0, 5 or 10, by its letters alone."""
    return 5 * (zlib.crc32(text.encode()) % 3)


class StubJudge(ThreadingHTTPServer):
    """Answers chat completions, and breaks after `most` of them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.most = 1_000_000
        self.answered: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Answer(BaseHTTPRequestHandler):
    server: StubJudge

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = asked["messages"][-1]["content"]
        is_broken = len(self.server.answered) >= self.server.most
        if not is_broken:
            self.server.answered.append(text)
        answer = f"Score: {_score(text)}"
        if "Better:" in asked["messages"][0]["content"]:
            first, second = (text.split(f"=== {name} ===")[1].split("=== end")[0] for name in "AB")
            answer = f"Better: {'A' if zlib.crc32(first.encode()) < zlib.crc32(second.encode()) else 'B'}"
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": answer}}]}).encode()
        self.send_response(400 if is_broken else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        pass


@pytest.fixture
def judge() -> Iterator[StubJudge]:
    with StubJudge() as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _run(directory: Path, judge: StubJudge, verdict: str, **options: object) -> tw.Flywheel:
    asked = {"verdict": verdict, "judge_model": "stub", "judge_url": judge.url, "rubric": RUBRIC}
    section = {"rounds": 1, "tasks": 4, "samples": 4, "sft_steps": 0, "eval_tasks": 2, **asked, **options}
    file = {
        "flywheel": section,
        "model": "tiny",
        "env": {"name": WORLD},
        "rollout": {"group_size": 4},
        "train": {"tasks_per_step": 2, "learning_rate": 1e-2},
    }
    path = directory.with_suffix(".yaml")
    path.write_text(json.dumps(file))
    return tw.flywheel(path, directory=directory)


def _kept_answers(directory: Path) -> int:
    with sqlite3.connect(f"file:{directory / 'judge.db'}?mode=ro", uri=True) as db:
        return int(db.execute("SELECT count(*) FROM answers").fetchone()[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rl_learns_from_the_score_of_the_judge_that_routes(tmp_path: Path, judge: StubJudge) -> None:
    wheel = _run(tmp_path / "wheel", judge, "judge", rl_steps=2)
    rubric = Rubric(criteria=RUBRIC)
    with RunReader(tmp_path / "wheel" / "rounds" / "01" / "rl") as run:
        rows = run.attempts(phase="train")
        said = [rubric.ask([message for message, _ in run.dialogue(row.id)])[-1].content for row in rows]
    assert rows
    assert [row.reward for row in rows] == [_score(text) / 10 for text in said]
    assert any(row.reward != float(bool(row.is_success)) for row in rows), "the world would have said something else"
    (routed,) = wheel.query("SELECT count(*) AS n FROM samples WHERE verdict = 'judge' AND round = 1")
    assert routed["n"] == 16
    assert len(judge.answered) == len(set(judge.answered)), "an answer is kept for the verdict and for the reward"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_comparisons_that_were_answered_are_not_asked_again_and_their_pairs_are_learned(
    tmp_path: Path, judge: StubJudge
) -> None:
    judge.most = 15
    with pytest.raises(TurnwiseError, match="status 400"):
        _run(tmp_path / "wheel", judge, "pairwise", rl_steps=0, preference_steps=2)
    kept, before = _kept_answers(tmp_path / "wheel"), len(judge.answered)
    assert 0 < kept <= before
    judge.most = 1_000_000
    wheel = _run(tmp_path / "wheel", judge, "pairwise", rl_steps=0, preference_steps=2)
    missing = len(set(judge.answered)) - kept
    assert len(judge.answered) - before == missing > 0, "what was kept is not asked again"
    (stage,) = wheel.query("SELECT detail FROM stages WHERE round = 1 AND stage = 'preference'")
    assert json.loads(stage["detail"])["steps"] == 2
    pairs = wheel.query("SELECT * FROM preference")
    scores = {row["id"]: row["score"] for row in wheel.query("SELECT id, score FROM samples")}
    assert pairs
    assert all(scores[pair["chosen_id"]] > scores[pair["rejected_id"]] for pair in pairs)


def test_rl_on_comparisons_is_refused_with_what_to_set_instead() -> None:
    asked: dict[str, Any] = {"verdict": "pairwise", "judge_model": "stub", "rubric": RUBRIC}
    with pytest.raises(ConfigError, match="set rl_steps=0, and preference_steps"):
        FlywheelConfig(**asked)
    assert FlywheelConfig(**asked, rl_steps=0).rl_steps == 0
