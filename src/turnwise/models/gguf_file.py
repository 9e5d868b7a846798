"""Writes a Hugging Face directory as one GGUF file, for llama.cpp. Weights keep float32: nothing is rounded.

Llama's family is supported, with a byte-level BPE vocabulary. GGUF stores the rows of query and key projections in
another order, because llama.cpp rotates neighbouring pairs where Hugging Face rotates halves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, TokenType, get_tensor_name_map
from numpy.typing import NDArray
from safetensors.numpy import load_file

from turnwise.errors import ModelError

PRE_TOKENIZERS = {"Digits": "smollm", "ByteLevel": "gpt-2"}
"""How text is split before BPE, by the first step of the tokenizer; the names are GGUF's."""


def write_gguf(directory: Path, file: Path) -> None:
    """Write the model in `directory` to `file`."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "llama":
        raise ModelError(
            f"{directory} is a {config.get('model_type')} model; GGUF files are written for llama models. "
            "Expected one, or --merged DIR and llama.cpp's own converter"
        )
    writer = GGUFWriter(file, "llama")
    _add_sizes(writer, config)
    _add_tokenizer(writer, directory, config)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for path in sorted(directory.glob("*.safetensors")):
        for name, values in load_file(path).items():
            gguf_name = names.get_name(name, try_suffixes=(".weight",))
            if gguf_name is None:
                raise ModelError(f"{directory}: tensor {name} has no name in GGUF's llama models")
            writer.add_tensor(gguf_name, _in_ggufs_order(name, values.astype(np.float32), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: GGUFWriter, directory: Path, config: dict[str, Any]) -> None:
    described = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    if described["model"]["type"] != "BPE":
        raise ModelError(f"{directory} has a {described['model']['type']} vocabulary; expected byte-level BPE")
    by_id: dict[int, tuple[str, TokenType]] = {
        number: (token, TokenType.NORMAL) for token, number in described["model"]["vocab"].items()
    }
    for added in described["added_tokens"]:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        by_id[added["id"]] = (added["content"], kind)
    rows = [by_id.get(number, (f"[PAD{number}]", TokenType.UNUSED)) for number in range(config["vocab_size"])]
    split = described.get("pre_tokenizer") or {}
    first = (split.get("pretokenizers") or [split])[0].get("type", "")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZERS.get(first, "default"))
    writer.add_token_list([token for token, _ in rows])
    writer.add_token_types([kind for _, kind in rows])
    writer.add_token_merges([" ".join(one) if isinstance(one, list) else one for one in described["model"]["merges"]])
    for key, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    ):
        value = config.get(key)
        value = value[0] if isinstance(value, list) else value
        if value is not None:
            add(value)
    template = directory / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def _in_ggufs_order(name: str, values: NDArray[np.float32], config: dict[str, Any]) -> NDArray[np.float32]:
    """Rows of queries and keys, of one head: x0 y0 x1 y1 ... in place of x0 x1 ... y0 y1 ..."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
