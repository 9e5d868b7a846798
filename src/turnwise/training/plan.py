"""Says what a run will spend, before it spends anything. Numbers are upper bounds, because attempts may end early."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from turnwise.config.checks import unread_of_stored
from turnwise.config.config import Config
from turnwise.config.training import TrainConfig
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import DeviceInfo
from turnwise.engine.machine_share import count_here, thread_share
from turnwise.engine.model.fused_parts import check_bitwise
from turnwise.engine.threads import find_threads
from turnwise.envs.base import Split
from turnwise.envs.config import EnvConfig, OneWorld
from turnwise.losses.table import LOSSES
from turnwise.memory.config import MemoryConfig
from turnwise.models.config import ModelConfig
from turnwise.models.facts import ModelFacts
from turnwise.models.linears import linear_kind
from turnwise.models.store import format_count
from turnwise.rollout.limits import RolloutLimits
from turnwise.training.assemble import critic_rate
from turnwise.training.memory import Memory, check_sharded, estimate_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers behind the printed plan."""

    num_train_tasks: int
    num_test_tasks: int
    num_steps: int
    num_train_attempts: int
    num_evaluations: int
    num_eval_attempts: int
    max_turns: int
    max_sampled_tokens: int
    """Upper bound over training and evaluation."""
    max_eval_tokens: int
    """Upper bound of those that evaluation samples."""
    num_optimizer_steps: int
    num_trained_parameters: int
    memory: Memory | None
    """None: the model is at a server."""


def make_plan(
    config: Config,
    facts: ModelFacts,
    limits: RolloutLimits,
    *,
    engine: EngineConfig,
    device: DeviceInfo | None,
    num_tasks: Mapping[Split | Literal["opponents"], int],
) -> Plan:
    """Compute what a run will take, from its config and the model's sizes alone.

    Args:
        num_tasks: By split; `opponents` is how many opponents play every held-out task, 1 if it is left out.
    """
    if device is not None:
        facts.check_trained(config.model)
    if config.model.routing_replay and not config.model.base_url:
        facts.check_replay(has_switch=facts.angle_switch is not None)
    if engine.bitwise and device is not None:
        check_bitwise(facts, device.facts, has_switch=facts.angle_switch is not None)
    if config.cluster.shard and device is not None:
        check_sharded(config, facts, device)
    train, evaluation, group_size = config.train, config.eval, attempts_per_task(config)
    num_evaluations = len(evaluation_steps(config)) if num_tasks["test"] else 0
    train_attempts = train.steps * train.accumulate * train.tasks_per_step * group_size
    eval_attempts = num_evaluations * num_tasks["test"] * evaluation.samples * num_tasks.get("opponents", 1)
    shared = train.steps * train.accumulate * train.tasks_per_step if group_size and config.method.branches else 0
    per_attempt = config.memory.most_sampled_tokens(
        max_turns=limits.max_turns,
        max_tokens=limits.max_tokens_per_turn,
        max_context=limits.max_trajectory_tokens,
    )
    num_learned = dialogues_per_optimizer_step(config)
    memory = None if device is None else estimate_memory(config, engine, device, facts, limits, num_learned)
    if memory is not None:
        memory.check_fits()
    return Plan(
        num_train_tasks=num_tasks["train"],
        num_test_tasks=num_tasks["test"],
        num_steps=train.steps,
        num_train_attempts=train_attempts,
        num_evaluations=num_evaluations,
        num_eval_attempts=eval_attempts,
        max_turns=limits.max_turns,
        max_sampled_tokens=(train_attempts + shared + eval_attempts) * per_attempt,
        max_eval_tokens=eval_attempts * per_attempt,
        num_optimizer_steps=config.warmup.steps + train.steps * train.substeps,
        num_trained_parameters=facts.num_adapter_parameters(config.model)
        if config.model.train == "lora"
        else facts.num_parameters,
        memory=memory,
    )


def attempts_per_task(config: Config) -> int:
    """Attempts at one task of a batch; 0 where stored data is read."""
    if config.reads_stored:
        return 0
    return config.rollout.group_size


def dialogues_per_optimizer_step(config: Config) -> int:
    """The most dialogues that one step learns from; a pair is two dialogues."""
    played = math.ceil(config.train.tasks_per_step / config.train.substeps) * (attempts_per_task(config) or 2)
    return max(played, config.warmup.batch_size if config.warmup.steps else 0)


