"""Trained policies that are served by name, beside the base models: `turnwise serve runs/a runs/b`.

Their files are copied to the data directory when the server starts. So a policy stays what it was, even if its run
goes on and removes old checkpoints.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from turnwise.client.checkpoints import read_info, verify, write_directory
from turnwise.errors import ConfigError
from turnwise.models.directories import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from turnwise.runtime.checksum import sha256_of

FOLDER = "policies"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """How a run wrote its dialogues, so that a served policy reads what it was trained on."""

    renderer: str = "auto"
    multi_turn: bool = True
    strip_thinking: bool = False
    stop: tuple[str, ...] = ()
    """Strings that end a reply. They stay in it, as in training; those of a caller are cut off, as OpenAI's are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPolicy:
    """An adapter with a name that clients use like a model's."""

    name: str
    base_model: str
    """The name of a base model that is served, too."""
    directory: Path
    """A checkpoint in PEFT's format."""
    identity: str = ""
    """The name and a hash of the weights: another policy of the same name has another one."""
    chat: ChatSettings = ChatSettings()
    """For the chat routes; in the SDKs a caller renders messages itself."""


def check_names(policies: Sequence[NamedPolicy], base_models: Sequence[str]) -> None:
    """Refuse names that clients could not tell apart, or could not write."""
    taken = {name: f"the base model {name}" for name in base_models}
    for policy in policies:
        if not NAME.fullmatch(policy.name):
            raise ConfigError(
                f"{policy.name!r} cannot be the name of a policy; expected letters, digits, '.', '_' and '-': "
                f"write NAME:{policy.directory}"
            )
        if policy.name in taken:
            raise ConfigError(
                f"{policy.directory} and {taken[policy.name]} are both called {policy.name!r}; give it another name: "
                f"NAME:{policy.directory}"
            )
        taken[policy.name] = str(policy.directory)


def keep_policies(policies: Sequence[NamedPolicy], data_dir: Path) -> tuple[NamedPolicy, ...]:
    """Copy the files of these policies to the data directory, in place of those of an earlier server."""
    root = data_dir / FOLDER
    shutil.rmtree(root, ignore_errors=True)
    return tuple(_keep(policy, root) for policy in policies)


def _keep(policy: NamedPolicy, root: Path) -> NamedPolicy:
    if read_info(policy.directory) is not None:  # written by us, with checksums
        verify(policy.directory)
    identity = f"{policy.name}-{sha256_of(policy.directory / ADAPTER_WEIGHTS)[:16]}"

    def copy(staged: Path) -> None:
        staged.mkdir()
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            shutil.copy2(policy.directory / name, staged / name)

    write_directory(root / identity, copy)
    return replace(policy, directory=root / identity, identity=identity)
