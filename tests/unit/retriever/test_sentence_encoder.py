from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel

from turnwise.errors import ConfigError
from turnwise.retriever.corpus import Corpus, Document
from turnwise.retriever.index import build_index, make_embedder
from turnwise.retriever.sentence_encoder import SentenceEncoder

WORDS = ("[UNK]", "the", "whale", "lives", "in", "sea", "a", "train", "runs", "on", "rails")
TEXTS = ("the whale lives in the sea", "a train runs on rails", "the sea", "whale")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT with two layers, saved as sentence encoders are."""
    folder = tmp_path_factory.mktemp("encoder")
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=48,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    model = BertModel(config, add_pooling_layer=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue] - a setter that is not declared
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_the_vectors_are_those_of_the_reference_implementation(folder: Path) -> None:
    """Also for short texts beside long ones, where padding must not count."""
    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    vectors_ND = SentenceEncoder(folder).embed(TEXTS)
    for text, vector_D in zip(TEXTS, vectors_ND, strict=True):
        ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
        with torch.no_grad():
            mean_D = model(ids).last_hidden_state[0].mean(dim=0)
        expected_D = (mean_D / mean_D.norm()).numpy()
        np.testing.assert_allclose(vector_D, expected_D, atol=2e-5)


def test_an_index_is_built_with_a_folder_as_its_encoder(folder: Path) -> None:
    corpus = Corpus.of(Document(id=str(number), contents=text) for number, text in enumerate(TEXTS))
    index = build_index(corpus, "dense", make_embedder(str(folder)))
    assert [hit.document.id for hit in index.search(TEXTS[1], 1)] == ["1"]


def test_encoders_that_differ_in_one_layer_have_other_names(folder: Path, tmp_path: Path) -> None:
    """The name is part of the key of a stored index."""
    _copy(folder, tmp_path)
    assert SentenceEncoder(tmp_path).name == SentenceEncoder(folder).name
    weights = load_file(tmp_path / "model.safetensors")
    weights["encoder.layer.1.output.dense.bias"] = weights["encoder.layer.1.output.dense.bias"] + 1
    save_file(weights, tmp_path / "model.safetensors")
    assert SentenceEncoder(tmp_path).name != SentenceEncoder(folder).name


def test_an_encoder_that_makes_its_vectors_in_another_way_is_refused(folder: Path, tmp_path: Path) -> None:
    _copy(folder, tmp_path)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in ("Transformer", "Pooling")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    SentenceEncoder(tmp_path)
    (tmp_path / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(ConfigError, match="does not take the mean over its tokens"):
        SentenceEncoder(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense", "path": "2"}]))
    with pytest.raises(ConfigError, match="has a part Dense; expected Transformer, Pooling, Normalize"):
        SentenceEncoder(tmp_path)


def _copy(folder: Path, target: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (target / name).write_bytes((folder / name).read_bytes())


def test_another_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json; expected a folder with"):
        SentenceEncoder(tmp_path)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="is llama with gelu; expected bert with gelu"):
        SentenceEncoder(tmp_path)
