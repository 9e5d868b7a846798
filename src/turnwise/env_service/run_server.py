"""Runs the server of a world at a socket, until the process is asked to end."""

from __future__ import annotations

import socket

import uvicorn

from turnwise.env_service.server import EnvServerOptions, make_env_app
from turnwise.envs.base import World
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError
from turnwise.judges import needs_service

KEEP_ALIVE_S = 600
"""A connection belongs to an attempt, which may wait long for its policy."""


def make_served_world(options: EnvServerOptions) -> World:
    """The world by its name. One that needs the models of a run cannot be played outside of it."""
    world = get_world(options.env, **options.options)
    if needs_service(world):
        raise ConfigError(
            f"{options.env} is judged by a model of the run's own service, which an env worker does not have; give the "
            "judge an address, or play it in the run"
        )
    return world


def serve_env(options: EnvServerOptions, listener: socket.socket, world: World | None = None) -> None:
    """Serve until SIGINT or SIGTERM."""
    app = make_env_app(world or make_served_world(options), options)
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=5, timeout_keep_alive=KEEP_ALIVE_S, access_log=False
    )
    uvicorn.Server(config).run(sockets=[listener])
