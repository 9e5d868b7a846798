"""Branched groups through the model: what is shared is computed once, and what cancels does cancel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from naive import displaced_adapter, random_ids, relative_error, run
from turnwise.credit.weights import weighting
from turnwise.engine.engine import Engine
from turnwise.methods.base import datums_of
from turnwise.methods.grpo import Grpo
from turnwise.methods.la_grpo import LaGrpo
from turnwise.methods.refuel import Refuel
from turnwise.rollout.sources import PlayBranches
from turnwise.runtime import tolerances
from turnwise.trajectory import Branch, EndReason, Message, Trajectory, TrajectoryGroup, Turn
from turnwise.types import Datum

TURN = 2


def make_group(rewards: list[float], *, num_turns: int = 4) -> TrajectoryGroup:
    """Continuations from turn 2 on; sampler logprobs are not the model's, so ratios are far from 1."""
    rng = np.random.default_rng(0)

    def draw(prompt: list[int], seed: int, reward: float) -> Turn:
        sampled = random_ids(5, seed)
        return Turn(
            prompt_ids=tuple(prompt),
            sampled_ids=tuple(sampled),
            sampler_logprobs=tuple(rng.uniform(-5, -4, 5).tolist()),
            policy_version=0,
            reply=Message(role="assistant", content="x"),
            reward_parts={"outcome": reward},
        )

    def play(turns: list[Turn], seed: int, until: int, reward: float) -> list[Turn]:
        turns = list(turns)
        while len(turns) < until:
            said = [*turns[-1].prompt_ids, *turns[-1].sampled_ids] if turns else []
            prompt = said + random_ids(8, 1000 + seed + len(turns))
            turns.append(draw(prompt, seed + len(turns), reward if len(turns) == num_turns - 1 else 0.0))
        return turns

    shared = play([], 1, TURN, 0.0)
    prompt = [*shared[-1].prompt_ids, *shared[-1].sampled_ids, *random_ids(8, 77)]
    trajectories = tuple(
        Trajectory(
            task_id="t",
            attempt=index,
            seed=0,
            turns=tuple(play([*shared, draw(prompt, 300 * (index + 1), 0.0)], 300 * (index + 1), num_turns, reward)),
            end_reason=EndReason.TERMINATED,
            branch=Branch(turn=TURN, seed=index),
        )
        for index, reward in enumerate(rewards)
    )
    return TrajectoryGroup(task_id="t", trajectories=trajectories, branch_turn=TURN)


GROUP = make_group([1.0, 0.0, 0.3, 0.9])
SEQ_SUM = weighting("seq_sum", max_tokens=1)


def la_grpo(**fields: object) -> LaGrpo:
    options: dict[str, object] = {"loss_fn": "importance_sampling", "loss_config": {}, "weigh": SEQ_SUM, **fields}
    return LaGrpo(source=PlayBranches(continuations=4), **options)  # pyright: ignore[reportArgumentType]


def gradient(engine: Engine, datums: list[Datum], loss: str = "importance_sampling") -> torch.Tensor:
    adapter = displaced_adapter(engine)
    run(engine.forward_backward(adapter, datums, loss, None))
    return adapter.grad.clone()


def test_t14_the_gradients_of_a_shared_prefix_cancel_within_the_group(make_engine: Callable[..., Engine]) -> None:
    """Training all turns of the branches is training those from the branch on, to rounding."""
    engine = make_engine()
    everything = Grpo(loss_fn="importance_sampling", loss_config={}, weigh=SEQ_SUM)
    from_branch = la_grpo(trains_later_turns=True)
    whole = gradient(engine, datums_of(everything.lessons([GROUP])))
    own = gradient(engine, datums_of(from_branch.lessons([GROUP])))
    assert relative_error(own, whole) < tolerances.GRADIENTS
    assert relative_error(gradient(engine, datums_of(la_grpo().lessons([GROUP]))), whole) > 0.1


@pytest.mark.parametrize("method", ["la_grpo", "refuel"])
def test_the_tree_gives_the_gradient_of_separate_rows(make_engine: Callable[..., Engine], method: str) -> None:
    if method == "la_grpo":
        datums = datums_of(la_grpo().lessons([GROUP]))
    else:
        pair = make_group([1.0, 0.0])
        datums = datums_of(Refuel(source=PlayBranches(continuations=2), loss_config={}).lessons([pair]))
    loss = "importance_sampling" if method == "la_grpo" else "refuel"
    tree = gradient(make_engine(), datums, loss)
    assert relative_error(gradient(make_engine(share_prefixes=False), datums, loss), tree) < tolerances.GRADIENTS
    assert relative_error(gradient(make_engine(micro_batch_tokens=48), datums, loss), tree) < tolerances.GRADIENTS


def test_cutting_off_what_comes_after_the_branch_turn_changes_nothing(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    short = make_group([1.0, 0.0, 0.3, 0.9], num_turns=TURN + 1)
    trimmed = datums_of(la_grpo().lessons([GROUP]))
    assert [datum.model_input.length for datum in trimmed] == [
        datum.model_input.length for datum in datums_of(la_grpo().lessons([short]))
    ]
    method = Grpo(loss_fn="importance_sampling", loss_config={}, weigh=SEQ_SUM)
    untrimmed = datums_of(method.lessons([la_grpo().trained_part(GROUP)]))
    assert all(a.model_input.length > b.model_input.length for a, b in zip(untrimmed, trimmed, strict=True))
    assert relative_error(gradient(engine, untrimmed), gradient(engine, trimmed)) < tolerances.GRADIENTS
