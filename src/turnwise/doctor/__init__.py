"""Says why a run does not learn: what is seen, why it matters, and which option to change.

    from turnwise.doctor import diagnose

    for finding in diagnose("runs/a"):
        print(finding)

Each diagnosis is one function over a `RunHistory`, which reads a run directory and changes nothing. `turnwise doctor`,
the training loop and the report of a run all ask `diagnose`.
"""

from turnwise.doctor.diagnose import DIAGNOSES, diagnose
from turnwise.doctor.finding import Finding, Fix, finding_lines

__all__ = ["DIAGNOSES", "Finding", "Fix", "diagnose", "finding_lines"]