def _training(config: Config, plan: Plan) -> str:
    count = config.train.tasks_per_step * config.train.accumulate
    if not attempts_per_task(config):
        return f"{plan.num_steps} steps x {count} {'pairs' if config.data.pairs else 'dialogues'} that are stored"
    kind = "continuations" if config.method.branches else "attempts"
    each = attempts_per_task(config)
    bound = config.train.max_sampled_tokens
    until = f", or until {bound:,} tokens are sampled" if bound else ""
    return f"{plan.num_steps} steps x {count} tasks x {each} {kind} = {plan.num_train_attempts:,} attempts{until}"


def _tokens(config: Config, plan: Plan) -> str:
    """What is sampled, and what of it is trained; stored data are trained and not sampled."""
    trained = plan.max_sampled_tokens - plan.max_eval_tokens
    learned = f"{trained:,} of them to train on" if attempts_per_task(config) else "stored dialogues are trained"
    return (
        f"at most {plan.max_sampled_tokens:,} sampled: {learned}, {plan.max_eval_tokens:,} to evaluate; without "
        "attempts that fail and are played again"
    )


def evaluation_steps(config: Config) -> list[tuple[str, int]]:
    """(label, step) of every evaluation, in order."""
    if config.eval.tasks == 0:
        return []
    steps, every = config.train.steps, config.eval.every
    between = [("step", step) for step in range(every, steps, every)] if every else []
    after_warmup = [("warm-up", 0)] if config.warmup.steps else []
    end = [("end", steps)] if steps else []
    return [("start", 0), *after_warmup, *between, *end]


def plan_lines(config: Config, facts: ModelFacts, plan: Plan, limits: RolloutLimits, directory: str) -> list[str]:
    """The plan as a person reads it."""
    model, train = config.model, config.train
    stand_in = f" (standing in for {model.name})" if model.alias else ""
    trained = f"LoRA rank {model.rank}" if model.train == "lora" else "all weights"
    trained += f", {format_count(plan.num_trained_parameters)} trained"
    if model.start_from:
        trained += f", starting from {model.start_from}"
    rows = {
        "model": f"{model.alias or model.name}{stand_in}, {format_count(facts.num_parameters)} parameters"
        f"{_active(facts)}; {trained}",
        **({} if model.base_url or model.train == "full" else {"adapters": _adapters(model, facts)}),
        "world": f"{config.env.name}: {plan.num_train_tasks} train tasks, {plan.num_test_tasks} held out",
        **_members(config.env),
        "attempts": f"up to {plan.max_turns} turns of {limits.max_tokens_per_turn} tokens, "
        f"{limits.max_trajectory_tokens} tokens in {'any prompt and its reply' if config.memory.window else 'all'}",
        **({"angles": facts.angle_note} if facts.angle_note and not model.base_url else {}),
        **_agent_memory(config.memory),
        "training": _training(config, plan),
        "evaluation": f"{plan.num_evaluations} times, {plan.num_eval_attempts:,} attempts in all, "
        f"temperature {config.eval.temperature:g}",
        "warm-up": _warmup(config),
        "optimizer": f"{plan.num_optimizer_steps} steps; {config.method.name} with {config.method_in_use.loss}, "
        f"learning rate {train.learning_rate:g}{_schedule(train)}",
        **_critic(config),
        **_lag(config),
        **_sampler(config),
        "tokens": _tokens(config, plan),
        "memory": "the server's" if plan.memory is None else plan.memory.line(),
        **({"memory": f"that of the service at {model.base_url}"} if model.base_url else {}),
        **_learners(config),
        **_cpu(config, plan),
        "run": directory,
    }
    notes = [("note", note) for note in _notes(config, plan)]
    return [f"{name:<13}{text}" for name, text in [*rows.items(), *notes]]


def _members(env: EnvConfig) -> dict[str, str]:
    """The lines about the worlds of a mix, and about curricula."""
    total = sum(member.share for member in env.mix.values())
    parts: list[str] = []
    for name, member in env.mix.items():
        world = "" if member.name == name else f" ({member.name})"
        level = "" if member.difficulty < 0 or member.curriculum else f", level {member.difficulty}"
        chosen = f", {_levels(member)}" if member.curriculum else ""
        parts.append(f"{name}{world} {member.share / total:.0%}{level}{chosen}")
    rows = {"mix": f"{'; '.join(parts)} of the groups"} if parts else {}
    return rows | ({"curriculum": _levels(env)} if env.curriculum else {})


