"""One data directory, one server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from turnwise.errors import ConfigError
from turnwise.service.commands import data_lock


def test_a_second_server_on_one_data_directory_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=f"process {os.getpid()}.*another --data-dir")
    with data_lock(tmp_path), refused, data_lock(tmp_path):
        pass
    with data_lock(tmp_path):
        pass  # the first one is gone


def test_a_data_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="choose another --data-dir"), data_lock(tmp_path / "file" / "data"):
        pass
