"""Options of samplers that are servers (vLLM, SGLang): where they are, or how to start one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, cast
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from turnwise.runtime.section import Section

NO_SERVERS = ("local",)
"""Backends that start and reach no server; the options of servers are refused with them."""
REACH_OPTIONS = ("url", "publish", "weight_transfer", "placement", "server_deadline_s", "server_wait_s")
"""Read by every backend that samples on servers."""
START_OPTIONS = ("server_python", "server_args", "tensor_parallel_size", "server_start_s")
"""Read only where a run starts a server of its own."""
SHARED_OPTIONS = ("gpu_memory_utilization", "max_num_seqs")
"""Read by a server that the run starts, and by the engine in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSampler:
    """What a run knows of a shipped backend before the backend and its packages are loaded."""

    takes_whole: bool = False
    """It takes whole weights (`rollout.publish=weights`)."""
    reads_memory: bool = False
    """It can read them in the memory of the trainer (`rollout.weight_transfer=ipc`)."""
    gpu_share: float = 0.0
    """About the share of a GPU's memory that a server takes where `rollout.gpu_memory_utilization` does not say; 0: the
    run starts no server."""


OTHER_SAMPLERS: Mapping[str, OtherSampler] = {
    "sglang": OtherSampler(takes_whole=True, gpu_share=0.9),
    "vllm": OtherSampler(takes_whole=True, reads_memory=True, gpu_share=0.9),
    "vllm_in_process": OtherSampler(takes_whole=True, reads_memory=True),
}
"""Shipped backends that sample with somebody else's engine, and never with the trainer's. One of your own may do so."""
NO_OTHER = OtherSampler()
"""Stands for a backend that is none of these."""


class ServerOptions(Section):
    """Which servers sample, and how one is started."""

    url: tuple[str, ...] = Field(
        default=(),
        description="Addresses of servers that sample, such as `http://gpu1:8000,http://gpu2:8000`. Empty: a backend "
        "that samples on a server starts its own.",
    )
    server_deadline_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds that one server gets for one reply; then another server gets the request. 0: 120, or 0.25 "
        "for each token that a reply may have, whichever is more.",
    )
    server_wait_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that a request waits for a server to come back when none is left; then it fails.",
    )
    server_python: str = Field(
        default="",
        description="The Python that runs the server; it must be able to import it. Empty: the Python of this process.",
    )
    server_args: tuple[str, ...] = Field(
        default=(),
        description="More arguments of the server's command line, as one string, a list, or a mapping in YAML. One "
        "that the server does not know is refused.",
    )
    server_start_s: float = Field(default=600.0, gt=0, description="Seconds that a server may take to be ready.")
    publish: Literal["adapter", "weights"] = Field(
        default="adapter",
        description="What a server gets after an update: the adapter alone, under a name of its own, or the whole "
        "model with the adapter added to its weights, which replaces the weights that it had.",
    )
    weight_transfer: Literal["disk", "ipc", "nccl"] = Field(
        default="disk",
        description="How whole weights (`publish=weights`) reach the server: as files (disk), or read in the trainer's "
        "memory by a vLLM on the same GPU (ipc).",
    )
    placement: Literal["separate", "colocated"] = Field(
        default="separate",
        description="Where the server's memory is: it keeps its own, or it gives its memory back while the trainer "
        "learns, on the same GPU (`colocated`; for synchronous runs: `train.max_staleness=0`).",
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs over which one server spreads the model.")
    gpu_memory_utilization: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of a GPU's memory for the sampler; 0 takes its own default. With `backend=local` this is "
        "`engine.gpu_memory_utilization`.",
    )
    max_num_seqs: int = Field(
        default=0,
        ge=0,
        description="Most sequences that the sampler decodes at the same time; 0 takes its own default. With "
        "`backend=local` this is `engine.max_num_seqs`.",
    )

    @field_validator("url", mode="before")
    @classmethod
    def _split_addresses(cls, url: object) -> object:
        """Several addresses are a list, or one text with commas."""
        if isinstance(url, str):
            url = url.split(",")
        if not isinstance(url, list | tuple):
            return url
        addresses = [str(one).strip().rstrip("/") for one in cast("list[object]", url) if str(one).strip()]
        for one in addresses:
            parts = urlsplit(one)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{one!r} is no address; expected http://HOST:PORT, and commas between several")
        if len(set(addresses)) < len(addresses):
            raise ValueError(f"an address is there twice: {', '.join(addresses)}")
        return tuple(addresses)

    @field_validator("server_args", mode="before")
    @classmethod
    def _split_arguments(cls, given: object) -> object:
        """`"--seed 3"` means `["--seed", "3"]`, and so does `{"seed": 3}`."""
        if isinstance(given, str):
            return tuple(shlex.split(given))
        if isinstance(given, Mapping):
            found = cast(Mapping[str, Any], given).items()
            return tuple(part for name, value in found for part in _argument(name, value))
        return given

    @model_validator(mode="after")
    def _a_server_elsewhere_is_not_started(self) -> Self:
        if self.url:
            unread = [*START_OPTIONS, *SHARED_OPTIONS]
            for name in [name for name in unread if name in self.changed_options()]:
                raise ValueError(f"{name} is not read with url: that server runs already; set it where it is started")
        return self

    @model_validator(mode="after")
    def _whole_weights_travel_in_a_way_that_is_there(self) -> Self:
        if self.weight_transfer == "nccl":
            raise ValueError(
                "weight_transfer=nccl is not offered: NCCL wants a GPU for each process, and sending weights between "
                "GPUs was never tried here; expected disk, or ipc for a server on the trainer's GPU"
            )
        if self.publish == "adapter" and "weight_transfer" in self.changed_options():
            raise ValueError(
                "weight_transfer is not read with publish=adapter, whose files are small; leave it out, or set "
                "publish=weights"
            )
        return self

    def check_backend(self, backend: str) -> None:
        """Refuse options of servers with a backend that has none."""
        if backend not in NO_SERVERS:
            return
        for name in (*REACH_OPTIONS, *START_OPTIONS):
            if name in self.changed_options():
                raise ValueError(
                    f"{name} is not read with backend={backend}; it is for a backend that samples on servers, such "
                    "as rollout.backend=vllm"
                )


def _argument(name: str, value: object) -> list[str]:
    flag = f"--{name.removeprefix('--').replace('_', '-')}"
    if value is True or value is None:
        return [flag]
    return [f"--no-{flag[2:]}"] if value is False else [flag, str(value)]
