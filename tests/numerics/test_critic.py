"""The critic: its values and gradients against a naive loop, and against itself cut, packed and saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from naive import NaiveModel, assert_close, displaced_adapter, move, random_ids, relative_error, rl_datum, run
from turnwise.engine.engine import Engine
from turnwise.engine.training.critic import CriticAdapter
from turnwise.errors import CheckpointError, ConfigError, DataError
from turnwise.runtime import tolerances
from turnwise.types import AdamParams, Datum, LoraConfig, ModelInput, TensorData

CLIP = {"value_clip": 0.2}
ADAM = AdamParams(learning_rate=1e-2)


def value_datum(ids: list[int], start: int, seed: int) -> Datum:
    """Values are asked from position `start` on; returns, old values and weights are random."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(len(ids)) >= start).astype(np.float32)
    inputs = {
        "mask": mask,
        "weights": mask * rng.uniform(0.5, 1.5, len(ids)).astype(np.float32),
        "returns": rng.standard_normal(len(ids)).astype(np.float32),
        "values": 0.2 * rng.standard_normal(len(ids)).astype(np.float32),
    }
    return Datum(ModelInput.from_ints(ids), {key: TensorData.from_numpy(value) for key, value in inputs.items()})


TREE = random_ids(40, 1)
DATUMS = [
    *(value_datum(TREE + random_ids(12 + i, 10 + i), start=39, seed=i) for i in range(3)),
    value_datum(TREE[:30], start=5, seed=51),
    value_datum(random_ids(33, 53), start=3, seed=53),
]
"""Three that share 40 tokens, one that is a prefix of them and learns inside it, and a loner."""


def make_critic(engine: Engine, *, seed: int = 5, size: float = 0.05) -> CriticAdapter:
    """A critic that has moved away from its zero start."""
    critic = engine.create_critic(LoraConfig(rank=4, seed=seed, train_unembed=False))
    move(critic, size, seed)
    return critic


def column(datum: Datum, name: str) -> torch.Tensor:
    return torch.tensor(datum.loss_fn_inputs[name].to_numpy())


def naive_values(model: NaiveModel, head: torch.Tensor, datum: Datum) -> torch.Tensor:
    state = dict(model.model.named_parameters())
    changed = {
        f"{name}.weight".removeprefix("model."): state[f"{name}.weight"].detach() + model.scale * (b @ a)
        for name, (a, b) in model.leaves.items()
    }
    ids = torch.tensor([datum.model_input.to_ints()])
    hidden = torch.func.functional_call(model.model.model, changed, (ids,)).last_hidden_state[0]
    return hidden @ head[:-1] + head[-1]


def naive_loss(model: NaiveModel, head: torch.Tensor, datums: list[Datum], clip: float) -> torch.Tensor:
    """The definition, one position after the other."""
    total = torch.zeros(())
    for datum in datums:
        values = naive_values(model, head, datum)
        mask, weights, returns, old = (column(datum, name) for name in ("mask", "weights", "returns", "values"))
        for i in range(len(values)):
            if mask[i]:
                error = (values[i] - returns[i]) ** 2
                near = values[i].clamp(old[i] - clip, old[i] + clip)
                total = total + weights[i] * 0.5 * torch.maximum(error, (near - returns[i]) ** 2)
    return total


