"""Demonstrations that do not fit the model's context, and worlds that take long to play them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from turnwise.envs.base import assistant, user
from turnwise.errors import ConfigError
from turnwise.renderers.base import Renderer
from turnwise.training.demonstrations import read_demonstrations
from turnwise.trajectory import Message
from turnwise.watch.interrupt import Interrupted
from unit.training.conftest import CoinWorld, MakeRig


@dataclass(frozen=True, slots=True)
class LongWorld(CoinWorld):
    """So many of ten demonstrations are long."""

    num_long: int = 0

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        lengths = [600 if index % 10 < self.num_long else 1 for index in range(count)]
        return [[user("heads or tails?"), assistant("heads " * length)] for length in lengths]


@dataclass(frozen=True)
class SlowWorld(CoinWorld):
    """Its demonstrations come when `is_free` is set; `has_begun` says that they are asked for."""

    has_begun: threading.Event = field(default_factory=threading.Event)
    is_free: threading.Event = field(default_factory=threading.Event)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        self.has_begun.set()
        assert self.is_free.wait(120)
        return CoinWorld().demonstrations(count, seed)


def test_demonstrations_longer_than_the_context_are_left_out_and_counted(renderer: Renderer) -> None:
    shown = read_demonstrations(cast(Any, LongWorld(num_long=3)), renderer, 20, 0, context_length=512)
    assert len(shown.dialogues) == 14
    assert shown.left_out is not None
    assert "6 of 20 demonstrations of coin are longer than the model's context of 512 tokens" in shown.left_out.seen
    assert read_demonstrations(cast(Any, LongWorld()), renderer, 20, 0, context_length=512).left_out is None


def test_a_run_tells_how_many_demonstrations_its_warm_up_is_without(make_rig: MakeRig) -> None:
    rig = make_rig({"warmup": {"steps": 1, "demonstrations": 10}, "train": {"steps": 1}})
    rig.world = LongWorld(num_long=2)
    asyncio.run(rig.loop().run())
    with rig.run() as run:
        found = {event.detail["name"]: event.detail["numbers"] for event in run.events("finding")}
    assert found["demonstrations_left_out"]["left_out"] == 2
    assert "forward_backward" in rig.methods_called()


def test_a_run_whose_demonstrations_mostly_do_not_fit_stops_before_it_spends_anything(make_rig: MakeRig) -> None:
    rig = make_rig({"warmup": {"steps": 1, "demonstrations": 10}})
    rig.world = LongWorld(num_long=6)
    with pytest.raises(ConfigError, match=r"6 of 10 demonstrations of coin .* context of 512 .*warmup.steps=0"):
        asyncio.run(rig.loop().run())
    assert rig.methods_called() == [], "nothing was sampled, published or trained"


def test_a_run_can_be_stopped_while_a_slow_world_plays_its_demonstrations(make_rig: MakeRig) -> None:
    rig = make_rig({"warmup": {"steps": 1, "demonstrations": 4}})
    rig.world = world = SlowWorld()

    async def run() -> None:
        going = asyncio.create_task(rig.loop().run())
        while not world.has_begun.is_set():
            await asyncio.sleep(0.01)
        rig.interrupt.ask()
        with pytest.raises(Interrupted):
            await asyncio.wait_for(going, 100)

    try:
        asyncio.run(run())
    finally:
        world.is_free.set()
