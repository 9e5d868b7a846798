"""The fused decoder stack against transformers' own modelling code, and its backward pass against autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from naive import displaced_adapter, random_ids, relative_error, rl_datum, run
from turnwise.engine.engine import Engine
from turnwise.engine.model.body import FusedBody
from turnwise.engine.model.kept import KeptRoom, kept_tensors
from turnwise.engine.model.lora import Route, Span
from turnwise.engine.ops import torch_layers
from turnwise.engine.ops.interface import Heads, Rotation
from turnwise.engine.training.pack import pack
from turnwise.runtime import tolerances

MakeEngine = Callable[..., Engine]


@pytest.mark.parametrize("targets", [{}, {"train_mlp": False}, {"train_attn": False, "train_unembed": False}])
def test_fused_gradients_are_those_of_the_modelling_code(
    arch_dir: Path, make_engine: MakeEngine, targets: dict[str, bool]
) -> None:
    prefix = random_ids(40, 1)
    datums = [rl_datum(prefix + random_ids(10 + i, 10 + i), start=30, seed=i) for i in range(4)]
    grads = []
    for is_fused in (True, False):
        engine = make_engine(arch_dir)
        assert engine.model.fused is not None
        if not is_fused:
            engine.model.fused = None
        adapter = displaced_adapter(engine, rank=4, **targets)
        run(engine.forward_backward(adapter, datums, "importance_sampling", None))
        grads.append(adapter.grad.clone())
    assert grads[0].norm() > 0
    assert relative_error(grads[0], grads[1]) < 1e-4


@pytest.mark.parametrize("start", [30, 48])
def test_activations_that_are_computed_twice_give_the_same_gradient(
    arch_dir: Path, make_engine: MakeEngine, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit where the last layer runs on all rows, and where it runs on a few."""
    prefix = random_ids(40, 1)
    datums = [rl_datum(prefix + random_ids(10 + i, 10 + i), start=start, seed=i) for i in range(4)]
    engine = make_engine(arch_dir)
    body = engine.model.fused
    assert body is not None
    blocks_run: list[int] = []
    run_block = body.run_block
    monkeypatch.setattr(body, "run_block", lambda i, *rest: (blocks_run.append(i), run_block(i, *rest))[1])
    grads = []
    for room in (KeptRoom(), KeptRoom(most_bytes=1000)):
        blocks_run.clear()
        engine.model.keep(room)
        adapter = displaced_adapter(engine, rank=4)
        run(engine.forward_backward(adapter, datums, "importance_sampling", None))
        grads.append(adapter.grad.clone())
    assert blocks_run == [0, 1, 1, 0]
    assert grads[0].norm() > 0
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("missing", [(), ("k_proj", "up_proj"), ("q_proj", "gate_proj", "down_proj")])
def test_low_rank_parts_inside_the_products_are_those_beside_them(
    arch_dir: Path, make_engine: MakeEngine, missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter on all rows, with and without some of a group's linears."""
    engine = make_engine(arch_dir)
    where = engine.model.device
    adapter = displaced_adapter(engine, rank=4)
    for pairs in (adapter.pairs, adapter.grad_pairs):
        for name in [name for name in pairs if name.endswith(missing)] if missing else []:
            del pairs[name]
    batch = pack([np.array(random_ids(50, 0)), np.array(random_ids(20, 1))], [0, 1])
    ids, positions = (torch.from_numpy(part).to(where) for part in (batch.input_ids, batch.position_ids))
    found: list[list[torch.Tensor]] = []
    for fewest in (0, 384):
        monkeypatch.setattr("turnwise.engine.ops.cpu_products.MIN_ROWS_ALONG", fewest)
        hidden = engine.model.hidden(ids, positions, batch.plan, Route(spans=[Span(0, 70, adapter)]))
        hidden.backward(torch.linspace(-1, 1, hidden.numel(), device=where).view_as(hidden))
        found.append([hidden.detach(), adapter.grad.clone()])
        adapter.grad.zero_()
    for inside, beside in zip(*found, strict=True):
        assert relative_error(inside, beside) < tolerances.GRADIENTS


def test_hidden_states_are_those_of_the_modelling_code(arch_dir: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(arch_dir)
    policy = engine.publish(displaced_adapter(engine, rank=4))
    batch = pack([np.array(random_ids(50, 0)), np.array(random_ids(20, 1))], [0, 1])
    ids, positions = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.position_ids)
    route = Route(spans=[Span(0, 30, policy), Span(40, 70, policy)])
    model = engine.model
    where = model.device
    with torch.no_grad():
        fused = model.hidden(ids.to(where), positions.to(where), batch.plan, route)
        model.fused = None
        plain = model.hidden(ids.to(where), positions.to(where), batch.plan, route)
    torch.testing.assert_close(fused, plain, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [[0, 3, 29, 30, 39, 40, 69], [5, 5, 6, 50, 50, 50], [69], []])
def test_some_rows_are_those_of_all_forward_and_backward(
    arch_dir: Path, make_engine: MakeEngine, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two adapters, rows of both, of one and of none; a row may be asked for twice."""
    engine = make_engine(arch_dir)
    where = engine.model.device
    adapters = [displaced_adapter(engine, rank=rank) for rank in (4, 8)]
    batch = pack([np.array(random_ids(50, 0)), np.array(random_ids(20, 1))], [0, 1])
    ids, positions = (torch.from_numpy(part).to(where) for part in (batch.input_ids, batch.position_ids))
    route = Route(spans=[Span(0, 30, adapters[0]), Span(40, 70, adapters[1])])
    wanted = torch.tensor(rows, dtype=torch.int64, device=where)
    found: list[list[torch.Tensor]] = []
    for most in (0.75, -1.0):  # the last layer on these rows, and on all
        monkeypatch.setattr("turnwise.engine.model.body.MOST_ROWS", most)
        hidden = engine.model.hidden(ids, positions, batch.plan, route, wanted)
        hidden.backward(torch.linspace(-1, 1, hidden.numel(), device=where).view_as(hidden))
        found.append([hidden.detach(), *(adapter.grad.clone() for adapter in adapters)])
        for adapter in adapters:
            adapter.grad.zero_()
    for some, full in zip(*found, strict=True):
        torch.testing.assert_close(some, full, atol=2e-5, rtol=2e-5)


def test_a_block_is_fused_when_every_part_is_supported(arch_dir: Path, make_engine: MakeEngine) -> None:
    sizes = make_engine(arch_dir).model.sizes
    assert sizes.block is not None
    assert FusedBody.supports(sizes)
    others = {"norm": "layer", "norm_place": "after", "rotation": "none", "mlp": "plain", "activation": "gelu"}
    for part, kind in (*others.items(), ("angles", "longrope")):
        assert not FusedBody.supports(replace(sizes, block=replace(sizes.block, **{part: kind}))), part
    assert not FusedBody.supports(replace(sizes, block=None))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pass_keeps_exactly_the_tensors_that_its_block_lists(
    arch_dir: Path, make_engine: MakeEngine, dtype: str
) -> None:
    engine = make_engine(arch_dir, dtype=dtype)
    where, model = engine.model.device, engine.model
    adapter = displaced_adapter(engine, rank=4)
    batch = pack([np.array(random_ids(50, 0)), np.array(random_ids(20, 1))], [0, 1])
    ids, positions = (torch.from_numpy(part).to(where) for part in (batch.input_ids, batch.position_ids))
    hidden = model.hidden(ids, positions, batch.plan, Route(spans=[adapter.span(0, 70)]))
    listed = kept_tensors(model.sizes, model.activation_dtype.itemsize, 4, model.ops.facts)
    for kept in hidden.grad_fn.kept.blocks:  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept.tensors()}
        assert sum(storage.nbytes() for storage in storages.values()) == 70 * sum(k.size * k.itemsize for k in listed)


def test_norm_backward_equals_autograd() -> None:
    h = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    weight, dx, around = torch.randn(24).double(), torch.randn(5, 24).double(), torch.randn(5, 24).double()
    x = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight
    (want,) = torch.autograd.grad((x * dx).sum() + (h * around).sum(), h)
    total, _, rstd = torch_layers.add_norm(h.detach().float(), None, weight.float(), 1e-6)
    got = torch_layers.norm_backward(dx.float(), total, rstd, weight.float(), around.float())
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_norm", [True, False])
def test_rotate_backward_equals_autograd(has_norm: bool) -> None:
    norms = (torch.randn(16), torch.randn(16)) if has_norm else (None, None)
    heads = Heads(4, 2, 16, *norms, 1e-6)
    angles = torch.randn(9, 8)
    rotation = Rotation(angles.cos(), angles.sin(), torch.tensor([0, 3, 8, 1, 1]))
    qkv = torch.randn(5, 8 * 16, requires_grad=True)
    sides = torch_layers.rotate(qkv, heads, rotation, None)
    grads = torch.randn_like(sides[0]), torch.randn_like(sides[1]), torch.randn_like(sides[2])
    (want,) = torch.autograd.grad(sides, qkv, grads)
    got = torch_layers.rotate_backward(grads, qkv.detach() if has_norm else None, heads, rotation)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_swiglu_backward_equals_autograd() -> None:
    gate_up, dact = torch.randn(5, 40, requires_grad=True), torch.randn(5, 20)
    gate, up = gate_up.chunk(2, dim=-1)
    act = torch.nn.functional.silu(gate) * up
    (want,) = torch.autograd.grad(act, gate_up, dact)
    got, again = torch_layers.swiglu_backward(dact.clone(), gate_up.detach().clone())
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again, act.detach())
