"""What is trained is a protocol: the engine trains, saves and refuses a kind that it has never heard of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from naive import random_ids, run
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.model.lora import Policy, Span, base_policy
from turnwise.engine.training.columns import Asked
from turnwise.engine.training.trainable import Trainable
from turnwise.errors import ConfigError
from turnwise.types import AdamParams, Datum, LoraConfig, ModelInput, TensorData


class ProbeDatum:
    """A sequence whose every position has a wanted number."""

    target_start = 0
    has_reference = False

    def __init__(self, datum: Datum) -> None:
        self.input_ids = np.asarray(datum.model_input.to_ints())
        self.wanted = datum.loss_fn_inputs["wanted"].to_numpy()

    def asked(self, *, only_trained: bool) -> Asked:  # noqa: ARG002 - all of them
        length = len(self.input_ids)
        return Asked(np.arange(length), np.ones(length, np.float32), np.zeros(length, np.int64))


class ProbeColumns:
    def __init__(self, wanted_T: Tensor) -> None:
        self.wanted_T = wanted_T

    def slice(self, index: Any) -> ProbeColumns:
        return ProbeColumns(self.wanted_T[index])

    def to(self, device: Any) -> ProbeColumns:
        return ProbeColumns(self.wanted_T.to(device))


class SquaredError:
    is_separable = True
    spans_datums = needs_entropy = needs_reference = False

    def __call__(self, outputs_T: Tensor, entropies_T: Tensor | None, columns: ProbeColumns) -> Tensor:  # noqa: ARG002
        return (outputs_T - columns.wanted_T).square()

    def metrics(self, outputs_T: Tensor, entropies_T: Tensor | None, columns: ProbeColumns) -> dict[str, float]:
        return {"loss:sum": float(self(outputs_T, entropies_T, columns).sum())}


class ProbeHead:
    """hidden . w, for one probe in the pass."""

    def __init__(self, probe: Probe, entries: Any) -> None:
        self.probe, self.entries = probe, entries

    def outputs(self, hidden_RH: Tensor) -> tuple[Tensor, None]:
        return (hidden_RH.float() @ self.probe.flat)[self.entries.rows], None

    def backward(self, hidden_RH: Tensor, gradients: Any) -> tuple[Tensor, Tensor, None]:
        outputs_E, _ = self.outputs(hidden_RH)
        grad_E, _ = gradients(outputs_E, None, slice(0, len(outputs_E)))
        self.probe.grad += hidden_RH.float()[self.entries.rows].t() @ grad_E
        return torch.zeros_like(hidden_RH), outputs_E, None


class Probe:
    """A linear probe on the frozen model: no LoRA, no policy."""

    output_name = "scores"

    def __init__(self, hidden_size: int) -> None:
        self.lora = LoraConfig(rank=1)
        self.flat, self.grad, self.exp_avg, self.exp_avg_sq = (torch.zeros(hidden_size) for _ in range(4))
        self.num_steps = 0
        self.has_gradient = False
        self.objective = self

    @property
    def num_bytes(self) -> int:
        return 4 * self.flat.nbytes

    def span(self, start: int, stop: int) -> Span:
        return base_policy().span(start, stop)

    def publish(self, dtype: torch.dtype) -> Policy:  # noqa: ARG002
        raise ConfigError("a probe has nothing to sample from")

    def weights_moved(self) -> None:
        pass

    def save(self, directory: Path, base_model: str, *, with_optimizer: bool) -> None:  # noqa: ARG002
        directory.mkdir()
        save_file({"flat": self.flat}, directory / "probe.safetensors")

    def load(self, directory: Path, *, with_optimizer: bool) -> None:  # noqa: ARG002
        self.flat.copy_(load_file(directory / "probe.safetensors")["flat"])

    def free(self) -> None:
        self.flat.resize_(0)

    def make_loss(self, name: Any, settings: Any, *, is_learning: bool) -> SquaredError:  # noqa: ARG002
        return SquaredError()

    def read_datums(self, datums: Sequence[Datum], loss: Any, model: Any, *, is_learning: bool) -> list[ProbeDatum]:  # noqa: ARG002
        return [ProbeDatum(datum) for datum in datums]

    def collate(self, datums: Sequence[ProbeDatum]) -> ProbeColumns:
        return ProbeColumns(torch.from_numpy(np.concatenate([datum.wanted for datum in datums])))

    def make_head(self, model: Any, route: Any, entries: Any, *, with_entropy: bool) -> ProbeHead:  # noqa: ARG002
        return ProbeHead(self, entries)


@pytest.mark.model
def test_a_trainable_from_outside_is_trained_saved_loaded_and_not_published(tiny_dir: Path, tmp_path: Path) -> None:
    engine = Engine(tiny_dir, EngineConfig(device="cpu", kv_cache_gib=0.01, micro_batch_tokens=32), name="tiny")
    probe = Probe(engine.model.sizes.hidden_size)
    trainable: Trainable = probe
    rng = np.random.default_rng(0)
    datums = [
        Datum(
            ModelInput.from_ints(random_ids(20, seed)),
            {"wanted": TensorData.from_numpy(rng.standard_normal(20).astype(np.float32))},
        )
        for seed in range(3)
    ]
    losses = []
    for _ in range(30):
        losses.append(run(engine.forward_backward(trainable, datums, "squared_error", None)).metrics["loss:sum"])
        engine.optim_step(trainable, AdamParams(learning_rate=3e-2))
    assert losses[-1] < 0.7 * losses[0]
    assert trainable.num_steps == 30
    engine.save_adapter(trainable, tmp_path / "probe", with_optimizer=False)
    other = Probe(engine.model.sizes.hidden_size)
    engine.load_adapter(other, tmp_path / "probe", with_optimizer=False)
    scores = [run(engine.forward(one, datums, "squared_error", None)).loss_fn_outputs for one in (probe, other)]
    for mine, loaded in zip(*scores, strict=True):
        assert mine["scores"].tolist() == loaded["scores"].tolist()
    with pytest.raises(ConfigError, match="nothing to sample from"):
        engine.publish(trainable)
