"""The C gradients of low-rank parts against torch in float64."""

import pytest
import torch

from cases import for_each
from turnwise.engine.ops import cpu_low_rank
from turnwise.engine.ops.cpu_products import low_rank_gradients
from turnwise.errors import DataError

pytestmark = pytest.mark.usefixtures("library")

# (M, I, R): one element, ends of rows, chunks and vectors, enough for several threads, ranks above one vector.
SHAPES = [(1, 1, 1), (5, 7, 3), (12, 512, 16), (13, 513, 8), (31, 40, 48), (300, 600, 16), (290, 1100, 17)]


@for_each("shape", SHAPES)
def test_both_gradients_equal_float64(shape: tuple[int, int, int]) -> None:
    rows, cols, rank = shape
    dy, low = torch.randn(rows, cols + 9)[:, 4 : 4 + cols], torch.randn(rows, 2 * rank)[:, :rank]
    b, grad_b = torch.randn(cols, rank), torch.randn(cols, rank)
    around = torch.full((rows, rank + 2), 7.0)
    added = grad_b.double() + 0.5 * dy.double().t() @ low.double()
    low_rank_gradients(dy, low, b, grad_b, out=around[:, 1:-1], scale=0.5)
    torch.testing.assert_close(grad_b.double(), added, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(around[:, 1:-1].double(), 0.5 * dy.double() @ b.double(), rtol=1e-5, atol=1e-4)
    assert (around[:, [0, -1]] == 7.0).all()


def test_gradients_are_the_same_every_time() -> None:
    dy, low, b = torch.randn(500, 700), torch.randn(500, 16), torch.randn(700, 16)
    sums = [torch.zeros(700, 16) for _ in range(2)]
    for grad_b in sums:
        low_rank_gradients(dy, low, b, grad_b, out=torch.empty(500, 16), scale=1.0)
    assert torch.equal(*sums)


def test_no_rows_leave_the_gradient_as_it_is() -> None:
    grad_b = torch.ones(6, 2)
    low_rank_gradients(torch.ones(0, 6), torch.ones(0, 2), torch.ones(6, 2), grad_b, out=torch.ones(0, 2), scale=1.0)
    assert torch.equal(grad_b, torch.ones(6, 2))


@for_each("dtype", [torch.float32, torch.bfloat16])
def test_what_the_kernel_does_not_read_takes_products(dtype: torch.dtype) -> None:
    dy, low, b = torch.randn(9, 20).t().to(dtype), torch.randn(20, 3).to(dtype), torch.randn(9, 3).to(dtype)
    grad_b, out = torch.zeros(9, 3), torch.empty(20, 3, dtype=dtype)
    low_rank_gradients(dy, low, b, grad_b, out=out, scale=2.0)
    torch.testing.assert_close(grad_b, 2 * (dy.t() @ low).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, 2 * (dy @ b), rtol=1e-5, atol=1e-5)


def test_sizes_that_do_not_agree_are_refused() -> None:
    dy, low, grad_b, b = torch.ones(4, 6), torch.ones(4, 2), torch.ones(6, 2), torch.ones(5, 2)
    with pytest.raises(DataError, match=r"\(5, 2\) on cpu beside 4 x 6; expected float32 \(6, 2\)"):
        cpu_low_rank.gradients(dy, low, grad_b, b, torch.ones(4, 2), 1.0)
