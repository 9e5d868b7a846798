"""`turnwise merge` from the command line: what it writes loads everywhere, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from turnwise.cli import main
from turnwise.training import merge_search
from turnwise.training.policy import PolicySampler, find_policy

pytestmark = pytest.mark.usefixtures("tiny_dir")
SMALL = ("model=tiny", "train.steps=1", "train.tasks_per_step=2", "rollout.group_size=2", "eval.tasks=0")
SMALL = (*SMALL, "warmup.steps=3", "warmup.demonstrations=4", "rollout.max_tokens_per_turn=8")


def _train(directory: Path, world: str, *options: str) -> str:
    assert main(["train", world, *SMALL, *options, f"run.dir={directory}"]) == 0
    return str(directory)


def test_a_merged_adapter_is_evaluated_exported_and_started_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _train(tmp_path / "a", "guess_number", "model.rank=4")
    second = _train(tmp_path / "b", "key_door", "model.rank=8")
    out = str(tmp_path / "merged")
    assert main(["merge", f"{first}=0.5", f"{second}=0.25", "--out", out]) == 0
    assert "an adapter of rank 12" in capsys.readouterr().out
    record = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert [(part["target"], part["weight"]) for part in record["parts"]] == [(first, 0.5), (second, 0.25)]
    small = ("eval.tasks=2", "rollout.max_tokens_per_turn=4", "rollout.max_turns=1")
    assert main(["eval", out, "--env", "key_door", "--json", *small]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_attempts"] == 2
    assert main(["export", out, "--merged", str(tmp_path / "whole")]) == 0
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
        name = "model.layers.0.self_attn.q_proj.weight"
        base = AutoModelForCausalLM.from_pretrained(record["base"], dtype=torch.float32)
        alone = []
        for target in (first, second):
            assert main(["export", target, "--merged", f"{target}-whole"]) == 0
            alone.append(AutoModelForCausalLM.from_pretrained(f"{target}-whole", dtype=torch.float32))
    start = base.get_parameter(name)
    changes = [one.get_parameter(name) - start for one in alone]
    assert all(change.abs().max() > 1e-5 for change in changes), "both runs have learned something"
    torch.testing.assert_close(
        whole.get_parameter(name), start + 0.5 * changes[0] + 0.25 * changes[1], atol=1e-6, rtol=1e-5
    )
    start_from = ("model.rank=12", f"model.from={out}", "warmup.steps=0")
    _train(tmp_path / "c", "guess_number", *start_from)
    assert main(["merge", f"{out}=1", f"{first}=-0.5", "--out", str(tmp_path / "again")]) == 0, "a merge is a part too"


def test_full_weights_merge_to_a_model_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = ("model.train=full",)
    first, second = (_train(tmp_path / n, w, *full) for n, w in (("a", "guess_number"), ("b", "key_door")))
    parts = (f"{first}=0.5", f"{second}=0.5")
    for method in ("sum", "slerp", "ties"):
        assert main(["merge", *parts, "--method", method, "--out", str(tmp_path / method)]) == 0
    files = [find_policy(target).files for target in (first, second)]
    one, two = (load_file(file / "model.safetensors") for file in files if file is not None)
    merged = load_file(tmp_path / "sum" / "model.safetensors")
    assert merged.keys() == one.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor.float(), (one[name].float() + two[name].float()) / 2, atol=1e-5, rtol=1e-2)
    capsys.readouterr()
    small = ("eval.tasks=2", "rollout.max_tokens_per_turn=4", "rollout.max_turns=1")
    assert main(["eval", str(tmp_path / "ties"), "--env", "key_door", "--json", *small]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_attempts"] == 2

    adapter = _train(tmp_path / "c", "guess_number")
    refused = {
        ("merge", f"{first}=1", f"{adapter}=1"): "expected parts of one kind",
        ("merge", f"{adapter}=1", f"{adapter}=1", "--method", "ties"): "use --method sum",
        ("merge", *parts, parts[0], "--method", "slerp"): "expects two",
        ("merge", *parts, "--density", "0.5"): "read by --method ties",
        ("merge", parts[0]): "expected two or more",
        ("merge", first, second): "has no weight",
        ("merge", f"{first}=half", parts[1]): "does not end with a weight",
        ("merge", "tiny=1", parts[1]): "is a model as it is",
    }
    for words, message in refused.items():
        assert main([*words, "--out", str(tmp_path / "no")]) == 2, words
        assert message in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert main(["merge", *parts, "--out", str(tmp_path / "sum")]) == 2
    assert "exists; name a new directory" in capsys.readouterr().err


def test_parts_of_other_bases_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_dir: Path) -> None:
    import shutil

    shutil.copytree(tiny_dir, tmp_path / "other")
    first = _train(tmp_path / "a", "guess_number")
    second = _train(tmp_path / "b", "guess_number", f"model={tmp_path / 'other'}")
    assert main(["merge", f"{first}=1", f"{second}=1", "--out", str(tmp_path / "no")]) == 2
    assert "expected parts of one base model" in capsys.readouterr().err


def test_a_search_reports_on_tasks_that_it_did_not_choose_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (_train(tmp_path / name, "guess_number", "model.rank=2", "train.steps=0") for name in "ab")
    played: list[tuple[str | None, set[str]]] = []
    evaluate = PolicySampler.evaluate

    def watched(policy: PolicySampler, **options: Any) -> Any:
        found = evaluate(policy, **options)
        played.append((policy.checkpoint, {group.task_id for group in found.played.groups}))
        return found

    monkeypatch.setattr(PolicySampler, "evaluate", watched)
    monkeypatch.setattr(merge_search, "DEFAULT_TASKS", 2)
    out = str(tmp_path / "out")
    assert main(["merge", first, second, "--search", "3", "--env", "guess_number", "--out", out]) == 0
    searched, final = played[:3], played[3:]
    assert len(final) == 4, "base, two parts, merge"
    assert final[0][0] is None
    assert {frozenset(tasks) for _, tasks in searched} == {frozenset(searched[0][1])}
    assert {frozenset(tasks) for _, tasks in final} == {frozenset(final[0][1])}
    assert searched[0][1]
    assert not searched[0][1] & final[0][1]
    assert "tasks that the weights were not chosen by" in capsys.readouterr().out
    assert main(["merge", first, second, "--search", "3", "--out", f"{out}2"]) == 2
