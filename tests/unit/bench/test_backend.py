"""A backend beside our engine: what is timed, and on how many tokens drift is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnwise.bench.cli import build_parser
from turnwise.bench.sample import run

LAZY_S = 0.25
LAZY = f'''
import time

from turnwise.backends import Publisher
from turnwise.client.publish import VersionedSampler


class LazyPublisher(Publisher):
    """Brings weights over when they are asked for, not when they are published."""

    async def deliver(self, trainer, version):
        return LazyClient(await trainer.save_weights_and_get_sampling_client_async(), version)


class LazyClient(VersionedSampler):
    is_there = False

    def submit(self, request):
        if not self.is_there:
            time.sleep({LAZY_S})
            self.is_there = True
        return super().submit(request)
'''
SMALL = ("--prompts=2", "--prompt-tokens=8", "--new-tokens=4", "--dialogues=0", "--repeats=1", "--rank=4")


@pytest.mark.model
def test_work_that_a_backend_leaves_to_its_first_request_counts_as_publishing(tmp_path: Path, tiny_dir: Path) -> None:
    (tmp_path / "lazy.py").write_text(LAZY)
    backend = f"{tmp_path / 'lazy.py'}:LazyPublisher"
    command = ["sample", f"--model={tiny_dir}", "--dtype=float32", "--weights=adapter", *SMALL, f"--backend={backend}"]
    found: dict[str, Any] = run(build_parser().parse_args(command))
    assert found[f"{backend}_publish_to_token_ms"] >= 1000 * LAZY_S
    for side in ("local", backend):
        assert 0 < found[f"{side}_publish_ms"] < found[f"{side}_publish_to_token_ms"]
        assert found[f"{side}_drift_tokens"] == 8 * 4
        assert 0 <= found[f"{side}_drift_k2"] < 1e-9
    assert found["ratio"] == found["local_tokens_per_s"] / found[f"{backend}_tokens_per_s"]
