"""`turnwise export`: write trained weights as files for other programs."""

from __future__ import annotations

from turnwise.commands.play import open_policy
from turnwise.commands.train import say
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.export import ExportPlaces, export_policy


def run_export(target: str, places: ExportPlaces, *, step: str | None) -> ExitCode:
    """Write one policy, and print how to load it."""
    for name, text in export_policy(open_policy(target, None, step), places, say):
        print(f"{name:<9}{text}")
    return ExitCode.OK
