"""The memory tables of docs/scale.md, from the plan's own arithmetic.

python -m turnwise.training.memory_table
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from turnwise.config.config import Config
from turnwise.engine.budget import training_pass_bytes
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import DeviceInfo
from turnwise.models.facts import ModelFacts
from turnwise.models.linears import Shape
from turnwise.rollout.config import RolloutConfig
from turnwise.training.memory import Memory, estimate_memory

GIB = 1 << 30
CARDS = {"24 GiB": 24, "80 GiB": 80, "141 GB": 131}
"""Names of cards, and the GiB that they have."""
SHAPES: dict[str, dict[str, int | bool]] = {
    "Qwen3 0.6B": {"layers": 28, "hidden": 1024, "inner": 3072, "heads": 16, "kv": 8, "tied": True},
    "Qwen3 1.7B": {"layers": 28, "hidden": 2048, "inner": 6144, "heads": 16, "kv": 8, "tied": True},
    "Qwen3 4B": {"layers": 36, "hidden": 2560, "inner": 9728, "heads": 32, "kv": 8, "tied": True},
    "Qwen3 8B": {"layers": 36, "hidden": 4096, "inner": 12288, "heads": 32, "kv": 8, "tied": False},
    "Qwen3 14B": {"layers": 40, "hidden": 5120, "inner": 17408, "heads": 40, "kv": 8, "tied": False},
    "Qwen3 32B": {"layers": 64, "hidden": 5120, "inner": 25600, "heads": 64, "kv": 8, "tied": False},
}
PARTS = 8
"""Learners of `cluster.shard=true` in the first table."""
DEVICES = (1, 2, 4, 8, 16, 64)
"""Learners in the table of weights in parts."""
MEASURED_MODEL, MEASURED = "Qwen3 0.6B", ((16, 512, 20.1), (32, 1024, 46.4))
"""Sequences, their tokens, and the peak in GiB of `turnwise bench train --weights full` on one H200."""
LONG_MODEL, LONG_TOKENS, LONG_KV_GIB = "Qwen3 8B", (32768, 65536, 131072), 40
TIMED_TOKENS, TIMED_SECONDS = 65536, 22.4
"""The attempt whose gradient was timed, on one H200; other times are computed from it by their operations."""
PRODUCT_PASSES, ATTENTION_PASSES = 3.0, 4.5
"""Work of a pass in forward passes: forward, forward again, and backward, which is 1 for products (frozen weights have
no gradient) and 2.5 for attention."""
HEAD_SIZE, VOCAB_SIZE, CONTEXT = 128, 151936, 40960


def facts_of_shape(name: str) -> ModelFacts:
    """The sizes of a model, without its files."""
    shape = SHAPES[name]
    layers, hidden, inner = int(shape["layers"]), int(shape["hidden"]), int(shape["inner"])
    query, key = int(shape["heads"]) * HEAD_SIZE, int(shape["kv"]) * HEAD_SIZE
    parts = {
        "self_attn.q_proj": Shape(query, hidden),
        "self_attn.k_proj": Shape(key, hidden),
        "self_attn.v_proj": Shape(key, hidden),
        "self_attn.o_proj": Shape(hidden, query),
        "mlp.gate_proj": Shape(inner, hidden),
        "mlp.up_proj": Shape(inner, hidden),
        "mlp.down_proj": Shape(hidden, inner),
    }
    linears = {f"model.layers.{i}.{part}": size for i in range(layers) for part, size in parts.items()}
    linears["lm_head"] = Shape(VOCAB_SIZE, hidden)
    in_products = sum(shape.num_values for shape in linears.values())
    norms = layers * (2 * hidden + 2 * HEAD_SIZE) + hidden
    embedding = 0 if shape["tied"] else VOCAB_SIZE * hidden
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": int(shape["heads"]),
        "num_key_value_heads": int(shape["kv"]),
        "head_dim": HEAD_SIZE,
    }
    return ModelFacts.read(
        config,
        VOCAB_SIZE,
        directory=Path(name),
        num_parameters=in_products + norms + embedding,
        context_length=CONTEXT,
        linears=linears,
        frozen={},
    )


def memory_of(name: str, train: str, card_gib: int, learners: int = 1) -> Memory:
    """What a run takes of a card, in bfloat16 and with otherwise default options; several learners hold parts."""
    cluster = {"learners": learners, "shard": True} if learners > 1 else {}
    model, env = {"name": name, "train": train}, {"name": "guess_number"}
    config = Config.model_validate({"model": model, "env": env, "cluster": cluster})
    device = DeviceInfo(kind="cuda", dtype="bfloat16", free_bytes=card_gib * GIB, total_bytes=card_gib * GIB)
    limits = RolloutConfig(max_turns=8, max_tokens_per_turn=512, max_trajectory_tokens=4096)
    engine = EngineConfig(full_weights=train == "full")
    return estimate_memory(config, engine, device, facts_of_shape(name), limits, num_attempts=64)


def table() -> str:
    """Markdown: what must be on every learner's card, and the smallest card that holds it with room for a pass."""
    heads = ["Model", "parameters", "LoRA, rank 16", "card", "all weights", "card", f"in parts over {PARTS}", "card"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name in SHAPES:
        cells = [name, f"{facts_of_shape(name).num_parameters / 1e9:.2f} B"]
        for train, learners in (("lora", 1), ("full", 1), ("full", PARTS)):
            needed = _fixed(name, train, learners)
            cells += [f"{needed / GIB:.1f} GiB", _smallest_card(needed)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parts_table() -> str:
    """Markdown: what each card must hold, by the number of learners that share the weights, and the smallest card."""
    heads = ["Model", "trained", *(f"{count} learner{'s' * (count > 1)}" for count in DEVICES)]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name in SHAPES:
        for train, trained in (("lora", "LoRA"), ("full", "all weights")):
            needed = [_fixed(name, train, learners) for learners in DEVICES]
            cells = [f"{one / GIB:.1f} GiB, {_smallest_card(one)}" for one in needed]
            lines.append(f"| {' | '.join([name, trained, *cells])} |")
    return "\n".join(lines)


def planned_bytes(num_tokens: int) -> int:
    """Bytes that the plan names for training all weights of `MEASURED_MODEL` with a pass of `num_tokens` tokens."""
    memory, facts = memory_of(MEASURED_MODEL, "full", max(CARDS.values())), facts_of_shape(MEASURED_MODEL)
    one_pass = training_pass_bytes(facts, memory.device, num_tokens, rank=0, train_unembed=False)
    return memory.weights + memory.adapter + one_pass


def measured_table() -> str:
    """Markdown: what is planned beside what was measured."""
    lines = ["| Load | planned | measured | planned / measured |", "|---|---:|---:|---:|"]
    for sequences, tokens, measured in MEASURED:
        planned = planned_bytes(sequences * tokens) / GIB
        load = f"{MEASURED_MODEL}, all weights, {sequences} x {tokens:,} tokens in one pass"
        lines.append(f"| {load} | {planned:.1f} GiB | {measured:.1f} GiB | {planned / measured:.2f} |")
    return "\n".join(lines)


def long_table() -> str:
    """Markdown: what one attempt of many tokens takes of the largest card, with a KV cache of `LONG_KV_GIB`."""
    passes = ["training pass with `keep`", "training pass as planned"]
    head = ["Tokens of an attempt", "attempts in the KV cache", *passes, "in all", "time of the pass, computed"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for num_tokens in LONG_TOKENS:
        auto, kept = (long_memory(num_tokens, how) for how in ("auto", "keep"))
        how = "computed twice" if auto.is_recomputed else "everything kept"
        how = f"in parts of {auto.num_part_tokens:,}" if auto.num_part_tokens else how
        cells = [
            f"{num_tokens:,}",
            f"{auto.kv_cache / (num_tokens * facts_of_shape(LONG_MODEL).kv_values_per_token * 2):.1f}",
            f"{kept.training_pass / GIB:.1f} GiB",
            f"{auto.training_pass / GIB:.1f} GiB, {how}",
            f"{auto.total / GIB:.1f} GiB",
            _long_time(num_tokens),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _long_time(num_tokens: int) -> str:
    if num_tokens == TIMED_TOKENS:
        return f"{TIMED_SECONDS:g} s, measured"
    return f"{TIMED_SECONDS * pass_operations(num_tokens) / pass_operations(TIMED_TOKENS):.1f} s"


def pass_operations(num_tokens: int) -> float:
    """Floating-point operations of the gradient of one attempt that is computed twice, with an adapter."""
    facts = facts_of_shape(LONG_MODEL)
    products = 2 * sum(shape.num_values for shape in facts.linears.values()) * num_tokens
    scored = num_tokens * (num_tokens + 1) / 2  # a token sees itself and what came before
    attention = 4 * facts.num_layers * facts.query_size * scored
    return PRODUCT_PASSES * products + ATTENTION_PASSES * attention


def long_memory(num_tokens: int, activations: str) -> Memory:
    """The memory of a run whose attempts have up to `num_tokens` tokens."""
    config = Config.model_validate({"model": {"name": LONG_MODEL}, "env": {"name": "guess_number"}})
    bytes_of_card = max(CARDS.values()) * GIB
    device = DeviceInfo(kind="cuda", dtype="bfloat16", free_bytes=bytes_of_card, total_bytes=bytes_of_card)
    limits = RolloutConfig(max_turns=num_tokens // 512, max_tokens_per_turn=512, max_trajectory_tokens=num_tokens)
    engine = EngineConfig.model_validate(
        {"kv_cache_gib": LONG_KV_GIB, "merge_adapter": "never", "activations": activations}
    )
    facts = replace(facts_of_shape(LONG_MODEL), context_length=num_tokens)
    return estimate_memory(config, engine, device, facts, limits, num_attempts=64)


def _fixed(name: str, train: str, learners: int) -> int:
    """Weights, what is trained and its state; without the merged copy, which a run leaves out if it does not fit."""
    memory = memory_of(name, train, max(CARDS.values()), learners)
    return memory.weights + memory.adapter + memory.gathered


def _smallest_card(needed: int) -> str:
    """The first card with 15 % left for the KV cache and a pass."""
    fitting = [card for card, gib in CARDS.items() if needed <= 0.85 * 0.9 * gib * GIB]
    return fitting[0] if fitting else "none"


if __name__ == "__main__":
    print("\n\n".join((table(), parts_table(), measured_table(), long_table())))
