"""What runs where a card is too old or heads have an odd size; the kernels themselves are tested on a card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from turnwise.engine.attention import cuda as attention_cuda


@pytest.fixture(autouse=True)
def fresh_answers() -> Iterator[None]:
    caches = (attention_cuda.has_triton, attention_cuda._fits_flash)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_an_old_card_says_once_what_it_does_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    query = torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16)
    for _ in range(3):
        assert not attention_cuda.has_triton()
        assert attention_cuda.triton_decode() is None
        assert not attention_cuda._has_flash(query)
    kernels, flash = (record.message for record in caplog.records)
    assert kernels.startswith("this card has compute capability 7.5, and our kernels would need 8.0")
    assert flash.startswith("this card has compute capability 7.5, and flash attention would need 8.0")


@pytest.mark.parametrize(("head_size", "is_taken"), [(64, True), (128, True), (256, True), (30, False), (264, False)])
def test_flash_attention_takes_multiples_of_eight_up_to_256(
    head_size: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    query = torch.zeros(1, 2, 3, head_size, dtype=torch.bfloat16)
    assert attention_cuda._has_flash(query) is is_taken
    assert not attention_cuda._has_flash(query.float()), "float32 is dense by design, which is nothing to warn of"
    assert [record.message for record in caplog.records] == (
        [] if is_taken else [f"heads of {head_size}: flash attention does not take them, dense attention runs, slower"]
    )
