"""The loop trains with a method from outside the package: one file, nothing registered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from unit.methods.test_outside import TOY
from unit.training.conftest import MakeRig


def test_a_method_from_a_file_trains_two_steps_and_doubles_what_grpo_gives(tmp_path: Path, make_rig: MakeRig) -> None:
    def advantages(method: dict[str, object]) -> list[float]:
        rig = make_rig({"method": method, "train": {"steps": 2, "tasks_per_step": 4}, "eval": {"tasks": 0}})
        rig.directory = tmp_path / str(method["name"]).rpartition(":")[2]
        asyncio.run(rig.loop().run())
        assert rig.methods_called().count("optim_step") == 2
        datums = [
            datum for call in rig.trainer.calls if call.method == "forward_backward" for datum in call.arguments["data"]
        ]
        return [value for datum in datums for value in datum.loss_fn_inputs["advantages"].tolist()]

    file = tmp_path / "toy_methods.py"
    file.write_text(TOY, encoding="utf-8")
    plain = advantages({"name": "grpo"})
    assert any(plain)
    assert advantages({"name": f"{file}:DoubledGrpo", "factor": 3.0}) == pytest.approx([3 * value for value in plain])
