"""The C matrix products against torch in float64."""

import pytest
import torch
from torch import Tensor

from cases import for_each
from turnwise.engine.ops import cpu_products
from turnwise.engine.ops.cpu_products import multiply, multiply_with_low_rank
from turnwise.errors import DataError

pytestmark = pytest.mark.usefixtures("library")

# (M, N, K): one element, ends of tiles and panels, more than a block in each direction, an adapter's shapes.
SHAPES = [
    (1, 1, 1),
    (5, 7, 3),
    (12, 32, 16),
    (13, 33, 17),
    (25, 500, 1100),
    (7, 577, 8),
    (300, 16, 600),
    (16, 400, 130),
]


def make(rows: int, cols: int, *, is_turned: bool) -> Tensor:
    return torch.randn(cols, rows).t() if is_turned else torch.randn(rows, cols)


@for_each("shape", SHAPES)
@for_each("turned", range(8))
def test_a_product_equals_float64_whichever_sides_are_transposed(shape: tuple[int, int, int], turned: int) -> None:
    rows, cols, depth = shape
    a, b = make(rows, depth, is_turned=bool(turned & 1)), make(depth, cols, is_turned=bool(turned & 2))
    out = make(rows, cols, is_turned=bool(turned & 4))
    exact = a.double() @ b.double()
    added = out.double() - 0.5 * exact
    torch.testing.assert_close(multiply(a, b, out=out, alpha=-0.5, is_added=True).double(), added, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(multiply(a, b, out=out, alpha=2.0).double(), 2 * exact, rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(multiply(a, b).double(), exact, rtol=1e-5, atol=1e-4)


@for_each("shape", SHAPES)
@for_each("rank", [1, 8, 16, 48])
@for_each("is_turned", [False, True])
def test_a_product_with_a_low_rank_part_equals_float64(shape: tuple[int, int, int], rank: int, is_turned: bool) -> None:
    rows, cols, depth = shape
    a, b = torch.randn(rows, depth), make(depth, cols, is_turned=is_turned)
    low_a, low_b = torch.randn(rows, 3 * rank)[:, rank : 2 * rank], make(rank, cols, is_turned=is_turned)
    exact = a.double() @ b.double() + 0.25 * low_a.double() @ low_b.double()
    around = torch.full((rows, cols + 2), 7.0)
    for out in (around[:, 1:-1], None):
        found = multiply_with_low_rank(a, b, low_a, low_b, out=out, scale=0.25)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    assert (around[:, [0, -1]] == 7.0).all()


@for_each("start", [0, 16, 3])
@for_each("depth", [40, 700])
def test_a_large_result_equals_float64_at_any_address(start: int, depth: int) -> None:
    rows, cols = 605, 464
    a, b = torch.randn(rows, depth), torch.randn(depth, cols)
    around = torch.full((rows, 512), 7.0)
    out = around[:, start : start + cols]
    exact = a.double() @ b.double()
    torch.testing.assert_close(multiply(a, b, out=out).double(), exact, rtol=1e-5, atol=3e-4)
    torch.testing.assert_close(multiply(a, b, out=out, is_added=True).double(), 2 * exact, rtol=1e-5, atol=6e-4)
    out.fill_(7.0)
    assert (around == 7.0).all()


@for_each("stride", [1024, 1040])
def test_rows_may_lie_any_distance_apart(stride: int) -> None:
    a, low_a = torch.randn(45, stride)[:, 5:305], torch.randn(45, stride)[:, :7]
    b, low_b = torch.randn(300, 40), torch.randn(7, 40)
    exact = a.double() @ b.double() + 3 * low_a.double() @ low_b.double()
    found = multiply_with_low_rank(a, b, low_a, low_b, scale=3.0)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


def test_a_product_writes_its_part_of_a_tensor_and_nothing_around_it() -> None:
    around = torch.full((30, 90), 7.0)
    a, b = torch.randn(19, 40), torch.randn(40, 51)
    multiply(a, b, out=around[3:22, 11:62])
    torch.testing.assert_close(around[3:22, 11:62], a @ b, rtol=1e-5, atol=1e-4)
    around[3:22, 11:62] = 7.0
    assert (around == 7.0).all()


def test_an_empty_sum_is_zero() -> None:
    out = torch.ones(3, 4)
    assert torch.equal(multiply(torch.ones(3, 0), torch.ones(0, 4), out=out, is_added=True), torch.ones(3, 4))
    assert torch.equal(multiply(torch.ones(3, 0), torch.ones(0, 4), out=out), torch.zeros(3, 4))
    assert multiply(torch.ones(0, 5), torch.ones(5, 4)).shape == (0, 4)


def test_nan_and_infinity_reach_their_rows_alone() -> None:
    a = torch.ones(20, 9)
    a[3, 4], a[5, 2] = float("nan"), float("inf")
    out = multiply(a, torch.ones(9, 40))
    assert out[3].isnan().all()
    assert (out[5] == float("inf")).all()
    assert (out[[i for i in range(20) if i not in (3, 5)]] == 9).all()


def test_other_dtypes_take_torch() -> None:
    a, b = torch.randn(5, 6, dtype=torch.bfloat16), torch.randn(6, 7, dtype=torch.bfloat16)
    assert torch.equal(multiply(a, b), a @ b)
    out = torch.ones(5, 7)
    assert torch.equal(multiply(a, b, out=out, alpha=0.5, is_added=True), torch.ones(5, 7).add_(a @ b, alpha=0.5))


def test_sizes_that_do_not_agree_are_refused() -> None:
    with pytest.raises(DataError, match=r"product of 3 x 4 and 4 x 6; expected float32 \(4, 6\)"):
        cpu_products.product(torch.ones(3, 4), torch.ones(5, 6), torch.ones(3, 6))
    low_rank = torch.ones(3, 2), torch.ones(1, 6), 1.0
    with pytest.raises(DataError, match=r"\(1, 6\) on cpu .* expected float32 \(2, 6\)"):
        cpu_products.product(torch.ones(3, 4), torch.ones(4, 6), torch.ones(3, 6), low_rank=low_rank)
