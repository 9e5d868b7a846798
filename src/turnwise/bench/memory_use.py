"""What an attempt needs while it is played (prompt, KV blocks, RSS), by its length, with and without a memory.

    python -m turnwise.bench.memory_use --cells 24 60 100 200

Forms of `workflow` are filled in by `tiny` without any training, with more positions than it ships with, so that an
attempt without a memory fits too. The engine draws one attempt after the other; after every pass the blocks are counted
that a sequence holds. Every row is a process of its own: its memory is what playing added to that of the loaded model.
Blocks that no sequence holds keep their content until the cache is full, so that memory is at most the whole cache's.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.bench.long_study import write_longer_tiny
from turnwise.client.base import SamplingClient
from turnwise.client.futures import ApiFuture, completed
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.envs.registry import get_world
from turnwise.errors import NotSupportedError
from turnwise.memory.config import NO_MEMORY, MemoryConfig
from turnwise.memory.renderer import MemoryRenderer
from turnwise.memory.world import MemoryWorld
from turnwise.models.tokenizer import load_tokenizer
from turnwise.renderers import get_renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.play import Attempt, play
from turnwise.rollout.stats import RolloutStats
from turnwise.types import ModelInput, SampleRequest, SampleResponse

POSITIONS, COLUMNS = 16384, 4
KV_GIB = 0.25
MEMORIES = {"none": NO_MEMORY, "window 6, summaries of 12": MemoryConfig(window=6, summary_tokens=12)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What the attempts of one length and one memory held."""

    memory: str
    cells: int
    turns: int
    longest_prompt: int
    most_blocks: int
    block_size: int
    added_mib: float


class CountingSampler(SamplingClient):
    """Samples with an engine of its own, in the caller's thread, and counts the KV blocks that are held."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self._engine = engine
        self._tokenizer = load_tokenizer(directory)
        self.most_blocks = 0

    def submit(self, request: SampleRequest) -> ApiFuture[SampleResponse]:
        found: list[Any] = []
        self._engine.sampler.submit(request, self._engine.base_policy, on_done=found.append)
        while self._engine.sampler.has_work:
            self._engine.sampler.step()
            pool = self._engine.sampler.pool
            self.most_blocks = max(self.most_blocks, pool.num_blocks - pool.num_available)
        return completed(found[0], "sample")

    def compute_logprobs(self, prompt: ModelInput) -> ApiFuture[list[float | None]]:
        raise NotSupportedError(f"this sampler counts blocks; it scores no prompt ({prompt.length} tokens came)")

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def get_base_model(self) -> str:
        return "tiny"


def measure_use(memory: str, cells: int, attempts: int) -> Use:
    """Play forms with `cells` cells."""
    options = MEMORIES[memory]
    with tempfile.TemporaryDirectory() as place:
        directory = write_longer_tiny(Path(place) / "tiny", POSITIONS)
        engine = Engine(directory, EngineConfig(device="cpu", kv_cache_gib=KV_GIB), name="tiny")
        sampler = CountingSampler(engine, directory)
        plain = get_renderer(sampler.get_tokenizer())
        renderer = MemoryRenderer(plain, options) if options.is_on else plain
        inner = get_world("workflow", rows=cells // COLUMNS, columns=COLUMNS, sections=1)
        world = MemoryWorld(inner, options) if options.is_on else inner
        rollout = RolloutConfig().for_world(world, POSITIONS)
        before, turns, prompts = resident_mib(), 0, list[int]()
        for index, task in enumerate(world.tasks("test", attempts, 0)):
            one = Attempt(task_id=task.id, index=index, seed=0, make_env=lambda task=task: world.make_env(task, 0))
            played = asyncio.run(play(one, sampler, renderer, rollout, RolloutStats()))
            assert played.failure is None, played.failure
            turns = max(turns, len(played.turns))
            prompts += [len(turn.prompt_ids) for turn in played.turns]
        added = resident_mib() - before
        found = sampler.most_blocks, engine.sampler.pool.block_size
        engine.close()
    return Use(
        memory=memory,
        cells=cells,
        turns=turns,
        longest_prompt=max(prompts),
        most_blocks=found[0],
        block_size=found[1],
        added_mib=added,
    )


def resident_mib() -> float:
    """Memory of this process that is in use now, on Linux."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def table(rows: Sequence[Use]) -> list[str]:
    lines = [
        "| memory | cells | turns | longest prompt | KV blocks held at once | memory that playing added |",
        "|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {one.memory} | {one.cells} | {one.turns} | {one.longest_prompt} | {one.most_blocks} of {one.block_size} "
        f"tokens | {one.added_mib:.0f} MiB |"
        for one in rows
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, nargs="+", default=[24, 60, 100, 200], help="default: %(default)s")
    parser.add_argument("--attempts", type=int, default=4, help="forms of each length (default %(default)s)")
    options = parser.parse_args(argv)
    rows: list[Use] = []
    for memory in MEMORIES:
        for cells in options.cells:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(measure_use, (memory, cells, options.attempts)))
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
