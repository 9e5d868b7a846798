"""How close two ways to compute the same number must come. The certificate and the numerics tests read this table.

`docs/numerics.md` lists what is compared, and where.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

K2: Final[Mapping[str, float]] = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest mean of (sampler logprob - trainer logprob)^2 / 2 in a certificate, by the type of the frozen weights."""
LOGPROBS: Final = 1e-4
"""Largest difference of a logprob between sampler, trainer and transformers, in nats, float32."""
LOSS: Final = 1e-4
"""Largest relative difference of a loss from a naive loop's, float32."""
GRADIENTS: Final = 1e-5
"""Largest relative difference of a gradient between two batchings of the same datums, float32."""


def k2(dtype: str) -> float:
    """The largest mean k2 for a type; one that is not in the table (float16, auto, 8 bits) rounds like bfloat16."""
    return K2.get(dtype, K2["bfloat16"])
