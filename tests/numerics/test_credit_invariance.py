"""What must not change a gradient on `tiny`: the order of siblings, a constant in the reward, how trajectories are cut
into datums, and how datums are laid out for the device. All to 1e-5 of the gradient's norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from naive import displaced_adapter, random_ids, relative_error, run
from turnwise.engine.engine import Engine
from turnwise.methods.base import DataConfig, MethodSetup, datums_of, with_old_logprobs
from turnwise.methods.lookup import read_method
from turnwise.runtime import tolerances
from turnwise.trajectory import EndReason, Message, Trajectory, TrajectoryGroup, Turn

METHODS = ("grpo", "rloo", "gspo", "reinforce_pp", "rebn", "gigpo", "mt_grpo")


def _attempt(index: int, rewards: Sequence[float], *, is_rewritten: bool = False) -> Trajectory:
    """Turns of 4 to 7 sampled ids; a rewritten history begins every later prompt anew, with the same last ids."""
    rng = np.random.default_rng(index)
    turns: list[Turn] = []
    ids = random_ids(12, 1)
    for turn, reward in enumerate(rewards):
        sampled = random_ids(4 + (index + turn) % 4, 100 * index + turn)
        turns.append(
            Turn(
                prompt_ids=tuple(ids),
                sampled_ids=tuple(sampled),
                sampler_logprobs=tuple(rng.uniform(-5, -3, len(sampled)).tolist()),
                policy_version=0,
                temperature=0.8,
                reply=Message(role="assistant", content="x"),
                reward_parts={"outcome": reward},
                env_state=f"turn {turn}",
            )
        )
        ids = [*random_ids(3, 7), *ids] if is_rewritten else [*ids, *sampled, *random_ids(3, 200 + turn)]
    return Trajectory(
        task_id="t", attempt=index, seed=index, turns=tuple(turns), end_reason=EndReason.TERMINATED, is_success=True
    )


REWARDS = [[0.0, 0.3, 1.0], [0.1, 0.0], [0.0, 0.0, 0.2], [0.5, 0.7]]
GROUP = TrajectoryGroup(task_id="t", trajectories=tuple(_attempt(i, own) for i, own in enumerate(REWARDS)))
OTHER = TrajectoryGroup(task_id="u", trajectories=(_attempt(8, [0.4]), _attempt(9, [0.0, 0.1])))


def _method(name: str, **options: Any) -> Any:
    setup = MethodSetup(data=DataConfig(), group_size=4, max_turns=4, max_tokens=32)
    return read_method({"name": name, **options}).build(setup)


def _gradient(engine: Engine, method: Any, groups: Sequence[TrajectoryGroup], **fields: Any) -> torch.Tensor:
    adapter = displaced_adapter(engine)
    datums = datums_of(replace(method, **fields).lessons(groups))
    run(engine.forward_backward(adapter, datums, method.loss_fn, method.loss_config))
    assert adapter.grad.norm() > 0
    return adapter.grad.clone()


@pytest.fixture
def engine(make_engine: Callable[..., Engine], tiny_dir: Path) -> Engine:
    return make_engine(tiny_dir)


@pytest.mark.parametrize("name", METHODS)
def test_the_order_of_siblings_and_of_groups_does_not_matter(engine: Engine, name: str) -> None:
    turned = [OTHER, TrajectoryGroup(task_id="t", trajectories=GROUP.trajectories[::-1])]
    method = _method(name)
    assert (
        relative_error(_gradient(engine, method, turned), _gradient(engine, method, [GROUP, OTHER]))
        < tolerances.GRADIENTS
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_constant_added_to_every_outcome_does_not_matter(engine: Engine, name: str) -> None:
    def shifted(group: TrajectoryGroup) -> TrajectoryGroup:
        attempts = []
        for one in group.trajectories:
            last = replace(one.turns[-1], reward_parts={"outcome": one.turns[-1].reward + 3.0})
            attempts.append(replace(one, turns=(*one.turns[:-1], last)))
        return replace(group, trajectories=tuple(attempts))

    method = _method(name, **({"gamma": 1.0} if name in ("rebn", "gigpo") else {}))
    moved = [shifted(GROUP), shifted(OTHER)]
    assert (
        relative_error(_gradient(engine, method, moved), _gradient(engine, method, [GROUP, OTHER]))
        < tolerances.GRADIENTS
    )


@pytest.mark.parametrize("normalisation", ["token_mean", "seq_mean", "turn_mean", "traj_turn_mean", "prompt_mean"])
def test_a_trajectory_in_one_datum_or_in_one_per_turn_has_the_same_gradient(engine: Engine, normalisation: str) -> None:
    method = _method("grpo", normalisation=normalisation, credit="reward_to_go")
    whole = _gradient(engine, method, [GROUP, OTHER])
    assert relative_error(_gradient(engine, method, [GROUP, OTHER], is_split=True), whole) < tolerances.GRADIENTS


@pytest.mark.parametrize("name", METHODS)
def test_micro_batches_packs_and_prefix_trees_have_the_same_gradient(
    make_engine: Callable[..., Engine], tiny_dir: Path, name: str
) -> None:
    method = _method(name)
    tree = _gradient(make_engine(tiny_dir), method, [GROUP, OTHER])
    packed = _gradient(make_engine(tiny_dir, share_prefixes=False), method, [GROUP, OTHER])
    cut = _gradient(make_engine(tiny_dir, micro_batch_tokens=16), method, [GROUP, OTHER])
    assert relative_error(packed, tree) < tolerances.GRADIENTS
    assert relative_error(cut, tree) < tolerances.GRADIENTS


def test_a_rewritten_history_keeps_baselines_and_the_number_of_trained_tokens() -> None:
    rewritten = tuple(_attempt(i, own, is_rewritten=True) for i, own in enumerate(REWARDS))
    plain = _method("grpo").lessons([GROUP])
    split = _method("grpo").lessons([replace(GROUP, trajectories=rewritten)])
    assert [lesson.advantages for lesson in split] == [lesson.advantages for lesson in plain]
    assert [len(lesson.datums) for lesson in split] == [3, 2, 3, 2]
    totals = [sum(sum(d.loss_fn_inputs["weights"].tolist()) for d in datums_of(own)) for own in (plain, split)]
    assert totals == pytest.approx([1.0, 1.0])


def test_with_the_old_policy_as_anchor_the_first_step_has_the_gradient_of_importance_sampling(engine: Engine) -> None:
    """Decoupled PPO before any step: the old policy is the trainer, so nothing clips and rho carries the ratio."""
    lessons = _method("grpo").lessons([GROUP])
    adapter = displaced_adapter(engine)
    output = run(engine.forward(adapter, datums_of(lessons), "cross_entropy", None))
    anchored = with_old_logprobs(lessons, [one["logprobs"] for one in output.loss_fn_outputs])
    run(engine.forward_backward(adapter, datums_of(anchored), "ppo", {}))
    assert relative_error(adapter.grad, _gradient(engine, _method("grpo"), [GROUP])) < tolerances.GRADIENTS


def test_rejecting_every_token_leaves_no_gradient_and_no_nan(engine: Engine) -> None:
    adapter = displaced_adapter(engine)
    config = {"correction": "sequence_geo_mask", "correction_low": 1e3, "correction_high": 1e4}
    output = run(engine.forward_backward(adapter, datums_of(_method("grpo").lessons([GROUP])), "ppo", config))
    assert output.metrics["rejected_fraction:mean"] == 1.0
    assert not adapter.grad.any()
