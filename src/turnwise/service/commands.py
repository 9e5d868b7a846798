"""What `turnwise serve` and `turnwise keys` do. `commands/serve.py` has their options."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.runtime.network import open_port
from turnwise.runtime.process import settled_process
from turnwise.service.access import Access, KeyStyle, create_key, revoke_key
from turnwise.service.config import ServeConfig
from turnwise.service.named_policies import NamedPolicy, check_names, keep_policies
from turnwise.service.store.store import Store

CLOSE_S = 5
LOCK_FILE = "serve.lock"


def serve(config: ServeConfig, policies: Sequence[NamedPolicy] = ()) -> int:
    """Serve base models, and policies that were trained on them, until interrupted."""
    try:
        import fastapi  # noqa: F401
        import google.protobuf  # noqa: F401
        import uvicorn
        import zstandard  # noqa: F401
    except ImportError as cause:
        raise ConfigError(
            f"{cause.name} is missing; install what the service needs: pip install 'turnwise[service]'"
        ) from cause
    check_names(policies, config.models)
    with data_lock(config.data_dir):
        return _serve(config, keep_policies(policies, config.data_dir), uvicorn)


@contextlib.contextmanager
def data_lock(data_dir: Path) -> Iterator[None]:
    """Hold a data directory for one server; the lock ends with the process, however it ends."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        opened = (data_dir / LOCK_FILE).open("a+")
    except OSError as cause:
        raise ConfigError(f"{data_dir} cannot hold the data: {cause.strerror}; choose another --data-dir") from cause
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            file.seek(0)
            raise ConfigError(
                f"another server (process {file.read(20).strip() or 'unknown'}) works on {data_dir}, and two would "
                "overwrite each other's data; stop it, or choose another --data-dir"
            ) from cause
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _serve(config: ServeConfig, policies: Sequence[NamedPolicy], uvicorn: Any) -> int:
    from turnwise.service.app import create_app
    from turnwise.service.engines import load_models

    store = Store(config.data_dir)
    access = Access(store, is_loopback=config.is_loopback, token_s=config.token_s)
    access.check_bind()
    listener = _listen(config)
    port = listener.getsockname()[1]
    names = [policy.name for policy in policies]
    _say(f"loading {', '.join(config.models)} ...")
    try:
        models = load_models(config.models, config.engine)
    except BaseException:
        listener.close()
        raise
    app = create_app(config, store, models, policies)

    def announce() -> None:
        host = f"[{config.host}]" if ":" in config.host else config.host
        address, key = f"http://{host}:{port}", "no key needed" if access.is_open else "API keys required"
        _say(f"serving {', '.join([*config.models, *names])} at {address} ({key}); data in {config.data_dir}")
        _say(f"Tinker and MinT SDKs: base_url={address}; OpenAI clients: base_url={address}/v1; Ctrl-C stops")

    class Server(uvicorn.Server):
        """Prints when it is ready. When it is asked to stop, it answers the polls that are waiting."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                app.state.service.screen.start()
                announce()

        def handle_exit(self, sig: int, frame: Any) -> None:
            if hasattr(app.state, "service"):
                app.state.service.promises.close()
            super().handle_exit(sig, frame)

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    options = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=CLOSE_S, timeout_keep_alive=75
    )
    with settled_process():
        Server(options).run(sockets=[listener])
    return 0


def _listen(config: ServeConfig) -> socket.socket:
    """Open the port before the models are loaded, which may take minutes."""
    try:
        return open_port(config.host, config.port, backlog=1024)
    except OSError as cause:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({cause.strerror}); choose another --port, or 0 for any"
        ) from cause


def create(data_dir: Path, name: str, style: KeyStyle) -> int:
    store = Store(data_dir)
    print(create_key(store, name, style))
    _say("this is the only time that the key is shown; the server keeps a hash of it")
    return 0


def list_all(data_dir: Path) -> int:
    keys = Store(data_dir).list_keys()
    if not keys:
        _say("no keys; a server on this machine's own address needs none")
    for key in keys:
        made = datetime.fromtimestamp(key.created_at, UTC).strftime("%Y-%m-%d %H:%M")
        state = "revoked" if key.revoked_at is not None else "active"
        print(f"{key.key_id:4d}  ...{key.hint}  {made}  {state:8s} {key.name}")
    return 0


def revoke(data_dir: Path, key_id: int) -> int:
    row = revoke_key(Store(data_dir), key_id)
    _say(f"key {row.key_id} ({row.name}) is revoked; its data stays on disk, and nobody can reach it")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
