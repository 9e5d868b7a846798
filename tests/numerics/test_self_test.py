"""The self-test at load: it passes what is right, and names the part of what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from naive import make_model
from turnwise.bench.family_samples import FamilySample, family_samples
from turnwise.cli import main
from turnwise.engine import passed_tests, self_test
from turnwise.engine.attention.plans import PagedPlan, TreePlan
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.model.body import FusedBody
from turnwise.engine.model.lora import LinearGroup, LoraLinear
from turnwise.engine.model.trace import EMBEDDING, Trace
from turnwise.engine.passed_tests import PassedTests
from turnwise.engine.sampling import inputs
from turnwise.engine.sampling.weights import SamplingWeights
from turnwise.engine.self_test import compared_parts
from turnwise.engine.training.logprobs import TargetHead
from turnwise.errors import ModelError
from turnwise.models.families import FAMILIES, llama_block

CPU = EngineConfig(device="cpu", dtype="float32", kv_cache_gib=0.01)
Patch = pytest.MonkeyPatch
NO_OTHER_SIDE = ("norm", "dropout")
"""Ends of the names of parts that only transformers writes out."""


def load(directory: Path, **settings: Any) -> Engine:
    return Engine(directory, CPU.model_copy(update=settings), name="a model")


@pytest.fixture(autouse=True)
def _always_tested(monkeypatch: Patch, tmp_path: Path) -> None:
    """On a busy machine even the test of a tiny model takes long, here and in tests that ran before."""
    monkeypatch.setattr(passed_tests, "LONG_SECONDS", 1e9)
    monkeypatch.setattr(passed_tests, "home", lambda: tmp_path / "records")


@pytest.fixture
def qwen3_dir(tmp_path: Path) -> Path:
    """Runs our fused layers."""
    return make_model(FamilySample(name="", model_type="qwen3").config(), tmp_path / "qwen3")


@pytest.fixture
def starcoder_dir(tmp_path: Path) -> Path:
    """Runs transformers' layers."""
    return make_model(FamilySample(name="", model_type="starcoder2").config(), tmp_path / "starcoder2")


def spoil(patch: Patch, owner: type, method: str, change: Callable[[Any], Any]) -> None:
    """Let a method return something else."""
    right = getattr(owner, method)
    patch.setattr(owner, method, lambda self, *args, **kwargs: change(right(self, *args, **kwargs)))


def spoil_embedding(patch: Patch) -> None:
    right = FusedBody.run
    patch.setattr(FusedBody, "run", lambda self, h, *rest: right(self, h * 1.01, *rest))


def spoil_order_of_joined_weights(patch: Patch) -> None:
    right = LinearGroup.join

    def swap(linears: list[LoraLinear]) -> LinearGroup:
        joined = right(linears)
        if len(linears) == 2:  # gate and up
            joined = replace(joined, weight=joined.weight.flip(0))
        return joined

    patch.setattr(LinearGroup, "join", staticmethod(swap))


def spoil_paged_attention(patch: Patch, *, decodes: bool) -> None:
    right = PagedPlan.attend

    def attend(self: PagedPlan, *args: Any) -> torch.Tensor:
        out = right(self, *args)
        return out * 1.05 if bool(self.num_decode) == decodes else out

    patch.setattr(PagedPlan, "attend", attend)


def spoil_positions_of_decode(patch: Patch) -> None:
    right = inputs.step_inputs

    def shifted(*args: Any) -> Any:
        input_ids, positions, plan = right(*args)
        return input_ids, positions * 2 if isinstance(plan, PagedPlan) and plan.num_decode else positions, plan

    patch.setattr("turnwise.engine.self_test.step_inputs", shifted)


def spoil_description(patch: Patch, **changes: Any) -> None:
    family = FAMILIES["qwen3"]
    patch.setitem(FAMILIES, "qwen3", replace(family, describe=lambda config: replace(llama_block(config), **changes)))


