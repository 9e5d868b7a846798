"""The branch benchmark measures what la_grpo trains."""

from __future__ import annotations

import argparse

from turnwise.bench.branch import make_datums


def test_its_datums_share_five_turns_and_train_the_last_reply_alone() -> None:
    args = argparse.Namespace(groups=2, group_size=8, turns=5, observation=6, reply=4)
    datums = make_datums(args, vocab_size=500)
    assert len(datums) == 16
    prefix = 5 * (6 + 4) + 6
    for group in (datums[:8], datums[8:]):
        assert len({tuple(datum.model_input.to_ints()[:prefix]) for datum in group}) == 1
        assert len({tuple(datum.model_input.to_ints()) for datum in group}) == 8
        for datum in group:
            assert datum.model_input.length == prefix + 3
            assert datum.loss_fn_inputs["mask"].tolist() == [0.0] * (prefix - 1) + [1.0] * 4
