"""A dialogue with a shell is branched by forking its session: each continuation goes on in files and variables of its
own."""

from __future__ import annotations

from typing import Any

from turnwise.client.fake import ScriptedSampler
from turnwise.envs.base import assistant
from turnwise.envs.library.code import Code
from turnwise.envs.library.workspace import Workspace
from turnwise.renderers.base import Renderer
from turnwise.rollout.branch import BranchRollout, check_can_branch
from turnwise.rollout.limits import RolloutLimits
from turnwise.rollout.replay import replay
from turnwise.rollout.sources import PlayBranches
from unit.rollout.worlds import quick

COUNT = "$ N=$((N+1)); echo $N >> log; echo $N $(wc -l < log)"
WORLDS: tuple[Any, ...] = (Workspace(interface="shell", chores=1), Code(shell=True, max_turns=6))


async def test_each_continuation_counts_on_from_the_branch_and_a_replay_hears_the_same(renderer: Renderer) -> None:
    sampler = ScriptedSampler(lambda _: renderer.encode_reply(assistant(COUNT)))
    config = quick(max_turns=5, max_tokens_per_turn=64, max_trajectory_tokens=2000)
    for world in WORLDS:
        assert await check_can_branch(world, RolloutLimits()) == "fork"
        rollout = BranchRollout(world, sampler, renderer, config, plan=PlayBranches(continuations=3))
        (task,) = world.tasks("train", 1, seed=0)
        (group,) = (await rollout.play([task], seed=0)).groups
        for trajectory in group.trajectories:
            heard = [turn.observation[0].content for turn in trajectory.turns if turn.observation]
            assert heard == [f"{number} {number}" for number in range(1, len(heard) + 1)], world.name
            assert len(heard) == 5
        again = await replay(world, task, group.trajectories[-1], renderer, config)
        assert again.is_exact, again.lines()