OF_OUR_LAYERS: dict[str, Callable[[Patch], None]] = {
    "trainer differs at the embedding": spoil_embedding,
    "trainer differs at layer 0 attention (self_attn)": spoil_description,  # without the norms of query and key heads
    "trainer differs at layer 0 MLP (mlp)": spoil_order_of_joined_weights,
    "trainer differs at the last norm": lambda patch: spoil(patch, FusedBody, "run", lambda out: out * 1.01),
    "trainer differs at the head": lambda patch: spoil(patch, TargetHead, "outputs", lambda out: (out[0] - 0.01, None)),
    "prefill differs at the head": lambda patch: spoil(patch, SamplingWeights, "logits", lambda out: out * 1.05),
    "decode differs at layer 0 attention (self_attn)": spoil_positions_of_decode,
}
OF_THEIR_LAYERS: dict[str, Callable[[Patch], None]] = {
    "trainer differs at layer 0 attention (self_attn)": lambda patch: spoil(
        patch, TreePlan, "attend", lambda out: out * 1.05
    ),
    "prefill differs at layer 0 attention (self_attn)": lambda patch: spoil_paged_attention(patch, decodes=False),
    "decode differs at layer 0 attention (self_attn)": lambda patch: spoil_paged_attention(patch, decodes=True),
    "trainer fails: ZeroDivisionError": lambda patch: spoil(patch, TreePlan, "attend", lambda _: 1 // 0),
}


def test_a_defect_in_any_part_is_refused_with_the_name_of_the_part(qwen3_dir: Path, starcoder_dir: Path) -> None:
    for directory, defects in ((qwen3_dir, OF_OUR_LAYERS), (starcoder_dir, OF_THEIR_LAYERS)):
        load(directory).close()
        for told, plant in defects.items():
            with pytest.MonkeyPatch.context() as patch:
                plant(patch)
                with pytest.raises(ModelError) as refused:
                    load(directory)
            assert told in str(refused.value)
            assert "engine.self_test=false" in str(refused.value)


def test_bfloat16_passes_in_every_family_and_no_part_of_a_layer_is_left_out(tmp_path: Path, monkeypatch: Patch) -> None:
    """Only norms within our layers, and what does nothing, have no other side."""
    left_out: dict[str, list[str]] = {}
    paths: list[str] = []

    def compare(exact: Trace, run: self_test.OurRun) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        found = compared_parts(exact, run)
        assert EMBEDDING in found
        left_out[run.path] = [part for part in exact.parts if part not in found and not part.endswith(NO_OTHER_SIDE)]
        paths.append(run.path)
        return found

    monkeypatch.setattr(self_test, "compared_parts", compare)
    for sample in family_samples():
        paths.clear()
        load(make_model(sample.config(), tmp_path / sample.name, spread=0.06), dtype="bfloat16").close()
        assert set(paths) == {"trainer", "prefill", "decode"}, sample.name
        assert left_out == {path: [] for path in paths}, sample.name


def test_a_defect_is_found_in_bfloat16_too(qwen3_dir: Path, monkeypatch: Patch) -> None:
    spoil_description(monkeypatch)
    with pytest.raises(ModelError, match="layer 0 attention"):
        load(qwen3_dir, dtype="bfloat16")


def test_a_long_test_is_not_repeated_until_model_or_code_change(qwen3_dir: Path, monkeypatch: Patch) -> None:
    def record() -> PassedTests:
        return PassedTests(qwen3_dir, torch.device("cpu"), torch.float32)

    load(qwen3_dir)
    assert not record().has_record(), "a short test runs at every load"
    monkeypatch.setattr(passed_tests, "LONG_SECONDS", 0.0)
    load(qwen3_dir)
    assert record().has_record()
    assert not PassedTests(qwen3_dir, torch.device("cpu"), torch.bfloat16).has_record()
    with pytest.MonkeyPatch.context() as patch:
        spoil_embedding(patch)
        load(qwen3_dir)  # it was passed
        os.utime(qwen3_dir / "model.safetensors", ns=(1, 1))
        with pytest.raises(ModelError, match="embedding"):
            load(qwen3_dir)
    monkeypatch.setattr(passed_tests, "TESTED_ROOMS", ("engine",))
    assert not record().has_record(), "other code"


def test_every_command_that_loads_a_model_refuses_a_wrong_one(
    tiny_dir: Path, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil_embedding(monkeypatch)
    for command in (
        ["train", "guess_number", f"model={tiny_dir}", f"run.dir={tmp_path / 'run'}", "train.steps=1"],
        ["eval", str(tiny_dir), "--env", "guess_number"],
        ["sample", str(tiny_dir)],
        ["serve", "--model", str(tiny_dir), "--port", "0", "--data-dir", str(tmp_path / "service")],
    ):
        assert main(command) != 0, command
        err = capsys.readouterr().err
        assert "trainer differs at the embedding" in err, (command, err)
        assert "Traceback" not in err, (command, err)


def test_it_can_be_turned_off_by_name(qwen3_dir: Path, monkeypatch: Patch) -> None:
    spoil_embedding(monkeypatch)
    load(qwen3_dir, self_test=False)


def test_the_reference_is_not_kept(qwen3_dir: Path) -> None:
    assert load(qwen3_dir).model.references == ()


def test_what_the_test_leaves_in_the_cache_is_not_used(qwen3_dir: Path) -> None:
    engine = load(qwen3_dir)
    assert engine.sampler.pool.num_available == engine.sampler.pool.num_blocks
    assert engine.sampler.pool.match(engine.base_policy.version, list(range(32)), 31)[0] == []
