"""The settings of one service."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from turnwise.engine.config import EngineConfig
from turnwise.runtime.network import is_loopback
from turnwise.runtime.section import Section

MIB = 1 << 20


class ServeConfig(Section):
    """What to serve, where, and how much of the machine callers may use."""

    models: tuple[str, ...] = Field(
        description="Base models, as names or directories; the first is the default of commands."
    )
    data_dir: Path = Field(description="Directory of the service's database, journal and checkpoints.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, lt=65536, description="Port to listen on; 0 is any free one.")
    autosave: int = Field(
        default=10,
        ge=0,
        description="Optimizer steps between two snapshots of a training client. Requests since the last one are kept "
        "on disk and replayed after a restart. 0 keeps neither: a restart loses unsaved weights.",
    )
    max_body_bytes: int = Field(default=64 * MIB, ge=1, description="Largest request body, compressed or not.")
    max_queued_bytes: int = Field(
        default=1024 * MIB,
        ge=1,
        description="Request bytes that may wait in memory; beyond that, callers are told to come back later.",
    )
    max_queued_requests: int = Field(default=20_000, ge=1, description="Unfinished requests of one key.")
    max_resident_adapters: int = Field(
        default=32, ge=1, description="Training adapters kept on the device; the longest idle are parked on disk."
    )
    max_resident_policies: int = Field(
        default=64, ge=1, description="Published weights kept on the device for sampling."
    )
    max_resident_bytes: int = Field(
        default=8192 * MIB,
        ge=1,
        description="Device memory of training adapters (with gradient and optimizer), and again of published weights.",
    )
    park_after_s: float = Field(
        default=900.0, ge=0, description="Seconds without use after which an adapter is parked."
    )
    max_rank: int = Field(default=256, ge=1, description="Largest rank of an adapter.")
    max_kept_result_bytes: int = Field(
        default=512 * MIB, ge=0, description="Size of the finished results that are kept for clients that ask again."
    )
    hold_s: float = Field(
        default=20.0,
        ge=0,
        description="Seconds that a poll waits for its request before the client must ask again; SDKs stop reading "
        "after 45 s.",
    )
    gap_s: float = Field(
        default=60.0, ge=0, description="Seconds that a training request waits for an earlier one that has not come."
    )
    token_s: float = Field(
        default=3600.0, ge=0, description="Seconds for which a token from /auth/token, or a download link, is valid."
    )
    engine: EngineConfig = Field(default_factory=EngineConfig)

    @field_validator("models")
    @classmethod
    def _serves_something(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        if not models:
            raise ValueError("no model to serve; name one: turnwise serve --model smollm2")
        return models

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)
