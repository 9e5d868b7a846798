"""The benchmark of sampling and training by turns: what it plays, trains on and reports."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from turnwise.bench import both, report
from turnwise.bench.both import PlayedDialogue, RlStep
from turnwise.errors import ConfigError


def _arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    report.add_common_options(parser)
    both.add_options(parser)
    small = ["--prompts=2", "--group-size=2", "--prompt-tokens=8", "--turns=3", "--new-tokens=4", "--observed=5"]
    return parser.parse_args(["--model=tiny", "--device=cpu", "--repeats=2", *small, *given])


@pytest.fixture(scope="module")
def measured(tiny_dir: Path) -> dict[str, Any]:  # noqa: ARG001
    return both.run(_arguments())


def test_the_share_is_what_a_step_takes_beyond_its_two_halves(measured: dict[str, Any]) -> None:
    alone = measured["sampling_alone_s"] + measured["training_alone_s"]
    assert measured["cost_of_both_share"] == pytest.approx(1 - alone / measured["step_s"])
    assert measured["sampled_tokens_per_s"] == pytest.approx(2 * 2 * 3 * 4 / measured["sampling_alone_s"])
    assert measured["trained_tokens_per_s"] == pytest.approx(4 * (8 + 3 * 4 + 2 * 5 - 1) / measured["training_alone_s"])


def test_the_merged_copy_is_smaller_than_the_weights_it_copies(measured: dict[str, Any]) -> None:
    assert 0 < measured["merged_gib"] < measured["weights_gib"]
    assert 0 < measured["adapter_gib"] < measured["kv_cache_gib"]


def test_a_step_samples_from_the_weights_that_the_step_before_it_trained(tiny_dir: Path) -> None:  # noqa: ARG001
    args = _arguments()
    engine = report.make_engine(args)
    step = RlStep(engine, args)
    before = step.adapter.flat.clone()
    step.alternate()
    assert not step.adapter.flat.equal(before)
    assert step.adapter.num_steps == 1
    (dialogue, *_) = step.play(engine.publish(step.adapter))
    assert sum(dialogue.is_sampled) == 3 * 4
    assert len(dialogue.ids) == 8 + 3 * 4 + 2 * 5


def test_only_what_was_sampled_is_trained() -> None:
    dialogue = PlayedDialogue([5, 6])
    dialogue.add([7, 8], [-1.0, -2.0])
    dialogue.add([9], None)
    dialogue.add([10], [-3.0])
    datum = dialogue.to_datum(-1.0)
    assert datum.model_input.to_ints() == [5, 6, 7, 8, 9]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [6, 7, 8, 9, 10]
    assert datum.loss_fn_inputs["mask"].tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert datum.loss_fn_inputs["logprobs"].tolist() == [0.0, -1.0, -2.0, 0.0, -3.0]
    assert datum.loss_fn_inputs["advantages"].tolist() == [0.0, -1.0, -1.0, 0.0, -1.0]


def test_without_an_adapter_there_is_nothing_to_train() -> None:
    with pytest.raises(ConfigError, match="--rank 0 leaves nothing to train"):
        both.run(_arguments("--rank=0"))