def _levels(env: OneWorld) -> str:
    """What a curriculum does, and where it is measured."""
    measured = "held out: every level" if env.difficulty < 0 else f"held out: level {env.difficulty}"
    return f"levels near {env.curriculum_target:.0%} success ({measured})"


def _agent_memory(memory: MemoryConfig) -> dict[str, str]:
    """The line about what the policy remembers, if that is not everything."""
    parts: list[str] = []
    if memory.summary_tokens:
        kept = f", {memory.keep} turns stay" if memory.keep else ""
        parts.append(f"a summary of up to {memory.summary_tokens} tokens whenever {memory.window} turns are full{kept}")
    elif memory.window:
        parts.append(f"the last {memory.window} turns")
    parts += ["notes by tool"] if memory.notes else []
    return {"remembers": ", ".join(parts)} if parts else {}


def _schedule(train: TrainConfig) -> str:
    """How the learning rate changes, and how many batches make a step; nothing where neither does."""
    rise = f", rising over {train.lr_warmup} steps" if train.lr_warmup else ""
    fall = "" if train.lr_schedule == "constant" else f", {train.lr_schedule} to {train.lr_floor:.0%} of it"
    batches = f"; gradients of {train.accumulate} batches averaged in each" if train.accumulate > 1 else ""
    return f"{rise}{fall}{batches}"


def _active(facts: ModelFacts) -> str:
    """The parameters that one token of a mixture of experts uses, in words."""
    active = facts.num_active_parameters
    return "" if active == facts.num_parameters else f" ({format_count(active)} of them for each token)"


def _adapters(model: ModelConfig, facts: ModelFacts) -> str:
    """Which layers have an adapter, and which do not."""
    with_adapter, total = facts.adapted_linears(model), format_count(facts.num_parameters)
    left = [name for name in facts.linears if name not in with_adapter]
    routers = [name for name in left if linear_kind(name) == "router"]
    others = [name for name in left if name not in routers]
    parts = [f"not adapted: {_short(others)}"] if others else []
    if routers:
        count = format_count(sum(facts.linears[name].num_values for name in routers))
        parts.append(f"routers are not adapted ({count} of {total} parameters; model.train_router=true adapts them)")
    for what, count in facts.frozen.items():
        parts.append(f"{what} cannot be adapted ({format_count(count)} of {total} parameters)")
    ranks = {shape.rank(model) for shape in with_adapter.values() if shape.experts}
    experts = [f"each of {facts.experts.num_experts} experts with rank {rank}" for rank in ranks if facts.experts]
    return "; ".join([_short(with_adapter), *experts, *parts])


def _short(names: Iterable[str]) -> str:
    """`self_attn (k_proj q_proj), mlp (down_proj), lm_head` of the dotted names of all layers."""
    found: dict[str, set[str]] = {}
    for name in names:
        parent, _, child = re.sub(r"^.*\.layers\.\d+\.", "", name).rpartition(".")
        found.setdefault(parent, set()).add(child)
    return ", ".join(
        f"{parent} ({' '.join(sorted(children))})" if parent else " ".join(sorted(children))
        for parent, children in found.items()
    )


def _warmup(config: Config) -> str:
    warmup = config.warmup
    if not warmup.steps:
        return "none"
    return f"{warmup.steps} supervised steps of {warmup.batch_size} from {warmup.demonstrations} scripted dialogues"


def _learners(config: Config) -> dict[str, str]:
    """The lines about the processes that train and sample, where there are several."""
    cluster, count = config.cluster, config.cluster.learners
    where = f"on the Ray cluster {cluster.address}" if cluster.uses_ray else "on this machine"
    found: dict[str, str] = {}
    if count > 1:
        held = f"1/{count} of the weights" if cluster.shard else "the whole model"
        slow = " (block by block from all of them, which is slow)" if cluster.shard else ""
        samples = f"samples{slow}" if config.rollout.backend == "local" and not cluster.has_fleet else "publishes"
        found["learners"] = (
            f"{count} processes {where}, each with {held} and a share of every batch; the first one also {samples} "
            "and saves"
        )
    if cluster.has_own_samplers:
        found["samplers"] = f"{cluster.samplers} processes of their own {where}, each with the whole model"
    elif cluster.has_fleet:
        found["samplers"] = f"the first {cluster.samplers} learners, each on its own device"
    return found


