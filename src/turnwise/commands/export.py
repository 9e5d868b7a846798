"""`turnwise export`: write trained weights as files for other programs.

A checkpoint's adapter is already in PEFT's format. With `--merged` it is added to the base model's weights; any program
that reads Hugging Face directories can load the result. A run that trained all weights is a whole model already.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from turnwise.commands.play import open_policy
from turnwise.commands.train import say
from turnwise.errors import CheckpointError, ConfigError
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.setup import find_model

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def run_export(target: str, out: str, *, step: str | None, is_merged: bool) -> ExitCode:
    """Write one policy to a new directory, complete or not at all, and print how to load it."""
    directory = Path(out).expanduser()
    if directory.exists():
        raise ConfigError(f"{directory} exists; name a new directory")
    policy = open_policy(target, None, step)
    if policy.files is None:
        raise ConfigError(f"{target} is an untrained base model; name a run or a checkpoint")
    if not policy.files.is_dir():
        raise CheckpointError(f"{policy.checkpoint} is not on this machine, so there are no files to export")
    is_full = policy.config.model.train == "full"
    if is_full and not is_merged:
        raise ConfigError(f"{target} trained all weights, so there is no adapter; add --merged for the whole model")
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        if is_full:
            from turnwise.engine.training.full_files import export_weights  # torch

            export_weights(policy.files, unfinished)
        elif is_merged:
            from turnwise.engine.model.merge import write_merged  # torch

            write_merged(policy.files, find_model(policy.config, say), unfinished)
        else:
            for name in ADAPTER_FILES:
                shutil.copy2(policy.files / name, unfinished / name)
        unfinished.chmod(0o755)
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if is_merged:
        print(f"model    {directory}\nload it  transformers.AutoModelForCausalLM.from_pretrained({str(directory)!r})")
        print(f"chat     turnwise sample {directory}")
    else:
        base = policy.config.model.alias or policy.config.model.name
        print(f"adapter  {directory}, for {base}\nload it  peft.PeftModel.from_pretrained(base, {str(directory)!r})")
    return ExitCode.OK
