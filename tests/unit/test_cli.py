"""The `turnwise` command: results on stdout, one clear line on stderr when something is wrong."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest

from turnwise import __version__
from turnwise.bench.cli import BENCHES
from turnwise.cli import build_parser, main
from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.training.combine import FullMethod
from turnwise.errors import TurnwiseError
from turnwise.models import store as model_store
from turnwise.retriever.dense import VectorKind
from turnwise.retriever.index import IndexKind
from turnwise.rollout.sources import PlayBranches
from turnwise.rounds.tables import POOLS
from turnwise.service.access import KeyStyle
from turnwise.training.merge import MergeMethod
from turnwise.training.pairs import PairKind


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    for word in ("model", "bench", "examples:", "TURNWISE_HOME"):
        assert word in out


def test_the_help_of_bench_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert [name for name in BENCHES if f" {name} (" not in out] == []


def offered(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The choices of an option, as the refusal of another value names them."""
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args([*words.split(), "?"])
    return sorted(re.findall(r"\w+", capsys.readouterr().err.partition("choose from")[2].partition(")")[0]))


def test_the_choices_of_the_command_line_are_those_of_the_code_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    # Parsers import nothing heavy, so they write down again what the types of the code say.
    assert get_args(FullMethod) == get_args(MergeMethod)
    behind: dict[str, tuple[Any, ...]] = {
        "cluster simulate --placement": get_args(ClusterConfig.model_fields["placement"].annotation),
        "keys create --style": get_args(KeyStyle),
        "merge --method": get_args(MergeMethod),
        "pairs --kind": get_args(PairKind),
        "pairs --turn": get_args(get_type_hints(PlayBranches)["turn"]),
        "pools --pool": POOLS,
        "retriever index --index": get_args(IndexKind),
        "retriever index --vectors": get_args(VectorKind),
        "retriever serve --index": get_args(IndexKind),
        "retriever serve --vectors": get_args(VectorKind),
        "serve --dtype": get_args(EngineConfig.model_fields["dtype"].annotation),
    }
    for words, known in behind.items():
        assert offered(words, capsys) == sorted(known), words


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"turnwise {__version__}\n"


def test_model_path_prints_the_path_and_nothing_else(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "path", "tiny"]) == 0
    assert capsys.readouterr().out == f"{own_home / 'models' / 'tiny'}\n"


def test_model_path_takes_repeated_aliases(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "path", "lab/model", "--alias", "x=y", "--alias", "lab/model=tiny"]) == 0
    assert capsys.readouterr().out == f"{tiny_dir}\n"


def test_model_fetch_reports_on_stderr(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "fetch", "tiny"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"tiny: ready in {own_home / 'models' / 'tiny'} (131k parameters")


@pytest.mark.usefixtures("own_home")
def test_model_list_shows_what_to_do_for_models_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model_store.fetch_model("tiny")
    assert main(["model", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["name", "smollm2", "tiny"]
    assert "ready" in lines[2]
    assert lines[-1] == "smollm2 is missing: turnwise model fetch smollm2"


@pytest.mark.usefixtures("own_home")
def test_users_mistake_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "path", "smollm2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("turnwise: smollm2 is not in the store yet")
    assert "Traceback" not in err


def test_unknown_command_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["modle"])
    assert "no 'modle'; did you mean 'model'?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["model"], ["bench"]])
def test_command_without_an_action_shows_its_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert f"usage: turnwise {arguments[0]}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["model"], ["model", "path"], ["model", "fetch"], ["bench"]])
def test_every_level_has_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--help"])
    assert f"usage: turnwise {' '.join(arguments)}" in capsys.readouterr().out


def _install_bench(monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException) -> list[list[str]]:
    """Stands in for `turnwise.bench.cli`; returns the list that collects its calls."""
    calls: list[list[str]] = []

    def bench_main(argv: list[str]) -> int:
        calls.append(argv)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    package, module = ModuleType("turnwise.bench"), ModuleType("turnwise.bench.cli")
    module.main = bench_main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "turnwise.bench", package)
    monkeypatch.setitem(sys.modules, "turnwise.bench.cli", module)
    return calls


def test_bench_gets_its_arguments_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _install_bench(monkeypatch, outcome=3)
    assert main(["bench", "sample", "--json", "--help"]) == 3
    assert calls == [["sample", "--json", "--help"]]


def test_interrupt_is_exit_code_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _install_bench(monkeypatch, outcome=KeyboardInterrupt())
    assert main(["bench", "train"]) == 130
    assert capsys.readouterr().err == "turnwise: stopped\n"


def test_any_turnwise_error_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _install_bench(monkeypatch, outcome=TurnwiseError("the card is full"))
    assert main(["bench", "tree"]) == 2
    assert capsys.readouterr().err == "turnwise: the card is full\n"


def test_our_own_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    _install_bench(monkeypatch, outcome=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["bench", "train"])


def test_an_alias_works_on_every_command_and_is_gone_afterwards(
    tiny_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNWISE_ALIASES", "some/model=tiny")
    assert main(["train", "guess_number", "model=org/absent", "--plan", "--no-time", "--alias", "org/absent=tiny"]) == 0
    assert "131k parameters" in capsys.readouterr().out
    assert main(["model", "path", "org/absent", "--alias=org/absent=tiny"]) == 0
    assert capsys.readouterr().out.strip() == str(tiny_dir)
    assert os.environ["TURNWISE_ALIASES"] == "some/model=tiny"
    assert main(["model", "path", "org/absent"]) == 2
