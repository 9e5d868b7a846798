"""An adapter added to its base model's weights, written as an ordinary Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.engine.model.load import without_progress_bars
from turnwise.engine.model.lora import LORA_ALPHA, split_pairs
from turnwise.engine.training.adapter_files import adapted_names, read_flat, read_lora_config
from turnwise.errors import CheckpointError

SAMPLING_FLAGS = ("temperature", "top_p", "top_k", "min_p", "typical_p")


@torch.no_grad()
@without_progress_bars()
def write_merged(adapter: Path, base: Path, out: Path) -> None:
    """Write W + scale * B A for every adapted linear, in the base's own dtype, with config and tokenizer beside it.

    An output head that shares its weights with the embedding gets weights of its own where the adapter changes it.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(str(base), dtype="auto")
    rank = read_lora_config(adapter).rank
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names = adapted_names(adapter)
    unknown = sorted(set(names) - set(linears))
    if unknown:
        raise CheckpointError(f"{adapter} adapts {unknown[0]}, which {base} does not have; is the base the same?")
    shapes = {name: (linears[name].out_features, linears[name].in_features) for name in names}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    for name, (a, b) in split_pairs(read_flat(adapter, shapes, rank), shapes, rank).items():
        linear = linears[name]
        if linear is head and is_tied:
            linear.weight = nn.Parameter(linear.weight.clone())
            model.config.tie_word_embeddings = False
        merged = torch.addmm(linear.weight.float(), b, a, alpha=LORA_ALPHA / rank)
        linear.weight.copy_(merged)
    generation = model.generation_config
    if generation is not None and any(getattr(generation, name) is not None for name in SAMPLING_FLAGS):
        generation.do_sample = True  # a base may name a temperature and not say that it samples; saving refuses that
    model.save_pretrained(str(out))
    AutoTokenizer.from_pretrained(str(base)).save_pretrained(str(out))
