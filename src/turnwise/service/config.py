"""Settings of one service."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.engine.config import EngineConfig
from turnwise.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What to serve, where, and how much of everything one machine gives away."""

    models: tuple[str, ...]
    """Base models, as names or directories; the first is the default of commands, none is special to clients."""
    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    autosave: int = 10
    """Optimizer steps between two snapshots of a training client; requests since the last one are kept on disk and
    replayed after a restart. 0: keep neither, a restart loses unsaved weights."""
    max_body_bytes: int = 64 * MIB
    """Largest request body, compressed or not."""
    max_queued_bytes: int = 1024 * MIB
    """Request bytes that may wait in memory; beyond that, submissions are told to come back later."""
    max_queued_requests: int = 20_000
    """Unfinished requests of one key."""
    max_resident_adapters: int = 32
    """Training adapters kept on the device; the longest idle are parked on disk."""
    max_resident_policies: int = 64
    """Published weights kept on the device for sampling."""
    max_resident_bytes: int = 8192 * MIB
    """Device memory of training adapters (with gradient and optimizer), and again of published weights."""
    park_after_s: float = 900.0
    """An adapter that nobody used for this long is parked."""
    max_rank: int = 256
    max_kept_result_bytes: int = 512 * MIB
    """Finished results kept for clients that ask again."""
    hold_s: float = 20.0
    """How long a poll waits for its request before it is told to ask again; SDKs give up reading after 45 s."""
    gap_s: float = 60.0
    """How long a training request waits for an earlier one that was never seen."""
    token_s: float = 3600.0
    """Lifetime of a token from /auth/token, and of a download link."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("no model to serve; name one: turnwise serve --model smollm2")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port}; expected 0 (any free one) to 65535")
        for name in ("autosave", "max_rank", "max_resident_adapters", "max_resident_policies", "max_resident_bytes"):
            low = 0 if name == "autosave" else 1
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least {low}")

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host.strip("[]") in ("localhost", ""):
        return host != ""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
