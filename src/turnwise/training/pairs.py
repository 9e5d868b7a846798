"""Preference pairs in a Parquet file: exact ids, logprobs and rewards of both sides, and where they come from.

    write_pairs(path, [StoredPair(pair=..., kind="dpo", run="runs/a", ...)])
    read_pairs(path)                      # [StoredPair, ...], each as it was played

One row is one pair. `chosen` and `rejected` hold the whole dialogue, turn by turn; before `branch_turn` they are equal.
The file's metadata say how all of it was made (`read_provenance`). Needs pyarrow: `pip install 'turnwise[pairs]'`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from turnwise import __version__
from turnwise.credit.preferences import PreferencePair
from turnwise.errors import ConfigError, DataError
from turnwise.runlog.arrays import messages_from_json, messages_to_json
from turnwise.trajectory import Branch, EndReason, Message, Trajectory, Turn

FORMAT_KEY = b"turnwise.pairs"
MADE_KEY = b"turnwise.made"
FORMAT = b"2"
"""Files of format 1 held a method's own mask and shaped rewards where they came from stored runs, and are refused."""

PairKind = Literal["dpo", "refuel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPair:
    """A pair and its provenance."""

    pair: PreferencePair
    kind: PairKind
    """How it was made: the best against the worst of some dialogues, or two continuations of one."""
    world: str
    """The world's name as in `env.name`; if that is a file, its absolute path."""
    model: str
    """The base model that sampled, as `model.name` names it; the path of a directory is whole."""
    run: str = ""
    """The run or checkpoint that it comes from; empty: the model as it is."""
    step: int = 0
    """The step of that run."""
    opponent: str = ""
    """Who had the other side; empty where the world has one side, or a file was written without it."""
    task: Mapping[str, Any]
    """The task's data."""
    rest: tuple[Trajectory, ...] = ()
    """In a pair of kind dpo: the other dialogues of the task, neither the best nor the worst. No loss reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How the pairs of a file were made."""

    turnwise: str = __version__
    policies: tuple[str, ...]
    """Who played: a run, a checkpoint or a model; or the runs whose stored attempts were paired."""
    config: str
    """The config that was played with, as YAML: the world's options, the opponent, the sampling. Of stored attempts,
    that of the first run."""
    is_stored: bool = False
    across_seeds: bool = False
    samples: int = 0
    """Attempts, or continuations, of a task; 0 for stored attempts."""
    turn: str = ""
    """The distribution of the turn at which dialogues of kind refuel branch; empty where nothing was drawn."""
    num_attempts: int
    num_sampled_tokens: int = 0
    """Sampled by the policy, for pairs and for what was left out; 0 for stored attempts."""


def check_can_write(path: Path) -> None:
    """Refuse a place that pairs cannot be written to, before they are made."""
    _pyarrow()
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name the file in it, such as {path / 'pairs.parquet'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigError(f"{path} cannot be written: {cause.strerror}") from cause


def write_pairs(path: Path, pairs: Sequence[StoredPair], made: Provenance | None = None) -> None:
    """Write a file; an existing one is replaced once the new one is whole."""
    pa, parquet = _pyarrow()
    check_can_write(path)
    schema = _schema(pa)
    if made is not None:
        schema = schema.with_metadata({**schema.metadata, MADE_KEY: json.dumps(asdict(made)).encode()})
    table = pa.Table.from_pylist([_to_row(stored) for stored in pairs], schema=schema)
    part = path.with_name(f"{path.name}.part")
    try:
        parquet.write_table(table, part, compression="zstd")
        part.replace(path)
    except OSError as cause:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {cause.strerror or cause}") from cause


def push_pairs(path: Path, repository: str) -> None:
    """Push a file to a data set repository of the Hugging Face hub, which is made if it is not there.

    The file stays where it is, whatever happens. The hub's own variables (HF_TOKEN, HF_ENDPOINT) say who and where.
    """
    from huggingface_hub import HfApi

    try:
        hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        hub.create_repo(repository, repo_type="dataset", exist_ok=True)
        hub.upload_file(
            path_or_fileobj=str(path), path_in_repo=f"data/{path.name}", repo_id=repository, repo_type="dataset"
        )
    except Exception as cause:
        said = next(iter(str(cause).splitlines()), "")  # the hub's client goes on with advice for its own users
        raise ConfigError(
            f"{path} is written, and was not pushed to {repository}: {type(cause).__name__}: {said}; expected a hub "
            "that can be reached (HF_ENDPOINT) and a token that may write there (HF_TOKEN)"
        ) from cause


def read_pairs(path: Path) -> list[StoredPair]:
    """Read every pair of a file, in the order of the file."""
    pa, parquet = _pyarrow()
    advice = "make one with: turnwise pairs RUN|CHECKPOINT|MODEL --out FILE"
    if not path.is_file():
        raise ConfigError(f"{path} is not there; {advice}")
    try:
        table = parquet.read_table(path)
    except (pa.ArrowInvalid, OSError) as cause:
        raise ConfigError(f"{path} cannot be read as Parquet: {cause}") from cause
    metadata: dict[bytes, bytes] = table.schema.metadata or {}
    came = metadata.get(FORMAT_KEY)
    if came is None:
        raise ConfigError(f"{path} is Parquet, but not of preference pairs; {advice}")
    if came != FORMAT:
        raise ConfigError(
            f"{path} has pairs of format {came.decode()}; this turnwise reads format {FORMAT.decode()}, whose masks "
            f"and rewards are those of the play. Make it again: turnwise pairs RUN|CHECKPOINT|MODEL --out {path}"
        )
    if not table.num_rows:
        raise DataError(f"{path} holds no pairs")
    return [_from_row(row) for row in table.to_pylist()]


def read_provenance(path: Path) -> Provenance | None:
    """How the pairs of a file were made; None for a file that does not say it."""
    _, parquet = _pyarrow()
    metadata: dict[bytes, bytes] = parquet.read_schema(path).metadata or {}
    text = metadata.get(MADE_KEY)
    if text is None:
        return None
    told: dict[str, Any] = json.loads(text)
    told["policies"] = tuple(told["policies"])
    return Provenance(**told)


def _pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as cause:
        raise ConfigError("pairs are kept as Parquet, which needs pyarrow; pip install 'turnwise[pairs]'") from cause


def _schema(pa: Any) -> Any:
    turn = pa.struct(
        [
            ("prompt_ids", pa.list_(pa.int32())),
            ("sampled_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float64())),
            ("policy_version", pa.int64()),
            ("temperature", pa.float64()),
            ("reward_parts", pa.string()),
            ("is_trained", pa.bool_()),
            ("is_cut", pa.bool_()),
            ("env_state", pa.string()),
            ("potential", pa.float64()),
            ("next_potential", pa.float64()),
            ("reply", pa.string()),
            ("observation", pa.string()),
        ]
    )
    side = pa.struct(
        [
            ("attempt", pa.int32()),
            ("seed", pa.int64()),
            ("branch", pa.string()),
            ("reward", pa.float64()),
            ("stop_reason", pa.string()),
            ("is_success", pa.bool_()),
            ("turns", pa.list_(turn)),
        ]
    )
    fields = [
        ("kind", pa.string()),
        ("world", pa.string()),
        ("model", pa.string()),
        ("run", pa.string()),
        ("opponent", pa.string()),
        ("step", pa.int64()),
        ("task_id", pa.string()),
        ("task", pa.string()),
        ("branch_turn", pa.int32()),
        ("branch_probability", pa.float64()),
        ("reward_difference", pa.float64()),
        ("start", pa.string()),
        ("chosen", side),
        ("rejected", side),
        ("rest", pa.list_(side)),
    ]
    return pa.schema(fields, metadata={FORMAT_KEY: FORMAT})


def _to_row(stored: StoredPair) -> dict[str, Any]:
    pair = stored.pair
    return {
        "kind": stored.kind,
        "world": stored.world,
        "model": stored.model,
        "run": stored.run,
        "opponent": stored.opponent,
        "step": stored.step,
        "task_id": pair.chosen.task_id,
        "task": json.dumps(dict(stored.task)),
        "branch_turn": pair.branch_turn,
        "branch_probability": pair.branch_probability,
        "reward_difference": pair.reward_difference,
        "start": messages_to_json(pair.chosen.start),
        "chosen": _side_to_row(pair.chosen),
        "rejected": _side_to_row(pair.rejected),
        "rest": [_side_to_row(trajectory) for trajectory in stored.rest],
    }


def _side_to_row(trajectory: Trajectory) -> dict[str, Any]:
    branch = trajectory.branch
    return {
        "attempt": trajectory.attempt,
        "seed": trajectory.seed,
        "branch": None if branch is None else json.dumps(asdict(branch)),
        "reward": trajectory.total_reward,
        "stop_reason": str(trajectory.end_reason),
        "is_success": trajectory.is_success,
        "turns": [_turn_to_row(turn) for turn in trajectory.turns],
    }


def _turn_to_row(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_ids": turn.prompt_ids,
        "sampled_ids": turn.sampled_ids,
        "logprobs": turn.sampler_logprobs,
        "policy_version": turn.policy_version,
        "temperature": turn.temperature,
        "reward_parts": json.dumps(dict(turn.reward_parts)),
        "is_trained": turn.is_trained,
        "is_cut": turn.is_cut,
        "env_state": turn.env_state,
        "potential": turn.potential,
        "next_potential": turn.next_potential,
        "reply": messages_to_json([turn.reply]),
        "observation": messages_to_json(turn.observation),
    }


def _from_row(row: Mapping[str, Any]) -> StoredPair:
    start = messages_from_json(row["start"])
    pair = PreferencePair(
        chosen=_side_from_row(row["task_id"], start, row["chosen"]),
        rejected=_side_from_row(row["task_id"], start, row["rejected"]),
        branch_turn=row["branch_turn"],
        branch_probability=row["branch_probability"],
    )
    return StoredPair(
        pair=pair,
        kind=row["kind"],
        world=row["world"],
        model=row["model"],
        run=row["run"],
        opponent=row.get("opponent") or "",
        step=row["step"],
        task=json.loads(row["task"]),
        rest=tuple(_side_from_row(row["task_id"], start, side) for side in row.get("rest") or ()),
    )


def _side_from_row(task_id: str, start: tuple[Message, ...], row: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        task_id=task_id,
        attempt=row["attempt"],
        seed=row["seed"],
        start=start,
        turns=tuple(_turn_from_row(turn) for turn in row["turns"]),
        end_reason=EndReason(row["stop_reason"]),
        is_success=row["is_success"],
        branch=None if row["branch"] is None else Branch(**json.loads(row["branch"])),
    )


def _turn_from_row(row: Mapping[str, Any]) -> Turn:
    return Turn(
        prompt_ids=tuple(row["prompt_ids"]),
        sampled_ids=tuple(row["sampled_ids"]),
        sampler_logprobs=tuple(row["logprobs"]),
        policy_version=row["policy_version"],
        temperature=row["temperature"],
        reply=messages_from_json(row["reply"])[0],
        observation=messages_from_json(row["observation"]),
        reward_parts=json.loads(row["reward_parts"]),
        is_trained=row["is_trained"],
        is_cut=row["is_cut"],
        env_state=row["env_state"],
        potential=row["potential"],
        next_potential=row["next_potential"],
    )
