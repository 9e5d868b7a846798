"""Seeds from hashes: the same on every machine, independent of what else runs."""

from __future__ import annotations

import hashlib
import json


def derive_seed(*parts: int | str) -> int:
    """A number from 0 to 2**31 - 1 that depends on all parts; every random generator accepts it.

    >>> derive_seed(0, "sum-7", 3) == derive_seed(0, "sum-7", 3)
    True
    """
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33


def world_seed(group_seed: int) -> int:
    """The env's seed that all attempts of a group share, so that they start in the same world."""
    return derive_seed(group_seed, "env")
