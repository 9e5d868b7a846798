"""DPO and REFUEL in the engine: against a naive loop, and against themselves swapped, cut and packed differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from naive import NaiveModel, displaced_adapter, random_ids, relative_error, rl_datum, run
from turnwise.engine.engine import Engine
from turnwise.errors import ConfigError, DataError
from turnwise.runtime import tolerances
from turnwise.types import Datum, TensorData

PROMPT = random_ids(30, 1)
SETTINGS = [("dpo", {"beta": 0.3}), ("dpo", {"beta": 0.3, "reward_offset": 0.5}), ("refuel", {"eta": 2.0})]


def side(seed: int, reward: float, length: int = 14, prompt: Sequence[int] = PROMPT, **columns: list[float]) -> Datum:
    """One dialogue: two trained replies with something of the world between them."""
    datum = rl_datum([*prompt, *random_ids(length, seed)], start=len(prompt) - 1, seed=seed)
    inputs = dict(datum.loss_fn_inputs)
    mask = inputs["mask"].to_numpy().copy()
    mask[len(prompt) + 4 : len(prompt) + 8] = 0
    extra = {"mask": mask, "weights": 0.5 * mask, "ref_logprobs": inputs["logprobs"].to_numpy() * mask}
    extra["advantages"] = reward * mask
    return Datum(datum.model_input, {**inputs, **extra, **columns})


def with_column(datum: Datum, **columns: object) -> Datum:
    return Datum(datum.model_input, {**datum.loss_fn_inputs, **columns})


PAIRS = [side(1, 1.0), side(2, 0.2, length=17), side(3, 0.5, prompt=random_ids(12, 9)), side(4, -1.0, length=20)]


def naive_loss(model: NaiveModel, datums: list[Datum], name: str, config: dict[str, float]) -> torch.Tensor:
    total = torch.zeros(())
    for chosen, rejected in zip(datums[::2], datums[1::2], strict=True):
        sums, rewards = [], []
        for datum in (chosen, rejected):
            inputs = {key: torch.tensor(value.to_numpy()) for key, value in datum.loss_fn_inputs.items()}
            logprobs, at = model.logprobs(datum), torch.zeros(())
            for i in range(len(logprobs)):
                if inputs["mask"][i]:
                    at = at + inputs.get("turn_weights", inputs["mask"])[i] * (logprobs[i] - inputs["ref_logprobs"][i])
            sums.append(at)
            rewards.append(inputs["advantages"][inputs["mask"] > 0][0])
        delta, difference = sums[0] - sums[1], rewards[0] - rewards[1]
        if name == "dpo":
            loss = -torch.log(torch.sigmoid(config["beta"] * delta - config.get("reward_offset", 0.0) * difference))
        else:
            loss = (delta / config["eta"] - difference) ** 2
        total = total + 0.5 * loss
    return total


def grads(engine: Engine, datums: list[Datum], name: str, **config: float | str) -> torch.Tensor:
    adapter = displaced_adapter(engine)
    run(engine.forward_backward(adapter, datums, name, config))
    return adapter.grad.clone()


@pytest.mark.parametrize(("name", "config"), SETTINGS)
def test_loss_and_gradient_equal_a_naive_loop(
    llama_dir: Path, make_engine: Callable[..., Engine], name: str, config: dict[str, float]
) -> None:
    engine = make_engine()
    weights = [np.where(np.arange(len(d.loss_fn_inputs["mask"])) < 36, 1.0, 0.4) for d in PAIRS]
    datums = [with_column(d, turn_weights=w.astype(np.float32)) for d, w in zip(PAIRS, weights, strict=True)]
    adapter = displaced_adapter(engine)
    naive = NaiveModel(llama_dir, adapter)
    output = run(engine.forward_backward(adapter, datums, name, config))
    want = naive_loss(naive, datums, name, config)
    want.backward()
    assert output.metrics["loss:sum"] == pytest.approx(float(want.detach()), rel=tolerances.LOSS)
    assert output.metrics["num_pairs:sum"] == 2
    for layer, pairs in naive.grads().items():
        for got, expected in zip(adapter.grad_pairs[layer], pairs, strict=True):
            assert relative_error(got, expected) < 2e-4, layer


@pytest.mark.parametrize(("name", "config"), SETTINGS)
def test_passes_packing_and_numbering_leave_the_gradient_alone(
    make_engine: Callable[..., Engine], name: str, config: dict[str, float]
) -> None:
    whole = grads(make_engine(), PAIRS, name, **config)
    assert (
        relative_error(grads(make_engine(micro_batch_tokens=32), PAIRS, name, **config), whole) < tolerances.GRADIENTS
    )
    assert relative_error(grads(make_engine(share_prefixes=False), PAIRS, name, **config), whole) < tolerances.GRADIENTS
    numbered = [
        with_column(datum, pair=TensorData([float(n)] * len(datum.loss_fn_inputs["mask"])))
        for datum, n in zip(PAIRS, (1, -1, 2, -2), strict=True)
    ]
    order = [3, 0, 2, 1]
    assert (
        relative_error(grads(make_engine(), [numbered[i] for i in order], name, **config), whole) < tolerances.GRADIENTS
    )


def test_a_dialogue_split_into_datums_has_the_gradient_of_the_whole(make_engine: Callable[..., Engine]) -> None:
    """Each reply of the chosen side in a datum of its own: same tokens, same contexts, same sum."""
    whole = grads(make_engine(), PAIRS[:2], "dpo", beta=0.3)
    parts = []
    for datum, number in ((PAIRS[0], 1.0), (PAIRS[1], -1.0)):
        mask = datum.loss_fn_inputs["mask"].to_numpy()
        for is_first in (True, False):
            of_reply = mask * ((np.arange(len(mask)) < len(PROMPT) + 5) == is_first)
            own = {"mask": of_reply, "weights": 0.5 * of_reply, "pair": np.full(len(mask), number, np.float32)}
            parts.append(with_column(datum, **own))
    assert relative_error(grads(make_engine(), parts, "dpo", beta=0.3), whole) < tolerances.GRADIENTS


def test_swapping_the_sides_flips_the_margin_and_dpos_gradients_add_up_to_its_scale(
    make_engine: Callable[..., Engine],
) -> None:
    """d/dz of -log sigmoid(z) and -log sigmoid(-z) differ by 1: swapped gradients differ by beta times Delta's."""
    engine = make_engine()
    adapter = displaced_adapter(engine)
    swapped = [PAIRS[1], PAIRS[0]]
    margins = [
        run(engine.forward(adapter, pair, "dpo", {"beta": 0.3})).metrics["pair_margin:mean"]
        for pair in (PAIRS[:2], swapped)
    ]
    assert margins[0] == pytest.approx(-margins[1], rel=1e-5)
    assert abs(margins[0]) > 0.1
    forth, back = grads(engine, PAIRS[:2], "dpo", beta=0.3), grads(engine, swapped, "dpo", beta=0.3)
    ratio = 1 / (1 + np.exp(0.3 * margins[0])) / -(1 / (1 + np.exp(-0.3 * margins[0])))
    assert relative_error(forth, ratio * back) < 1e-4


