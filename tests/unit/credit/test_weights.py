"""Vector V3 of the algorithms' specification, and how weights add up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from turnwise.credit.datums import dialogue_to_datums, num_trained_tokens, trajectory_to_datums
from turnwise.credit.weights import Normalisation, Share, share_of, token_mean, weigh, weighting
from turnwise.errors import DataError
from turnwise.types import Datum
from unit.credit.test_datums import D1, chain, column, make_trajectory, make_turn

MODES = ("token_mean", "seq_mean", "seq_sum", "const", "turn_mean", "traj_turn_mean", "prompt_mean")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", 2.5),
        ("seq_mean", 3.0),
        ("seq_sum", 5.0),
        ("const", 0.625),
        ("turn_mean", 2.833333),
        ("traj_turn_mean", 3.125),
    ],
)
def test_the_weightings_match_the_vector(name: Normalisation, expected: float) -> None:
    """V3: per-token losses [1, 2 | 3] and [4] in turns of 2, 1 and 1 tokens, L_max = 8."""
    shares = [Share(turn_sizes=(2, 1)), Share(turn_sizes=(1,))]
    turn_losses = [[3.0, 3.0], [4.0]]
    weights = weighting(name, max_tokens=8)(shares)
    total = sum(
        w * loss for own, losses in zip(weights, turn_losses, strict=True) for w, loss in zip(own, losses, strict=True)
    )
    assert total == pytest.approx(expected, abs=1e-6)


def test_prompt_mean_gives_every_group_the_same_weight() -> None:
    shares = [Share(turn_sizes=(2, 1), group=0), Share(turn_sizes=(5,), group=0), Share(turn_sizes=(4,), group=1)]
    weights = weighting("prompt_mean", max_tokens=0)(shares)
    by_group = [0.0, 0.0]
    for share, own in zip(shares, weights, strict=True):
        by_group[share.group] += sum(w * size for w, size in zip(own, share.turn_sizes, strict=True))
    assert by_group == pytest.approx([0.5, 0.5])


def _weighted(datums: Sequence[Datum]) -> list[float]:
    columns = [(column(d, "weights"), column(d, "advantages")) for d in datums]
    return sorted(w * a for weights, advantages in columns for w, a in zip(weights, advantages, strict=True) if w)


@pytest.mark.parametrize("name", MODES)
def test_splitting_keeps_trained_tokens_their_advantages_and_their_weights(name: Normalisation) -> None:
    """T7: the same turns, merged and apart, add up to the same weighted sums under every weighting."""
    merged = trajectory_to_datums(D1, [1.0, 2.0, 3.0])
    apart = [trajectory_to_datums(make_trajectory(turn), [float(i + 1)]) for i, turn in enumerate(D1.turns)]
    split = [datum for datums in apart for datum in datums]
    other, shares = trajectory_to_datums(chain((3, 4), start=50), [1.0]), [share_of(D1), share_of(chain((3, 4)), 1)]
    assert sum(num_trained_tokens(datum) for datum in split) == num_trained_tokens(merged[0])
    one, many = (weigh([datums, other], weighting(name, max_tokens=8), shares) for datums in (merged, split))
    flat = [[datum for own in batch for datum in own] for batch in (one, many)]
    assert _weighted(flat[0]) == pytest.approx(_weighted(flat[1]))


@pytest.mark.parametrize("name", [mode for mode in MODES if mode not in ("seq_sum", "const")])
def test_means_add_up_to_one(name: Normalisation) -> None:
    trajectories = [D1, chain((2, 5)), chain((1, 1), (1, 3))]
    batch = [trajectory_to_datums(t, [0.0] * len(t.turns)) for t in trajectories]
    weighted = weigh(batch, weighting(name, max_tokens=8), [share_of(t, i) for i, t in enumerate(trajectories)])
    assert sum(sum(column(datum, "weights")) for own in weighted for datum in own) == pytest.approx(1.0)


def test_a_turn_that_is_not_trained_has_no_weight_and_no_share() -> None:
    trajectory = make_trajectory(make_turn([1], [2, 3]), make_turn([1, 2, 3, 4], [5], is_trained=False))
    assert share_of(trajectory).turn_sizes == (2,)
    ((datum,),) = weigh([trajectory_to_datums(trajectory, [1.0, 1.0])], token_mean, [share_of(trajectory)])
    assert column(datum, "weights") == pytest.approx([0.5, 0.5, 0.0, 0.0])


def test_an_attempt_without_trained_tokens_still_counts_among_the_attempts() -> None:
    masked = make_trajectory(make_turn([1], [2], is_trained=False))
    batch = [trajectory_to_datums(D1, [0.0] * 3), trajectory_to_datums(masked, [0.0])]
    (datum,), nothing = weigh(batch, weighting("seq_mean", max_tokens=8), [share_of(D1), share_of(masked)])
    assert nothing == []
    assert sum(column(datum, "weights")) == pytest.approx(0.5)


def test_a_written_dialogue_has_the_turns_that_the_world_speaks_between() -> None:
    """V3 of the specification: turns of 2 and 1 tokens, and a dialogue of one token; its history may be rewritten."""
    whole = dialogue_to_datums([([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])])
    rewritten = dialogue_to_datums([([1, 2], [3, 4]), ([1, 9, 5], [6])])
    other = dialogue_to_datums([([1, 2], [3])])
    assert (len(whole), len(rewritten)) == (1, 2)
    losses = [1.0, 2.0, 3.0, 4.0]
    plain: dict[Normalisation, float] = {
        "token_mean": 2.5,
        "seq_mean": 3.0,
        "seq_sum": 5.0,
        "const": 0.625,
        "prompt_mean": 3.0,
    }
    by_turn: dict[Normalisation, float] = {"turn_mean": 2.833333, "traj_turn_mean": 3.125}
    for name, value in (plain | by_turn).items():
        for dialogue in (whole, rewritten):
            weighted = weigh([dialogue, other], weighting(name, max_tokens=8))
            weights = [w for own in weighted for datum in own for w in column(datum, "weights") if w]
            assert np.dot(weights, losses) == pytest.approx(value, abs=1e-6), name


def test_a_constant_needs_a_length() -> None:
    with pytest.raises(DataError, match="max_tokens=0"):
        weighting("const", max_tokens=0)([Share(turn_sizes=(1,))])
