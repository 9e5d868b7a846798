"""Turns a model's name into its directory: finds it on disk, makes it, converts it or downloads it.

`resolve_model` finds and never replaces: a model comes under the name that was asked for, or under an alias that the
caller spelled out and that is written on the result. `fetch_model` is the only way in for models that have to be
downloaded into our store. Everything is written to a temporary folder and renamed, so a directory that is there is
whole. This module imports without torch; a GGUF file loads `turnwise.models.convert`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import ssl
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import ConfigError, ModelError, ModelNotFoundError
from turnwise.models.catalogue import CATALOG, CatalogEntry, Report
from turnwise.models.directories import converted_directory, home, is_complete, models_directory
from turnwise.runtime.suggest import did_you_mean

__all__ = [
    "ALIASES_VARIABLE",
    "ModelRow",
    "ResolvedModel",
    "aliases_from_environment",
    "fetch_model",
    "format_count",
    "home",
    "list_models",
    "parse_alias",
    "resolve_model",
]

logger = logging.getLogger(__name__)

ModelSource = Literal["directory", "gguf", "store", "hub_cache"]

ALIASES_VARIABLE = "TURNWISE_ALIASES"
HUB_REACH_S = 8.0
"""Seconds until the hub's first answer; after that we say that it cannot be reached."""
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
HUB_IGNORED = ["*/*"]
"""Folders inside a repository hold other formats of the same weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model directory and how its name led there."""

    name: str
    """The name as the caller spelled it."""
    directory: Path
    source: ModelSource
    aliased_to: str | None = None
    """The name that an alias puts in place of `name`; None if there is no alias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One row of `list_models`. A field is None if it is only known once the model is on disk."""

    name: str
    path: Path
    is_ready: bool
    how_to_get: str
    description: str
    num_bytes: int | None = None
    num_parameters: int | None = None
    architecture: str | None = None
    context_length: int | None = None


def parse_alias(text: str) -> tuple[str, str]:
    """Parse `"A=B"` as `("A", "B")`: a request for A gets B."""
    name, separator, target = (part.strip() for part in text.partition("="))
    if not (name and separator and target):
        raise ConfigError(f"alias {text!r}; expected NAME=MODEL, for example Qwen/Qwen3-0.6B=smollm2")
    return name, target


def aliases_from_environment() -> dict[str, str]:
    """`TURNWISE_ALIASES="A=B,C=D"` as a mapping."""
    entries = os.environ.get(ALIASES_VARIABLE, "").split(",")
    return dict(parse_alias(entry) for entry in entries if entry.strip())


def resolve_model(
    name: str, aliases: Mapping[str, str] | None = None, *, report: Report = logger.info
) -> ResolvedModel:
    """Find the directory of a model: a path, a GGUF file, a name in the store, or a name on the Hugging Face hub.

    Args:
        aliases: `{asked: used}`; applied once, before `TURNWISE_ALIASES`. The result says when one was used.
        report: receives a line before anything that takes time.
    """
    if not name.strip():
        raise ModelNotFoundError("the model name is empty; expected a directory, a GGUF file or a name")
    target = {**aliases_from_environment(), **(aliases or {})}.get(name)
    if target is not None:
        logger.warning("%s: using %s in its place (alias)", name, target)
    tried: list[str] = []
    for find in (_find_directory, _find_gguf, _find_in_store, _find_on_hub):
        found = find(target or name, tried, report)
        if found is not None:
            source, directory = found
            return ResolvedModel(name=name, directory=directory, source=source, aliased_to=target)
    raise ModelNotFoundError(_not_found_message(name, target, tried))


def fetch_model(name: str, *, report: Report = logger.info) -> ResolvedModel:
    """Download or make one of the store's own models. A model that is on disk already stays as it is."""
    entry = CATALOG.get(name)
    if entry is None:
        raise ModelNotFoundError(
            f"there is nothing to fetch under {name!r}; the store can fetch: {', '.join(sorted(CATALOG))}. "
            "Models of the Hugging Face hub are downloaded when they are first used."
        )
    directory = models_directory() / name
    if _is_up_to_date(directory, entry):
        report(f"{name}: already there, in {directory}")
    else:
        _build(name, entry, directory, report)
    return ResolvedModel(name=name, directory=directory, source="store")


