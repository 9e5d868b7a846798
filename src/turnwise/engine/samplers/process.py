"""A sampler process: an engine that draws from published weights. `links.start_sampler` starts it."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from turnwise.engine.engine import Engine
from turnwise.engine.learners.portable import end_with_leader, portable
from turnwise.engine.samplers.calls import SamplerSetup
from turnwise.engine.samplers.host import SamplerHost, serve_samples
from turnwise.engine.worker import EngineWorker


def make_host(setup: SamplerSetup) -> SamplerHost:
    """Load the model."""
    return SamplerHost(EngineWorker(lambda: Engine(setup.model_dir, setup.engine, name=setup.name), name=setup.name))


def main() -> None:
    end_with_leader()
    with Connection(int(sys.argv[1])) as connection:
        number, setup = connection.recv()
        try:
            host = make_host(setup)
        except Exception as error:  # noqa: BLE001 - the run raises it
            connection.send((number, "error", portable(error)))
            return
        connection.send((number, "done", None))
        serve_samples(connection, host)


if __name__ == "__main__":
    main()
