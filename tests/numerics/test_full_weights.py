"""All weights in training: gradients are transformers', versions stay as they were published, files are Hugging
Face's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cases import for_each
from naive import assert_close, make_model, random_ids, relative_error, rl_datum, run, sample, sample_many
from turnwise.engine.engine import Engine
from turnwise.engine.training.full_weights import FullWeights
from turnwise.errors import CheckpointError, ConfigError
from turnwise.types import AdamParams, Datum, LoraConfig

MakeEngine = Callable[..., Engine]
PROMPT = random_ids(40, 1)
GROUP = [rl_datum(PROMPT + random_ids(12 + i, 10 + i), start=39, seed=i) for i in range(4)]
"""Four datums that share 40 tokens."""
DATUMS = [*GROUP, rl_datum(PROMPT[:30] + random_ids(20, 50), start=10, seed=50), rl_datum(random_ids(33, 53), start=3)]
STEP = AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)


def naive_gradients(directory: Path, datums: list[Datum]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of `importance_sampling`, with transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    total = torch.zeros(())
    for datum in datums:
        logits = model(torch.tensor(datum.model_input.to_ints())[None]).logits[0]
        own = {key: torch.tensor(value.to_numpy()) for key, value in datum.loss_fn_inputs.items()}
        logprobs = logits.log_softmax(-1).gather(1, own["target_tokens"].long()[:, None])[:, 0]
        total = total - (own["mask"] * torch.exp(logprobs - own["logprobs"]) * own["advantages"]).sum()
    total.backward()
    return float(total.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


def whole_weights(engine: Engine) -> FullWeights:
    trainable = engine.create_full()
    assert isinstance(trainable, FullWeights), "one process holds them all"
    return trainable


def check_gradients(engine: Engine, directory: Path) -> FullWeights:
    trainable = whole_weights(engine)
    output = run(engine.forward_backward(trainable, DATUMS, "importance_sampling", None))
    loss, expected = naive_gradients(directory, DATUMS)
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4, abs=1e-4)
    found = trainable.layout.views(trainable.grad)
    assert set(found) == set(expected)
    for name, grad in expected.items():
        if grad is None:  # an expert that no token was sent to
            assert not found[name].any(), name
        else:
            assert relative_error(found[name], grad) < 2e-4, name
    return trainable


def trained(engine: Engine, steps: int = 2, trainable: FullWeights | None = None) -> FullWeights:
    trainable = trainable or whole_weights(engine)
    for _ in range(steps):
        run(engine.forward_backward(trainable, DATUMS, "importance_sampling", None))
        engine.optim_step(trainable, STEP)
    return trainable


def prompt_logprobs(engine: Engine, policy: Any, ids: list[int]) -> list[float]:
    reply = sample(engine, ids, policy, prompt_logprobs=True, max_tokens=1)
    return [value for value in reply.prompt_logprobs or () if value is not None]


def test_gradients_of_every_weight_are_those_of_transformers(arch_dir: Path, make_engine: MakeEngine) -> None:
    check_gradients(make_engine(arch_dir), arch_dir)


@for_each("family", ["gpt_neox", "phi", "qwen3_moe"])
def test_models_that_transformers_runs_have_the_same_gradients(
    family: str, tmp_path: Path, make_engine: MakeEngine
) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ids: dict[str, Any] = {
        "vocab_size": 97,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": 2,
    }
    experts: dict[str, Any] = {
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
    }
    own: dict[str, Any] = experts | {"head_dim": 8} if family == "qwen3_moe" else {}
    directory = make_model(CONFIG_MAPPING[family](**cast(Any, shape | ids | own)), tmp_path / family)
    engine = make_engine(directory)
    trainable = check_gradients(engine, directory)
    engine.optim_step(trainable, STEP)
    ids_seen = DATUMS[0].model_input.to_ints()
    scored = run(engine.forward(trainable, [DATUMS[0]], "cross_entropy", None)).loss_fn_outputs[0]["logprobs"]
    assert_close(prompt_logprobs(engine, engine.publish(trainable), ids_seen), scored.to_numpy()[:-1], 1e-4)


def test_recomputed_activations_and_cut_passes_give_the_same_gradient(make_engine: MakeEngine) -> None:
    whole, cut = make_engine(), make_engine(micro_batch_tokens=64)
    recomputed = make_engine(share_prefixes=False, activations="recompute")
    grads = []
    for engine in (whole, cut, recomputed):
        trainable = engine.create_full()
        run(engine.forward_backward(trainable, DATUMS, "ppo", {"entropy_coef": 0.1, "kl_coef": 0.1}))
        grads.append(trainable.grad)
    assert relative_error(grads[1], grads[0]) < 1e-5
    assert relative_error(grads[2], grads[0]) < 1e-5


def test_a_published_version_stays_as_it_was_while_training_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    trainable = trained(engine)
    old = engine.publish(trainable)
    before = prompt_logprobs(engine, old, PROMPT)
    trained(engine, steps=1, trainable=trainable)
    new = engine.publish(trainable)
    assert prompt_logprobs(engine, old, PROMPT) == before
    assert prompt_logprobs(engine, new, PROMPT) != before
    assert new.version > old.version
    scored = run(engine.score(new, GROUP[:1])).loss_fn_outputs[0]["logprobs"].to_numpy()
    mine = run(engine.forward(trainable, GROUP[:1], "cross_entropy", None)).loss_fn_outputs[0]["logprobs"].to_numpy()
    assert_close(scored, mine, 1e-6)


def test_versions_adapters_and_the_base_share_a_sampler(make_engine: MakeEngine) -> None:
    engine = make_engine()
    trainable = trained(engine)
    old = engine.publish(trainable)
    trained(engine, steps=1, trainable=trainable)
    adapter = engine.publish(engine.create_adapter(LoraConfig(rank=4, seed=1)))
    policies = [old, engine.base_policy, engine.publish(trainable), adapter]
    settings = {"max_tokens": 12, "temperature": 1.0, "seed": 5}
    alone = [sample(engine, PROMPT, policy, **settings) for policy in policies]
    engine.sampler.drop_cache()
    together = sample_many(engine, [(PROMPT, policy) for policy in policies], **settings)
    assert [reply.sequences[0].tokens for reply in together] == [reply.sequences[0].tokens for reply in alone]


def test_copies_that_nobody_samples_from_are_used_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    trainable = whole_weights(engine)
    places = set()
    policy = None
    for _ in range(6):
        policy = engine.publish(trainable)
        assert policy.full is not None
        places.add(policy.full.weights.flat.data_ptr())
        trained(engine, steps=1, trainable=trainable)
    assert len(places) == 2


def test_training_goes_on_bit_for_bit_from_a_saved_state(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    first = trained(engine, steps=3)
    engine.save_adapter(first, tmp_path / "state", with_optimizer=True)
    second = engine.create_saved(tmp_path / "state", None)
    assert isinstance(second, FullWeights)
    engine.load_adapter(second, tmp_path / "state", with_optimizer=True)
    for trainable in (first, second):
        trained(engine, steps=2, trainable=trainable)
    assert torch.equal(first.flat, second.flat)
    assert first.num_steps == second.num_steps == 5
    adapter = engine.create_adapter(LoraConfig(rank=2))
    with pytest.raises(CheckpointError, match="not an adapter"):
        engine.load_adapter(adapter, tmp_path / "state", with_optimizer=False)
    engine.save_adapter(adapter, tmp_path / "adapter", with_optimizer=False)
    with pytest.raises(CheckpointError, match="holds no full weights"):
        engine.load_adapter(first, tmp_path / "adapter", with_optimizer=False)


def test_transformers_loads_what_was_saved_with_the_same_logprobs(
    arch_dir: Path, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(arch_dir)
    trainable = trained(engine)
    policy = engine.publish(trainable)
    engine.save_policy(policy, tmp_path / "weights")
    engine.save_adapter(trainable, tmp_path / "state", with_optimizer=True)
    ids = GROUP[0].model_input.to_ints()
    sampled = prompt_logprobs(engine, policy, ids)
    for name in ("weights", "state"):
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        is_tied = bool(json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"])
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == is_tied
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert_close(sampled, expected.detach().numpy(), 1e-5)
    assert prompt_logprobs(engine, engine.load_policy(tmp_path / "state"), ids) == sampled


def test_kl_to_the_base_compares_with_the_weights_at_the_start(make_engine: MakeEngine) -> None:
    engine = make_engine()
    trainable = whole_weights(engine)
    settings = {"kl_coef": 0.5, "kl_estimator": "k2"}
    at_start = run(engine.forward_backward(trainable, DATUMS, "importance_sampling", settings)).metrics
    engine.optim_step(trainable, STEP)
    later = run(engine.forward_backward(trainable, DATUMS, "importance_sampling", settings)).metrics
    assert at_start["kl_reference:mean"] == pytest.approx(0, abs=1e-9)
    assert later["kl_reference:mean"] > 1e-4


def test_a_pass_holds_one_set_of_weights(make_engine: MakeEngine) -> None:
    engine = make_engine()
    batches = [(engine.create_full(), GROUP), (engine.create_adapter(LoraConfig(rank=2)), GROUP)]
    with pytest.raises(ConfigError, match="shares its passes with no other"):
        run(engine.forward_backward_many(batches, "importance_sampling", None))
