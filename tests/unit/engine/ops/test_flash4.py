"""When FlashAttention 4 is called; what it computes is tested on a card (tests/numerics/test_gpu_kernels.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turnwise.engine.ops import flash4


def forward(
    q: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, softmax_scale: Any, causal: Any
) -> None: ...


def forward_with_lse(
    q: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    softmax_scale: Any,
    causal: Any,
    return_lse: Any,
) -> None: ...


@pytest.mark.parametrize(
    ("package", "problem"),
    [
        (SimpleNamespace(_flash_attn_fwd=forward_with_lse, _flash_attn_bwd=forward), None),
        (SimpleNamespace(_flash_attn_fwd=forward_with_lse), "has no _flash_attn_bwd"),
        (
            SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=forward),
            "has a _flash_attn_fwd without return_lse",
        ),
    ],
)
def test_another_version_of_the_package_is_looked_at_before_it_is_called(package: Any, problem: str | None) -> None:
    assert flash4.find_problem(package) == problem


def test_tensors_that_are_not_on_a_card_are_not_for_it() -> None:
    assert not flash4.fits(torch.zeros(4, 2, 64, dtype=torch.bfloat16))
