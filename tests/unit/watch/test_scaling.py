"""Success against budget: the estimators equal what counting all subsets gives."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from turnwise.watch.curve import BudgetLine, budgets_svg
from turnwise.watch.intervals import Interval, change_of
from turnwise.watch.scaling import (
    ScaledAttempt,
    best_of_k,
    majority_of_k,
    pass_at_k,
    powers_up_to,
    scale_changes,
    scale_points,
)


def _attempt(is_success: bool, **fields) -> ScaledAttempt:
    return ScaledAttempt(is_success=is_success, **{"num_turns": 1, "num_tokens": 1, **fields})


def test_pass_at_k_is_the_share_of_subsets_with_a_success() -> None:
    outcomes = [True, True, False, False, False]
    for k in range(1, 6):
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(5, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="expected 1 to 5"):
        pass_at_k(5, 2, 6)


def test_best_of_k_is_the_mean_pick_over_subsets_and_shares_ties() -> None:
    attempts = [_attempt(i in (1, 4), score=s) for i, s in enumerate([0.9, 0.7, 0.7, 0.2, 0.1])]
    for k in range(1, 6):
        picks: list[float] = []
        for subset in itertools.combinations(attempts, k):
            best = max(one.score or 0 for one in subset)
            tied = [one.is_success for one in subset if one.score == best]
            picks.append(sum(tied) / len(tied))
        assert best_of_k(attempts, k) == pytest.approx(sum(picks) / len(picks)), k
    with pytest.raises(ValueError, match="no score"):
        best_of_k([_attempt(True)], 1)


def test_a_majority_is_right_if_its_answer_is_and_silence_has_no_vote() -> None:
    attempts = [_attempt(True, answer="7"), _attempt(True, answer="7"), _attempt(False, answer="8"), _attempt(False)]
    assert majority_of_k(attempts, 1) == pytest.approx(2 / 4)
    # Pairs: 77 -> 1; 78 twice -> a tie, 1/2; 7 and silence twice -> 1; 8 and silence -> 0.
    assert majority_of_k(attempts, 2) == pytest.approx((1 + 2 * 0.5 + 2 * 1 + 0) / 6)
    assert majority_of_k(attempts, 4) == 1


def test_points_count_budgets_and_leave_out_tasks_that_cannot_tell() -> None:
    solved = [_attempt(True, num_turns=2, num_tokens=10), _attempt(False, num_turns=3, num_tokens=30)]
    points = {(p.kind, p.budget): p for p in scale_points([solved, [_attempt(False, num_turns=3, num_tokens=20)]])}
    assert points["pass@k", 1].success == pytest.approx((0.5 + 0) / 2)
    assert (points["pass@k", 2].success, points["pass@k", 2].num_tasks) == (1, 1), "one task was played once"
    assert points["pass@k", 2].mean_tokens == 40
    assert [points["turns", turns].success for turns in (1, 2, 3)] == [0, 0.25, 0.25]
    assert [points["tokens", tokens].success for tokens in (8, 16, 30)] == [0, 0.25, 0.25]
    assert not any(kind in ("best of k", "majority of k") for kind, _ in points)
    assert all(p.success_low <= p.success <= p.success_high for p in points.values())
    assert points["turns", 1].success_high > 0.5, "two tasks without a success do not prove that there is none"
    assert powers_up_to(6) == [1, 2, 4, 6]
    assert scale_points([]) == []


def test_what_changed_is_paired_by_task_and_leaves_out_tasks_that_one_side_cannot_tell() -> None:
    won, lost = _attempt(True), _attempt(False)
    before = {"a": [lost, lost], "b": [won, lost], "c": [won], "only before": [won, won]}
    after = {"b": [won, won], "a": [won, lost], "c": [won, won]}
    found = {(one.kind, one.budget): one for one in scale_changes(before, after)}
    assert found["pass@k", 1].change == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert (found["pass@k", 2].change, found["pass@k", 2].num_tasks) == (0.5, 2), "c was played once before"
    assert found["turns", 1].num_tasks == 3
    assert scale_changes(before, {}) == []


def test_the_interval_of_a_change_is_shorter_where_tasks_are_alike_and_never_empty() -> None:
    easy_and_hard = [1.0, 0.0] * 16
    same, other = (change_of(easy_and_hard, after) for after in (easy_and_hard, [0.0, 1.0] * 16))
    assert same.value == other.value == 0
    assert 0 < same.high - same.low < 0.6 * (other.high - other.low)
    nothing = change_of([0.0] * 8, [0.0] * 8)
    assert nothing.low < -0.2, "eight tasks that nobody solves do not show that nothing changed"
    assert change_of([0.0] * 40, [1.0] * 40).low > 0.8
    assert math.isnan(change_of([], []).value)


def test_the_interval_of_a_change_covers_the_truth_in_95_of_100_studies() -> None:
    rng = np.random.default_rng(0)
    for num_tasks, samples in ((8, 1), (16, 1), (16, 4), (48, 2)):
        covered = 0
        for _ in range(600):
            chances = rng.beta(0.5, 0.5, num_tasks)
            before, after = (rng.binomial(samples, p) / samples for p in (chances, 0.7 * chances + 0.3))
            found = change_of(before.tolist(), after.tolist())
            covered += found.low <= 0.15 <= found.high
        assert covered >= 0.93 * 600, (num_tasks, samples)


def test_the_picture_is_xml_with_a_point_for_every_budget() -> None:
    lines = [BudgetLine("pass@k, <after>", [(1, Interval(0.5, 0.3, 0.7)), (4, Interval(0.8, 0.6, 0.9))])]
    root = ElementTree.fromstring(budgets_svg("a & b", {"samples": lines, "turns": lines}))
    assert len([part for part in root.iter() if part.tag.endswith("circle")]) == 4
    assert math.isclose(float(root.attrib["height"]), 2 * (360 + 18))
