"""Bytes and back, exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import DataError
from turnwise.runlog.arrays import pack_flags, pack_floats, pack_ids, unpack_array


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_ids_come_back(ids: list[int]) -> None:
    assert unpack_array(pack_ids(ids)).tolist() == ids


@given(st.lists(st.floats(allow_nan=False), max_size=50))
def test_floats_come_back_exactly(values: list[float]) -> None:
    assert unpack_array(pack_floats(values)).tolist() == values


def test_nan_is_kept() -> None:
    assert math.isnan(unpack_array(pack_floats([math.nan, 1.0]))[0])


@given(st.lists(st.booleans(), max_size=50))
def test_flags_come_back(flags: list[bool]) -> None:
    assert unpack_array(pack_flags(flags)).tolist() == flags


def test_floats_of_a_float32_sampler_take_four_bytes_each() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    assert len(pack_floats(values.tolist())) <= 4 * 1000 + 2


def test_a_constant_column_takes_a_few_bytes() -> None:
    assert len(pack_floats([0.375] * 10_000)) < 16


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(DataError, match="newer turnwise"):
        unpack_array(b"xi\x00")
