"""Products with bfloat16 weights against float64 on the rounded operands, for every instruction set."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import for_each
from turnwise.engine.ops import cpu, cpu_products, processor
from turnwise.errors import DataError

EXACT = 2e-6
"""Of the largest value. Rounding to bfloat16 moves a product by 1e-3, so an operand rounded otherwise is seen."""


@pytest.fixture
def kernels(library: ctypes.CDLL) -> cpu.CpuKernels:
    return cpu.CpuKernels(library)


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().double()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype is torch.float32
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() <= EXACT * expected.abs().max()


@for_each("rows", [*range(1, 35), 48, 57, 64, 127, 129])
@for_each(("outputs", "inputs"), [(83, 46), (7, 10), (17, 62), (1, 2), (24, 64), (33, 2048)])
def test_few_rows_are_rounded_and_summed_in_float32(
    kernels: cpu.CpuKernels, rows: int, outputs: int, inputs: int
) -> None:
    weight, x, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(rows, inputs), torch.randn(outputs)
    expected = rounded(x) @ weight.double().T
    assert_close(kernels.linear_small(weight, x), expected)
    assert_close(kernels.linear_small(weight, x, bias=bias), expected + bias.double())


def test_a_weight_large_enough_for_threads_gives_the_same(kernels: cpu.CpuKernels) -> None:
    weight = torch.randn(1003, 518).bfloat16()
    for rows in (1, 3, 40):
        x = torch.randn(rows, 518)
        assert_close(kernels.linear_small(weight, x), rounded(x) @ weight.double().T)


@for_each("rows", [1, 12, 13, 100])
@for_each(("outputs", "inputs"), [(83, 46), (97, 64), (576, 1400), (33, 1300), (1, 6)])
@pytest.mark.usefixtures("library")
def test_products_of_training_are_rounded_but_for_their_low_rank_part(rows: int, outputs: int, inputs: int) -> None:
    weight, x, dy = torch.randn(outputs, inputs).bfloat16(), torch.randn(rows, inputs), torch.randn(rows, outputs)
    low, a, b = torch.randn(rows, 5), torch.randn(5, inputs), torch.randn(5, outputs)
    forward, backward = rounded(x) @ weight.double().T, rounded(dy) @ weight.double()
    assert_close(cpu_products.multiply(x, weight.t()), forward)
    assert_close(cpu_products.multiply(dy, weight), backward)
    own = cpu_products.multiply_with_low_rank(x, weight.t(), low, b, scale=0.5)
    assert_close(own, forward + 0.5 * low.double() @ b.double())
    own = cpu_products.multiply_with_low_rank(dy, weight, low, a, scale=0.5)
    assert_close(own, backward + 0.5 * low.double() @ a.double())
    out = torch.ones(rows, inputs)
    assert_close(cpu_products.multiply(dy, weight, out=out, alpha=2.0, is_added=True), 1 + 2 * backward)


@pytest.mark.usefixtures("library")
def test_many_rows_and_few_rows_give_the_same_product() -> None:
    weight, x, bias = torch.randn(130, 96).bfloat16(), torch.randn(500, 96), torch.randn(130)
    many = cpu_products.linear(x, weight, bias)
    few = torch.cat([cpu_products.linear(part, weight, bias) for part in x.split(7)])
    assert_close(many, few.double())


@pytest.mark.usefixtures("library")
def test_rows_of_a_larger_weight_and_strided_inputs_are_read_where_they_lie() -> None:
    whole, x = torch.randn(96, 64).bfloat16(), torch.randn(40, 80)[:, 8:72]
    part = whole[32:64]
    assert_close(cpu_products.multiply(x, part.t()), rounded(x) @ part.double().T)
    dy = torch.randn(32, 40).t()
    assert_close(cpu_products.multiply(dy, part), rounded(dy) @ part.double())


def test_nan_and_infinity_stay(kernels: cpu.CpuKernels) -> None:
    for rows in (2, 12):
        x = torch.ones(rows, 8)
        x[0, 3], x[1, 3] = float("nan"), float("inf")
        for out in (
            kernels.linear_small(torch.ones(9, 8).bfloat16(), x),
            cpu_products.multiply(x, torch.ones(8, 9).bfloat16()),
        ):
            assert out[0].isnan().all()
            assert (out[1] == float("inf")).all()
            assert (out[2:] == 8).all()


def test_what_the_kernels_cannot_read_is_refused(kernels: cpu.CpuKernels) -> None:
    with pytest.raises(DataError, match="expected an even number of inputs"):
        kernels.linear_small(torch.ones(4, 7).bfloat16(), torch.ones(2, 7))
    with pytest.raises(DataError, match="dense rows or columns of an even number"):
        cpu_products.multiply(torch.ones(2, 7), torch.ones(4, 7).bfloat16().t())
    with pytest.raises(DataError, match="dense rows or columns of an even number"):
        cpu_products.multiply(torch.ones(2, 4), torch.ones(4, 12).bfloat16()[:, ::2])


def test_the_library_uses_the_instructions_where_the_processor_has_them(
    kernels: cpu.CpuKernels, request: pytest.FixtureRequest
) -> None:
    is_native = "native" in request.node.name
    has_flag = processor.DOT_FLAG in Path("/proc/cpuinfo").read_text()
    assert kernels.has_pair_dots == (is_native and has_flag)
