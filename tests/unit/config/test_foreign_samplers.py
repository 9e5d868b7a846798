"""A sampler that is another program is corrected for unless the user decides otherwise; the local one is not."""

from __future__ import annotations

from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml, config_to_yaml, load_config
from turnwise.methods.grpo import Grpo
from turnwise.rollout.limits import RolloutLimits
from turnwise.training.assemble import make_method

FOREIGN = "rollout.backend=turnwise.backends.local:LocalPublisher"
LIMITS = RolloutLimits(max_turns=3, max_tokens_per_turn=5, max_trajectory_tokens=64)


def _in_use(*overrides: str) -> tuple[str, dict[str, object], str]:
    """The loss, its settings, and where the old policy comes from, as the run uses them."""
    config = load_config("guess_number", overrides)
    method = make_method(config, LIMITS)
    return method.loss_fn, dict(method.loss_config), config.method_in_use.old_policy_source


def test_nothing_changes_where_this_program_samples() -> None:
    assert _in_use() == ("importance_sampling", {}, "none")
    assert _in_use("method.loss_fn=ppo") == ("ppo", {}, "none")
    assert _in_use("train.max_staleness=2") == ("cispo", {}, "none")


def test_a_foreign_sampler_gets_truncated_ratios_by_default_for_every_loss_that_compares_policies() -> None:
    assert _in_use(FOREIGN) == ("cispo", {"clip_high_threshold": 2.0}, "none")
    assert _in_use(FOREIGN, "train.max_staleness=2") == ("cispo", {"clip_high_threshold": 2.0}, "none")
    assert _in_use(FOREIGN, "method.loss_fn=ppo") == ("ppo", {"correction": "token_tis"}, "forward")
    loss, settings, old_policy = _in_use(FOREIGN, "method=gspo")
    assert (loss, settings["correction"], old_policy) == ("gspo", "token_tis", "forward")
    loss, settings, old_policy = _in_use(FOREIGN, "method.old_policy=true")
    assert (loss, settings["correction"], old_policy) == ("importance_sampling", "token_tis", "forward")
    assert _in_use(FOREIGN, "method=rft")[0] == "cross_entropy"


def test_what_the_user_set_wins_also_after_the_config_was_stored() -> None:
    assert _in_use(FOREIGN, "method.correction=none") == ("importance_sampling", {}, "none")
    assert _in_use(FOREIGN, "method.correction=token_mask") == (
        "importance_sampling",
        {"correction": "token_mask"},
        "none",
    )
    assert _in_use(FOREIGN, "method.loss_fn=cispo") == ("cispo", {}, "none")
    for correction, loss in (("none", "importance_sampling"), ("auto", "cispo")):
        config = load_config("guess_number", [FOREIGN, f"method.correction={correction}"])
        again = config_from_yaml(config_to_yaml(config), "stored")
        assert isinstance(again, Config)
        assert again.method_in_use.loss == loss
    assert isinstance(load_config("guess_number", [FOREIGN]).method, Grpo.Options), "the stored options stay"
