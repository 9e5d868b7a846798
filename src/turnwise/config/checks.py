"""Sections that do not fit together: options beside lag, groups, stored data, and a service that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.methods.fit import why_not_own_worlds, why_not_potential, why_not_so_many
from turnwise.runtime.section import Section

if TYPE_CHECKING:
    from turnwise.config.config import Config


def check_stored(config: Config) -> None:
    """Refuse what only attempts that are played for training have a use for."""
    if not config.reads_stored:
        return
    unread = [
        *(f"reward.{name}" for name in changed_options(config.reward)),
        *(f"alarms.{name}" for name in changed_options(config.alarms)),
        *(f"train.{name}" for name in changed_options(config.train) if name == "max_empty_steps"),
        *(f"generator.{name}" for name in changed_options(config.generator) if name == "min_group_size"),
        *(f"method.{name}" for name in changed_options(config.method) if name == "branch_turn"),
    ]
    if unread:
        what = "pairs" if config.data.pairs else "dialogues"
        raise ValueError(
            f"{unread[0]} is not read by method={config.method.name} with stored {what}: nothing is played for "
            "training that it could apply to; leave it out"
        )


def unread_of_stored(config: Config) -> list[str]:
    """What a preset, or a comparison, says for all methods, and stored data has no use for: told, not refused."""
    if not config.reads_stored:
        return []
    generator = config.generator
    found = [f"generator.{name}" for name in changed_options(generator) if name == "n_samples_per_prompt"]
    if "temperature" in changed_options(generator.sampling_params):
        found.append("generator.sampling_params.temperature")
    if "max_sampled_tokens" in changed_options(config.train):
        found.append("train.max_sampled_tokens")
    if "num_tasks" in changed_options(config.train) and (config.data.pairs or config.data.dialogues):
        found.append("train.num_tasks")
    return found


def check_lag(config: Config) -> None:
    """Refuse what only playing ahead has a use for, and what it has none for."""
    lag = config.train.max_staleness
    if lag and config.reads_stored:
        raise ValueError(
            f"train.max_staleness={lag} is not read by method={config.method.name}, which reads stored data: "
            "nothing is played that could lag; leave it out"
        )
    if not lag and config.generator.kv_across_updates != "recompute":
        raise ValueError(
            f"generator.kv_across_updates={config.generator.kv_across_updates} is not read while "
            "train.max_staleness is 0: no dialogue goes on over an update"
        )
    if lag and config.generator.deterministic:
        raise ValueError(
            f"generator.deterministic is not read with train.max_staleness={lag}: what an update learns from then "
            "depends on who is done first; leave one of them out"
        )
    if not lag and config.alarms.max_stale_share != type(config.alarms).model_fields["max_stale_share"].default:
        raise ValueError(
            f"alarms.max_stale_share={config.alarms.max_stale_share} is not read while train.max_staleness is 0: "
            "nothing grows old; leave it out"
        )
    if not lag and config.method.old_policy_from != "forward":
        raise ValueError(
            f"method.old_policy_from={config.method.old_policy_from} is not read while train.max_staleness is 0: it "
            "goes by how many updates a token lags, and none does; leave it out"
        )


def check_groups(config: Config) -> None:
    """Refuse how attempts at a task are played, or rewarded, where the method cannot use it."""
    method, count = config.method, config.generator.n_samples_per_prompt
    asked = (
        ("generator.same_start=false", not config.generator.same_start, why_not_own_worlds(method)),
        (f"generator.n_samples_per_prompt={count}", not config.data.pairs, why_not_so_many(method, count)),
        ("reward.potential=true", config.reward.potential, why_not_potential(method)),
    )
    for option, is_asked, why in asked:
        if is_asked and why is not None:
            raise ValueError(f"{option}, and method={method.name} {why}")


def check_service(config: Config) -> None:
    """Refuse what a service elsewhere does not read."""
    if not config.model.base_url:
        return
    engine_options = {
        "model.device": config.model.device != "auto",
        "generator.max_num_seqs": config.generator.max_num_seqs != 256,
        "generator.deterministic": config.generator.deterministic,
        "generator.gpu_memory_utilization": config.generator.gpu_memory_utilization != 0.9,
        "train.micro_batch_tokens": config.train.micro_batch_tokens != 0,
    }
    for name, is_set in engine_options.items():
        if is_set:
            raise ValueError(f"{name} is not read with model.base_url: the service has its own; leave it out")
    if config.generator.stop:
        raise ValueError("generator.stop cannot be sent to a service beside the end of turn; leave it out")


def changed_options(section: Section) -> list[str]:
    """The options of a section that are not at their defaults."""
    fields = type(section).model_fields.items()
    return [name for name, field in fields if getattr(section, name) != field.get_default(call_default_factory=True)]
