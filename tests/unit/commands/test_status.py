"""What `turnwise status` says of a stored run."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.commands.status import run_status
from turnwise.config.files import config_to_yaml, load_config
from turnwise.runlog.writer import RunWriter


@pytest.mark.parametrize("method", ["la_grpo", "refuel", "grpo"])
def test_a_run_that_branches_says_how_much_of_the_variance_is_left_after_the_branch(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """(0.5 * 3 + 1 * 1) / (3 + 1): a step counts by its variance."""
    config = load_config("bargain", [f"method={method}", "model=tiny"])
    writer = RunWriter.create(tmp_path / "run", config_to_yaml(config), max_size_mb=64)
    for step, share, total in ((1, 0.5, 3.0), (2, 1.0, 1.0)):
        branches = {"method/branch_variance_share": share, "method/branch_variance_total": total}
        writer.metrics(step, {"time/step_s": 1.0, **(branches if method != "grpo" else {})})
        writer.commit(step)
    writer.close()
    assert run_status(str(tmp_path / "run"), as_json=False, watch=False) == 0
    said = capsys.readouterr().out
    assert ("Var(R | prefix) / Var(R) is 0.62 over all steps" in said) == (method != "grpo")
