"""What runs where a card is too old or heads have an odd size; the kernels themselves are tested on a card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from turnwise.engine.ops import cuda_support
from turnwise.engine.ops.cuda_support import fits_flash, has_triton, triton_decode


@pytest.fixture(autouse=True)
def fresh_answers() -> Iterator[None]:
    for cached in (has_triton, fits_flash):
        cached.cache_clear()
    yield
    for cached in (has_triton, fits_flash):
        cached.cache_clear()


def test_an_old_card_says_once_what_it_does_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    for _ in range(3):
        assert not has_triton()
        assert triton_decode(64) is None
        assert not fits_flash(torch.bfloat16, 64)
    kernels, flash = (record.message for record in caplog.records)
    assert kernels.startswith("this card has compute capability 7.5, and our kernels would need 8.0")
    assert flash.startswith("this card has compute capability 7.5, and flash attention would need 8.0")


@pytest.mark.parametrize(("head_size", "is_taken"), [(64, True), (128, True), (256, True), (30, False), (264, False)])
def test_flash_attention_takes_multiples_of_eight_up_to_256(
    head_size: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert fits_flash(torch.bfloat16, head_size) is is_taken
    assert not fits_flash(torch.float32, head_size), "float32 is dense by design, which is nothing to warn of"
    assert [record.message for record in caplog.records] == (
        [] if is_taken else [f"heads of {head_size}: flash attention does not take them, dense attention runs, slower"]
    )


def test_heads_that_the_decode_kernel_cannot_hold_are_decoded_by_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_support, "has_triton", lambda: True)
    assert triton_decode(512) is None
