"""The section `opponent` of a run's config: how the opponent plays that `env.options.opponent` names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from turnwise.envs.seats import OPPONENT_DEADLINE_S
from turnwise.runtime.section import ONE_OR_MORE, Section


class OpponentConfig(Section):
    """How the other seat is played; `env.options.opponent` says by whom (docs/opponents.md)."""

    model: str = Field(
        default="", description="For an address: the model's name there. For a Tinker service also a `tinker://` path."
    )
    api_key_variable: str = Field(
        default="", description="For an address: the environment variable that holds the key; the key is never stored."
    )
    temperature: float = Field(default=1.0, ge=0, le=100, description="Sampling temperature of the opponent.")
    max_tokens: int = Field(
        default=0, ge=0, description="Most tokens in a reply of the opponent; 0: as many as the policy may use."
    )
    deadline_s: float = Field(
        default=OPPONENT_DEADLINE_S,
        gt=0,
        description="Seconds for one reply; then the attempt fails, with the opponent to blame. It must be less than "
        "rollout.step_deadline_s.",
    )
    device: str = Field(
        default="", description="For another base model: the device that it is loaded on; empty: that of the policy."
    )
    kv_cache_gib: float = Field(
        default=1.0, gt=0, description="For another base model: GiB of its KV cache, beside its weights."
    )
    train: Literal["one", "both"] = Field(
        default="one",
        description="With env.options.opponent=self: train the policy's own seat, or both seats, each with its own "
        "group and baseline.",
    )
    panel: Annotated[tuple[str, ...], ONE_OR_MORE] = Field(
        default=(),
        description="Opponents of every evaluation, such as [base, tough]. Each plays all held-out tasks. Empty: the "
        "opponent of training; with self or pool, the base model and the world's first script.",
    )
    snapshot_every: int = Field(
        default=10,
        ge=1,
        description="With env.options.opponent=pool: a snapshot of the policy joins after every n-th step.",
    )
    keep_last: int = Field(
        default=4, ge=1, description="With env.options.opponent=pool: how many of the last snapshots play."
    )
    base_weight: float = Field(
        default=1.0, ge=0, description="With env.options.opponent=pool: weight of the base model."
    )
    last_weight: float = Field(
        default=2.0, ge=0, description="With env.options.opponent=pool: weight of the last snapshots."
    )
    best_weight: float = Field(
        default=1.0,
        ge=0,
        description="With env.options.opponent=pool: weight of the snapshot with the highest Elo.",
    )
    scripted_weight: float = Field(
        default=1.0, ge=0, description="With env.options.opponent=pool: weight of the world's scripted players."
    )

    keep_files: Literal["needed", "all"] = Field(
        default="needed",
        description="With env.options.opponent=pool: keep the files of snapshots that the pool or a kept checkpoint "
        "has, or of all, for a tournament of them.",
    )
