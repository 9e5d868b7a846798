"""Sliding windows, soft caps, sinks and scaled logits: what transformers computes, in contexts of several windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from naive import make_model, random_ids, rl_datum, run, sample, sample_many
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.runtime import tolerances
from turnwise.types import LoraConfig

WINDOW = 21
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "sliding_window": WINDOW,
}
MIXED = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {"layer_types": MIXED, "logit_scale": 0.3},
    "cwm": {"layer_types": MIXED},
    "exaone4": {"layer_types": MIXED},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"layer_types": MIXED, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    "gpt_oss": {"layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": {"layer_types": MIXED, "logits_scaling": 3.0, "attention_multiplier": 0.3},
    "ministral": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "olmo3": {"layer_types": MIXED},
    "phi3": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "smollm3": {"use_sliding_window": True, "layer_types": MIXED, "no_rope_layers": [1, 1, 1, 0]},
    "starcoder2": {},
    "vaultgemma": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
}


def make_engine(family: str, folder: Path, **settings: Any) -> tuple[Engine, Any]:
    """Our engine and transformers' own model, of random weights; norms and sinks differ from their first values."""
    directory = make_model(CONFIG_MAPPING[family](**SHAPE | FAMILIES[family]), folder / family)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "sinks" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_gib=0.01, **settings)
    return Engine(directory, config, name=family), model


def expected_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_trainer_prefill_and_decode_equal_transformers_several_windows_long(family: str, tmp_path: Path) -> None:
    engine, model = make_engine(family, tmp_path, prefill_tokens=48)
    adapter = engine.create_adapter(LoraConfig(rank=2, seed=1, train_mlp=False))
    stem = random_ids(70, 3)
    batch = [random_ids(150, 1), stem + random_ids(60, 4), stem + random_ids(5, 5), stem[:40] + random_ids(9, 6)]
    output = run(engine.forward(adapter, [rl_datum(ids, 0) for ids in batch], "cross_entropy", None))
    for ids, columns in zip(batch, output.loss_fn_outputs, strict=True):
        error = (columns["logprobs"].to_torch() - expected_logprobs(model, ids)).abs().max()
        assert error < tolerances.LOGPROBS, ("trained", len(ids), error)
    prompts = [random_ids(9, 7), random_ids(130, 8), stem + random_ids(20, 9)]
    replies = sample_many(engine, [(one, engine.base_policy) for one in prompts], max_tokens=60, seed=1)
    for prompt, reply in zip(prompts, replies, strict=True):
        (own,) = reply.sequences
        error = (torch.tensor(own.logprobs) - expected_logprobs(model, [*prompt, *own.tokens])[len(prompt) - 1 :]).abs()
        assert error.max() < tolerances.LOGPROBS, ("sampled", len(prompt), error)
    scored = sample(engine, prompts[1], engine.base_policy, max_tokens=1, prompt_logprobs=True).prompt_logprobs
    assert scored is not None
    error = (torch.tensor(scored[1:]) - expected_logprobs(model, prompts[1])).abs().max()
    assert error < tolerances.LOGPROBS, ("read", error)
