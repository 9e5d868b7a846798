"""Converts a GGUF file to a Hugging Face directory: float32 safetensors, config, tokenizer, chat template."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from turnwise.errors import ModelError

SINGLE_DIGIT_PRE_TOKENIZERS = frozenset({"smollm"})
"""`tokenizer.ggml.pre` of vocabularies that were trained with every digit split off. transformers reads these with
GPT-2's splitting alone, and then "\\n\\n1" or "   7" become tokens that the model has rarely seen."""

SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Hugging Face's names, and GGUF's: `tokenizer.ggml.bos_token_id` and so on."""


def gguf_to_directory(gguf: Path, target: Path) -> None:
    """Dequantise `gguf` to float32 and write it to the directory `target`, which is made if need be."""
    with _quiet_transformers():
        model, tokenizer = _load(gguf)
    # The weights are plain tensors now; left in place, these two would have them saved as a GGUF-quantised model.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _drop_file_title(model.config)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    fields = GGUFReader(gguf)
    _set_special_tokens(tokenizer, fields)
    if _read(fields, "tokenizer.ggml.model") == "gpt2":
        _make_byte_level(tokenizer)
    if _read(fields, "tokenizer.ggml.pre") in SINGLE_DIGIT_PRE_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    target.mkdir(parents=True, exist_ok=True)
    with _quiet_transformers():
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _load(gguf: Path) -> tuple[Any, Any]:
    directory, name = str(gguf.parent), gguf.name
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    except (ImportError, KeyError, NotImplementedError, OSError, RuntimeError, ValueError) as cause:
        raise ModelError(
            f"{gguf} cannot be read as a causal language model: {cause}. Expected a whole GGUF file of an architecture "
            "that transformers can convert; a safetensors directory of the same model works too."
        ) from cause
    return model, tokenizer


def _drop_file_title(config: Any) -> None:
    """Remove GGUF's `general.name` from the config, where Hugging Face keeps the model's origin."""
    config._name_or_path = ""
    if hasattr(config, "_model_name_or_path"):
        del config._model_name_or_path


def _set_special_tokens(tokenizer: Any, fields: GGUFReader) -> None:
    """Set the special tokens of the file. Some releases of transformers guess them, and then no reply would end."""
    for name, gguf_name in SPECIAL_TOKENS.items():
        token_id = _read(fields, f"tokenizer.ggml.{gguf_name}_token_id")
        if token_id is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(token_id)))


def _make_byte_level(tokenizer: Any) -> None:
    """Use GPT-2's scheme only. Some releases of transformers add steps of Llama's, or change the decoded text."""
    tokenizer.clean_up_tokenization_spaces = False
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None
    backend.decoder = decoders.ByteLevel()
    backend.model.unk_token = None
    backend.model.fuse_unk = False
    backend.model.byte_fallback = False


def _read(fields: GGUFReader, key: str) -> Any:
    """A field's value; None where the file has no such field."""
    field = fields.get_field(key)
    return None if field is None else field.contents()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and hints in the block, then restore all settings.

    stderr is held back too: one of the bars (dequantising) obeys no setting. What fails still raises.
    """
    had_bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
