"""Tensors of a datum: lists, or arrays that become lists when somebody looks."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError
from typing import cast

import numpy as np
import pytest

from turnwise.types import TensorData


def test_an_array_and_a_list_make_equal_tensors() -> None:
    made = TensorData.from_numpy(np.array([0.5, -1.0], dtype=np.float64))
    assert made == TensorData([0.5, -1.0], "float32", [2])
    assert repr(made) == "TensorData(data=[0.5, -1.0], dtype='float32', shape=[2])"
    assert made != TensorData([0.5, -1.0], "float32")
    assert TensorData.from_numpy(np.array([[1, 2], [3, 4]])) == TensorData([1, 2, 3, 4], "int64", [2, 2])


def test_the_array_that_came_and_the_one_that_is_given_out_are_free_to_change() -> None:
    array = np.array([1.0, 2.0], dtype=np.float32)
    made = TensorData.from_numpy(array)
    array[0] = 9.0
    made.to_numpy()[1] = 9.0
    assert made.to_numpy().tolist() == [1.0, 2.0]


def test_data_that_was_read_is_a_list_and_is_what_counts_from_then_on() -> None:
    made = TensorData.from_numpy(np.array([1, 2, 3]))
    kept = made.copy()
    numbers = cast("list[int]", made.data)
    assert isinstance(numbers, list)
    numbers[0] = 7
    assert made.data == [7, 2, 3]
    assert made.to_numpy().tolist() == [7, 2, 3]
    assert kept.data == [1, 2, 3], "a copy was taken before"


def test_a_copy_of_a_list_does_not_follow_it() -> None:
    numbers, shape = [1.0, 2.0], [2]
    copied = TensorData(numbers, "float32", shape).copy()
    numbers[0], shape[0] = 5.0, 9
    assert copied == TensorData([1.0, 2.0], "float32", [2])


def test_it_stays_as_it_is() -> None:
    made = TensorData.from_numpy(np.arange(4))
    assert copy.deepcopy(made) == made
    assert len(made) == 4
    with pytest.raises(FrozenInstanceError):
        made.dtype = "float32"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="unhashable"):
        hash(made)


def test_an_array_given_as_data_is_read_in_the_dtype_that_came_with_it() -> None:
    given = np.array([0.5, 1.0])
    assert TensorData(given).to_numpy().dtype == np.float32
    assert TensorData(given, "int64").to_numpy().tolist() == [0, 1]
    assert TensorData(given).data == [0.5, 1.0]
