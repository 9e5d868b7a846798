"""A mixture of experts computes and trains what transformers and autograd compute on a dense reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from naive import (
    NaiveModel,
    assert_close,
    displaced_adapter,
    make_model,
    random_ids,
    relative_error,
    rl_datum,
    run,
    sample,
    sample_many,
    with_ops,
)
from turnwise.bench import family_samples
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.model.kept import kept_bytes
from turnwise.engine.model.lora import Route
from turnwise.engine.model.merge import write_merged
from turnwise.engine.training.adapter_files import read_lora_config
from turnwise.engine.training.pack import pack
from turnwise.errors import ConfigError
from turnwise.models.facts import read_facts
from turnwise.models.tiny import build_tokenizer
from turnwise.types import LoraConfig

SHAPE: dict[str, Any] = {
    **family_samples.SHAPE,
    "num_hidden_layers": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "head_dim": 8, "mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 6, "sliding_window": None},
    "glm4_moe": {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 6, "head_dim": 8, "sliding_window": 9},
}
"""gpt_oss has windows in every second layer, which most prompts of these tests leave behind."""
PREFIX = random_ids(40, 1)
DATUMS = [rl_datum(PREFIX + random_ids(10 + i, 10 + i), start=30, seed=i) for i in range(3)]


@pytest.fixture(scope="module", params=list(FAMILIES))
def moe_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = CONFIG_MAPPING[request.param](**SHAPE, **FAMILIES[request.param])
    return make_model(config, tmp_path_factory.mktemp(request.param))


def load(directory: Path, **settings: Any) -> Engine:
    more = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.01, "seed": 3, **settings}
    return Engine(directory, EngineConfig.model_validate(more), name=directory.name)


def naive_gradients(directory: Path, adapter: Any) -> NaiveModel:
    naive = NaiveModel(directory, adapter)
    for datum in DATUMS:
        columns = {name: torch.tensor(column.to_numpy()) for name, column in datum.loss_fn_inputs.items()}
        ratios = torch.exp(naive.logprobs(datum) - columns["logprobs"])
        (-(ratios * columns["advantages"] * columns["mask"]).sum()).backward()
    return naive


def test_every_experts_gradient_is_that_of_autograd_on_a_dense_reference(moe_dir: Path) -> None:
    engine = load(moe_dir)
    adapter = displaced_adapter(engine, rank=4, train_router=True)
    run(engine.forward_backward(adapter, DATUMS, "importance_sampling", None))
    wanted = naive_gradients(moe_dir, adapter).grads()
    kinds = {name.rpartition("layers.")[2].partition(".")[2] for name in adapter.pairs}
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= kinds
    assert kinds & {"mlp.gate", "mlp.router"}
    for name, (a, b) in adapter.grad_pairs.items():
        assert relative_error(a, wanted[name][0]) < 1e-4, name
        assert relative_error(b, wanted[name][1]) < 1e-4, name
    rank = adapter.pairs[next(name for name in adapter.pairs if ".mlp.experts." in name)][0].shape[1]
    assert rank == 2, "the experts of one token share the rank out"


def test_recomputed_activations_and_cut_passes_give_the_same_gradient_of_experts(moe_dir: Path) -> None:
    grads = []
    again = {"activations": "recompute"}
    for settings in ({}, {"micro_batch_tokens": 64, **again}, {"share_prefixes": False, **again}):
        engine = load(moe_dir, **settings)
        adapter = displaced_adapter(engine, rank=4)
        run(engine.forward_backward(adapter, DATUMS, "importance_sampling", None))
        grads.append(adapter.grad)
    assert relative_error(grads[1], grads[0]) < 1e-5
    assert relative_error(grads[2], grads[0]) < 1e-5


def test_the_plan_counts_what_a_block_of_experts_keeps(moe_dir: Path) -> None:
    engine = load(moe_dir)
    if engine.model.fused is None:
        return  # transformers' layers keep what autograd keeps
    adapter = displaced_adapter(engine, rank=4, train_router=True)
    batch = pack([np.array(random_ids(50, 0)), np.array(random_ids(20, 1))], [0, 1])
    ids, positions = (torch.from_numpy(part) for part in (batch.input_ids, batch.position_ids))
    hidden = engine.model.hidden(ids, positions, batch.plan, Route(spans=[adapter.span(0, 70)]))
    planned = 70 * kept_bytes(engine.model.sizes, 4, 4, engine.model.ops.facts)
    own = hidden.grad_fn.kept.blocks[0]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in own.tensors()}
    kept = sum(storage.nbytes() for storage in storages.values())
    assert 0.9 * planned < kept < 1.1 * planned


def test_merged_unmerged_and_mixed_sampling_have_the_trainers_logprobs(moe_dir: Path) -> None:
    prompt = random_ids(30, 4)
    for merges in ("always", "never"):
        engine = load(moe_dir, merge_adapter=merges)
        adapters = [displaced_adapter(engine, rank=rank, seed=rank) for rank in (4, 6)]
        policies = [engine.base_policy, *(engine.publish(adapter) for adapter in adapters)]
        replies = [sample(engine, prompt, policies[1], max_tokens=8, seed=1)]
        replies += sample_many(engine, [(prompt, policy) for policy in policies], max_tokens=8, seed=1)
        for reply, owner in zip(replies, [adapters[0], None, *adapters], strict=True):
            (sequence,) = reply.sequences
            ids = [*prompt, *sequence.tokens]
            weights = adapters[0] if owner is None else owner
            scored = run(
                engine.score(engine.base_policy, [rl_datum(ids, 0)])
                if owner is None
                else engine.forward(weights, [rl_datum(ids, 0)], "cross_entropy", None)
            )
            trained = scored.loss_fn_outputs[0]["logprobs"].to_numpy()[len(prompt) - 1 :]
            assert_close(sequence.logprobs, trained, 2e-5)


def test_all_weights_of_experts_and_routers_can_be_trained(moe_dir: Path) -> None:
    engine = load(moe_dir)
    trainable = engine.create_full()
    run(engine.forward_backward(trainable, DATUMS, "importance_sampling", None))
    model = NaiveModel(moe_dir).model
    for datum in DATUMS:
        columns = {name: torch.tensor(column.to_numpy()) for name, column in datum.loss_fn_inputs.items()}
        logits = model(torch.tensor([datum.model_input.to_ints()])).logits[0]
        logprobs = torch.log_softmax(logits, -1).gather(1, columns["target_tokens"][:, None])[:, 0]
        (-(torch.exp(logprobs - columns["logprobs"]) * columns["advantages"] * columns["mask"]).sum()).backward()
    grads = engine.model.layout.views(trainable.grad)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert relative_error(grads[name], parameter.grad) < 1e-4, name


def peft_logprobs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def our_logprobs(engine: Engine, adapter: Any, ids: list[int]) -> Any:
    return (
        run(engine.forward(adapter, [rl_datum(ids, 0)], "cross_entropy", None))
        .loss_fn_outputs[0]["logprobs"]
        .to_numpy()
    )


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys")  # PEFT, which does read them for parameters
@pytest.mark.parametrize("targets", [{}, {"train_router": True, "expert_rank": 3}, {"train_mlp": False}])
def test_peft_reads_our_experts_and_so_do_we_and_a_merged_export_is_the_same(
    moe_dir: Path, tmp_path: Path, targets: dict[str, Any]
) -> None:
    engine, ids = load(moe_dir), random_ids(30, 8)
    adapter = displaced_adapter(engine, rank=4, **targets)
    ours = our_logprobs(engine, adapter, ids)
    engine.save_adapter(adapter, tmp_path / "ours", with_optimizer=False)
    base = AutoModelForCausalLM.from_pretrained(moe_dir, dtype=torch.float32)
    assert_close(ours, peft_logprobs(PeftModel.from_pretrained(base, tmp_path / "ours"), ids).numpy(), 1e-4)
    again = engine.create_adapter(read_lora_config(tmp_path / "ours"))
    engine.load_adapter(again, tmp_path / "ours", with_optimizer=False)
    assert torch.equal(again.flat, adapter.flat)
    build_tokenizer().save(str(moe_dir / "tokenizer.json"))
    write_merged(tmp_path / "ours", moe_dir, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert_close(ours, peft_logprobs(merged, ids).numpy(), 1e-4)


def test_we_read_pefts_experts_in_both_of_its_forms(moe_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    base = AutoModelForCausalLM.from_pretrained(moe_dir, dtype=torch.float32)
    places = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    theirs = get_peft_model(
        base, PeftLoraConfig(r=6, lora_alpha=9, target_modules=["q_proj"], target_parameters=places)
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    engine, ids = load(moe_dir), random_ids(30, 8)
    adapter = engine.create_adapter(read_lora_config(tmp_path / "theirs"))
    engine.load_adapter(adapter, tmp_path / "theirs", with_optimizer=False)
    wanted = peft_logprobs(theirs, ids)
    assert_close(our_logprobs(engine, adapter, ids), wanted.numpy(), 1e-4)


def test_an_older_file_with_a_linear_per_expert_is_read_as_it_was_meant(moe_dir: Path, tmp_path: Path) -> None:
    """Every expert's gate, up and down have A and B of their own."""
    if moe_dir.name.startswith("gpt_oss"):
        return  # it never had a linear per expert
    engine, ids, rank = load(moe_dir), random_ids(30, 8), 3
    adapter = engine.create_adapter(LoraConfig(rank=rank, train_unembed=False, train_attn=False))
    engine.save_adapter(adapter, tmp_path / "old", with_optimizer=False)
    generator = torch.Generator().manual_seed(1)
    tensors, changed = {}, {}
    old = "block_sparse_moe" if "mixtral" in str(moe_dir) else "mlp"
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name, shape in engine.model.shapes.items():
        if not shape.experts or not name.endswith("gate_up_proj"):
            continue
        layer, inner, hidden = name.partition(".mlp.")[0], shape.outputs // 2, shape.inputs
        delta = {part: [] for part in parts}
        for expert in range(shape.experts):
            for part, short in parts.items():
                num_out, num_in = (hidden, inner) if part == "down_proj" else (inner, hidden)
                a = 0.1 * torch.randn(rank, num_in, generator=generator)
                b = 0.1 * torch.randn(num_out, rank, generator=generator)
                stem = f"base_model.model.{layer}.{old}.experts.{expert}.{short if old != 'mlp' else part}"
                tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
                delta[part].append(32 / rank * b @ a)
        gate, up, down = (torch.stack(delta[part]) for part in parts)
        changed[f"{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        changed[f"{layer}.mlp.experts.down_proj"] = down
    save_file(tensors, tmp_path / "old" / "adapter_model.safetensors")
    model = NaiveModel(moe_dir).model
    with torch.no_grad():
        for name, delta in changed.items():
            model.get_parameter(name).add_(delta)
    adapter = engine.create_adapter(read_lora_config(tmp_path / "old"))
    engine.load_adapter(adapter, tmp_path / "old", with_optimizer=False)
    assert_close(our_logprobs(engine, adapter, ids), peft_logprobs(model, ids).numpy(), 1e-4)


def gaps(engine: Engine, adapter: Any, prompts: list[list[int]]) -> tuple[float, dict[str, float]]:
    """The largest difference of the trainer's logprobs from the sampler's, over two turns of dialogues."""
    policy, largest, metrics = engine.publish(adapter), 0.0, {}
    for turn in range(2):
        replies = sample_many(engine, [(prompt, policy) for prompt in prompts], max_tokens=6, seed=turn)
        said = [list(reply.sequences[0].tokens) for reply in replies]
        datums = [rl_datum([*prompt, *reply], 0) for prompt, reply in zip(prompts, said, strict=True)]
        output = run(engine.forward(adapter, datums, "cross_entropy", None))
        metrics = dict(output.metrics)
        for columns, reply in zip(output.loss_fn_outputs, replies, strict=True):
            logprobs = torch.tensor(reply.sequences[0].logprobs)
            trained = columns["logprobs"].to_torch()[-len(logprobs) :]
            largest = max(largest, float((trained - logprobs).abs().max()))
        prompts = [[*prompt, *reply, 7, 8, 9] for prompt, reply in zip(prompts, said, strict=True)]
    return largest, metrics


def test_replay_gives_the_trainer_the_samplers_experts_when_its_router_moved(moe_dir: Path) -> None:
    """The router gets a constant that hardly changes its scores' ratios but turns its choice around."""
    prompts = [random_ids(20 + i, i) for i in range(4)]
    engine = load(moe_dir, routing_replay=True)
    adapter = displaced_adapter(engine, rank=4)
    exact, metrics = gaps(engine, adapter, prompts)
    assert exact < 2e-5
    assert (metrics["routing_flips:mean"], metrics["routing_replayed:mean"]) == (0.0, 1.0)
    (reply,) = sample(engine, prompts[0], engine.publish(adapter), max_tokens=12, seed=1).sequences
    ids = [*prompts[0], *reply.tokens]
    assert engine.sampler.routing is not None
    recorded = engine.sampler.routing.find(ids[:-1])
    assert recorded is not None
    generator = torch.Generator().manual_seed(3)
    routers = [name for name in engine.model.linears if name.endswith(("mlp.gate", "mlp.router"))]
    with torch.no_grad():
        for name in routers:
            weight = engine.model.linears[name].weight
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    with_replay = run(engine.forward(adapter, [rl_datum(ids, 0)], "cross_entropy", None))
    flips = with_replay.metrics["routing_flips:mean"]
    assert 0 < flips < 1
    model = NaiveModel(moe_dir, adapter)
    with torch.no_grad():
        for name in routers:
            model.model.get_parameter(f"{name}.weight").copy_(engine.model.linears[name].weight)
    forced = force_choice(model, routers, recorded)
    assert_close(with_replay.loss_fn_outputs[0]["logprobs"].to_numpy(), forced(ids), 2e-5)
    engine.trainer.routing = None
    own = run(engine.forward(adapter, [rl_datum(ids, 0)], "cross_entropy", None))
    assert "routing_flips:mean" not in own.metrics
    assert abs(own.loss_fn_outputs[0]["logprobs"].to_numpy() - forced(ids)).max() > 1e-3


def force_choice(naive: NaiveModel, routers: list[str], choices: Any) -> Any:
    """A function that computes transformers' logprobs with given experts [T, L, K] in place of the routers' own."""

    def forced(name: str, layer: int) -> Any:
        router = naive.model.get_submodule(name)
        chosen = torch.tensor(choices[:, layer].astype("int64"))

        def hook(module: Any, _: Any, output: Any) -> Any:
            logits = output[0].float()
            if hasattr(module, "e_score_correction_bias"):
                scores = logits.sigmoid().gather(1, chosen)
                scores = scores / (scores.sum(-1, keepdim=True) + 1e-20) * module.routed_scaling_factor
            else:
                scores = torch.softmax(logits, -1).gather(1, chosen)
                if getattr(module, "norm_topk_prob", True):
                    scores = scores / scores.sum(-1, keepdim=True)
            return output[0], scores, chosen

        return router.register_forward_hook(hook)

    for layer, name in enumerate(routers):
        forced(name, layer)

    def logprobs(ids: list[int]) -> Any:
        with torch.no_grad():
            return naive.logprobs(rl_datum(ids, 0)).numpy()

    return logprobs


WINDOWED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 6, "head_dim": 8, "sliding_window": 9},
    "mixtral": {"num_local_experts": 6, "sliding_window": 9},
    "phimoe": {"num_local_experts": 6, "sliding_window": None},
}


