"""The fused C kernels between matrix products against plain torch."""

import dataclasses

import pytest
import torch
from torch import Tensor

from cases import for_each
from turnwise.engine.ops import cpu_layers, torch_layers
from turnwise.engine.ops.cpu_products import empty_rows
from turnwise.engine.ops.interface import CacheSlots, Heads, Rotation
from turnwise.errors import DataError

pytestmark = pytest.mark.usefixtures("library")

ROWS = [1, 2, 7, 133]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype is expected.dtype
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def make_heads(num_query: int, num_kv: int, size: int, *, has_norm: bool) -> Heads:
    norms = (torch.rand(size) + 0.5, torch.rand(size) + 0.5) if has_norm else (None, None)
    return Heads(num_query, num_kv, size, *norms, 1e-5)


def make_rotation(rows: int, size: int) -> Rotation:
    angles = torch.rand(97, size // 2) * 6.3
    return Rotation(angles.cos(), angles.sin(), torch.randint(97, (rows,)))


@for_each("rows", ROWS)
@for_each("size", [1, 16, 37, 576])
@for_each("has_delta", [False, True])
def test_add_norm_equals_the_plain_steps(rows: int, size: int, has_delta: bool) -> None:
    h, weight = torch.randn(rows, size), torch.randn(size)
    delta = torch.randn(rows, size) if has_delta else None
    for actual, expected in zip(
        cpu_layers.add_norm(h, delta, weight, 1e-5), torch_layers.add_norm(h, delta, weight, 1e-5), strict=True
    ):
        assert_close(actual, expected)


@for_each("rows", ROWS)
@for_each("size", [1, 16, 37, 576])
@for_each("has_residual", [False, True])
def test_norm_backward_equals_the_plain_steps(rows: int, size: int, has_residual: bool) -> None:
    h, dx, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    rstd = torch.rand(rows) + 0.5
    dh = torch.randn(rows, size) if has_residual else None
    expected = torch_layers.norm_backward(dx, h, rstd, weight, None if dh is None else dh.clone())
    actual = cpu_layers.norm_backward(dx, h, rstd, weight, dh)
    assert_close(actual, expected)
    assert dh is None or actual is dh


@for_each("rows", ROWS)
@for_each("shape", [(1, 1, 2), (4, 2, 10), (9, 3, 64), (2, 2, 256)])
@for_each("has_norm", [False, True])
@for_each("has_cache", [False, True])
def test_rotate_equals_the_plain_steps(rows: int, shape: tuple[int, int, int], has_norm: bool, has_cache: bool) -> None:
    heads, rotation = make_heads(*shape, has_norm=has_norm), make_rotation(rows, shape[2])
    qkv = torch.randn(rows, (shape[0] + 2 * shape[1]) * shape[2])
    caches = []
    for ops in (cpu_layers, torch_layers):
        empty = torch.zeros(2, rows + 5, *shape[1:])
        caches.append(CacheSlots(empty[0], empty[1], torch.arange(rows).flip(0) + 3) if has_cache else None)
        result = ops.rotate(qkv.clone(), heads, rotation, caches[-1])
        if ops is cpu_layers:
            ours = result
    for actual, expected in zip(ours, result, strict=True):
        assert_close(actual, expected)
    if caches[0] is not None and caches[1] is not None:
        assert_close(caches[0].keys, caches[1].keys)
        assert_close(caches[0].values, caches[1].values)


@for_each("has_norm", [False, True])
def test_a_pass_without_a_cache_keeps_heads_once_unless_it_needs_them_as_they_were(has_norm: bool) -> None:
    qkv = torch.randn(5, 32)
    before = qkv.clone()
    parts = cpu_layers.rotate(qkv, make_heads(2, 1, 8, has_norm=has_norm), make_rotation(5, 8), None)
    storages = {part.untyped_storage().data_ptr() for part in parts}
    assert (len(storages) == 1) is not has_norm
    assert torch.equal(qkv, before) is has_norm


@for_each("rows", ROWS)
@for_each("shape", [(1, 1, 2), (4, 2, 10), (9, 3, 64), (2, 2, 256)])
@for_each("has_norm", [False, True])
@for_each("is_heads_first", [False, True])
def test_rotate_backward_equals_the_plain_steps(
    rows: int, shape: tuple[int, int, int], has_norm: bool, is_heads_first: bool
) -> None:
    heads, rotation = make_heads(*shape, has_norm=has_norm), make_rotation(rows, shape[2])
    qkv = torch.randn(rows, (shape[0] + 2 * shape[1]) * shape[2]) if has_norm else None
    nums = (shape[0], shape[1], shape[1])
    if is_heads_first:
        dq, dk, dv = (torch.randn(num, rows, shape[2]).transpose(0, 1) for num in nums)
    else:
        dq, dk, dv = (torch.randn(rows, num, shape[2]) for num in nums)
    actual = cpu_layers.rotate_backward((dq, dk, dv), qkv, heads, rotation)
    assert_close(actual, torch_layers.rotate_backward((dq, dk, dv), qkv, heads, rotation))


@for_each("rows", ROWS)
@for_each("size", [1, 16, 37, 300])
def test_swiglu_equals_the_plain_steps_forward_and_backward(rows: int, size: int) -> None:
    gate_up, dact = torch.randn(rows, 2 * size) * 5, torch.randn(rows, size)
    assert_close(cpu_layers.swiglu(gate_up), torch_layers.swiglu(gate_up))
    expected = torch_layers.swiglu_backward(dact.clone(), gate_up.clone())
    for actual, wanted in zip(cpu_layers.swiglu_backward(dact, gate_up), expected, strict=True):
        assert_close(actual, wanted)


def test_results_take_the_room_they_are_given_where_it_fits() -> None:
    h, weight, gate_up = torch.randn(5, 40), torch.randn(40), torch.randn(5, 80)
    fitting, other = torch.empty(5, 40), torch.empty(6, 40)
    for room in (fitting, other):
        x = cpu_layers.add_norm(h, None, weight, 1e-5, room=room)[1]
        assert (x is room) is (room is fitting)
        assert_close(x, torch_layers.add_norm(h, None, weight, 1e-5)[1])
        act = cpu_layers.swiglu(gate_up, room=room)
        assert (act is room) is (room is fitting)
        assert_close(act, torch_layers.swiglu(gate_up))


def test_swiglu_reads_and_writes_rows_with_room_between_them() -> None:
    plain = torch.randn(133, 1024)
    gate_up = empty_rows(plain, 133, 1024).copy_(plain)
    assert gate_up.stride(0) == 1040, "rows of 4 KiB get a cache line more"
    assert empty_rows(plain, 133, 1000).is_contiguous(), "others do not need it"
    assert_close(cpu_layers.swiglu(gate_up), torch_layers.swiglu(plain))
    dact = torch.randn(133, 512)
    expected = torch_layers.swiglu_backward(dact.clone(), plain.clone())
    for actual, wanted in zip(cpu_layers.swiglu_backward(dact, gate_up), expected, strict=True):
        assert_close(actual, wanted)


def test_swiglu_is_exact_for_gates_of_any_size() -> None:
    gate = torch.linspace(-110, 110, 4001)
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None]
    exact = torch.nn.functional.silu(gate.double())
    error = (cpu_layers.swiglu(gate_up)[0].double() - exact).abs()
    assert (error <= 1e-6 * exact.abs() + 1e-35).all()