def test_refuel_is_at_rest_where_the_margin_is_eta_times_the_reward_difference(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    margin = run(engine.forward(displaced_adapter(engine), PAIRS[:2], "refuel", None)).metrics["pair_margin:mean"]
    at_rest = [side(1, margin / 2.0), side(2, 0.0, length=17)]
    moved = [side(1, margin / 2.0 + 1.0), side(2, 0.0, length=17)]
    assert grads(engine, at_rest, "refuel", eta=2.0).norm() < 1e-4 * grads(engine, moved, "refuel", eta=2.0).norm()


def test_refuel_ignores_a_constant_added_to_both_rewards_and_the_forms_differ_by_eta_squared(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    plain = grads(engine, PAIRS[:2], "refuel", eta=3.0)
    shifted = [side(1, 6.0), side(2, 5.2, length=17)]
    assert relative_error(grads(engine, shifted, "refuel", eta=3.0), plain) < tolerances.GRADIENTS
    assert relative_error(grads(engine, PAIRS[:2], "refuel", eta=3.0, form="repo"), 9 * plain) < tolerances.GRADIENTS


def test_what_the_world_said_changes_nothing(make_engine: Callable[..., Engine]) -> None:
    plain = grads(make_engine(), PAIRS[:2], "dpo", beta=0.3)
    spoiled = []
    for datum in PAIRS[:2]:
        is_world = datum.loss_fn_inputs["mask"].to_numpy() == 0
        spoiled.append(
            with_column(
                datum,
                ref_logprobs=np.where(is_world, -50.0, datum.loss_fn_inputs["ref_logprobs"].to_numpy()),
                advantages=np.where(is_world, 9.0, datum.loss_fn_inputs["advantages"].to_numpy()),
                weights=np.where(is_world, 3.0, datum.loss_fn_inputs["weights"].to_numpy()),
            )
        )
    assert relative_error(grads(make_engine(), spoiled, "dpo", beta=0.3), plain) < 1e-6


def test_without_reference_logprobs_the_base_model_is_the_reference(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    bare = [
        Datum(d.model_input, {key: value for key, value in d.loss_fn_inputs.items() if key != "ref_logprobs"})
        for d in PAIRS[:2]
    ]
    base = run(engine.forward(displaced_adapter(engine, size=0.0), bare, "cross_entropy", None))
    known = [with_column(d, ref_logprobs=out["logprobs"]) for d, out in zip(bare, base.loss_fn_outputs, strict=True)]
    assert relative_error(grads(engine, bare, "dpo", beta=0.3), grads(engine, known, "dpo", beta=0.3)) < 1e-4


@pytest.mark.parametrize(
    ("datums", "message"),
    [
        (PAIRS[:3], "3 datums; expected pairs"),
        ([with_column(d, pair=[1.0] * len(d.loss_fn_inputs["mask"])) for d in PAIRS[:2]], "pair 1 has no rejected"),
        ([with_column(d, pair=[0.0] * len(d.loss_fn_inputs["mask"])) for d in PAIRS[:2]], "expected one number, not 0"),
        ([PAIRS[0], with_column(PAIRS[1], weights=PAIRS[1].loss_fn_inputs["mask"])], "weights of pair 1 are"),
    ],
)
def test_a_batch_that_is_not_pairs_is_refused(
    make_engine: Callable[..., Engine], datums: list[Datum], message: str
) -> None:
    engine = make_engine()
    with pytest.raises(DataError, match=message):
        run(engine.forward_backward(displaced_adapter(engine), datums, "dpo", None))


def test_a_setting_that_the_loss_does_not_have_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match="dpo has no config key 'eta'; did you mean 'beta'"):
        run(engine.forward_backward(displaced_adapter(engine), PAIRS[:2], "dpo", {"eta": 1.0}))
    with pytest.raises(ConfigError, match="eta=0"):
        run(engine.forward_backward(displaced_adapter(engine), PAIRS[:2], "refuel", {"eta": 0}))
