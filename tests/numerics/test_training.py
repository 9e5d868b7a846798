"""Gradients and logprobs of the trainer: against a naive model, and against itself cut and packed differently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from naive import NaiveModel, assert_close, displaced_adapter, random_ids, relative_error, rl_datum, run
from turnwise.engine.engine import Engine
from turnwise.errors import DataError
from turnwise.runtime import tolerances
from turnwise.types import AdamParams, Datum, LoraConfig, ModelInput

TREE = random_ids(40, 1)
GROUP = [rl_datum(TREE + random_ids(12 + i, 10 + i), start=39, seed=i) for i in range(4)]
"""Four datums that share 40 tokens."""
DEEP = [
    *GROUP,
    rl_datum(TREE[:30] + random_ids(20, 50), start=10, seed=50),
    rl_datum(TREE[:30], start=5, seed=51),
    rl_datum(TREE + random_ids(12, 10) + random_ids(25, 52), start=20, seed=52),
    rl_datum(random_ids(33, 53), start=3, seed=53),
]
"""Branches off branches, a datum that is a prefix of others, one whose trained tokens others share, and a loner."""


def naive_importance_sampling(model: NaiveModel, datums: list[Datum]) -> float:
    total = torch.zeros(())
    for datum in datums:
        inputs = {key: torch.tensor(value.to_numpy()) for key, value in datum.loss_fn_inputs.items()}
        logprobs = model.logprobs(datum)
        for i in range(len(logprobs)):
            if inputs["mask"][i]:
                total = total - torch.exp(logprobs[i] - inputs["logprobs"][i]) * inputs["advantages"][i]
    total.backward()
    return float(total.detach())


def engine_grads(engine: Engine, datums: list[Datum], loss_fn: str = "importance_sampling", **config) -> torch.Tensor:
    adapter = displaced_adapter(engine)
    run(engine.forward_backward(adapter, datums, loss_fn, config or None))
    return adapter.grad.clone()


@pytest.mark.parametrize("datums", [[GROUP[0]], GROUP, DEEP], ids=["one", "group", "deep tree"])
def test_gradients_and_logprobs_equal_a_naive_model(arch_dir: Path, make_engine: Callable[..., Engine], datums) -> None:
    engine = make_engine(arch_dir)
    adapter = displaced_adapter(engine)
    naive = NaiveModel(arch_dir, adapter)
    output = run(engine.forward_backward(adapter, datums, "importance_sampling", None))
    want = naive_importance_sampling(naive, datums)
    assert output.metrics["loss:sum"] == pytest.approx(want, rel=tolerances.LOSS, abs=1e-4)
    for name, grads in naive.grads().items():
        for got, expected in zip(adapter.grad_pairs[name], grads, strict=True):
            assert relative_error(got, expected) < 2e-4, name
    for datum, out in zip(datums, output.loss_fn_outputs, strict=True):
        mask = datum.loss_fn_inputs["mask"].to_numpy()
        expected = naive.logprobs(datum).detach().numpy() * mask
        assert_close(out["logprobs"].to_numpy(), expected, 1e-4)
        assert_close(out["mask"].to_numpy(), mask, 0)


@pytest.mark.parametrize(
    ("loss_fn", "config"),
    [
        ("importance_sampling", {}),
        ("ppo", {"dual_clip": 3.0}),
        ("cispo", {}),
        ("dro", {"beta": 0.1}),
        ("gspo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("importance_sampling", {"entropy_coef": 0.3}),
        ("importance_sampling", {"kl_coef": 0.2, "kl_estimator": "k2"}),
        ("gspo", {"entropy_coef": 0.3, "clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
        ("ppo", {"correction": "sequence_geo_mask", "correction_low": 0.05, "correction_high": 20.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "plain",
)
def test_a_shared_tree_a_pack_and_one_by_one_give_the_same_gradient(make_engine, loss_fn: str, config) -> None:
    tree = engine_grads(make_engine(), DEEP, loss_fn, **config)
    packed = engine_grads(make_engine(share_prefixes=False, micro_batch_tokens=4096), DEEP, loss_fn, **config)
    cut = engine_grads(make_engine(micro_batch_tokens=16), DEEP, loss_fn, **config)
    engine = make_engine(share_prefixes=False)
    adapter = displaced_adapter(engine)
    for datum in DEEP:
        run(engine.forward_backward(adapter, [datum], loss_fn, config or None))
    assert tree.norm() > 0
    for other in (packed, cut, adapter.grad):
        assert relative_error(tree, other) < tolerances.GRADIENTS


def test_the_tree_computes_shared_tokens_once() -> None:
    from turnwise.engine.training.pack import pack

    sequences = [np.asarray(d.model_input.to_ints()) for d in GROUP]
    batch = pack(sequences, range(len(GROUP)))
    assert batch.num_tokens == 40 + sum(len(s) - 40 for s in sequences)
    for sequence, index in zip((sequences[m] for m in batch.members), batch.packed_index, strict=True):
        assert_close(batch.input_ids[index], sequence, 0)
        assert_close(batch.position_ids[index], np.arange(len(sequence)), 0)


def test_changing_one_datum_leaves_the_logprobs_of_the_others_unchanged(make_engine) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    other = rl_datum(TREE + random_ids(15, 99), start=39, seed=9)
    first = run(engine.forward(adapter, [GROUP[0], GROUP[1]], "importance_sampling", None))
    second = run(engine.forward(adapter, [GROUP[0], other], "importance_sampling", None))
    assert_close(first.loss_fn_outputs[0]["logprobs"].data, second.loss_fn_outputs[0]["logprobs"].data, 1e-6)


def test_forward_gives_logprobs_of_every_target_and_no_gradient(arch_dir: Path, make_engine) -> None:
    engine = make_engine(arch_dir)
    adapter = displaced_adapter(engine)
    output = run(engine.forward(adapter, DEEP, "importance_sampling", None))
    naive = NaiveModel(arch_dir, adapter)
    for datum, out in zip(DEEP, output.loss_fn_outputs, strict=True):
        assert_close(out["logprobs"].to_numpy(), naive.logprobs(datum).detach().numpy(), 1e-4)
    assert not adapter.grad.any()


def test_two_adapters_in_one_batch_equal_each_alone(make_engine) -> None:
    engine = make_engine()
    shapes = [{"rank": 4}, {"rank": 7, "train_mlp": False}, {"rank": 2, "train_attn": False, "train_unembed": False}]
    together = [displaced_adapter(engine, seed=i, **shape) for i, shape in enumerate(shapes)]
    alone = [displaced_adapter(engine, seed=i, **shape) for i, shape in enumerate(shapes)]
    batches = [GROUP, DEEP, DEEP[4:]]
    outputs = run(engine.forward_backward_many(list(zip(together, batches, strict=True)), "importance_sampling", None))
    for adapter, single, datums, output in zip(together, alone, batches, outputs, strict=True):
        want = run(engine.forward_backward(single, datums, "importance_sampling", None))
        assert relative_error(adapter.grad, single.grad) < tolerances.GRADIENTS
        assert output.metrics["loss:sum"] == pytest.approx(want.metrics["loss:sum"], rel=1e-5, abs=1e-5)


def test_temperature_divides_the_logits_of_its_own_token(arch_dir: Path, make_engine) -> None:
    engine = make_engine(arch_dir)
    adapter = displaced_adapter(engine)
    rng = np.random.default_rng(4)
    datums = [
        rl_datum(TREE + random_ids(9, 20 + i), start=30, seed=i, temperature=rng.uniform(0.5, 1.5, 48).tolist())
        for i in range(3)
    ]
    naive = NaiveModel(arch_dir, adapter)
    want = naive_importance_sampling(naive, datums)
    output = run(engine.forward_backward(adapter, datums, "importance_sampling", None))
    assert output.metrics["loss:sum"] == pytest.approx(want, rel=tolerances.LOSS, abs=1e-4)
    for name, grads in naive.grads().items():
        assert relative_error(adapter.grad_pairs[name][1], grads[1]) < 2e-4, name


def test_entropy_and_its_gradient_equal_a_naive_model(llama_dir: Path, make_engine) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    naive = NaiveModel(llama_dir, adapter)
    total = torch.zeros(())
    for datum in GROUP:
        inputs = {key: torch.tensor(value.to_numpy()) for key, value in datum.loss_fn_inputs.items()}
        logprobs = torch.log_softmax(naive.logits(datum.model_input.to_ints()), dim=-1)
        entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
        total = total - 0.5 * (inputs["mask"] * entropies).sum()
    total.backward()
    zero = [_without_advantage(d) for d in GROUP]
    output = run(engine.forward_backward(adapter, zero, "importance_sampling", {"entropy_coef": 0.5}))
    assert output.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=tolerances.LOSS)
    for name, grads in naive.grads().items():
        assert relative_error(adapter.grad_pairs[name][0], grads[0]) < 5e-4, name


def _without_advantage(datum: Datum) -> Datum:
    zeros = [0.0] * datum.model_input.length
    return Datum(datum.model_input, {**datum.loss_fn_inputs, "advantages": zeros})


def test_kl_to_the_base_is_measured_and_pulls_back(make_engine) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    zero = [_without_advantage(d) for d in GROUP]
    kl = []
    for _ in range(30):
        output = run(engine.forward_backward(adapter, zero, "importance_sampling", {"kl_coef": 1.0}))
        kl.append(output.metrics["kl_reference:mean"])
        engine.optim_step(adapter, AdamParams(learning_rate=3e-3))
    assert kl[-1] < 0.1 * kl[0]


def test_kl_to_a_saved_adapter_is_zero_at_that_adapter(make_engine, tmp_path: Path) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    engine.save_adapter(adapter, tmp_path / "reference", with_optimizer=False)
    zero = [_without_advantage(d) for d in GROUP]
    config = {"kl_coef": 1.0, "kl_reference": str(tmp_path / "reference")}
    output = run(engine.forward_backward(adapter, zero, "importance_sampling", config))
    assert output.metrics["kl_reference:mean"] == pytest.approx(0, abs=1e-9)
    base = run(engine.forward_backward(adapter, zero, "importance_sampling", {"kl_coef": 1.0}))
    assert base.metrics["kl_reference:mean"] > 1e-4


def test_a_forward_with_a_reference_gives_the_references_logprobs(make_engine, tmp_path: Path) -> None:
    engine = make_engine()
    adapter, fresh = displaced_adapter(engine), engine.create_adapter(LoraConfig(rank=4))
    engine.save_adapter(adapter, tmp_path / "reference", with_optimizer=False)

    def logprobs(of, config: dict[str, str] | None) -> list[float]:
        output = run(engine.forward(of, DEEP, "cross_entropy", config))
        return [value for one in output.loss_fn_outputs for value in one["logprobs"].tolist()]

    base, moved = logprobs(fresh, None), logprobs(adapter, None)
    assert base != pytest.approx(moved, abs=1e-3)
    assert logprobs(adapter, {"kl_reference": "base"}) == pytest.approx(base, abs=1e-5)
    assert logprobs(fresh, {"kl_reference": str(tmp_path / "reference")}) == pytest.approx(moved, abs=1e-5)


def test_a_custom_loss_equals_the_built_in_one(make_engine) -> None:
    engine = make_engine()
    built_in, custom = displaced_adapter(engine), displaced_adapter(engine)

    def importance_sampling(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = torch.zeros(())
        for datum, p in zip(data, logprobs, strict=True):
            columns = {key: torch.tensor(value.to_numpy()) for key, value in datum.loss_fn_inputs.items()}
            total = total - (columns["mask"] * torch.exp(p - columns["logprobs"]) * columns["advantages"]).sum()
        return total, {"mine": 1.0}

    want = run(engine.forward_backward(built_in, DEEP, "importance_sampling", None))
    got = run(engine.forward_backward_custom(custom, DEEP, importance_sampling))
    assert got.metrics["loss:sum"] == pytest.approx(want.metrics["loss:sum"], rel=tolerances.LOSS)
    assert got.metrics["mine:mean"] == 1.0
    assert relative_error(custom.grad, built_in.grad) < 1e-4


def test_a_call_that_fails_leaves_the_accumulated_gradient_as_it_was(make_engine) -> None:
    engine = make_engine(micro_batch_tokens=16)
    adapter = displaced_adapter(engine)
    run(engine.forward_backward(adapter, GROUP, "importance_sampling", None))
    before = adapter.grad.clone()
    work = engine.forward_backward(adapter, DEEP, "importance_sampling", None)
    next(work)
    assert not torch.equal(adapter.grad, before)
    with pytest.raises(RuntimeError, match="interrupted"):
        work.throw(RuntimeError("interrupted"))
    assert torch.equal(adapter.grad, before)


def test_adamw_equals_torch_on_the_same_gradients(make_engine) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    params = AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-7, weight_decay=0.1, grad_clip_norm=0.5)
    twin = adapter.flat.clone().requires_grad_()
    torch_adam = torch.optim.AdamW([twin], lr=1e-2, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.1)
    for _ in range(3):
        output = run(engine.forward_backward(adapter, GROUP, "importance_sampling", None))
        assert np.isfinite(output.loss)
        twin.grad = adapter.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_([twin], 0.5)
        torch_adam.step()
        metrics = engine.optim_step(adapter, params)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert relative_error(adapter.flat, twin.detach()) < 1e-6
        assert not adapter.grad.any()


def test_a_gradient_that_is_not_finite_changes_no_weight(make_engine) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    before = adapter.flat.clone()
    adapter.grad[3] = float("nan")
    with pytest.raises(DataError, match="gradient norm is nan"):
        engine.optim_step(adapter, AdamParams())
    assert torch.equal(adapter.flat, before)
    assert not adapter.grad.any()


def test_the_same_seed_starts_the_same_adapter_and_a_fresh_one_changes_nothing(make_engine) -> None:
    engine = make_engine()
    first, second = (engine.create_adapter(LoraConfig(rank=3, seed=11)) for _ in range(2))
    assert torch.equal(first.flat, second.flat)
    datum = Datum(ModelInput.from_ints(TREE[:-1]), {"target_tokens": TREE[1:]})
    fresh = run(engine.forward(first, [datum], "cross_entropy", None))
    naive = NaiveModel(engine.model_dir)
    assert_close(fresh.loss_fn_outputs[0]["logprobs"].data, naive.logprobs(datum).detach().numpy(), 1e-5)


def test_forward_measures_the_kl_that_forward_backward_trains_on(make_engine) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    config = {"kl_coef": 1.0}
    read = run(engine.forward(adapter, GROUP, "importance_sampling", config))
    trained = run(engine.forward_backward(adapter, GROUP, "importance_sampling", config))
    assert read.metrics["kl_reference:mean"] == pytest.approx(trained.metrics["kl_reference:mean"], rel=1e-5)
    assert read.metrics["loss:sum"] == pytest.approx(trained.metrics["loss:sum"], rel=tolerances.LOSS)
