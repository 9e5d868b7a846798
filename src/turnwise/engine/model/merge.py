"""An adapter added to its base model's weights, written as an ordinary Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from turnwise.engine.model.load import without_progress_bars
from turnwise.engine.model.lora import LORA_ALPHA, split_pairs
from turnwise.engine.model.pretrained import load_pretrained
from turnwise.engine.training.adapter_files import adapted_names, read_flat, read_lora_config
from turnwise.errors import CheckpointError
from turnwise.models.linears import Shape

SAMPLING_FLAGS = ("temperature", "top_p", "top_k", "min_p", "typical_p")


@torch.no_grad()
@without_progress_bars()
def write_merged(adapter: Path, base: Path, out: Path) -> None:
    """Write W + scale * B A for every adapted linear, in the base's own dtype, with config and tokenizer beside it.

    An output head that shares its weights with the embedding gets weights of its own where the adapter changes it.
    """
    model = load_pretrained(base, None)
    lora = read_lora_config(adapter)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embedding.weight and lora.train_unembed:
        head.weight = nn.Parameter(head.weight.clone())
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    matrices = {name: _find_matrix(model, name) for name in adapted_names(adapter)}
    known = {name: matrix for name, matrix in matrices.items() if matrix is not None}
    if len(known) < len(matrices):
        unknown = min(set(matrices) - set(known))
        raise CheckpointError(f"{adapter} adapts {unknown}, which {base} does not have; is the base the same?")
    shapes = {name: _shape(matrix) for name, matrix in known.items()}
    for name, (a, b) in split_pairs(read_flat(adapter, shapes, lora), shapes, lora).items():
        known[name].copy_(known[name].float() + (b @ a) * (LORA_ALPHA / shapes[name].rank(lora)))
    generation = model.generation_config
    if generation is not None and any(getattr(generation, name) is not None for name in SAMPLING_FLAGS):
        generation.do_sample = True  # a base may name a temperature and not say that it samples; saving refuses that
    model.save_pretrained(str(out))
    AutoTokenizer.from_pretrained(str(base)).save_pretrained(str(out))


def _find_matrix(model: nn.Module, name: str) -> Tensor | None:
    """[O, I] of a linear or a router, [E, O, I] of a layer's experts, as a view of the model's own parameter."""
    modules = dict(model.named_modules())
    parent, _, child = name.rpartition(".")
    own = getattr(modules.get(parent), child, None)
    if isinstance(own, nn.Parameter):
        return own.transpose(1, 2) if getattr(modules[parent], "is_transposed", False) else own
    return modules[name].get_parameter("weight") if name in modules else None


def _shape(matrix: Tensor) -> Shape:
    """The file says the rank of experts, so the number of chosen ones does not matter."""
    return Shape(matrix.shape[-2], matrix.shape[-1], matrix.shape[0] if matrix.dim() == 3 else 0, 1)
