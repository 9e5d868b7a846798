"""The tests of AgentDojo's suites, in an environment of its own.

The package imports the clients of four model services, in versions that do not agree with those of constraints.txt.
There it has the versions that it asks for; all else is ours.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from environments import Environment, make_environment
from package_python import run_tests_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first run installs the packages

AGENTDOJO = "agentdojo==0.1.35"
NEEDED = (
    "anthropic==2.10.0",
    "cachebox==5.2.3",
    "cffi==2.1.1",
    "cohere==7.3.1",
    "cryptography==50.0.2",
    "deepdiff==9.1.0",
    "dnspython==2.9.2",
    "docstring-parser==0.18.0",
    "email-validator==2.4.0",
    "fastavro==1.13.1",
    "google-auth==2.62.2",
    "google-genai==3.3.0",
    "jsonpatch==1.47",
    "jsonpointer==3.12",
    "langchain==1.4.7",
    "langchain-core==1.7.2",
    "langchain-protocol==0.0.20",
    "langgraph==1.2.22",
    "langgraph-checkpoint==4.3.2",
    "langgraph-prebuilt==1.1.2",
    "langgraph-sdk==0.4.14",
    "langsmith==0.14.17",
    "orderly-set==5.5.0",
    "ormsgpack==1.13.1",
    "pyasn1==0.6.5",
    "pyasn1-modules==0.4.2",
    "pycparser==3.12",
    "requests-toolbelt==1.0.0",
    "tenacity==9.1.4",
    "types-requests==2.33.0.20261030",
    "uuid-utils==0.19.0",
    "xxhash==4.1.0",
)
"""What it needs in versions that are not ours, or that we have no version of: 80 MB."""


def test_every_test_of_agentdojo_runs_and_none_is_skipped(tmp_path: Path) -> None:
    def fill(environment: Environment) -> None:
        environment.end_with_ours(is_editable=True)
        environment.install_missing(AGENTDOJO, *NEEDED)

    python = make_environment(AGENTDOJO, fill)
    # The client of Google's models warns when it is imported, and our tests treat warnings as errors.
    run_tests_with(python, ["tests/unit/envs/adapters/test_agentdojo.py"], tmp_path, "-W", "ignore")
