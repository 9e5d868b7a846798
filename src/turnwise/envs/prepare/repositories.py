"""swe: rows in the columns of SWE-bench, with the repositories on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnwise.envs.library.swe_tasks import read_swe_rows
from turnwise.envs.prepare.folder import Preparation
from turnwise.errors import ConfigError

_ENDINGS = ("", ".git", ".tar.gz", ".tar", ".zip")


def prepare_swe(work: Preparation) -> str:
    """Rows (JSON lines, JSON or parquet) whose `repo`, owner/name, is in the folder `repos` as a clone or an archive.

    Every row is loaded once: a missing repository, commit or test is an error now, not in the middle of a run.
    """
    path, rows = work.rows(
        "*.jsonl", "*.json", "*.parquet", "data/*.parquet", what="file of rows with SWE-bench's columns"
    )
    found: list[dict[str, Any]] = []
    for number, row in enumerate(rows, start=1):
        repo = row.get("repo")
        if not isinstance(repo, str) or not repo:
            raise ConfigError(f"{path}, row {number}: repo is {repo!r:.40}; expected owner/name")
        place = _find_repository(work.source, repo)
        if place is None:
            raise ConfigError(
                f"{path}, row {number}: no repository {repo} in {work.source / 'repos'}; expected a clone or an "
                f"archive named {repo.replace('/', '__')} or {repo}"
            )
        if place.is_file():
            work.note(place)
        found.append({**row, "repo": str(place.resolve())})
    work.write_lines("tasks.jsonl", found)
    read_swe_rows(work.target / "tasks.jsonl")
    return "turnwise train swe env.options.path={target}/tasks.jsonl"


def _find_repository(source: Path, repo: str) -> Path | None:
    names = (repo.replace("/", "__"), repo, repo.rpartition("/")[2])
    for name in names:
        for ending in _ENDINGS:
            place = source / "repos" / f"{name}{ending}"
            if place.exists():
                return place
    return None
