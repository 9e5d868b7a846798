"""Playing ahead: dialogues go on over updates, each turn with the newest weights or all with the first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from turnwise.client.fake import ScriptedSampler
from turnwise.client.publish import NewestSampler, VersionedSampler
from turnwise.config.config import Config
from turnwise.envs.base import EnvStep, Split, Task, user
from turnwise.renderers import Renderer
from turnwise.training.checkpoint import RunState
from turnwise.training.supply import Supply
from turnwise.trajectory import Message
from turnwise.types import ModelInput
from turnwise.watch.watchdog import Watchdog
from unit.training.conftest import MakeRig


class GateWorld:
    """Two turns; the answer to the first waits until somebody opens the gate of its task."""

    name = "gate"
    max_turns = 2
    max_tokens = 4

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.open_envs: set[GateEnv] = set()
        self.num_first_turns = 0

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{index}", data={}) for index in range(count)]

    def make_env(self, task: Task, seed: int) -> GateEnv:
        return GateEnv(self, self.gates.setdefault(task.id, asyncio.Event()), seed)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        return []


class GateEnv:
    def __init__(self, world: GateWorld, gate: asyncio.Event, seed: int) -> None:
        self._world = world
        self._gate = gate
        self._seed = seed
        self._num_steps = 0
        world.open_envs.add(self)

    async def start(self) -> Sequence[Message]:
        return [user("go")]

    async def step(self, reply: Message) -> EnvStep:  # noqa: ARG002
        self._num_steps += 1
        if self._num_steps == 1:
            self._world.num_first_turns += 1
            await self._gate.wait()
            return EnvStep(messages=[user("on")])
        return EnvStep(reward=float(self._seed % 2), terminated=True, is_success=bool(self._seed % 2))

    async def close(self) -> None:
        self._world.open_envs.discard(self)


@pytest.fixture
def make_supply(make_rig: MakeRig, renderer: Renderer) -> Any:
    def make(world: GateWorld, **options: Any) -> tuple[Supply, VersionedSampler]:
        state = options.pop("state", RunState())
        generator = {"group_size": 2, **options.pop("rollout", {})}
        rig = make_rig({"train": {"steps": 5, "max_staleness": 2, **options}, "rollout": generator})
        rig.world = world  # pyright: ignore[reportAttributeAccessIssue]
        end_id = renderer.stop_ids[0]
        sampler = VersionedSampler(ScriptedSampler(lambda _: [7, end_id]), 0)
        supply = Supply(rig.parts(), renderer, Watchdog())
        supply.open(sampler, 0, state, 5)
        return supply, sampler

    return make


async def _until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("kv", "expected"), [("recompute", {(0, 1)}), ("keep", {(0, 0)}), ("end", {(0,)})])
async def test_a_dialogue_goes_on_over_an_update_with_new_weights_or_keeps_the_old_or_ends(
    make_supply: Any, kv: str, expected: set[tuple[int, ...]]
) -> None:
    world = GateWorld()
    supply, sampler = make_supply(world, tasks_per_step=1, rollout={"kv_across_updates": kv})
    await _until(lambda: world.num_first_turns == 6)  # lag 2: three groups of two attempts
    first, second, third = list(world.gates)
    world.gates[second].set()
    batch = await supply.batch(0)
    assert [task.id for task in batch.tasks] == [second], "the first to be done, not the first in line"
    supply.publish(VersionedSampler(sampler.client, 1))
    supply.learned(5)
    world.gates[first].set()
    batch = await supply.batch(1)
    assert [task.id for task in batch.tasks] == [first]
    versions = {tuple(turn.policy_version for turn in t.turns) for t in batch.played.groups[0].trajectories}
    assert versions == expected
    assert all((t.end_reason == "updated") == (kv == "end") for t in batch.played.groups[0].trajectories)
    assert batch.taken is not None
    assert batch.taken.staleness == [1]
    await supply.close()
    assert not world.open_envs
    assert third in world.gates


async def test_what_is_played_when_a_run_stops_is_queued_again_with_the_same_task_and_seed(make_supply: Any) -> None:
    world = GateWorld()
    supply, _ = make_supply(world, tasks_per_step=1)
    await _until(lambda: world.num_first_turns == 6)
    world.gates[list(world.gates)[1]].set()
    await _until(lambda: supply.stream.pool.counts()["done"] == 1)
    await supply.close()
    state = supply.state(RunState(version=3))
    assert [(row.number, row.outcome is None) for row in state.pool] == [(0, True), (1, False), (2, True)]
    assert (state.num_dealt, state.version) == (3, 3)
    resumed, _ = make_supply(GateWorld(), tasks_per_step=1, state=state)
    assert resumed.stream is not None
    seeds = [place.plan.seed for place in resumed.stream.pool.entries.values()]
    assert seeds == [place.plan.seed for place in supply.stream.pool.entries.values()]
    assert resumed.stream.pool.num_dealt == 3, "nothing is dealt beyond what was in the pool"
    batch = await resumed.batch(0)
    assert [task.id for task in batch.tasks] == [state.pool[1].task_id], "what was done is not played again"
    await resumed.close()


async def test_a_group_that_waited_long_enough_is_waited_for(make_supply: Any) -> None:
    world = GateWorld()
    supply, sampler = make_supply(world, tasks_per_step=1)
    for gate in range(2):
        await _until(lambda gate=gate: world.num_first_turns == 2 * (3 + gate))
        world.gates[list(world.gates)[1 + gate]].set()
        await supply.batch(gate)
        supply.publish(VersionedSampler(sampler.client, gate + 1))
        supply.learned(5)
    slow, *_, newest = world.gates
    world.gates[newest].set()
    await _until(lambda: supply.stream.pool.counts()["done"] >= 1)
    assert not supply.stream.pool.is_ready, "another group is done, and the oldest goes first"
    world.gates[slow].set()
    batch = await supply.batch(2)
    assert [task.id for task in batch.tasks] == [slow]
    assert batch.taken is not None
    assert max(batch.taken.staleness) == 2
    await supply.close()


async def test_responses_carry_the_runs_version_whatever_the_engine_calls_it() -> None:
    client = ScriptedSampler([[5], [6], [7]], policy_version=41)
    newest = NewestSampler(client, 0)
    prompt = ModelInput.from_ints([1])
    assert (await newest.sample_async(prompt)).policy_version == 0
    pinned = newest.pinned()
    newest.follow(VersionedSampler(client, 3))
    assert (await newest.sample(prompt)).policy_version == 3
    assert (await pinned.sample_async(prompt)).policy_version == 0


def test_stored_data_cannot_lag_and_the_config_says_so() -> None:
    with pytest.raises(ValueError, match="no attempt is played that could lag"):
        Config.model_validate({"train": {"max_staleness": 1}, "method": {"name": "sft"}})
    with pytest.raises(ValueError, match="kv_across_updates=keep is not read"):
        Config.model_validate({"rollout": {"kv_across_updates": "keep"}})
    with pytest.raises(ValueError, match=r"deterministic is not read with train\.max_staleness=1: .* finish first"):
        Config.model_validate({"rollout": {"deterministic": True}, "train": {"max_staleness": 1}})
    with pytest.raises(ValueError, match=r"engine\.max_num_seqs=8 is not read with rollout\.deterministic"):
        Config.model_validate({"rollout": {"deterministic": True}, "engine": {"max_num_seqs": 8}})
    with pytest.raises(ValueError, match="min_batch=1 is not read while max_staleness is 0"):
        Config.model_validate({"train": {"min_batch": 1}})


def test_lag_takes_cispo_unless_a_loss_was_chosen_and_never_corrects_twice() -> None:
    lagging = {"train": {"max_staleness": 2}}
    assert Config.model_validate(lagging).method_in_use.loss == "cispo"
    assert Config.model_validate({}).method_in_use.loss == "importance_sampling"
    chosen = Config.model_validate({**lagging, "method": {"loss_fn": "ppo", "old_policy": True}})
    assert (chosen.method_in_use.loss, chosen.method_in_use.old_policy) == ("ppo", True)
    assert Config.model_validate({**lagging, "method": {"name": "ppo"}}).method_in_use.loss == "ppo"
    with pytest.raises(ValueError, match="corrected twice"):
        Config.model_validate({**lagging, "method": {"correction": "token_tis"}})
