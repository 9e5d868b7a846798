"""What `--plan` refuses: mistakes that would otherwise show up when the run begins."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from turnwise.cli import main


def _plan(*overrides: str) -> int:
    return main(["train", "guess_number", "model=tiny", *overrides, "--plan"])


def test_a_service_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert _plan(f"model.base_url={url}") == 2
    assert f"no service answers at {url}" in capsys.readouterr().err


def test_a_run_directory_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    assert _plan(f"run.dir={file / 'run'}") == 2
    assert f"{file} is a file; choose another run.dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("train.lr=1e-4", "train.learning_rate"),
        ("train.epochs=3", "train.steps"),
        ("train.max_grad_norm=1", "train.grad_clip_norm"),
    ],
)
def test_words_of_other_tools_lead_to_ours(wrong: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plan(wrong) == 2
    assert f"did you mean {right}?" in capsys.readouterr().err
