"""Write trained weights as files for other programs.

    peft=DIR      the adapter, in PEFT's format
    merged=DIR    a whole Hugging Face model with the adapter added to its weights
    gguf=FILE     the same as one GGUF file, for llama.cpp

An adapter on an output head that shares its weights with the embedding (tied) is right as an adapter. Added to the
shared weights, as PEFT's `merge_and_unload` does, it would change the embedding too. So a merged model gets a head of
its own. docs/export.md has the measured differences.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turnwise.errors import CheckpointError, ConfigError
from turnwise.models.directories import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from turnwise.models.facts import is_tied, read_config
from turnwise.models.families import auto_class_name
from turnwise.training.model_card import ExportedAs, write_card
from turnwise.training.policy import PolicySampler
from turnwise.training.setup import Report, find_model, report_nothing

ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
UNTIED = (
    "The base model's output head shares its weights with the embedding, and the adapter changes only the head. This "
    "model has a head of its own (tie_word_embeddings is false), so it equals what was trained."
)
TIED_ADAPTER = (
    "The adapter changes the output head, which shares its weights with the embedding. PEFT, transformers and vLLM "
    "load it right. Do not merge it with merge_and_unload: that changes the embedding too. turnwise export --merged "
    "merges it right."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlaces:
    """The files or directories to write; exactly one is given."""

    peft: str | Path | None = None
    merged: str | Path | None = None
    gguf: str | Path | None = None

    @property
    def place(self) -> Path:
        """The one that is given; nothing is written over."""
        given = [place for place in (self.peft, self.merged, self.gguf) if place is not None]
        if len(given) != 1:
            raise ConfigError(
                "name one thing to write: --peft DIR, --merged DIR or --gguf FILE (in Python peft=, merged= or gguf=)"
            )
        place = Path(given[0]).expanduser()
        if place.exists():
            raise ConfigError(f"{place} exists; name a new {'file' if self.gguf else 'directory'}")
        return place


Notes = list[tuple[str, str]]
"""What to tell about an export, each with a word for it: where it is, how to load it."""


def export_policy(policy: PolicySampler, places: ExportPlaces, report: Report = report_nothing) -> Notes:
    """Write one policy, complete or not at all."""
    place = places.place
    if policy.files is None:
        raise ConfigError("an untrained base model has nothing to export; name a run or a checkpoint")
    if not policy.files.is_dir():
        raise CheckpointError(f"{policy.checkpoint} is not on this machine, so there are no files to export")
    if policy.config.model.train == "full" and places.peft:
        raise ConfigError(
            "the run trained all weights, so there is no adapter; add --merged DIR for the whole model, not --peft"
        )
    write = _write_peft if places.peft else _write_merged if places.merged else _write_gguf
    return _written_whole(place, lambda unfinished: write(policy, report, unfinished, place))


def _written_whole(place: Path, write: Callable[[Path], Notes]) -> Notes:
    """Call `write` with a directory beside `place`, and move what it made into place."""
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        notes = write(unfinished)
        file = unfinished / place.name
        if file.is_file():  # a GGUF file is one file
            file.rename(place)
            shutil.rmtree(unfinished)
        else:
            unfinished.chmod(0o755)
            unfinished.rename(place)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return notes


def _write_peft(policy: PolicySampler, report: Report, out: Path, place: Path) -> Notes:
    assert policy.files is not None
    for name in ADAPTER_FILES:
        shutil.copy2(policy.files / name, out / name)
    base, model = policy.config.model.alias or policy.config.model.name, find_model(policy.config, report)
    notes = (TIED_ADAPTER,) if is_tied(model) and _adapts_head(policy.files) else ()
    load = f"peft.PeftModel.from_pretrained(base, {place.name!r})"
    write_card(policy, out, ExportedAs(library="peft", load=load, notes=notes))
    said = [("adapter", f"{place}, for {base}"), ("load it", f"peft.PeftModel.from_pretrained(base, {str(place)!r})")]
    return [*said, *(("note", note) for note in notes)]


def _write_merged(policy: PolicySampler, report: Report, out: Path, place: Path) -> Notes:
    assert policy.files is not None
    notes: tuple[str, ...] = ()
    if policy.config.model.train == "full":
        from turnwise.engine.training.full_files import export_weights  # torch

        export_weights(policy.files, out)
    else:
        from turnwise.engine.model.merge import write_merged  # torch

        base = find_model(policy.config, report)
        write_merged(policy.files, base, out)
        notes = (UNTIED,) if is_tied(base) and not is_tied(out) else ()
    own = auto_class_name(read_config(out))
    load = f"transformers.{own}.from_pretrained({place.name!r})"
    write_card(policy, out, ExportedAs(library="transformers", load=load, notes=notes))
    said = [("model", str(place)), ("load it", f"transformers.{own}.from_pretrained({str(place)!r})")]
    return [*said, ("chat", f"turnwise sample {place}"), *(("note", note) for note in notes)]


def _write_gguf(policy: PolicySampler, report: Report, out: Path, place: Path) -> Notes:
    from turnwise.models.gguf_file import write_gguf  # torch

    with tempfile.TemporaryDirectory(prefix="turnwise-gguf-") as merged:
        _write_merged(policy, report, Path(merged), place)
        write_gguf(Path(merged), out / place.name)
    return [("model", str(place)), ("load it", f"llama_cpp.Llama({str(place)!r})")]


def _adapts_head(adapter: Path) -> bool:
    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return "lm_head" in config["target_modules"]
