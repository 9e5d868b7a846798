"""The state of a run whose weights are in parts, as torch's distributed checkpoint (DCP): every learner writes its own.

    sharded/.metadata, sharded/__0_0.distcp, ...   masters and AdamW's moments, by unit of the layout
    sharded/state.json                              optimizer steps, and what the units hold

DCP knows the place of each number, so any count of learners can read it, one process too.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from turnwise.engine.model.full import WeightLayout
from turnwise.engine.model.sharded import ShardLayout
from turnwise.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

FOLDER, STATE_FILE = "sharded", "state.json"
MASTERS = "masters"

dist: Any = torch.distributed  # stores and groups have no type stubs


@dataclass(frozen=True, slots=True)
class Meeting:
    """The store through which the learners meet to write or read files together, and how long they wait."""

    store: Any
    """Nothing else uses it."""
    meet_s: float
    """Seconds until all are there."""
    deadline_s: float
    """Seconds that they wait for each other's files."""


def has_shards(directory: Path) -> bool:
    """Whether several learners have saved their parts there."""
    return (directory / FOLDER / STATE_FILE).is_file()


def read_num_steps(directory: Path, layout: WeightLayout) -> int:
    """Optimizer steps before the state was saved; refuses a state of another model."""
    path = directory / FOLDER / STATE_FILE
    state = json.loads(path.read_text(encoding="utf-8"))
    if state["layout"] != layout_digest(layout):
        raise CheckpointError(
            f"{path} was written for weights that lie in another order; is the base the same? "
            f"{directory} holds the weights by name too: load it without the optimizer"
        )
    return int(state["num_steps"])


def write_num_steps(directory: Path, layout: WeightLayout, num_steps: int) -> None:
    """Write the small file, after all parts."""
    text = json.dumps({"num_steps": num_steps, "layout": layout_digest(layout)})
    (directory / FOLDER / STATE_FILE).write_text(text + "\n", encoding="utf-8")


def layout_digest(layout: WeightLayout) -> str:
    """A short text that two layouts share if every number lies at the same place in both."""
    places = [[name, place.start, place.shape] for name, place in layout.places.items()]
    units = [[unit.start, unit.stop] for unit in layout.units]
    return hashlib.sha256(json.dumps([places, units]).encode()).hexdigest()


def save_shards(directory: Path, shards: ShardLayout, parts: Mapping[str, Tensor], meeting: Meeting) -> None:
    """Write this learner's parts; all learners call it at the same time.

    Args:
        parts: what this learner holds of each kind, all units one after the other.
    """
    from torch.distributed.checkpoint.state_dict_saver import save  # seconds of imports, for few runs

    with _one_group(meeting, shards) as mesh, _told(directory, "written"):
        save(_as_tensors(shards, parts, mesh), checkpoint_id=directory / FOLDER)


def load_shards(directory: Path, shards: ShardLayout, parts: Mapping[str, Tensor], meeting: Meeting) -> None:
    """Fill this learner's parts from what any count of learners has saved; all learners call it at the same time."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with _one_group(meeting, shards) as mesh, _told(directory, "read"):
        state = _as_tensors(shards, parts, mesh)
        load(state, checkpoint_id=directory / FOLDER)
    for kind, local in parts.items():
        for unit in range(shards.num_units):
            known = shards.known_part(unit, local)
            known.copy_(state[f"{kind}.{unit}"].to_local()[: len(known)])


def load_whole(directory: Path, layout: WeightLayout, parts: Mapping[str, Tensor]) -> None:
    """Fill flat tensors of all weights, by kind, from what several learners have saved."""
    from torch.distributed.checkpoint.state_dict_loader import load

    host = {kind: torch.zeros(layout.size) for kind in parts}
    state = {f"{kind}.{i}": flat[u.start : u.stop] for kind, flat in host.items() for i, u in enumerate(layout.units)}
    with warnings.catch_warnings(), _told(directory, "read"):
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is: one process reads
        load(state, checkpoint_id=directory / FOLDER, no_dist=True)
    for kind, flat in parts.items():
        flat.copy_(host[kind])


def _as_tensors(shards: ShardLayout, parts: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, DTensor]:
    """The units as distributed tensors on the host, of which this learner holds its part."""
    from torch.distributed.tensor import DTensor, Shard

    found: dict[str, DTensor] = {}
    for kind, local in parts.items():
        for number, unit in enumerate(shards.layout.units):
            own = shards.known_part(number, local).to("cpu", copy=True)
            found[f"{kind}.{number}"] = DTensor.from_local(
                own, mesh, [Shard(0)], run_check=False, shape=torch.Size([unit.size]), stride=(1,)
            )
    return found


@contextmanager
def _told(directory: Path, what: str) -> Iterator[None]:
    """Raise DCP's error, which no `except Exception` catches, as one of ours; all learners raise it together."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as cause:
        why = "; ".join(f"learner {rank}: {failure[0]!r}" for rank, failure in sorted(cause.failures.items()))
        raise CheckpointError(
            f"{directory / FOLDER} could not be {what}: {why}. Is every file there, and is the folder the same for all "
            "learners?"
        ) from cause


@contextmanager
def _one_group(meeting: Meeting, shards: ShardLayout) -> Iterator[DeviceMesh]:
    """torch's global group over all learners, for as long as files are written: DCP knows no other."""
    from torch.distributed.device_mesh import DeviceMesh

    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialised in this process by other code; a sharded checkpoint needs the global "
            "group for itself while it is written: call torch.distributed.destroy_process_group() first"
        )
    place, wait = shards.place, timedelta(seconds=meeting.meet_s)
    dist.init_process_group("gloo", store=meeting.store, rank=place.rank, world_size=place.size, timeout=wait)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=meeting.deadline_s))
    try:
        yield DeviceMesh("cpu", list(range(place.size)))
    finally:
        dist.destroy_process_group()