def list_models() -> list[ModelRow]:
    """The store's own models, ready or not, and every other model directory under `home()/models`."""
    rows = [_catalog_row(name, entry) for name, entry in sorted(CATALOG.items())]
    root = models_directory()
    for config in sorted([*root.glob("*/config.json"), *root.glob("*/*/config.json")]):
        name = config.parent.relative_to(root).as_posix()
        if name not in CATALOG and not name.startswith("."):
            rows.append(_ready_row(name, config.parent, "put here by hand"))
    return rows


# --- the four places to look, in order; each adds a line to `tried` when it has nothing -------------------------------

_Found = tuple[ModelSource, Path] | None


def _find_directory(name: str, tried: list[str], _report: Report) -> _Found:
    path = Path(name).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return "directory", path.absolute()
    reason = "has no config.json" if path.is_dir() else "is not there"
    tried.append(f"directory {path}: {reason}")
    return None


def _find_gguf(name: str, tried: list[str], report: Report) -> _Found:
    path = Path(name).expanduser().absolute()
    if path.suffix.lower() != ".gguf":
        return None
    if not path.is_file():
        tried.append(f"GGUF file {path}: is not there")
        return None
    directory = converted_directory(path)
    if not is_complete(directory):
        report(f"{path.name}: converting to safetensors, once ...")
        from turnwise.models.convert import gguf_to_directory  # seconds of imports, so after the message

        with _directory_in_the_making(directory) as partial:
            gguf_to_directory(path, partial)
    return "gguf", directory


def _find_in_store(name: str, tried: list[str], report: Report) -> _Found:
    directory = models_directory() / name
    entry = CATALOG.get(name)
    if entry is not None and not _is_up_to_date(directory, entry):
        if not entry.is_made_on_demand:
            raise ModelNotFoundError(_not_fetched_message(name, directory))
        _build(name, entry, directory, report)
    # A name such as "../x" or "/x" would leave the store; it is a path, and paths were tried before.
    is_inside = models_directory() in directory.parents and ".." not in Path(name).parts
    if is_inside and is_complete(directory):
        return "store", directory
    tried.append(f"model store {models_directory()}: holds {_stored_names()}")
    return None


def _find_on_hub(name: str, tried: list[str], report: Report) -> _Found:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import HFValidationError

    def snapshot(*, local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                name, local_files_only=local_files_only, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORED
            )
        )

    try:
        directory = snapshot(local_files_only=True)
        if is_complete(directory):
            return "hub_cache", directory
        tried.append(f"Hugging Face cache: {directory} holds only a part of the model")
    except HFValidationError:
        tried.append(f"Hugging Face hub: {name!r} cannot be a name there")
        return None
    except OSError:
        tried.append(f"Hugging Face cache {constants.HF_HUB_CACHE}: not downloaded yet")
    if _is_hub_offline():
        tried.append("Hugging Face hub: not asked, because HF_HUB_OFFLINE is set")
        return None
    unreachable = _reach_error(constants.ENDPOINT)
    if unreachable is not None:
        tried.append(f"Hugging Face hub: cannot be reached ({unreachable})")
        return None
    report(f"{name}: downloading from the Hugging Face hub ...")
    try:
        directory = snapshot(local_files_only=False)
    except (OSError, RuntimeError) as cause:
        tried.append(f"Hugging Face hub: {str(cause).strip().splitlines()[0]}")
        return None
    if not is_complete(directory):
        tried.append("Hugging Face hub: the repository has no config.json with safetensors weights")
        return None
    return "hub_cache", directory


def _is_hub_offline() -> bool:
    values = (os.environ.get("HF_HUB_OFFLINE", ""), os.environ.get("TRANSFORMERS_OFFLINE", ""))
    return any(value.upper() in {"1", "ON", "YES", "TRUE"} for value in values)


def _reach_error(endpoint: str) -> str | None:
    """Why no answer of any kind comes from `endpoint`; None when one does.

    huggingface_hub sets no time limit on its first request. A look-up of a host name cannot be interrupted either,
    so the question is asked in a thread that may be left behind.
    """
    answer: list[str | None] = [f"no answer within {HUB_REACH_S:.0f} s"]

    def ask() -> None:
        request = urllib.request.Request(endpoint, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=HUB_REACH_S):
                answer[0] = None
        except urllib.error.HTTPError:
            answer[0] = None  # a refusal is an answer
        except (OSError, ValueError) as cause:
            reason = getattr(cause, "reason", cause)
            # A certificate that we cannot judge was sent by somebody; huggingface_hub has rules of its own for it.
            answer[0] = None if isinstance(reason, ssl.SSLError) else str(reason)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_REACH_S)
    return answer[0]


# --- keeping what was made --------------------------------------------------------------------------------------------


