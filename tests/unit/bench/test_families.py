"""`turnwise bench families` names the machine that ran, and keeps a table for each kind of device."""

from __future__ import annotations

import argparse

import pytest
import torch

from turnwise.bench import families
from turnwise.bench.family_page import ON_CPU, ON_GPU, Differences, FamilyRow, family_table, read_table, replace_tables

ROW = FamilyRow(
    name="llama",
    layers="ours",
    adapted="attn",
    moved=0.1,
    differences=Differences(forward=1e-6, prefill=1e-6, decode=1e-6, training=1e-6, peft=1e-6),
)
PAGE = "".join(
    f"<!-- {name}: begin -->old<!-- {name}: end -->\n" for name in ("families", "families on a GPU", "refusals")
)


def test_the_report_names_the_gpu_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(families, "compare_all", lambda *_: ([ROW], {}))
    asked = argparse.Namespace(device="cuda", dtype="auto", only=["llama"], write=None)
    assert families.run(asked)["machine"] == "NVIDIA H200"


def test_a_gpus_table_leaves_the_cpus_alone() -> None:
    page = replace_tables(PAGE, [ROW], "NVIDIA H200", is_gpu=True)
    assert read_table(page, ON_CPU) == "old"
    assert read_table(page, ON_GPU) == f"Measured on one NVIDIA H200:\n\n{family_table([ROW])}"
    again = replace_tables(page, [ROW, ROW], "x86_64 CPU", is_gpu=False)
    assert read_table(again, ON_CPU) == family_table([ROW, ROW])
    assert read_table(again, ON_GPU) == read_table(page, ON_GPU)
