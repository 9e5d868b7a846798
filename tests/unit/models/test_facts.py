"""What a model directory says about itself is what the engine finds in it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.errors import ModelError
from turnwise.models.config import ModelConfig
from turnwise.models.facts import ModelSizes, read_facts
from turnwise.types import LoraConfig

pytestmark = pytest.mark.model


@pytest.mark.parametrize("trained", [("attn",), ("mlp",), ("unembed",), ("attn", "mlp", "unembed")])
def test_sizes_are_the_engines(tiny_dir: Path, trained: tuple[str, ...]) -> None:
    flags = {f"train_{kind}": kind in trained for kind in ("attn", "mlp", "unembed")}
    facts = read_facts(tiny_dir)
    engine = Engine(tiny_dir, EngineConfig(device="cpu"), name="tiny")
    adapter = engine.create_adapter(LoraConfig(rank=3, **flags))
    model = ModelConfig.model_validate({"rank": 3, **flags})
    assert facts.num_adapter_parameters(model) == adapter.flat.numel()
    assert facts.context_length == engine.max_context_length
    sizes = {field.name: getattr(facts, field.name) for field in fields(ModelSizes)}
    assert ModelSizes(**sizes) == engine.model.sizes


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read as a model"):
        read_facts(tmp_path)
