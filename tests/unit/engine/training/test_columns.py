"""Datums in every accepted form, and the message for each that is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import for_each
from turnwise.engine.training.columns import DatumColumns, collate_columns, datum_to_columns, datums_to_columns
from turnwise.engine.training.losses import Loss, make_loss
from turnwise.errors import DataError
from turnwise.types import Datum, EncodedTextChunk, ModelInput, TensorData

FULL = {
    "target_tokens": [11, 12, 13, 14],
    "logprobs": [0.0, -0.5, -0.25, -1.0],
    "advantages": [0.0, 1.0, 0.0, -2.0],
}
SHORT = {"target_tokens": [13, 14], "logprobs": [-0.5, -0.5], "advantages": [0.75]}
OPTIONAL = ("old_logprobs", "ref_logprobs", "clip_low_threshold", "clip_high_threshold")


def convert(
    inputs: dict[str, Any], *, loss: Loss | str = "ppo", tokens: tuple[int, ...] = (10, 11, 12, 13), **limits: int
) -> DatumColumns:
    datum = Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    return datum_to_columns(datum, loss=loss, **{"vocab_size": 100, "max_length": 16, **limits})


def test_the_full_form_keeps_every_number_in_its_place() -> None:
    columns = convert(
        {
            **FULL,
            "mask": [0, 1, 0, 1],
            "weights": [0.5, 0.5, 0.5, 0.25],
            "temperature": [1.0, 0.7, 1.0, 0.7],
            "old_logprobs": [-1.0, -2.0, -3.0, -4.0],
            "ref_logprobs": [-5.0, -6.0, -7.0, -8.0],
            "clip_low_threshold": [0.5, 0.625, 0.75, 0.875],
            "clip_high_threshold": [1.5, 1.625, 1.75, 1.875],
            "sequence_ratio_mask": [0, 1, 0, 0],
        }
    )
    assert columns.input_ids.tolist() == [10, 11, 12, 13]
    assert columns.target_ids.tolist() == [11, 12, 13, 14]
    assert columns.mask.tolist() == [False, True, False, True]
    assert columns.weights.tolist() == [0.0, 0.5, 0.0, 0.25]
    assert columns.advantages.tolist() == FULL["advantages"]
    assert columns.sampler_logprobs.tolist() == FULL["logprobs"]
    assert columns.temperature.tolist() == pytest.approx([1.0, 0.7, 1.0, 0.7])
    optional = (columns.old_logprobs, columns.ref_logprobs, columns.clip_low, columns.clip_high)
    assert [None if x is None else x.tolist() for x in optional] == [
        [-1.0, -2.0, -3.0, -4.0],
        [-5.0, -6.0, -7.0, -8.0],
        [0.5, 0.625, 0.75, 0.875],
        [1.5, 1.625, 1.75, 1.875],
    ]
    assert columns.sequence_ratio_mask is not None
    assert columns.sequence_ratio_mask.tolist() == [False, True, False, False]
    assert (columns.target_start, columns.num_targets) == (0, 4)


def test_the_short_form_belongs_to_the_end_of_the_input_and_spreads_one_advantage() -> None:
    columns = convert({**SHORT, "temperature": [0.5, 0.5], "old_logprobs": [-1.0, -2.0]})
    assert (columns.target_start, columns.num_targets) == (2, 2)
    assert columns.target_ids.tolist() == [0, 0, 13, 14]
    assert columns.mask.tolist() == [False, False, True, True]
    assert columns.weights.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert columns.advantages.tolist() == [0.0, 0.0, 0.75, 0.75]
    assert columns.sampler_logprobs.tolist() == [0.0, 0.0, -0.5, -0.5]
    assert columns.temperature.tolist() == [1.0, 1.0, 0.5, 0.5]
    assert columns.old_logprobs is not None
    assert columns.old_logprobs.tolist() == [0.0, 0.0, -1.0, -2.0]


def test_the_short_form_may_give_one_advantage_per_target() -> None:
    assert convert({**SHORT, "advantages": [1.0, -1.0]}).advantages.tolist() == [0.0, 0.0, 1.0, -1.0]


def test_dtypes_are_the_engines_whatever_came() -> None:
    ints = {"advantages": TensorData(data=[1, 0, 0, -1], dtype="int64"), "mask": np.array([True, True, False, True])}
    columns = convert({**FULL, **ints, "weights": torch.ones(4, dtype=torch.int32)})
    assert columns.advantages.tolist() == [1.0, 0.0, 0.0, -1.0]
    assert columns.mask.tolist() == [True, True, False, True]
    assert {columns.input_ids.dtype, columns.target_ids.dtype} == {np.dtype(np.int64)}
    floats = (columns.weights, columns.advantages, columns.sampler_logprobs, columns.temperature)
    assert {array.dtype for array in floats} == {np.dtype(np.float32)}
    assert columns.mask.dtype == np.bool_


@for_each(
    ("more", "mask", "weights"),
    [
        ({}, [1, 1, 1, 1], [1, 1, 1, 1]),
        ({"weights": [0, 0.5, 0, 2]}, [0, 1, 0, 1], [0, 0.5, 0, 2]),
        ({"mask": [1, 0, 1, 0]}, [1, 0, 1, 0], [1, 0, 1, 0]),
        ({"mask": [1, 0, 1, 0], "weights": [0, 3, 0.5, 3]}, [1, 0, 1, 0], [0, 0, 0.5, 0]),
    ],
)
def test_the_mask_comes_from_mask_then_weights_then_every_target(
    more: dict[str, list[float]], mask: list[int], weights: list[float]
) -> None:
    columns = convert({**FULL, **more})
    assert columns.mask.tolist() == mask
    assert columns.weights.tolist() == weights


@given(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=4))
def test_the_mask_never_depends_on_the_advantages(advantages: list[float]) -> None:
    assert convert({**FULL, "advantages": advantages}).mask.all()
    masked = convert({**FULL, "advantages": advantages, "weights": [0.0, 1.0, 0.0, 1.0]})
    assert masked.mask.tolist() == [False, True, False, True]


@given(st.integers(1, 8), st.integers(0, 8))
def test_targets_as_given_are_found_again_from_target_start(num_targets: int, num_before: int) -> None:
    targets = list(range(20, 20 + num_targets))
    inputs = {"target_tokens": targets, "weights": [1.0] * num_targets}
    columns = convert(inputs, loss="cross_entropy", tokens=tuple(range(num_before + num_targets)))
    assert columns.target_ids[columns.target_start :].tolist() == targets
    assert columns.num_targets == num_targets == columns.mask.sum()


def test_negative_weights_train_because_a_custom_loss_sends_its_gradient_as_weights() -> None:
    columns = convert({"target_tokens": FULL["target_tokens"], "weights": [0, -1.5, 0, 1]}, loss="cross_entropy")
    assert columns.mask.tolist() == [False, True, False, True]
    assert columns.weights.tolist() == [0, -1.5, 0, 1]


def test_bounds_that_cross_on_an_untrained_target_are_filler() -> None:
    columns = convert({**FULL, "mask": [0, 1, 0, 1], "clip_high_threshold": [0.0, 1.5, 0.0, 1.5]})
    assert columns.clip_high is not None
    assert columns.clip_high.tolist() == [0.0, 1.5, 0.0, 1.5]


TWO_D = TensorData(data=[1, 2, 3, 4, 5, 6, 7, 8], dtype="int64", shape=[4, 2])


@for_each(
    ("more", "message"),
    [
        (
            {"logprobs": [-0.5] * 3},
            r"lengths differ: model_input 4, target_tokens 4, logprobs 3; expected logprobs to be",
        ),
        (
            {"advantages": [1.0]},
            r"lengths differ: model_input 4, target_tokens 4, advantages 1; expected advantages to",
        ),
        (
            {"weights": [1.0] * 5},
            r"lengths differ: model_input 4, target_tokens 4, weights 5; .*: 1.0 \(or a normaliser\)",
        ),
        (
            {"target_tokens": [1] * 5},
            r"lengths differ: model_input 4, target_tokens 5; expected a target for each input",
        ),
        ({"target_tokens": []}, r"lengths differ: model_input 4, target_tokens 0; .* at least one"),
        (
            {"target_tokens": TWO_D},
            r"target_tokens has shape \[4, 2\]; expected one dimension; \[N, K\] targets are not",
        ),
        ({"weights": TWO_D}, r"weights has shape \[4, 2\]; expected one dimension$"),
        ({"advantages": 1.0}, r"advantages has shape \[\]; expected one dimension"),
        ({"weights": TensorData(data=[1.0] * 4, shape=[3])}, r"weights cannot be read as float32 of shape \[3\]: "),
        ({"target_tokens": torch.ones(4)}, r"target_tokens came as float32; expected int64 token ids"),
        (
            {"target_tokens": [1, 2, 100, 3]},
            r"target_tokens holds token id 100 at position 2; expected 0 to 99; were the",
        ),
        ({"target_tokens": [1, -1, 2, 3]}, r"target_tokens holds token id -1 at position 1; expected 0 to 99"),
        ({"logprobs": [0, -1, math.nan, 0]}, r"logprobs holds nan at position 2; expected finite numbers: the logprob"),
        ({"advantages": [0, math.inf, 0, 0]}, r"advantages holds inf at position 1; expected finite numbers"),
        (
            {"logprobs": TensorData(data=[0, 0, 0, -1e300])},
            r"logprobs holds -inf at position 3; expected finite numbers",
        ),
        ({"mask": [0, 1, 0.5, 1]}, r"mask holds 0.5 at position 2; expected 0 or 1; normalisers belong into weights"),
        ({"temperature": [1, 1, 1, 0]}, r"temperature holds 0.0 at position 3; expected more than 0"),
        (
            {"clip_low_threshold": [0.8, -0.2, 1, 1]},
            r"clip_low_threshold holds -0.2.* at position 1; expected an absolute",
        ),
        (
            {"clip_high_threshold": [1.2, 1.2, -1, 1]},
            r"clip_high_threshold holds -1.0 at position 2; expected an absolute",
        ),
        ({"clip_low_threshold": [0.5, 0.5, 1.5, 1]}, r"clip_low_threshold holds 1.5 at position 2; .* are 1.5 and 1.2"),
        ({"clip_high_threshold": [0.5, 2, 2, 2]}, r"clip_high_threshold holds 0.5 at position 0; .* are 0.8 and 0.5"),
        (
            {"advantage": [0] * 4},
            r"loss_fn_inputs has no key 'advantage'; did you mean 'advantages'\?; expected some of",
        ),
        ({"zzz": [0] * 4}, r"loss_fn_inputs has no key 'zzz'; expected some of target_tokens, weights, mask, logprobs"),
        (
            {"mask": [0, 0, 1, 1], "sequence_ratio_mask": [0, 1, 1, 1]},
            r"sequence_ratio_mask holds 1.0 at position 1; expected 0 there, because that target is untrained",
        ),
    ],
)
def test_a_full_form_that_does_not_fit_is_refused_by_name_and_position(more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert({**FULL, **more})


@for_each(
    ("more", "message"),
    [
        ({"logprobs": [-0.5]}, r"lengths differ: model_input 4, target_tokens 2, logprobs 1"),
        ({"logprobs": [-0.5] * 4}, r"lengths differ: model_input 4, target_tokens 2, logprobs 4"),
        ({"advantages": [1.0] * 3}, r"lengths differ: model_input 4, target_tokens 2, advantages 3"),
        ({"temperature": [1.0]}, r"lengths differ: model_input 4, target_tokens 2, temperature 1"),
        ({"temperature": [1.0, -1.0]}, r"temperature holds -1.0 at position 1"),
        ({"mask": [2, 1]}, r"mask holds 2.0 at position 0"),
    ],
)
def test_a_short_form_that_does_not_fit_counts_positions_as_the_caller_does(more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert({**SHORT, **more})


@for_each("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
@for_each("key", ["logprobs", "advantages", "target_tokens"])
def test_an_rl_loss_names_the_input_that_is_missing(loss: str, key: str) -> None:
    inputs = {k: v for k, v in FULL.items() if k != key}
    came = ", ".join(inputs)
    with pytest.raises(DataError, match=f"{loss} needs {key} in loss_fn_inputs, and {came} came; send "):
        convert(inputs, loss=loss)


def test_cross_entropy_without_weights_or_mask_is_refused_instead_of_learning_the_prompt() -> None:
    with pytest.raises(DataError, match=r"cross_entropy needs weights \(or mask\) .* and target_tokens came; send 1.0"):
        convert({"target_tokens": FULL["target_tokens"]}, loss="cross_entropy")


def test_a_truncation_asks_each_datum_for_old_logprobs() -> None:
    loss = make_loss("ppo", {"correction": "token_tis"})
    with pytest.raises(DataError, match=r"ppo with correction='token_tis' needs old_logprobs .* what forward returned"):
        convert(FULL, loss=loss)
    assert convert({**FULL, "old_logprobs": [-1.0] * 4}, loss=loss).old_logprobs is not None
    assert convert({**FULL, "old_share": [0.5] * 4}, loss=loss).old_share is not None


def test_an_old_policy_is_told_in_one_way_and_lies_between_the_other_two() -> None:
    with pytest.raises(DataError, match="both old_logprobs and old_share came"):
        convert({**FULL, "old_logprobs": [-1.0] * 4, "old_share": [0.5] * 4}, loss="ppo")
    with pytest.raises(DataError, match=r"old_share holds 1\.5 at position 1; expected 0 \(the sampler\) to 1"):
        convert({**FULL, "old_share": [0.0, 1.5, 0.0, 0.0]}, loss="ppo")


def test_an_empty_input_is_refused() -> None:
    with pytest.raises(DataError, match="model_input is empty; expected at least one token"):
        convert(FULL, tokens=())


def test_an_input_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(DataError, match=r"model_input has 4 tokens; expected at most 3 .* split the longest turns"):
        convert(FULL, max_length=3)


def test_an_input_id_outside_the_vocabulary_is_refused_by_position() -> None:
    with pytest.raises(
        DataError, match="model_input holds token id 13 at position 3; expected 0 to 12; were the tokens"
    ):
        convert(FULL, vocab_size=13)


def test_input_ids_that_are_not_integers_are_refused() -> None:
    half: list[Any] = [0.5, 1.0]
    inputs: dict[str, Any] = {"target_tokens": [1, 2], "mask": [1, 1]}
    datum = Datum(model_input=ModelInput([EncodedTextChunk(half)]), loss_fn_inputs=inputs)
    with pytest.raises(DataError, match="model_input holds float64 values; expected integer token ids"):
        datum_to_columns(datum, loss="cross_entropy", vocab_size=10, max_length=10)


def test_collated_datums_lie_end_to_end_over_all_their_positions() -> None:
    columns = collate_columns([convert(SHORT), convert({**FULL, "sequence_ratio_mask": [0, 1, 0, 1]})])
    assert columns.num_datums == 2
    assert columns.datum_T.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert columns.mask_T.tolist() == [False, False, True, True, True, True, True, True]
    assert columns.weights_T.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert columns.advantages_T.tolist() == [0.0, 0.0, 0.75, 0.75, *FULL["advantages"]]
    assert columns.sampler_logprobs_T.tolist() == [0.0, 0.0, -0.5, -0.5, *FULL["logprobs"]]
    assert columns.sequence_ratio_mask_T is not None
    assert columns.sequence_ratio_mask_T.tolist() == [False, False, True, True, False, True, False, True]
    assert (columns.old_logprobs_T, columns.ref_logprobs_T, columns.clip_low_T, columns.clip_high_T) == (None,) * 4
    assert columns.weights_T.dtype == torch.float32


def test_collating_keeps_the_optional_columns_that_every_datum_brings() -> None:
    both = [convert({**FULL, **{key: [value] * 4 for key in OPTIONAL}}) for value in (0.25, 0.5)]
    columns = collate_columns(both)
    for column_T in (columns.old_logprobs_T, columns.ref_logprobs_T, columns.clip_low_T, columns.clip_high_T):
        assert column_T is not None
        assert column_T.tolist() == [0.25] * 4 + [0.5] * 4


def test_the_loss_of_collated_datums_is_the_sum_of_theirs() -> None:
    datums, loss = [convert(SHORT), convert(FULL)], make_loss("gspo", {"clip_high_threshold": 9.0})
    p_T = torch.linspace(-1.0, -0.2, 8)
    alone = [loss(p_T[i * 4 : i * 4 + 4], None, collate_columns([d])).sum().item() for i, d in enumerate(datums)]
    assert loss(p_T, None, collate_columns(datums)).sum().item() == pytest.approx(sum(alone))


@for_each("key", OPTIONAL)
def test_an_optional_tensor_in_only_some_datums_of_a_request_is_refused(key: str) -> None:
    inputs = [FULL, {**FULL, key: [1.0] * 4}]
    datums = [Datum(model_input=ModelInput.from_ints([1, 2, 3, 4]), loss_fn_inputs=i) for i in inputs]
    message = f"datum 1 brings {key} and datum 0 does not; send it with every datum of a request, or with none"
    with pytest.raises(DataError, match=message):
        datums_to_columns(datums, loss="ppo", vocab_size=100, max_length=16)
    with pytest.raises(DataError, match=message):
        collate_columns([convert(i) for i in inputs])


def test_the_datum_at_fault_is_named_by_its_place_in_the_request() -> None:
    good = Datum(model_input=ModelInput.from_ints([1, 2, 3, 4]), loss_fn_inputs=FULL)
    bad = Datum(model_input=ModelInput.from_ints([]), loss_fn_inputs=FULL)
    assert len(datums_to_columns([good, good], loss="ppo", vocab_size=100, max_length=16)) == 2
    with pytest.raises(DataError, match="datum 1: model_input is empty"):
        datums_to_columns([good, bad], loss="ppo", vocab_size=100, max_length=16)


def test_collating_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="no datums; expected at least one"):
        collate_columns([])
