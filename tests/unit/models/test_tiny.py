"""`tiny` is the same everywhere, reads and writes any text, and starts out undecided."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from turnwise.models.tiny import SPECIAL_TOKENS, VOCAB_SIZE, build_tokenizer, write_tiny

VOCABULARY_SHA256 = "b09e4418c4f074cb24fdd14d509c306f218501d4ee00d2016b82e91a568464ff"
WEIGHTS_SHA256 = "e06bc353fd6ec9ad08c3ffe02b0451e339ca723b1eaac35646bf99073d7f19b5"
"""These two may only change together with `tiny`'s revision in `turnwise.models.catalogue`."""

TOKENIZER = build_tokenizer()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_building_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    contents: list[dict[str, bytes]] = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_tiny(tmp_path / name)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]


def test_vocabulary_and_merges_never_change() -> None:
    model = json.loads(TOKENIZER.to_str())["model"]
    assert _sha256(json.dumps([sorted(model["vocab"].items()), model["merges"]]).encode()) == VOCABULARY_SHA256


def test_weights_never_change(tiny_dir: Path) -> None:
    assert _sha256((tiny_dir / "model.safetensors").read_bytes()) == WEIGHTS_SHA256


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_vocabulary_is_full_and_small() -> None:
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(VOCAB_SIZE))
    assert VOCAB_SIZE < 512


@pytest.mark.parametrize("text", ["7", "42", "2024", " 15", "x9y"])
def test_every_digit_is_a_token_of_its_own(text: str) -> None:
    tokens = TOKENIZER.encode(text).tokens
    assert [token for token in tokens if any(c.isdigit() for c in token)] == [c for c in text if c.isdigit()]


@pytest.mark.parametrize("text", [*SPECIAL_TOKENS, "system", "user", "assistant", "tool", " the", " number", " door"])
def test_chat_markers_and_common_words_are_single_tokens(text: str) -> None:
    assert len(TOKENIZER.encode(text).ids) == 1


def test_tokenizer_loads_in_transformers_with_its_special_tokens(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer("Hi").input_ids == TOKENIZER.encode("Hi").ids  # nothing is put in front or behind


def test_chat_template_is_chatml_for_all_four_roles(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    messages = [{"role": role, "content": f"{role} says\n 1"} for role in ("system", "user", "assistant", "tool")]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert text == turns + "<|im_start|>assistant\n"


def test_next_prompt_extends_the_sampled_tokens(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    messages = [{"role": "user", "content": "Guess the number."}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    sampled = tokenizer("My guess is 5.<|im_end|>").input_ids
    messages += [{"role": "assistant", "content": "My guess is 5."}, {"role": "user", "content": "Higher."}]
    longer = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert longer[: len(prompt) + len(sampled)] == prompt + sampled


def test_unknown_role_is_refused(tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    with pytest.raises(TemplateError, match="unknown role judge"):
        tokenizer.apply_chat_template([{"role": "judge", "content": "x"}], tokenize=False)


def test_first_distribution_is_nearly_uniform_everywhere(tiny_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    ids = torch.arange(VOCAB_SIZE).reshape(4, -1)
    logprobs = model(ids).logits.detach().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert entropy.min() > 0.99 * math.log(VOCAB_SIZE)


def test_first_distribution_depends_on_earlier_tokens(tiny_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    logits = model(torch.tensor([[5, 6, 7, 8], [9, 6, 7, 8]])).logits.detach()
    assert (logits[0, -1] - logits[1, -1]).std() > 0.01