def test_a_nan_stays_visible() -> None:
    row = torch.ones(1, 40)
    row[0, 21] = float("nan")
    assert cpu_layers.add_norm(row, None, torch.ones(40), 1e-5)[1].isnan().all()
    assert cpu_layers.swiglu(row).isnan().sum() == 1
    assert cpu_layers.norm_backward(row, torch.ones(1, 40), torch.ones(1), torch.ones(40), None).isnan().all()


def test_other_dtypes_and_layouts_take_the_plain_steps() -> None:
    narrow = torch.randn(3, 20, dtype=torch.bfloat16)
    for actual, expected in zip(
        cpu_layers.add_norm(narrow, narrow, narrow[0], 1e-5),
        torch_layers.add_norm(narrow, narrow, narrow[0], 1e-5),
        strict=True,
    ):
        assert torch.equal(actual, expected)
    turned = torch.randn(20, 3).t()
    assert torch.equal(cpu_layers.swiglu(turned), torch_layers.swiglu(turned))
    heads, rotation = make_heads(2, 1, 4, has_norm=False), make_rotation(3, 4)
    short = dataclasses.replace(rotation, positions=rotation.positions.int())
    qkv = torch.randn(3, 16)
    assert torch.equal(
        cpu_layers.rotate(qkv, heads, short, None)[0], torch_layers.rotate(qkv, heads, rotation, None)[0]
    )


def test_sizes_that_do_not_agree_are_refused() -> None:
    with pytest.raises(DataError, match=r"add_norm: a tensor of \(4,\) beside one of \(2, 5\), expected \(5,\)"):
        cpu_layers.add_norm(torch.ones(2, 5), None, torch.ones(4), 1e-5)
    with pytest.raises(DataError, match="swiglu_backward"):
        cpu_layers.swiglu_backward(torch.ones(2, 5), torch.ones(2, 9))


@for_each("position", [-1, 97])
def test_a_position_beyond_the_table_is_refused(position: int) -> None:
    heads, rotation = make_heads(2, 1, 4, has_norm=False), make_rotation(3, 4)
    rotation.positions[1] = position
    with pytest.raises(DataError, match=r"within 0\.\.96"):
        cpu_layers.rotate(torch.ones(3, 16), heads, rotation, None)


def test_a_slot_beyond_the_cache_is_refused() -> None:
    heads, rotation = make_heads(2, 1, 4, has_norm=False), make_rotation(3, 4)
    cache = CacheSlots(torch.zeros(4, 1, 4), torch.zeros(4, 1, 4), torch.tensor([0, 4, 1]))
    with pytest.raises(DataError, match=r"slots, if any, within 0\.\.3"):
        cpu_layers.rotate(torch.ones(3, 16), heads, rotation, cache)
