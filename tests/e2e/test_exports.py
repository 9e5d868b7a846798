"""What is exported is what was trained: the same logprobs in PEFT, transformers and llama.cpp; tied or not."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import turnwise as tw
from llama_cpp import next_token_logprobs
from turnwise.cli import main
from turnwise.client.checkpoints import CheckpointStore
from turnwise.engine.config import EngineConfig
from turnwise.models.convert import gguf_to_directory
from turnwise.runtime import tolerances
from turnwise.types import ModelInput

IDS = [[5, 17, 40, 41, 9, 77, 300, 12, 88, 130], [60, 3, 211, 211, 19, 400, 2, 71, 33, 90]]


def _base(tiny: Path, place: Path, *, is_tied: bool) -> Path:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    if is_tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(place)
    return place


def _adapter(base: Path, place: Path) -> tuple[Path, torch.Tensor]:
    """A checkpoint whose adapter changes everything, the head included, and our engine's logprobs with it."""
    with tw.ServiceClient(data_dir=place, engine=EngineConfig(dtype="float32", seed=0)) as service:
        saved = service.create_lora_training_client(str(base), rank=4, seed=1).save_state("one").result()
        files = CheckpointStore(place).directory(saved.path)
        directory = place / "adapter"  # without checkpoint.json, whose checksums are those of the untrained adapter
        directory.mkdir()
        shutil.copyfile(files / "adapter_config.json", directory / "adapter_config.json")
        weights = load_file(files / "adapter_model.safetensors")
        generator = torch.Generator().manual_seed(0)
        for name in weights:
            if "lora_B" in name:
                weights[name] = 0.05 * torch.randn(weights[name].shape, generator=generator)
        save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        client = service.create_sampling_client(model_path=str(directory))
        ours = [client.compute_logprobs(ModelInput.from_ints(ids)).result()[1:] for ids in IDS]
    return directory, torch.tensor(ours)


def _gguf_matrix(file: Path, name: str) -> torch.Tensor:
    """A matrix of a GGUF file, as the `gguf` package reads it."""
    (found,) = [one for one in gguf.GGUFReader(str(file)).tensors if one.name == name]
    return torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy())


def _gap(model: Any, ours: torch.Tensor) -> float:
    ids = torch.tensor(IDS)
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return float((logprobs - ours).abs().max())


def _gap_in_llama_cpp(file: Path, ours: torch.Tensor, text: str, text_ids: list[int]) -> float:
    """The gap in llama.cpp itself, which must also read a text as the same ids."""
    prompts = [ids[:length] for ids in IDS for length in range(1, len(ids))]
    *found, of_ids, of_text = torch.tensor(next_token_logprobs(file, [*prompts, text_ids, text]))
    whole = torch.stack(found)
    assert torch.allclose(whole.exp().sum(-1), torch.ones(len(whole)), atol=1e-4), "the whole vocabulary"
    assert of_text.equal(of_ids), "the same tokens"
    targets = torch.tensor([ids[length] for ids in IDS for length in range(1, len(ids))])
    return float((whole.gather(-1, targets[:, None])[:, 0] - ours.flatten()).abs().max())


@pytest.mark.model
@pytest.mark.timeout(600)  # the first run installs llama.cpp
@pytest.mark.parametrize("is_tied", [True, False])
def test_every_export_gives_our_logprobs_also_where_head_and_embedding_share_weights(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_tied: bool
) -> None:
    from peft import PeftModel

    load: Any = AutoModelForCausalLM.from_pretrained
    base = _base(tiny_dir, tmp_path / "base", is_tied=is_tied)
    checkpoint, ours = _adapter(base, tmp_path / "data")
    assert _gap(load(base), ours) > 0.05, "the adapter changes the model"

    assert main(["export", str(checkpoint), "--peft", str(tmp_path / "peft")]) == 0
    said = capsys.readouterr().out
    assert ("merge_and_unload" in said) == is_tied
    card = (tmp_path / "peft" / "README.md").read_text()
    assert ("Do not merge it with merge_and_unload" in card) == is_tied
    with pytest.warns(UserWarning, match="tie_word_embeddings") if is_tied else contextlib.nullcontext():
        adapted = PeftModel.from_pretrained(load(base), str(tmp_path / "peft"))
    assert _gap(adapted, ours) < tolerances.LOGPROBS
    with pytest.warns(UserWarning, match="tie_word_embeddings") if is_tied else contextlib.nullcontext():
        merged_by_peft = adapted.merge_and_unload()
    assert (_gap(merged_by_peft, ours) < tolerances.LOGPROBS) != is_tied, "the note is true"

    assert main(["export", str(checkpoint), "--merged", str(tmp_path / "merged")]) == 0
    assert ("tie_word_embeddings is false" in capsys.readouterr().out) == is_tied
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    assert _gap(load(tmp_path / "merged"), ours) < tolerances.LOGPROBS

    assert main(["export", str(checkpoint), "--gguf", str(tmp_path / "model.gguf")]) == 0
    assert _gguf_matrix(tmp_path / "model.gguf", "output.weight").equal(
        load_file(tmp_path / "merged" / "model.safetensors")["lm_head.weight"].float()
    ), "bit for bit"
    gguf_to_directory(tmp_path / "model.gguf", tmp_path / "from_gguf")
    assert _gap(load(tmp_path / "from_gguf"), ours) < tolerances.LOGPROBS
    text = "guess 12\n\n7 and 8"
    text_ids = AutoTokenizer.from_pretrained(base).encode(text)
    assert AutoTokenizer.from_pretrained(tmp_path / "from_gguf").encode(text) == text_ids
    gap = _gap_in_llama_cpp(tmp_path / "model.gguf", ours, text, text_ids)
    print(f"llama.cpp: {gap:.1e}")
    assert gap < tolerances.LOGPROBS