@pytest.mark.parametrize(
    ("family", "reason"), [("mixtral", "every layer of this model has a sliding window"), ("phimoe", "code of their")]
)
def test_the_plan_and_the_engine_refuse_the_same_replay(family: str, reason: str, tmp_path: Path) -> None:
    directory = make_model(CONFIG_MAPPING[family](**SHAPE, **WINDOWED[family]), tmp_path)
    facts = read_facts(directory)
    with pytest.raises(ConfigError, match=reason) as planned:
        facts.check_replay(has_switch=facts.angle_switch is not None)
    with pytest.raises(ConfigError, match=reason) as loaded:
        load(directory, routing_replay=True)
    assert str(planned.value) == str(loaded.value)


def test_layers_with_windows_beside_others_can_be_replayed_by_the_plan_too(tmp_path: Path) -> None:
    facts = read_facts(make_model(CONFIG_MAPPING["gpt_oss"](**SHAPE, **WINDOWED["gpt_oss"]), tmp_path))
    assert facts.kv_windows == (None, 9)
    facts.check_replay(has_switch=False)


def test_a_plan_refuses_to_replay_what_is_read_again_with_other_angles(moe_dir: Path) -> None:
    with pytest.raises(ConfigError, match="other angles"):
        read_facts(moe_dir).check_replay(has_switch=True)


