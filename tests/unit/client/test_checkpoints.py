"""The one store of checkpoints: whole or absent, found by path, readable in every layout that was ever written."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from turnwise.client.checkpoints import (
    CHECKSUMS_FILE,
    INFO_FILE,
    CheckpointInfo,
    CheckpointPath,
    CheckpointStore,
    checksums_of,
    verify,
    write_directory,
)
from turnwise.errors import CheckpointError
from turnwise.types import LoraConfig

PATH = CheckpointPath("session:train:0", "weights", "step-1")


def info(**changes: object) -> CheckpointInfo:
    known = {"base_model": "tiny", "stored_model": "tiny", "model_directory": "/models/tiny", "has_optimizer": True}
    return CheckpointInfo(**{**known, "lora": LoraConfig(), "created_at": "2026-01-01T00:00:00+00:00", **changes})  # pyright: ignore[reportArgumentType]


def writes(text: str) -> Callable[[Path], None]:
    def fill(directory: Path) -> None:
        directory.mkdir()
        (directory / "adapter_config.json").write_text(text)

    return fill


def test_a_checkpoint_is_found_by_every_scheme_and_its_id_may_hold_colons(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.save(PATH, info(), writes("{}"), overwrite=False) == "tinker://session:train:0/weights/step-1"
    for scheme in ("tinker", "mint", "turnwise"):
        found = store.find(f"{scheme}://session:train:0/weights/step-1")
        assert found.directory == tmp_path / "checkpoints" / "session-train-0" / "weights" / "step-1"
    assert store.has(PATH.uri)
    for bad in ("tinker://a/b/c", "tinker://../weights/x", "tinker://a/weights/.x", "tinker://a/weights", "http://x"):
        with pytest.raises(CheckpointError, match="expected"):
            store.find(bad)
    store.delete(PATH.uri)
    store.delete(PATH.uri)
    assert not store.has(PATH.uri)


def test_directories_that_earlier_versions_wrote_are_read_and_their_damage_is_seen(tmp_path: Path) -> None:
    """Clients once wrote no checksums; the service wrote them into a file beside `checkpoint.json`."""
    store = CheckpointStore(tmp_path)
    directory = store.directory(PATH.uri)
    directory.parent.mkdir(parents=True)
    writes("{}")(directory)
    (directory / INFO_FILE).write_text(info().to_json())
    assert store.find(PATH.uri).info == info()
    (directory / CHECKSUMS_FILE).write_text(json.dumps(checksums_of(directory)))
    assert store.find(PATH.uri).info == info()
    (directory / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is damaged"):
        store.find(PATH.uri)
    (directory / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
        store.find(PATH.uri)


def test_a_sealed_directory_is_verified_without_a_description(tmp_path: Path) -> None:
    place = tmp_path / "snapshot"
    write_directory(place, writes("{}"))
    verify(place)
    (place / CHECKSUMS_FILE).write_text("no json")
    with pytest.raises(CheckpointError, match="its checksums are missing"):
        verify(place)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(PATH, info(), writes("{}"), overwrite=False)
    with pytest.raises(CheckpointError, match="exists; choose another name"):
        store.save(PATH, info(), writes("[]"), overwrite=False)

    def fail(directory: Path) -> None:
        writes("[]")(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(PATH, info(), fail, overwrite=True)
    assert (store.find(PATH.uri).directory / "adapter_config.json").read_text() == "{}"
    assert [path.name for path in store.directory(PATH.uri).parent.iterdir()] == ["step-1"]


def test_what_a_process_left_half_done_is_put_back_or_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    kept, gone = PATH.uri, "tinker://other/weights/gone"
    for path in (kept, gone, "tinker://other/sampler_weights/own"):
        store.save(CheckpointPath.parse(path), info(), writes("{}"), overwrite=False)
    directory = store.directory(kept)
    directory.rename(directory.with_name(".step-1.01234567.replaced"))  # killed in the middle of an overwrite
    writes("[]")(directory.with_name(".step-1.01234567"))
    store.keep_only([kept], kinds=("weights",))
    assert [path.name for path in directory.parent.iterdir()] == ["step-1"]
    assert store.find(kept)
    assert not store.has(gone)
    assert store.has("tinker://other/sampler_weights/own"), "another kind than those asked for"
    store.keep_only([kept])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["session-train-0"]


def test_what_has_expired_is_refused_and_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    store.save(PATH, info(expires_at=past), writes("{}"), overwrite=False)
    with pytest.raises(CheckpointError, match="expired at"):
        store.find(PATH.uri)
    store.remove_expired()
    assert not store.has(PATH.uri)
