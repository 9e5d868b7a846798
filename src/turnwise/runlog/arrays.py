"""Packs numpy arrays, messages and trajectories into compact bytes, without loss.

The first byte of an array says how it is stored, the second its type. It is stored raw, deflated if that is shorter, or
as one value and a count if all values are equal, as in masks and per-turn advantages.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.remote.wire import message_from_json, message_to_json
from turnwise.errors import DataError
from turnwise.trajectory import Message, Trajectory, trajectory_from_json, trajectory_to_json

_DTYPES = {b"i": "<i4", b"f": "<f4", b"d": "<f8", b"?": "|b1"}
_RAW, _DEFLATED, _CONSTANT = b"r", b"z", b"c"


def pack_ids(ids: Sequence[int]) -> bytes:
    return _pack(np.asarray(ids, dtype="<i4"), b"i")


def pack_floats(values: Sequence[float]) -> bytes:
    """Pack as float32 if every value is exact in it, as a sampler's logprobs are, else as float64."""
    wide = np.asarray(values, dtype="<f8")
    with np.errstate(over="ignore"):  # a value too large for float32 becomes inf, and the comparison fails
        narrow = wide.astype("<f4")
    if np.array_equal(narrow.astype("<f8"), wide, equal_nan=True):
        return _pack(narrow, b"f")
    return _pack(wide, b"d")


def pack_flags(flags: Sequence[bool]) -> bytes:
    return _pack(np.asarray(flags, dtype="|b1"), b"?")


def unpack_array(data: bytes) -> NDArray[Any]:
    kind, dtype, body = data[:1], _DTYPES.get(data[1:2]), data[2:]
    if dtype is None or kind not in (_RAW, _DEFLATED, _CONSTANT):
        raise DataError("an array in the run log cannot be read; was it written by a newer turnwise?")
    if kind == _CONSTANT:
        (count,) = struct.unpack_from("<I", body)
        return np.full(count, np.frombuffer(body[4:], dtype=dtype)[0])
    return np.frombuffer(zlib.decompress(body) if kind == _DEFLATED else body, dtype=dtype).copy()


def messages_to_json(messages: Sequence[Message]) -> str:
    return json.dumps([message_to_json(m) for m in messages], ensure_ascii=False)


def messages_from_json(text: str | bytes) -> tuple[Message, ...]:
    return tuple(message_from_json(entry) for entry in json.loads(text))


def pack_messages(messages: Sequence[Message]) -> bytes:
    return zlib.compress(messages_to_json(messages).encode())


def unpack_messages(data: bytes) -> tuple[Message, ...]:
    return messages_from_json(zlib.decompress(data))


def pack_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """Compressed JSON."""
    return zlib.compress(json.dumps([trajectory_to_json(one) for one in trajectories]).encode(), level=1)


def unpack_trajectories(data: bytes) -> tuple[Trajectory, ...]:
    return tuple(trajectory_from_json(entry) for entry in json.loads(zlib.decompress(data)))


def _pack(array: NDArray[Any], dtype: bytes) -> bytes:
    raw = array.tobytes()
    size = array.dtype.itemsize
    if len(array) > 1 and raw == raw[:size] * len(array):
        return _CONSTANT + dtype + struct.pack("<I", len(array)) + raw[:size]
    deflated = zlib.compress(raw)
    return (_DEFLATED + dtype + deflated) if len(deflated) < len(raw) else (_RAW + dtype + raw)
