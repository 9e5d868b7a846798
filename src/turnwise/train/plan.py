"""What a run is going to spend, said before it spends anything. Bounds are upper bounds: attempts may end early."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.model_store import format_count
from turnwise.rollout.limits import RolloutLimits
from turnwise.train.config import Config
from turnwise.train.facts import ModelFacts

GIB = 1 << 30
CPU_KV_BYTES = GIB
"""What the engine takes for its KV cache on a CPU, at most."""
ADAPTER_COPIES = 5
"""Weights, gradient, two Adam moments, and the copy that is sampled from; float32."""


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
    num_warmup_steps: int
    num_optimizer_steps: int
    weights_gib: float
    adapter_gib: float
    kv_gib: float
    num_adapter_parameters: int


def make_plan(
    config: Config, facts: ModelFacts, limits: RolloutLimits, *, num_train_tasks: int, num_test_tasks: int
) -> Plan:
    train, evaluation, group_size = config.train, config.eval, config.generator.n_samples_per_prompt
    num_evaluations = len(evaluation_steps(config)) if num_test_tasks else 0
    train_attempts = train.steps * train.tasks_per_step * group_size
    eval_attempts = num_evaluations * num_test_tasks * evaluation.samples
    per_attempt = min(limits.max_turns * limits.max_tokens_per_turn, limits.max_trajectory_tokens)
    num_adapter = facts.num_adapter_parameters(config.model)
    kv_bytes = facts.kv_values_per_token * 4 * config.generator.max_num_seqs * facts.context_length
    return Plan(
        num_train_tasks=num_train_tasks,
        num_test_tasks=num_test_tasks,
        num_steps=train.steps,
        num_train_attempts=train_attempts,
        num_evaluations=num_evaluations,
        num_eval_attempts=eval_attempts,
        max_turns=limits.max_turns,
        max_sampled_tokens=(train_attempts + eval_attempts) * per_attempt,
        num_warmup_steps=config.warmup.steps,
        num_optimizer_steps=config.warmup.steps + train.steps * train.substeps,
        weights_gib=facts.num_parameters * 4 / GIB,
        adapter_gib=num_adapter * 4 * ADAPTER_COPIES / GIB,
        kv_gib=min(kv_bytes, CPU_KV_BYTES) / GIB,
        num_adapter_parameters=num_adapter,
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
    model, train, generator = config.model, config.train, config.generator
    stand_in = f" (standing in for {model.name})" if model.alias else ""
    num_tasks, num_attempts = train.tasks_per_step, generator.n_samples_per_prompt
    trained = f"LoRA rank {model.rank}, {format_count(plan.num_adapter_parameters)} trained"
    parts = f"weights {plan.weights_gib:.2f}, adapter and optimizer {plan.adapter_gib:.2f}, KV cache {plan.kv_gib:.2f}"
    total_gib = plan.weights_gib + plan.adapter_gib + plan.kv_gib
    rows = {
        "model": f"{model.alias or model.name}{stand_in}, {format_count(facts.num_parameters)} parameters; {trained}",
        "world": f"{config.env.name}: {plan.num_train_tasks} train tasks, {plan.num_test_tasks} held out",
        "attempts": f"up to {plan.max_turns} turns of {limits.max_tokens_per_turn} tokens, "
        f"{limits.max_trajectory_tokens} tokens in all",
        "training": f"{plan.num_steps} steps x {num_tasks} tasks x {num_attempts} attempts "
        f"= {plan.num_train_attempts:,} attempts",
        "evaluation": f"{plan.num_evaluations} times, {plan.num_eval_attempts:,} attempts in all, "
        f"temperature {config.eval.temperature:g}",
        "warm-up": _warmup(config),
        "optimizer": f"{plan.num_optimizer_steps} steps; {config.method.name} with {config.method.loss_fn}, "
        f"learning rate {train.learning_rate:g}",
        "tokens": f"at most {plan.max_sampled_tokens:,} sampled, attempts that fail and are played again aside",
        "memory": f"about {total_gib:.2f} GiB in float32 ({parts}), and what one training pass needs",
        "run": directory,
    }
    notes = [("note", note) for note in _notes(config, plan)]
    return [f"{name:<13}{text}" for name, text in [*rows.items(), *notes]]


def _warmup(config: Config) -> str:
    warmup = config.warmup
    if not warmup.steps:
        return "none"
    return f"{warmup.steps} supervised steps of {warmup.batch_size} from {warmup.demonstrations} scripted dialogues"


def _notes(config: Config, plan: Plan) -> list[str]:
    notes: list[str] = []
    if plan.num_train_tasks < config.train.tasks_per_step:
        notes.append("fewer train tasks than tasks per step: some are played twice in a step")
    if plan.num_test_tasks < config.eval.tasks:
        notes.append(f"eval.tasks={config.eval.tasks}, but this world holds out {plan.num_test_tasks}")
    if config.train.substeps == 1 and config.method.loss_fn in ("ppo", "cispo", "gspo"):
        notes.append(f"one optimizer step per batch: ratios stay at 1, and {config.method.loss_fn} clips nothing")
    return notes