def _build(name: str, entry: CatalogEntry, directory: Path, report: Report) -> None:
    started = time.monotonic()
    with _directory_in_the_making(directory) as partial:
        entry.build(partial, report)
        num_parameters = _num_parameters(partial)
        provenance = {
            "name": name,
            "description": entry.description,
            "revision": entry.revision,
            **entry.provenance,
            "num_parameters": num_parameters,
        }
        (partial / "model.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    seconds = time.monotonic() - started
    report(f"{name}: ready in {directory} ({format_count(num_parameters)} parameters, {seconds:.0f} s)")


@contextmanager
def _directory_in_the_making(directory: Path) -> Iterator[Path]:
    """A folder to fill. It becomes `directory` if the block succeeds, and is removed if it fails."""
    partial: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        yield partial
        partial.chmod(0o755)
        for file in partial.iterdir():
            file.chmod(0o644)
        _move_into_place(partial, directory)
    except OSError as cause:
        raise ModelError(
            f"{directory} could not be written: {cause}. Make room there, or set TURNWISE_HOME to a folder that can "
            "be written."
        ) from cause
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _move_into_place(partial: Path, directory: Path) -> None:
    """Put a finished copy in place, unless another process did so meanwhile; replace a damaged or old copy."""

    def is_there() -> bool:
        return is_complete(directory) and _read_json(directory / "model.json") == _read_json(partial / "model.json")

    if is_there():
        return
    try:
        if directory.exists():
            # Renamed before it is deleted: whoever looks in between sees no model, not half of one.
            outdated = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
            directory.rename(outdated / directory.name)
            shutil.rmtree(outdated, ignore_errors=True)
        partial.rename(directory)
    except OSError:
        if not is_there():
            raise


# --- looking at what is there -----------------------------------------------------------------------------------------


def _is_up_to_date(directory: Path, entry: CatalogEntry) -> bool:
    return is_complete(directory) and _read_json(directory / "model.json").get("revision") == entry.revision


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _num_parameters(directory: Path) -> int:
    """Number of parameters, from the headers of the safetensors files; the weights are not read."""
    total = 0
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return total


def format_count(count: int) -> str:
    """`134515008` as `135M`: three digits and a power of a thousand."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _catalog_row(name: str, entry: CatalogEntry) -> ModelRow:
    directory = models_directory() / name
    if _is_up_to_date(directory, entry):
        return _ready_row(name, directory, entry.description)
    how_to_get = "it is made when first used" if entry.is_made_on_demand else f"turnwise model fetch {name}"
    return ModelRow(name=name, path=directory, is_ready=False, how_to_get=how_to_get, description=entry.description)


def _ready_row(name: str, directory: Path, description: str) -> ModelRow:
    config = _read_json(directory / "config.json")
    text_config = config.get("text_config", config)
    is_ready = is_complete(directory)
    return ModelRow(
        name=name,
        path=directory,
        is_ready=is_ready,
        how_to_get="" if is_ready else "has no safetensors weights",
        description=description,
        num_bytes=sum(file.stat().st_size for file in directory.iterdir() if file.is_file()),
        num_parameters=_num_parameters(directory) if is_ready else None,
        architecture=next(iter(config.get("architectures") or []), None),
        context_length=text_config.get("max_position_embeddings"),
    )


def _stored_names() -> str:
    names = [row.name for row in list_models() if row.is_ready]
    return ", ".join(names) if names else "nothing yet"


def _not_fetched_message(name: str, directory: Path) -> str:
    return f"{name} is not in the store yet ({directory}). Fetch it once with: turnwise model fetch {name}"


def _not_found_message(name: str, aliased_to: str | None, tried: list[str]) -> str:
    alias = "" if aliased_to is None else f" (an alias made that {aliased_to!r})"
    near = did_you_mean(name, [*CATALOG, *(row.name for row in list_models() if row.is_ready)], cutoff=0.6)
    lines = [
        f"no model under {name!r}{alias}{near or '.'} Tried:",
        *(f"  - {line}" for line in tried),
        "What you can do:",
    ]
    asked = name if aliased_to is not None or name[0] not in "./~" else "Qwen/Qwen3-0.6B"
    lines += [
        "  - name a model directory (config.json and safetensors) or a .gguf file by its path",
        "  - fetch a small chat model with `turnwise model fetch smollm2` and use the name smollm2",
        f"  - let another model stand in for one: --alias {asked}=smollm2, or {ALIASES_VARIABLE}={asked}=smollm2",
    ]
    return "\n".join(lines)
