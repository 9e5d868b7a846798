"""Worlds as a service: the server of `turnwise env serve`, and the worker processes that a run starts."""