def test_values_loss_and_gradients_equal_a_naive_loop(arch_dir: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(arch_dir)
    critic = make_critic(engine)
    naive = NaiveModel(arch_dir, critic)
    head = critic.head_flat.detach().cpu().clone().requires_grad_()
    output = run(engine.forward_backward(critic, DATUMS, "value", CLIP))
    want = naive_loss(naive, head, DATUMS, clip=0.2)
    want.backward()
    assert output.metrics["loss:sum"] == pytest.approx(float(want.detach()), rel=tolerances.LOSS)
    for name, grads in naive.grads().items():
        for got, expected in zip(critic.grad_pairs[name], grads, strict=True):
            assert relative_error(got, expected) < 2e-4, name
    assert head.grad is not None
    assert relative_error(critic.grad[-len(head) :], head.grad) < 1e-4
    for datum, out in zip(DATUMS, output.loss_fn_outputs, strict=True):
        mask = column(datum, "mask")
        assert_close(out["values"].to_numpy(), (naive_values(naive, head, datum) * mask).detach().numpy(), 1e-4)
        assert_close(out["mask"].to_numpy(), mask.numpy(), 0)


def test_the_gradient_agrees_with_finite_differences_of_the_head(make_engine: Callable[..., Engine]) -> None:
    """Without clipping, whose edges have no slope."""
    engine = make_engine()
    critic = make_critic(engine)
    run(engine.forward_backward(critic, DATUMS, "value", None))
    for at in (0, 7, -1):
        losses = []
        for sign in (1, -1):
            critic.head_flat[at] += sign * 1e-2
            moved = make_copy(engine, critic)
            losses.append(run(engine.forward_backward(moved, DATUMS, "value", None)).metrics["loss:sum"])
            critic.head_flat[at] -= sign * 1e-2
        slope = (losses[0] - losses[1]) / 2e-2
        assert slope == pytest.approx(float(critic.grad[len(critic.flat) - len(critic.head_flat) :][at]), rel=1e-2)


def make_copy(engine: Engine, critic: CriticAdapter) -> CriticAdapter:
    other = engine.create_critic(critic.lora)
    other.flat.copy_(critic.flat)
    return other


def test_a_shared_tree_a_pack_and_one_by_one_give_the_same_gradient(make_engine: Callable[..., Engine]) -> None:
    grads = []
    for settings in ({}, {"share_prefixes": False, "micro_batch_tokens": 4096}, {"micro_batch_tokens": 16}):
        engine = make_engine(**settings)
        critic = make_critic(engine)
        run(engine.forward_backward(critic, DATUMS, "value", CLIP))
        grads.append(critic.grad.clone())
    engine = make_engine(share_prefixes=False)
    critic = make_critic(engine)
    for datum in DATUMS:
        run(engine.forward_backward(critic, [datum], "value", CLIP))
    assert grads[0].norm() > 0
    for other in (*grads[1:], critic.grad):
        assert relative_error(grads[0], other) < tolerances.GRADIENTS


def test_a_new_critic_says_zero_and_learns_what_it_is_told(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    critic = engine.create_critic(LoraConfig(rank=4, seed=5, train_unembed=False))
    first = run(engine.forward_backward(critic, DATUMS, "value", None))
    assert all((out["values"].to_numpy() == 0).all() for out in first.loss_fn_outputs)
    for _ in range(60):
        engine.optim_step(critic, ADAM)
        last = run(engine.forward_backward(critic, DATUMS, "value", None))
    assert last.metrics["loss:sum"] < 0.1 * first.metrics["loss:sum"]


def test_forward_gives_the_values_that_learning_saw_and_leaves_no_gradient(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    critic = make_critic(engine)
    asked = run(engine.forward(critic, DATUMS, "value", None))
    assert not critic.grad.any()
    learned = run(engine.forward_backward(critic, DATUMS, "value", None))
    for one, other in zip(asked.loss_fn_outputs, learned.loss_fn_outputs, strict=True):
        assert_close(one["values"].to_numpy(), other["values"].to_numpy(), 1e-6)


def test_what_stands_at_positions_outside_the_mask_changes_nothing(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    grads = []
    for filler in (0.0, 1e6):
        changed = []
        for datum in DATUMS:
            mask = datum.loss_fn_inputs["mask"].to_numpy()
            inputs = {key: value.to_numpy() for key, value in datum.loss_fn_inputs.items()}
            inputs |= {key: np.where(mask > 0, inputs[key], filler) for key in ("weights", "returns", "values")}
            tensors = {key: TensorData.from_numpy(value.astype(np.float32)) for key, value in inputs.items()}
            changed.append(Datum(datum.model_input, tensors))
        critic = make_critic(engine)
        run(engine.forward_backward(critic, changed, "value", CLIP))
        grads.append(critic.grad.clone())
    assert torch.equal(grads[0], grads[1])


def test_a_critic_and_a_policy_on_one_base_do_not_touch_each_other(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    policy, critic = displaced_adapter(engine), make_critic(engine)
    lessons = [rl_datum(TREE + random_ids(12, 10), start=39, seed=1)]
    alone = run(engine.forward(policy, lessons, "cross_entropy", None)).loss_fn_outputs[0]["logprobs"].tolist()
    policy_before, critic_before = policy.flat.clone(), critic.flat.clone()
    run(engine.forward_backward(critic, DATUMS, "value", CLIP))
    engine.optim_step(critic, ADAM)
    assert torch.equal(policy.flat, policy_before)
    assert not policy.grad.any()
    assert not torch.equal(critic.flat, critic_before)
    critic_before = critic.flat.clone()
    run(engine.forward_backward(policy, lessons, "importance_sampling", None))
    engine.optim_step(policy, ADAM)
    assert torch.equal(critic.flat, critic_before)
    policy.flat.copy_(policy_before)
    again = run(engine.forward(policy, lessons, "cross_entropy", None)).loss_fn_outputs[0]["logprobs"].tolist()
    assert again == alone


def test_a_saved_critic_goes_on_as_if_it_had_not_stopped(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine()
    critic = make_critic(engine)
    run(engine.forward_backward(critic, DATUMS, "value", CLIP))
    engine.optim_step(critic, ADAM)
    engine.save_adapter(critic, tmp_path / "critic", with_optimizer=True)
    assert (tmp_path / "critic" / "value_head.safetensors").is_file()
    other = engine.create_critic(LoraConfig(rank=4, seed=99, train_unembed=False))
    engine.load_adapter(other, tmp_path / "critic", with_optimizer=True)
    for one in (critic, other):
        run(engine.forward_backward(one, DATUMS, "value", CLIP))
        engine.optim_step(one, ADAM)
    assert torch.equal(critic.flat, other.flat)
    assert critic.num_steps == other.num_steps == 2


def test_a_critic_is_not_taken_for_a_policy_nor_a_policy_for_a_critic(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine()
    critic, policy = make_critic(engine), displaced_adapter(engine, train_unembed=False)
    engine.save_adapter(critic, tmp_path / "critic", with_optimizer=True)
    engine.save_adapter(policy, tmp_path / "policy", with_optimizer=True)
    before = policy.flat.clone(), critic.flat.clone()
    with pytest.raises(CheckpointError, match=r"is a policy, not a critic: it has no value_head\.safetensors"):
        engine.load_adapter(critic, tmp_path / "policy", with_optimizer=False)
    with pytest.raises(CheckpointError, match="is a critic, not a policy"):
        engine.load_adapter(policy, tmp_path / "critic", with_optimizer=False)
    with pytest.raises(CheckpointError, match="nothing to sample from"):
        engine.load_policy(tmp_path / "critic")
    with pytest.raises(ConfigError, match="sampling needs a policy"):
        engine.publish(critic)
    assert torch.equal(policy.flat, before[0])
    assert torch.equal(critic.flat, before[1])


def test_peft_reads_the_body_of_a_critic(make_engine: Callable[..., Engine], llama_dir: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    engine = make_engine()
    engine.save_adapter(make_critic(engine), tmp_path / "critic", with_optimizer=False)
    model = peft.PeftModel.from_pretrained(NaiveModel(llama_dir).model, tmp_path / "critic")
    assert model.peft_config["default"].r == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"returns": None}, "datum 0: value needs returns"),
        ({"values": None}, "datum 0: value needs values"),
        ({"return": [0.0] * 52}, "no key 'return'; did you mean 'returns'"),
        ({"returns": [0.0]}, r"returns has shape \[1\] and model_input 52 tokens"),
        ({"mask": [0.5] * 52}, "mask holds other numbers than 0 and 1"),
        ({"returns": [float("nan")] * 52}, "returns holds nan at position 0"),
    ],
)
def test_a_datum_that_does_not_fit_is_refused_by_name(
    make_engine: Callable[..., Engine], changed: dict[str, list[float] | None], message: str
) -> None:
    engine = make_engine()
    critic = make_critic(engine)
    inputs = {**DATUMS[0].loss_fn_inputs, **{k: TensorData(v) for k, v in changed.items() if v is not None}}
    for key in [key for key, value in changed.items() if value is None]:
        del inputs[key]
    with pytest.raises(DataError, match=message):
        run(engine.forward_backward(critic, [Datum(DATUMS[0].model_input, inputs)], "value", CLIP))
    assert not critic.grad.any()


@pytest.mark.parametrize(
    ("loss_fn", "config", "message"),
    [
        ("ppo", None, "it knows one loss: 'value'"),
        ("value", {"value_clipp": 0.2}, "did you mean 'value_clip'"),
        ("value", {"value_clip": -1.0}, "value_clip=-1.0; expected a finite number that is not negative"),
    ],
)
def test_a_loss_that_a_critic_does_not_know_is_refused(
    make_engine: Callable[..., Engine], loss_fn: str, config: dict[str, float] | None, message: str
) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match=message):
        run(engine.forward_backward(make_critic(engine), DATUMS, loss_fn, config))
