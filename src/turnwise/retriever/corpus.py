"""Passages, and the files that hold them: one JSON object per line, `{"id": ..., "contents": ...}`.

`contents` may begin with a line that holds the title, as in the Wikipedia dumps that search agents are trained on. Rows
with `title` and `text` in place of `contents` are read too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.errors import ConfigError

MAX_CONTENTS_CHARS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One passage."""

    id: str
    contents: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A passage that was found. A higher score is better; the scale depends on the index."""

    document: Document
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """All passages, with a checksum that names them."""

    documents: Sequence[Document]
    checksum: str
    """Checksum of ids and contents, in order. It does not depend on the format of the file."""

    @classmethod
    def of(cls, documents: Iterable[Document]) -> Corpus:
        kept = tuple(documents)
        if not kept:
            raise ConfigError("the corpus holds no passages; expected at least one")
        digest = hashlib.sha256()
        for document in kept:
            digest.update(json.dumps([document.id, document.contents]).encode("utf-8"))
        return cls(documents=kept, checksum=digest.hexdigest())


def read_corpus(path: Path | str) -> Corpus:
    """Read every passage of a JSON-lines file. An error names the line of a bad row."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no corpus file {path}; expected JSON lines with id and contents")
    documents: dict[str, Document] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            document = _read_line(line, f"{path}, line {number}", default_id=str(number - 1))
            if document.id in documents:
                raise ConfigError(f"{path}, line {number}: id {document.id!r} was used before; ids must be unique")
            documents[document.id] = document
    if not documents:
        raise ConfigError(f"{path} holds no passages; expected JSON lines with id and contents")
    return Corpus.of(documents.values())


def write_corpus(path: Path | str, documents: Iterable[Document]) -> int:
    """Write passages as JSON lines. Return their number."""
    lines = [json.dumps({"id": document.id, "contents": document.contents}) for document in documents]
    Path(path).expanduser().write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def _read_line(line: str, where: str, *, default_id: str) -> Document:
    try:
        row = json.loads(line)
    except ValueError as cause:
        raise ConfigError(f"{where}: {cause}; expected one JSON object per line") from cause
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is {type(row).__name__}; expected an object with id and contents")
    contents = _contents(row)
    if not contents.strip():
        raise ConfigError(f"{where} has no text; expected contents, or title and text")
    if len(contents) > MAX_CONTENTS_CHARS:
        raise ConfigError(f"{where} has {len(contents)} characters; cut it into passages of {MAX_CONTENTS_CHARS}")
    identifier = row.get("id", row.get("_id", default_id))
    if not isinstance(identifier, str | int):
        raise ConfigError(f"{where}: id is {identifier!r:.40}; expected text or a whole number")
    return Document(id=str(identifier), contents=contents)


def _contents(row: Mapping[str, object]) -> str:
    if isinstance(row.get("contents"), str):
        return str(row["contents"])
    title, text = row.get("title"), row.get("text")
    return f'"{title}"\n{text}' if isinstance(title, str) and title and isinstance(text, str) else str(text or "")
