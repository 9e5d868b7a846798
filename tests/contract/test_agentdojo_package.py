"""The tests of AgentDojo's worlds, in an environment that has the package and the clients that it imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments import Environment, make_environment
from package_python import run_tests_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first run installs the packages

VERSION = "0.1.35"
CLIENTS = ("anthropic==2.10.0", "cohere==7.3.1", "google-genai==3.3.0", "langchain==1.4.7", "openai==3.51.0")
"""They do not agree with our constraints, so they have versions of their own."""


def test_every_test_of_agentdojo_runs_and_none_is_skipped(tmp_path: Path) -> None:
    def fill(environment: Environment) -> None:
        environment.install(f"agentdojo=={VERSION}", *CLIENTS)
        environment.end_with_ours(is_editable=True)

    python = make_environment(f"agentdojo-{VERSION}", fill)
    # one of the clients gives a warning when it is imported
    run_tests_with(python, ["tests/unit/envs/adapters/test_agentdojo.py"], tmp_path, "-W", "ignore")
