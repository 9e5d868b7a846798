"""A real Ray for tests: an environment of its own, made on first use. Its search path ends with ours."""

from __future__ import annotations

from pathlib import Path

from environments import Environment, make_environment

VERSION = "2.60.0"


def ray_python() -> Path:
    """The interpreter of a virtual environment with Ray, 450 MB."""

    def fill(environment: Environment) -> None:
        environment.install(f"ray[default]=={VERSION}", "psutil")
        environment.end_with_ours()

    return make_environment(f"ray-{VERSION}", fill)
