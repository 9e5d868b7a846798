"""Checks of options from several sections: lag, groups, stored data, and a service that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.losses.outside import is_outside
from turnwise.models.config import EXPERT_OPTIONS
from turnwise.rollout.server_options import NO_OTHER, OTHER_SAMPLERS, SHARED_OPTIONS

if TYPE_CHECKING:
    from turnwise.config.config import Config


def check_stored(config: Config) -> None:
    """Refuse options that only apply to attempts played for training, if the method reads stored data."""
    if not config.reads_stored:
        return
    unread = [
        *(f"reward.{name}" for name in config.reward.changed_options()),
        *(f"alarms.{name}" for name in config.alarms.changed_options()),
        *(f"train.{name}" for name in config.train.changed_options() if name == "max_empty_steps"),
        *(f"rollout.{name}" for name in config.rollout.changed_options() if name == "min_group_size"),
        *(f"method.{name}" for name in config.method.changed_options() if name == "branch_turn"),
    ]
    if unread:
        what = "pairs" if config.data.pairs else "dialogues"
        raise ValueError(
            f"{unread[0]} is not read by method={config.method.name} with stored {what}: no attempt is "
            "played for training; leave it out"
        )


def unread_of_stored(config: Config) -> list[str]:
    """Options that stored data does not use. They are reported, not refused: presets and comparisons set them for
    all."""
    if not config.reads_stored:
        return []
    changed = config.rollout.changed_options()
    found = [f"rollout.{name}" for name in ("group_size", "temperature") if name in changed]
    if "max_sampled_tokens" in config.train.changed_options():
        found.append("train.max_sampled_tokens")
    if "num_tasks" in config.train.changed_options() and (config.data.pairs or config.data.dialogues):
        found.append("train.num_tasks")
    return found


def check_lag(config: Config) -> None:
    """Refuse options that need lag if there is none, and options that lag makes useless."""
    lag = config.train.max_staleness
    if lag and config.reads_stored:
        raise ValueError(
            f"train.max_staleness={lag} is not read by method={config.method.name}, which reads stored data: "
            "no attempt is played that could lag; leave it out"
        )
    if not lag and config.rollout.kv_across_updates != "recompute":
        raise ValueError(
            f"rollout.kv_across_updates={config.rollout.kv_across_updates} is not read while "
            "train.max_staleness is 0: no dialogue goes on over an update"
        )
    if lag and config.rollout.deterministic:
        raise ValueError(
            f"rollout.deterministic is not read with train.max_staleness={lag}: an update then learns from "
            "the attempts that finish first; leave one of them out"
        )
    if not lag and config.alarms.max_stale_share != type(config.alarms).model_fields["max_stale_share"].default:
        raise ValueError(
            f"alarms.max_stale_share={config.alarms.max_stale_share} is not read while train.max_staleness is 0: "
            "no attempt is stale; leave it out"
        )
    if not lag and config.method.old_policy_source == "loglinear":
        raise ValueError(
            "method.old_policy_from=loglinear is not read while train.max_staleness is 0: it "
            "depends on how many updates a token lags, and none does; leave it out"
        )


def check_groups(config: Config) -> None:
    """Refuse options for groups and rewards that the method cannot use."""
    method, count = config.method, config.rollout.group_size
    asked = (
        ("rollout.same_start=false", not config.rollout.same_start, method.why_not_own_worlds()),
        (f"rollout.group_size={count}", not config.data.pairs, method.why_not_group_size(count)),
        ("reward.potential=true", config.reward.potential, method.why_not_potential()),
    )
    for option, is_asked, why in asked:
        if is_asked and why is not None:
            raise ValueError(f"{option}, and method={method.name} {why}")
    why = method.why_discount_unread()
    if why is not None and not config.reward.potential:
        raise ValueError(f"method.gamma={method.discount} is not read {why}; leave it out")


def check_memory(config: Config) -> None:
    """Refuse a memory where prompts cannot be rewritten, or where the method needs the attempt in one piece."""
    if not config.memory.is_on:
        return
    option = f"memory.{config.memory.changed_options()[0]}"
    if not config.rollout.use_conversation_multi_turn:
        raise ValueError(
            f"{option} rewrites prompts, and rollout.use_conversation_multi_turn=false keeps an attempt in one "
            "message; leave one of them out"
        )
    if config.opponent.train == "both":
        raise ValueError(f"{option} and opponent.train=both: a game of two trained seats has no memory yet; leave one")
    why = config.method.why_not_memory()
    if why is not None:
        raise ValueError(f"{option}, and method={config.method.name} {why}")


def check_worlds(config: Config) -> None:
    """Refuse what several worlds, or the levels of a curriculum, cannot be played with or would not read."""
    env, opponent = config.env, config.opponent.changed_options()
    option = "env.mix" if env.mix else "env.curriculum" if env.curriculum else ""
    if not option:
        return
    if config.cluster.env_workers:
        raise ValueError(
            f"{option} with cluster.env_workers={config.cluster.env_workers!r}: a worker serves one world at one "
            "level; leave one of them out"
        )
    if opponent:
        raise ValueError(
            f"opponent.{opponent[0]} is not read with {option}: only scripts of a world play its other seat there; "
            "leave it out"
        )
    if not config.reads_stored:
        return
    if env.has_curriculum:
        raise ValueError(
            f"a curriculum is not read by method={config.method.name} with stored data: no attempt is played for "
            "training; leave it out"
        )
    for name, member in env.mix.items():
        if "share" in member.changed_options():
            raise ValueError(
                f"env.mix.{name}.share is not read by method={config.method.name} with stored data: no attempt is "
                "played for training; leave it out"
            )


def check_play(config: Config) -> None:
    """Refuse rollout options that only evaluations may use, and engine options that `deterministic` makes useless."""
    rollout, engine = config.rollout, config.engine
    if rollout.temperature == 0:
        raise ValueError("rollout.temperature=0 is greedy, and all attempts of a group would be equal; expected > 0")
    if rollout.min_group_size < 2:
        raise ValueError(f"rollout.min_group_size={rollout.min_group_size}; expected 2 or more")
    if rollout.deterministic and engine.max_num_seqs not in (1, type(engine).model_fields["max_num_seqs"].default):
        raise ValueError(
            f"engine.max_num_seqs={engine.max_num_seqs} is not read with rollout.deterministic: one sequence is "
            "decoded at a time; leave one of them out"
        )
    if engine.speculation != "none":
        _check_speculation(config)
    takes_whole = OTHER_SAMPLERS.get(rollout.backend, NO_OTHER).takes_whole
    if config.model.train == "full" and takes_whole and rollout.publish == "adapter":
        raise ValueError(
            "rollout.publish=adapter brings an adapter to the sampler, and model.train=full trains all weights; set "
            "rollout.publish=weights"
        )
    for name in SHARED_OPTIONS if rollout.backend == "local" else ():
        here, there = getattr(rollout, name), getattr(engine, name)
        if here and name in engine.changed_options() and here != there:
            raise ValueError(f"rollout.{name}={here} and engine.{name}={there} are one option here; leave one out")
        if here and name == "max_num_seqs" and rollout.deterministic and here != 1:
            raise ValueError(
                f"rollout.{name}={here} is not read with rollout.deterministic: one sequence is decoded at a time; "
                "leave one of them out"
            )


def _check_speculation(config: Config) -> None:
    rollout, engine = config.rollout, config.engine
    if rollout.backend != "local":
        raise ValueError(
            f"engine.speculation={engine.speculation} is not read with rollout.backend={rollout.backend}, which "
            "samples elsewhere; leave it out"
        )
    if rollout.deterministic:
        raise ValueError(
            f"engine.speculation={engine.speculation} with rollout.deterministic: what is guessed depends on what was "
            "sampled before, and the last bits of a logprob on how many tokens a pass checks; leave one of them out"
        )


def check_full(config: Config) -> None:
    """Refuse to train all weights where only adapters can be trained."""
    if config.model.train == "full" and config.model.base_url:
        raise ValueError(
            "model.train=full with model.base_url: a service trains LoRA adapters only; leave one of them out"
        )
    if config.engine.full_weights and config.model.train != "full":
        raise ValueError("engine.full_weights is not read with model.train=lora; leave it out, or set model.train=full")


def check_shard(config: Config) -> None:
    """Refuse options that weights in parts do not read."""
    if not config.cluster.shard:
        return
    if config.engine.merge_adapter == "always":
        raise ValueError(
            "engine.merge_adapter=always with cluster.shard=true: merged weights are a whole copy of the model; leave "
            "it out"
        )
    if config.model.train == "full" and "max_restarts" in config.cluster.changed_options():
        raise ValueError(
            f"cluster.max_restarts={config.cluster.max_restarts} is not read with cluster.shard=true and "
            "model.train=full: a learner that is lost takes its part of the weights with it, and the run ends with its "
            "last checkpoint; leave it out, and resume the run"
        )


def check_samplers(config: Config) -> None:
    """Refuse samplers of the cluster where something else samples, or nothing is played."""
    unread = [name for name in ("samplers", "placement") if name in config.cluster.changed_options()]
    if unread and config.rollout.backend != "local":
        raise ValueError(
            f"cluster.{unread[0]}={getattr(config.cluster, unread[0])} is not read with rollout.backend="
            f"{config.rollout.backend}, which samples elsewhere; leave it out. Several servers are addresses in "
            "rollout.url"
        )
    if config.cluster.has_fleet and config.model.routing_replay:
        raise ValueError(
            f"model.routing_replay with cluster.{unread[0]}: the learners do not know which experts another process "
            "chose; leave one of them out"
        )


def check_replay(config: Config) -> None:
    """Refuse to replay a choice of experts that this process does not see."""
    if config.engine.routing_replay and not config.model.routing_replay:
        raise ValueError("engine.routing_replay is set by model.routing_replay; set that instead")
    if not config.model.routing_replay or config.model.base_url:
        return
    if config.rollout.backend != "local":
        raise ValueError(
            f"model.routing_replay with rollout.backend={config.rollout.backend}: another program chooses the experts "
            "and does not say which; use rollout.backend=local, or leave it out"
        )
    if config.cluster.learners > 1:
        raise ValueError(
            f"model.routing_replay with cluster.learners={config.cluster.learners}: only the first learner samples and "
            "knows the experts that were chosen; leave one of them out"
        )


def check_bitwise(config: Config) -> None:
    """Refuse `engine.bitwise` where the sampler is not the trainer's own engine."""
    if not config.engine.bitwise or config.model.base_url:
        return
    if config.rollout.backend != "local":
        raise ValueError(
            f"engine.bitwise=true with rollout.backend={config.rollout.backend}: another program samples and sums in "
            "its own order; use rollout.backend=local, or leave it out"
        )
    if config.cluster.shard:
        raise ValueError(
            "engine.bitwise=true with cluster.shard=true: weights in parts are read by other kernels; leave one of "
            "them out"
        )


def check_service(config: Config) -> None:
    """Refuse options that a service elsewhere does not read."""
    if not config.model.base_url:
        return
    # engine.dtype is allowed: the certificate's tolerance needs the service's dtype, which is not known here.
    unread = [f"engine.{name}" for name in config.engine.changed_options() if name != "dtype"]
    unread += [
        f"cluster.{name}" for name in config.cluster.changed_options() if not name.startswith(("env", "address"))
    ]
    experts = (*EXPERT_OPTIONS, "routing_replay")
    unread += [f"model.{name}" for name in experts if name in config.model.changed_options()]
    unread += ["rollout.deterministic"] if config.rollout.deterministic else []
    if config.rollout.backend == "local":
        unread += [f"rollout.{name}" for name in SHARED_OPTIONS if getattr(config.rollout, name)]
    if unread:
        raise ValueError(f"{unread[0]} is not read with model.base_url: the service has its own; leave it out")
    if is_outside(config.method.loss):
        raise ValueError(
            f"method.loss_fn={config.method.loss} runs in this process, and model.base_url trains in another: a "
            "service imports nothing that a request names; leave one of them out"
        )
    if config.rollout.stop:
        raise ValueError("rollout.stop cannot be sent to a service beside the end of turn; leave it out")
