"""The study of self-play: tournaments of several seeds become one matrix and paired differences."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from turnwise.bench.self_play_matrix import forgotten, main, policies_of, read_players, shared_name, to_matrix

STEPS = (10, 20, 30, 40)


def reward(own: str, other: str, seed: int) -> float:
    """Everybody gets 0.5 and a little for the seed; the last policy of `self` plays the start worse than before."""
    is_forgetful = own == "self 40" and other == "warm"
    return 0.5 + 0.01 * seed - (0.3 + 0.03 * seed if is_forgetful else 0.0)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found: list[Path] = []
    for seed in range(3):
        paths = {f"runs/warm-{seed}": "warm", "tough": "tough"}
        for arm in ("pool", "self"):
            for step in STEPS:
                paths[f"runs/{arm}-{seed}/checkpoints/id/weights/step-{step:06d}"] = f"{arm} {step}"
        cell = {"value": 0.5, "low": 0.4, "high": 0.6}
        players = {
            path: {
                **dict.fromkeys(("elo", "reward", "agreement", "joint", "efficient"), cell),
                "against": {other: {"value": reward(name, paths[other], seed)} for other in paths if other != path},
            }
            for path, name in paths.items()
        }
        found.append(tmp_path / f"matrix-{seed}.json")
        found[-1].write_text(json.dumps({"players": players}))
    return found


def test_runs_of_all_seeds_share_a_name() -> None:
    assert [shared_name(label) for label in ("pool-3/step-000010", "warm-12", "tough")] == ["pool 10", "warm", "tough"]


def test_what_the_last_policy_has_forgotten_is_counted_by_seed(files: list[Path]) -> None:
    seeds = read_players(files)
    matrix, names = to_matrix(seeds), list(seeds[0])
    assert forgotten(matrix, policies_of(names, "pool", "warm")) == pytest.approx([0, 0, 0])
    assert forgotten(matrix, policies_of(names, "self", "warm")) == pytest.approx([-0.1, -0.11, -0.12])


def test_the_command_prints_paired_differences_and_draws_the_mean_matrix(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "matrix.svg"
    monkeypatch.setattr(sys, "argv", ["self_play_matrix", *map(str, files), "--out", str(picture)])
    main()
    lines = capsys.readouterr().out.splitlines()
    (told,) = [line for line in lines if line.startswith("| early opponents")]
    assert told.endswith("| 0.110 [0.085, 0.135] |"), "2.5 points either way, by Student with three seeds"
    assert (
        "| strangers: last policy less the start | 0.00 [0.00, 0.00] | 0.00 [0.00, 0.00] | 0.000 [0.000, 0.000] |"
        in lines
    )
    assert "| last policy against tough | 0.51 [0.49, 0.53] | 0.51 [0.49, 0.53] | 0.000 [0.000, 0.000] |" in lines
    texts = [element.text or "" for element in ET.parse(picture).iter() if element.text]
    assert any(text.startswith("pool 40 (") for text in texts)


def test_tournaments_of_other_players_are_refused(files: list[Path]) -> None:
    found = json.loads(files[0].read_text())
    found["players"]["fair"] = found["players"]["tough"]
    files[0].write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="not in every tournament: fair"):
        read_players(files)
