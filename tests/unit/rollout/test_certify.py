"""The certificate: exact on what is exact, and every kind of drift is found where it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turnwise.credit.datums import trajectory_to_datums
from turnwise.errors import DataError
from turnwise.renderers import get_renderer
from turnwise.rollout import play_groups
from turnwise.rollout.certify import Certificate, TrainerLogprobs, certify
from turnwise.trajectory import EndReason, Message, Trajectory, Turn
from turnwise.types import Datum, ModelInput, TensorData
from unit.rollout.worlds import CountingEnv, World, make_tasks, quick

pytestmark = pytest.mark.model

REPLY = Message(role="assistant", content="")


def make_turn(prompt: Sequence[int], sampled: Sequence[int], **fields: Any) -> Turn:
    logprobs = tuple(-0.5 - 0.01 * id_ for id_ in sampled)
    settings = {"sampler_logprobs": logprobs, "policy_version": 1, "reply": REPLY, **fields}
    return Turn(prompt_ids=tuple(prompt), sampled_ids=tuple(sampled), **settings)


def make_trajectory(*turns: Turn) -> Trajectory:
    return Trajectory(task_id="t", attempt=3, seed=0, turns=turns, end_reason=EndReason.TERMINATED)


WHOLE = make_trajectory(
    make_turn([1, 2], [10, 11, 12]), make_turn([1, 2, 10, 11, 12, 3], [13, 14]),
    make_turn([1, 2, 10, 11, 12, 3, 13, 14, 4], [15, 16, 17, 18]),
)  # fmt: skip


def honest(datums: list[Datum]) -> list[list[float]]:
    """Trainer logprobs that are the sampler's."""
    return [datum.loss_fn_inputs["logprobs"].tolist() for datum in datums]


def off_by(gaps: dict[int, float]) -> TrainerLogprobs:
    """Honest but for the tokens with these ids."""

    def logprobs(datums: list[Datum]) -> list[list[float]]:
        return [
            [
                logprob + gaps.get(target, 0.0)
                for logprob, target in zip(own, datum.loss_fn_inputs["target_tokens"].tolist(), strict=True)
            ]
            for own, datum in zip(honest(datums), datums, strict=True)
        ]

    return logprobs


def test_what_is_exact_is_certified() -> None:
    certificate = certify([WHOLE, WHOLE], honest)
    assert certificate.is_exact
    assert (certificate.num_trajectories, certificate.num_turns, certificate.num_tokens) == (2, 6, 18)
    assert certificate.max_gap == pytest.approx(0.0, abs=1e-6)
    assert [turn.link for turn in certificate.turns[:3]] == ["first", "extends", "extends"]
    assert certificate.lines()[0] == "token exactness: EXACT"
    assert "6 of 6 turns" in certificate.lines()[2]


def test_a_split_is_accounted_for() -> None:
    split = make_trajectory(
        WHOLE.turns[0], make_turn([1, 2, 12, 3], [13, 14]), make_turn([1, 2, 12, 3, 13, 14, 4], [5])
    )
    certificate = certify([split], honest)
    assert certificate.is_exact
    assert [turn.link for turn in certificate.turns] == ["first", "splits", "extends"]
    assert certificate.num_splits == 1


def test_untrained_turns_are_checked_for_their_place_and_not_for_logprobs() -> None:
    first, second, third = WHOLE.turns
    certificate = certify([make_trajectory(first, dataclasses.replace(second, is_trained=False), third)], honest)
    assert certificate.is_exact
    assert certificate.num_tokens == 7
    alone = make_trajectory(dataclasses.replace(first, is_trained=False))
    assert certify([alone], honest).is_exact


@pytest.mark.parametrize(
    ("gaps", "turn", "token", "cause"),
    [
        ({12: 0.5}, 0, 2, "only the last token"),
        ({13: -0.5}, 1, 0, "only the first token"),
        ({16: 0.9, 17: 0.8}, 2, 1, "the turns before are exact"),
        ({10: 0.9, 11: 0.9, 12: 0.9}, 0, 0, "all turns differ"),
        ({10: 0.1, 11: 0.1, 12: 0.1}, 0, 0, "rounded differently"),
        ({11: float("nan")}, 0, 1, "no logprob"),
    ],
)
def test_drift_is_located_by_turn_and_token_with_a_likely_cause(
    gaps: dict[int, float], turn: int, token: int, cause: str
) -> None:
    certificate = certify([WHOLE], off_by(gaps))
    assert not certificate.is_exact
    drift = certificate.drifts[0]
    assert (drift.task_id, drift.attempt, drift.turn, drift.token) == ("t", 3, turn, token)
    assert cause in drift.cause
    assert drift.token_id == WHOLE.turns[turn].sampled_ids[token]
    assert any(f"turn {turn}, token {token}" in line for line in certificate.lines())


