"""`turnwise doctor`: say why a run does not learn."""

from __future__ import annotations

import json

from turnwise.doctor import diagnose, finding_lines
from turnwise.runlog.reader import RunReader
from turnwise.runtime.exit_codes import ExitCode


def run_doctor(target: str, *, as_json: bool) -> ExitCode:
    """Print the findings; exit code 1 if there is one."""
    with RunReader(target) as run:
        findings = diagnose(run)
        num_steps = len(run.metric("time/step_s"))
    if as_json:
        print(json.dumps({"run": target, "steps": num_steps, "findings": [one.to_json() for one in findings]}))
    elif findings:
        print("\n".join(finding_lines(findings)))
    else:
        print(f"nothing found in {num_steps} steps of {target}")
    return ExitCode.FAILED if findings else ExitCode.OK