def _cpu(config: Config, plan: Plan) -> dict[str, str]:
    """The lines about the CPU's threads and the type of its weights, where the model runs on one in this process."""
    if plan.memory is None or plan.memory.device.facts.has_own_memory:
        return {}
    threads, learners = find_threads(), count_here(config.cluster.learners, config.cluster)
    each = f" ({thread_share(learners)} in each learner)" if learners > 1 else ""
    why = plan.memory.device.why
    return {**({"dtype": why} if why else {}), "threads": f"{threads.count}{each}: {threads.why}"}


def _critic(config: Config) -> dict[str, str]:
    """The line about the critic, where the method has one."""
    critic = config.critic
    if not config.method.needs_critic:
        return {}
    trained = f"LoRA rank {critic.rank or config.model.rank}, {critic.updates} updates per policy step, learning rate "
    trained += f"{critic_rate(config):g}"
    if not critic.pretrain_steps:
        return {"critic": f"{trained}; not pre-trained"}
    more = ", whose tokens are not counted below" if critic.pretrain_from == "rollouts" else ""
    return {"critic": f"{trained}; first up to {critic.pretrain_steps} batches of {critic.pretrain_from} alone{more}"}


def _lag(config: Config) -> dict[str, str]:
    """The line about playing ahead, if the run plays ahead."""
    train = config.train
    if not train.max_staleness:
        return {}
    waited = train.max_wait or train.max_staleness
    drops = "" if waited <= train.max_staleness else "; groups that grow older than that are dropped"
    return {
        "lag": f"tokens up to {train.max_staleness} updates old, an update as soon as {train.batch_size} groups are "
        f"done, a group waited for after {waited} updates{drops}"
    }


def _sampler(config: Config) -> dict[str, str]:
    """The line about another program that samples, and how its logprobs are corrected for."""
    if not config.is_sampled_elsewhere:
        return {}
    return {"sampler": f"{config.rollout.backend}; correction: {config.method_in_use.correction_words()}"}


def _notes(config: Config, plan: Plan) -> list[str]:
    notes: list[str] = []
    if plan.num_train_tasks < config.train.tasks_per_step:
        notes.append("there are fewer train tasks than tasks per step, so a step plays some of them twice")
    share, default = config.engine_in_use.gpu_memory_utilization, EngineConfig().gpu_memory_utilization
    if plan.memory is not None and not plan.memory.device.facts.has_own_memory and share != default:
        notes.append(
            f"engine.gpu_memory_utilization={share:g} is an option for GPUs; this run uses a CPU and does not read it"
        )
    notes += [f"{name} is not read: nothing is played for training" for name in unread_of_stored(config)]
    unread = [name for name in config.warmup.changed_options() if name in ("batch_size", "learning_rate")]
    if unread and not config.warmup.steps:
        notes.append(f"warmup.{unread[0]} is not read: warmup.steps is 0")
    if plan.num_test_tasks < config.eval.tasks * max(1, len(config.env.mix)) and not config.env.has_curriculum:
        worlds = f"these {len(config.env.mix)} worlds hold" if config.env.mix else "this world holds"
        notes.append(f"eval.tasks={config.eval.tasks}, but {worlds} out {plan.num_test_tasks}")
    unread = [f"reward.{name}" for name in config.reward.changed_options() if name != "on_truncated"]
    if unread and config.method.judges_success:
        notes.append(
            f"{unread[0]} is read only in a world that does not say what a success is; here, set method.threshold"
        )
    is_clipped = config.method.loss in LOSSES and LOSSES[config.method.loss].is_clipped
    is_on_policy = not config.train.max_staleness and not config.is_sampled_elsewhere
    if config.train.substeps == 1 and is_on_policy and is_clipped:
        notes.append(f"there is one optimizer step per batch, so ratios stay at 1 and {config.method.loss} never clips")
    return notes