def test_the_gradient_under_replay_is_that_of_the_forced_choice(moe_dir: Path) -> None:
    engine = load(moe_dir, routing_replay=True)
    adapter = displaced_adapter(engine, rank=4, train_router=True)
    prompt = random_ids(24, 2)
    (reply,) = sample(engine, prompt, engine.publish(adapter), max_tokens=12, seed=1).sequences
    ids = [*prompt, *reply.tokens]
    assert engine.sampler.routing is not None
    recorded = engine.sampler.routing.find(ids[:-1])
    adapter.flat.add_(0.05 * torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(4)))
    datum = rl_datum(ids, 10)
    output = run(engine.forward_backward(adapter, [datum], "importance_sampling", None))
    assert output.metrics["routing_flips:mean"] > 0
    naive = NaiveModel(moe_dir, adapter)
    force_choice(naive, [n for n in engine.model.linears if n.endswith(("mlp.gate", "mlp.router"))], recorded)
    columns = {name: torch.tensor(column.to_numpy()) for name, column in datum.loss_fn_inputs.items()}
    ratios = torch.exp(naive.logprobs(datum) - columns["logprobs"])
    (-(ratios * columns["advantages"] * columns["mask"]).sum()).backward()
    for name, (a, b) in adapter.grad_pairs.items():
        assert relative_error(a, naive.grads()[name][0]) < 1e-4, name
        assert relative_error(b, naive.grads()[name][1]) < 1e-4, name