def test_rounding_is_no_drift() -> None:
    certificate = certify([WHOLE], off_by(dict.fromkeys(range(10, 19), 1e-3)))
    assert certificate.is_exact
    assert certificate.max_gap == pytest.approx(1e-3, rel=1e-2)
    assert certificate.mean_k2 == pytest.approx(5e-7, rel=1e-2)
    assert not certify([WHOLE], off_by({11: 0.1}), k2_tolerance=1e-5).is_exact
    assert certify([WHOLE], off_by({14: 0.4}), k2_tolerance=0.01).mean_k2 == pytest.approx(0.4**2 / 2 / 9)
    assert certify([WHOLE], off_by({14: 0.4}), k2_tolerance=0.01).is_exact, "bfloat16: one token of a turn of two"
    assert not certify([WHOLE], off_by({14: 0.8}), k2_tolerance=0.01).is_exact, "half the probability is no rounding"
    assert not certify([WHOLE], off_by(dict.fromkeys(range(10, 19), 0.2)), k2_tolerance=0.01).is_exact, "all tokens"


def test_temperature_and_version_are_named_as_causes() -> None:
    warm = make_trajectory(*(dataclasses.replace(turn, temperature=0.7) for turn in WHOLE.turns))
    gaps = dict.fromkeys(range(10, 19), 0.4)
    assert "temperature 0.7" in certify([warm], off_by(gaps)).drifts[0].cause
    assert "version 1 and checked with version 2" in certify([WHOLE], off_by(gaps), trainer_version=2).drifts[0].cause


def test_ids_that_were_not_sampled_are_found_in_the_datums_that_were_trained() -> None:
    (datum,) = trajectory_to_datums(WHOLE, [0.0] * 3)
    ids = [*datum.model_input.to_ints(), 18]
    reencoded = [99 if id_ == 14 else id_ for id_ in ids]
    inputs = dict(datum.loss_fn_inputs)
    wrong_ids = Datum(ModelInput.from_ints(reencoded[:-1]), {**inputs, "target_tokens": reencoded[1:]})
    certificate = certify([WHOLE], honest, datums=[[wrong_ids]])
    assert not certificate.has_same_ids
    assert [turn.link for turn in certificate.turns] == ["first", "lost", "lost"]
    assert [turn.has_same_ids for turn in certificate.turns] == [True, False, False]
    assert "not the sampled ids" in certificate.drifts[0].cause

    mask = inputs["mask"].tolist()
    moved = Datum(datum.model_input, {**inputs, "mask": TensorData([*mask[1:], 0.0])})
    more = Datum(datum.model_input, {**inputs, "mask": TensorData([1.0] * len(mask))})
    unshifted = Datum(ModelInput.from_ints(ids[1:]), inputs)
    for wrong in (moved, more, unshifted):
        assert not certify([WHOLE], honest, datums=[[wrong]]).has_same_ids


def test_many_drifts_are_cut_and_counted() -> None:
    certificate = certify([WHOLE] * 10, off_by({10: 1.0, 13: 1.0, 15: 1.0}))
    assert (certificate.num_drifting_turns, len(certificate.drifts)) == (30, 20)
    assert certificate.lines()[-1] == "  and 10 more drifting turns"


def test_a_certificate_survives_json() -> None:
    for logprobs in (honest, off_by({11: float("nan")})):
        certificate = certify([WHOLE], logprobs)
        assert Certificate.from_json(certificate.to_json()) == certificate
        json.loads(certificate.to_json(), parse_constant=pytest.fail)


def test_answers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="1 logprobs came"):
        certify([WHOLE], lambda datums: [[0.0] for _ in datums])
    with pytest.raises(DataError, match="datums of 0 trajectories"):
        certify([WHOLE], honest, datums=[])


def test_nothing_to_certify_is_exact() -> None:
    assert certify([], honest).is_exact


@pytest.mark.parametrize(
    ("multi_turn", "strip_thinking", "temperature"), [(True, False, 1.0), (False, False, 0.7), (True, True, 1.3)]
)
async def test_the_engine_is_certified_on_its_own_rollouts(
    tiny_dir: Path, multi_turn: bool, strip_thinking: bool, temperature: float
) -> None:
    """Sampled and trained by the same weights, stops and temperatures included."""
    from turnwise.client.local import ServiceClient

    service = ServiceClient()
    try:
        trainer = await service.create_lora_training_client_async(str(tiny_dir), rank=4, seed=0)
        sampler = await trainer.save_weights_and_get_sampling_client_async()
        renderer = get_renderer(trainer.get_tokenizer(), multi_turn=multi_turn, strip_thinking=strip_thinking)
        config = quick(group_size=3, temperature=temperature, max_tokens_per_turn=12, sample_deadline_s=60.0)
        world = World(lambda *_: CountingEnv(num_turns=3))
        result = await play_groups(world, make_tasks(2), sampler, renderer, config, seed=0)
        trajectories = [trajectory for group in result.groups for trajectory in group.trajectories]
        assert len(trajectories) == 6

        def forward(datums: list[Datum]) -> list[list[float]]:
            output = trainer.forward(datums, "importance_sampling").result()
            return [one["logprobs"].tolist() for one in output.loss_fn_outputs]

        certificate = certify(trajectories, forward)
        assert certificate.is_exact, certificate.lines()
        assert certificate.max_gap < 1e-3
        assert certificate.num_tokens == sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    finally:
        service.close()