def test_a_bank_of_adapters_serves_experts_of_several_policies_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a kernel reads banks, rows of many adapters are sorted by adapter and expert."""
    wide: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    more: dict[str, Any] = {"num_experts": 6, "shared_expert_intermediate_size": 64, "intermediate_size": 64}
    directory = make_model(CONFIG_MAPPING["qwen2_moe"](**SHAPE | wide | more), tmp_path)
    tokens = []
    for has_bank in (False, True):
        engine = load(directory, merge_adapter="never")
        if has_bank:
            with_ops(engine, add_low_rank=add_low_rank)
            monkeypatch.setattr("turnwise.engine.model.lora.for_device", lambda _, ops=engine.model.ops: ops)
        policies = [engine.publish(displaced_adapter(engine, rank=rank, seed=rank)) for rank in (4, 6, 2)]
        requests = [(random_ids(17 + i, i), policy) for i, policy in enumerate([*policies, engine.base_policy])]
        replies = sample_many(engine, requests, max_tokens=10, seed=1, temperature=1.0)
        tokens.append([(list(r.sequences[0].tokens), r.sequences[0].logprobs) for r in replies])
    for (plain, plain_logprobs), (banked, banked_logprobs) in zip(*tokens, strict=True):
        assert plain == banked
        assert_close(banked_logprobs, plain_logprobs, 2e-5)


def add_low_rank(x: Any, bank_a: Any, bank_b: Any, members: Any, tiles: Any, y: Any) -> None:
    """What the kernel computes, tile by tile."""
    for start, count, slot in tiles.t().tolist():
        rows = slice(start, start + count)
        low = torch.einsum("ni,mri->nmr", x[rows], bank_a[slot])
        owners = members.long().repeat_interleave(64)[: y.shape[1]]
        y[rows] += torch.einsum("nor,or->no", low[:, owners], bank_b[slot])
