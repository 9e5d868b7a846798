"""The catalogue of metrics: name, unit, meaning, and the file that emits it. `docs/metrics.md` is generated from it.

To add a metric, emit it and add its row here; the test suite refuses a name that is not in the catalogue. A name in
braces stands for several: `rollout/stop_{end_reason}_share` has one metric for each end reason. The part before the
slash says what the step number counts: training steps, but warm-up steps for `warmup/` and batches of the critic's
pre-training for `critic/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from turnwise.errors import Party
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import REWARD_PARTS, EndReason


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the catalogue."""

    name: str
    unit: str
    meaning: str
    emitter: str
    """The file that emits it, below `src/turnwise/`."""


BLANKS: Mapping[str, Iterable[str] | None] = {
    "channel": REWARD_PARTS,
    "end_reason": tuple(EndReason),
    "party": tuple(Party),
    "why": None,
    "env_metric": None,
    "opponent": None,
    "world": None,
    "level": None,
    "turn": tuple("12345678"),
    "fifth": tuple("12345"),
    "state": ("queued", "running", "done", "consumed", "dropped"),
    "side": ("low", "high", "dual"),
    "lag": (*"12345678", "later"),
}
"""What a name in braces stands for. None means any word, such as a number that a world gives its attempts."""


def _rows(emitter: str, *rows: tuple[str, str, str]) -> list[Metric]:
    return [Metric(name, unit, meaning, emitter) for name, unit, meaning in rows]


CATALOGUE: tuple[Metric, ...] = (
    *_rows(
        "backends/servers/fleet_figures.py",
        ("fleet/requests", "requests", "Replies that were asked for on servers since the last step."),
        ("fleet/retries", "requests", "Requests that were sent again because a server failed them."),
        ("fleet/servers_lost", "servers", "Times that a server was taken out, because it failed or did not answer."),
        ("fleet/servers_returned", "servers", "Times that a server came back."),
        ("fleet/laggards_fenced", "servers", "Servers that a version was published without, because they lagged."),
        ("fleet/sticky_share", "share", "Requests that went to the server that drew the conversation's last reply."),
        ("fleet/cached_prompt_share", "share", "Prompt tokens that servers had in their prefix caches."),
    ),
    *_rows(
        "backends/servers/publisher.py",
        ("fleet/servers_ready", "servers", "Servers that take requests."),
        ("fleet/load_s", "s", "Time in which the servers loaded the newest version."),
    ),
    *_rows(
        "training/learner_news.py",
        ("learners/count", "learners", "Learners that train, where the run began with several."),
        ("learners/restarts", "times", "Times that learners were started again in this process, because one was lost."),
    ),
    *_rows(
        "rollout/stats.py",
        ("rollout/attempts", "attempts", "Attempts that the step took: the kept ones and all `rollout/dropped_*`."),
        ("rollout/attempts_kept", "attempts", "Attempts in groups that were kept; averages are over these."),
        ("rollout/dropped_{why}", "attempts", "Attempts that are not trained on, by reason."),
        ("rollout/groups_kept", "groups", "Groups with enough attempts left."),
        ("rollout/groups_dropped", "groups", "Groups with too few attempts left, or whose task is in quarantine."),
        ("rollout/groups_with_unequal_starts", "groups", "Groups whose attempts did not begin with equal messages."),
        ("rollout/tasks_quarantined", "tasks", "Tasks that are not played again because they failed too often."),
        ("rollout/tries", "tries", "Plays of attempts; a failed play may be followed by another one."),
        ("rollout/retries", "tries", "Tries that repeat a failed one."),
        ("rollout/failures_{party}", "tries", "Tries that failed, by the party that failed."),
        ("rollout/close_failures", "calls", "Calls of an env's `close` that failed."),
        ("rollout/abandoned_calls", "calls", "Env calls that missed their deadline and still run in their threads."),
        ("rollout/unparsable_replies", "replies", "Replies that the env could not read."),
        ("rollout/tokens_drawn", "tokens", "All tokens that the sampler drew, failed attempts included."),
        ("rollout/draft_tokens", "tokens", "Tokens that the sampler guessed and checked (`engine.speculation`)."),
        ("rollout/draft_tokens_accepted", "tokens", "Those that it had guessed right; they are sampled tokens too."),
        ("rollout/draft_accepted_share", "share", "Guessed tokens that were right."),
        ("rollout/sampled_tokens", "tokens", "Sampled tokens of kept attempts; shared beginnings count once."),
        ("rollout/shared_sampled_tokens", "tokens", "Sampled tokens that all continuations of a dialogue share."),
        ("rollout/sampled_tokens_per_turn_mean", "tokens", "Sampled tokens of one turn."),
        ("rollout/prompt_tokens_max", "tokens", "Longest prompt."),
        ("rollout/turns_mean", "turns", "Turns of an attempt."),
        ("rollout/duration_mean_s", "s", "Time of an attempt."),
        ("rollout/duration_max_s", "s", "Time of the slowest attempt."),
        ("rollout/{party}_wait_s", "s", "Time that attempts waited for a party, added up over parallel attempts."),
        ("rollout/reward_mean", "reward", "Return of an attempt, after shaping."),
        ("rollout/reward_{channel}_mean", "reward", "One channel of the return."),
        ("rollout/success_mean", "share", "Attempts that succeeded, of those that the env judged."),
        ("rollout/stop_{end_reason}_share", "share", "Attempts that ended for this reason."),
        ("rollout/cut_turn_share", "share", "Turns that ran into their token limit before a stop."),
        ("rollout/untrained_turns", "turns", "Turns that are left out of the loss."),
        ("rollout/splits", "datums", "Turns whose prompt does not extend what came before; each starts a new datum."),
        ("rollout/env_{env_metric}_mean", "as the world says", "A number that the world gives its attempts."),
    ),
    *_rows(
        "watch/behaviour.py",
        ("rollout/entropy_estimate", "nats/token", "Minus the mean logprob of sampled tokens."),
        ("rollout/entropy_turn_{turn}", "nats/token", "The same for one turn of the attempts."),
        ("rollout/entropy_turn_later", "nats/token", "The same for all turns after the eighth."),
        (
            "rollout/entropy_tool_call",
            "nats/token",
            "The same for tool calls, and replies that the env read as an action.",
        ),
        ("rollout/entropy_text", "nats/token", "The same for all other replies."),
    ),
    *_rows(
        "watch/behaviour.py",
        ("behaviour/entropy_fifth_{fifth}", "nats/token", "Minus the mean logprob of tokens, by fifth of the attempt."),
        ("behaviour/entropy_first_token", "nats/token", "The same for the first token of replies."),
        ("behaviour/entropy_inner_token", "nats/token", "The same for the tokens between the first and the last."),
        ("behaviour/entropy_last_token", "nats/token", "The same for the last token of replies, usually their end."),
        ("behaviour/entropy_summary", "nats/token", "The same for summaries, which a memory asks for."),
        ("behaviour/action_entropy", "nats", "Entropy of the step's replies as whole texts: how varied actions are."),
        (
            "behaviour/sibling_diversity",
            "share",
            "How different a group's replies in a turn are: 0 all equal, 1 none.",
        ),
        ("behaviour/repeat_share", "share", "Replies that repeat the one before in the same attempt."),
        ("behaviour/unparsable_share", "share", "Replies that the env could not read."),
        ("behaviour/tool_error_share", "share", "Answers of tools that begin with `error:`."),
        ("behaviour/sampled_tokens_per_attempt", "tokens", "Sampled tokens of an attempt, shared turns included."),
    ),
    *_rows(
        "training/metrics.py",
        ("rollout/sampled_tokens_per_s", "tokens/s", "Sampled tokens of kept attempts per second of playing."),
        ("method/groups_trained", "groups", "Groups that the method learned from."),
        ("method/groups_dropped_{why}", "groups", "Groups that tell the method nothing, by reason."),
        ("method/branch_variance_share", "share", "Variance of returns that is within continuations of one dialogue."),
        ("method/branch_variance_total", "reward^2", "Variance of returns of branched dialogues, within and between."),
        ("time/step_s", "s", "Time of the whole step."),
        ("time/sampling_share", "share", "Share of the step in which the loop waited for the sampler."),
        ("time/env_share", "share", "Share of the step in which the loop waited for envs and tools."),
        ("time/training_share", "share", "Share of the step that training and publishing took."),
        ("pool/groups_{state}", "groups", "Groups in the pool of attempts played ahead, by state."),
        ("pool/attempts_playing", "attempts", "Attempts under way when the step ended."),
        ("pool/tokens_drawn", "tokens", "Tokens of groups that no step has taken yet."),
        ("pool/groups_dropped_stale", "groups", "Groups that were dropped because they were too old."),
        ("pool/stale_share", "share", "The same, as a share of the groups that the step could take."),
        ("pool/staleness_mean", "updates", "Updates between the weights that sampled a group and those that learn."),
        ("pool/staleness_max", "updates", "The same for the oldest group of the step."),
        ("pool/length_bias", "ratio", "Tokens of a group that was learned from over those of a started one, minus 1."),
        ("train/geo_outside_fraction", "share", "Datums whose geometric mean ratio is outside 0.99 to 1.01."),
    ),
    *_rows(
        "rollout/drift.py",
        ("drift/tokens", "tokens", "Trained tokens that the newest weights drew (lag 0): those of `drift/k2`."),
        ("drift/k2", "nats/token", "Sampler against trainer on the same weights, mean of gap^2 / 2: numerics alone."),
        ("drift/abs_mean", "nats/token", "The same, mean of the absolute gap."),
        ("drift/abs_max", "nats", "The same, gap of the worst token; the event `worst_token` says where it is."),
        ("drift/beyond_share", "share", "The same, tokens with a gap over 0.1 nats."),
        ("drift/lag_{lag}_k2", "nats/token", "The gap of tokens whose weights were this many updates old."),
        ("drift/lag_{lag}_tokens", "tokens", "Trained tokens of that age."),
        ("drift/broken_tokens", "tokens", "Trained tokens without a finite logprob on one of the two sides."),
    ),
    *_rows(
        "engine/training/losses.py",
        ("train/loss", "loss", "Sum of the loss over the batch, per optimizer step."),
        ("train/num_trained_tokens", "tokens", "Tokens that the loss trains."),
        ("train/entropy", "nats/token", "Entropy of the trainer's distribution at trained tokens."),
        ("train/ratio", "ratio", "Mean ratio of trainer to anchor (old policy, or sampler)."),
        ("train/ratio_max", "ratio", "Largest such ratio."),
        ("train/clip_fraction_{side}", "share", "Trained tokens whose ratio the loss clipped."),
        ("train/kl_sampler_trainer_k1", "nats/token", "KL(sampler || trainer), estimated by -log r."),
        ("train/kl_sampler_trainer_k2", "nats/token", "KL(sampler || trainer), estimated by (log r)^2 / 2."),
        ("train/ess_fraction", "share", "Effective share of the batch once ratios to the sampler count."),
        ("train/rejected_fraction", "share", "Trained tokens that a mask took out of the loss."),
        ("train/correction_factor", "ratio", "Mean factor that corrects old policy over sampler."),
        ("train/correction_factor_max", "ratio", "Largest such factor."),
        ("train/kl_reference", "nats/token", "KL to the reference policy."),
    ),
    *_rows(
        "engine/training/routing_memory.py",
        ("train/routing_flips", "share", "Recorded choices of experts that the trainer would have made otherwise."),
        ("train/routing_replayed", "share", "Choices of experts that were the sampler's and not the trainer's own."),
    ),
    *_rows(
        "engine/training/preference_losses.py",
        ("train/num_pairs", "pairs", "Pairs that the loss compares."),
        ("train/pair_loss", "loss", "Mean loss of a pair."),
        ("train/pair_margin", "nats", "Log-ratio of the chosen side minus that of the rejected side."),
        ("train/pair_accuracy", "share", "Pairs whose chosen side has the larger log-ratio."),
        ("train/chosen_log_ratio", "nats", "Log-ratio to the reference of the chosen side."),
        ("train/rejected_log_ratio", "nats", "Log-ratio to the reference of the rejected side."),
        ("train/reward_difference", "reward", "Return of the chosen side minus that of the rejected side."),
    ),
    *_rows(
        "engine/training/optim.py",
        ("train/grad_norm", "norm", "Norm of the gradient before clipping."),
        ("train/optimizer_step", "steps", "Optimizer steps that the adapter has had."),
        ("train/learning_rate", "rate", "Learning rate of the last optimizer step."),
    ),
    *_rows(
        "training/learner.py",
        ("train/positive_nll", "nats/token", "Mean negative log-likelihood of successes (`method.positive_nll`)."),
    ),
    *_rows(
        "training/critic.py",
        ("train/critic_loss", "loss", "Value loss of the critic's first update in this step."),
        ("train/critic_value", "reward", "Mean value that the critic gave."),
        ("train/critic_return", "reward", "Mean return that it should have given."),
        ("train/critic_value_error", "reward", "Mean absolute difference of the two."),
        ("train/critic_value_clip_fraction", "share", "Values that moved further than `critic.value_clip`."),
        ("train/critic_grad_norm", "norm", "Norm of the critic's gradient before clipping."),
        ("train/critic_explained_variance", "share", "Variance of returns that the critic's values explain."),
        ("eval/critic_error_{fifth}", "reward", "Mean error on held-out attempts, by fifth of the attempt."),
        ("eval/critic_explained_variance_{fifth}", "share", "Explained variance on held-out attempts, by fifth."),
    ),
    *_rows(
        "training/critic.py",
        ("critic/loss", "loss", "Value loss of a batch of the critic's pre-training."),
        ("critic/value", "reward", "Mean value that the critic gave."),
        ("critic/return", "reward", "Mean return that it should have given."),
        ("critic/value_error", "reward", "Mean absolute difference of the two."),
        ("critic/grad_norm", "norm", "Norm of the critic's gradient before clipping."),
        ("critic/explained_variance", "share", "Variance of returns explained, before the batch was learned."),
    ),
    *_rows(
        "training/pretrain.py",
        ("critic/attempts", "attempts", "Attempts in the batch."),
        ("critic/sampled_tokens", "tokens", "Tokens that were sampled for the batch."),
    ),
    *_rows(
        "training/pretrain.py",
        ("warmup/loss", "loss", "Cross-entropy of a supervised step, summed over the batch."),
        ("warmup/num_trained_tokens", "tokens", "Tokens that the step trains."),
        ("warmup/entropy", "nats/token", "Entropy of the trainer's distribution at trained tokens."),
        ("warmup/grad_norm", "norm", "Norm of the gradient before clipping."),
        ("warmup/optimizer_step", "steps", "Optimizer steps that the adapter has had."),
        ("warmup/learning_rate", "rate", "Learning rate of the step."),
    ),
    *_rows(
        "training/record.py",
        ("eval/success", "share", "Held-out attempts that succeeded."),
        ("eval/reward", "reward", "Mean return of held-out attempts."),
        ("eval/failed_attempts", "attempts", "Held-out attempts that failed, and are not scored."),
    ),
    *_rows(
        "training/opponents.py",
        (
            "opponent/opening_diversity",
            "share",
            "Different first replies of a group's attempts, less 1, over attempts less 1; the mean over groups.",
        ),
        (
            "opponent/exploitation",
            "share",
            "Games won against the newest snapshot less those against older ones and the base model, since it joined.",
        ),
        (
            "opponent/seat_gap",
            "share",
            "With opponent.train=both: games won in the better seat less those in the other.",
        ),
        ("opponent/attempts_{opponent}", "attempts", "Attempts of the step against this opponent."),
        (
            "opponent/reward_{opponent}_mean",
            "reward",
            "Reward of the policy against this opponent.",
        ),
        (
            "opponent/elo_{opponent}",
            "Elo",
            "Rating in the pool, from the results of all attempts so far; the mean is 0.",
        ),
    ),
    *_rows(
        "training/evaluate.py",
        ("opponent/eval_reward_{opponent}", "reward", "Held-out reward against one opponent of the panel."),
        ("world/eval_success_{world}", "share", "Held-out success of one member of a mix, or of one level."),
        ("world/eval_reward_{world}", "reward", "Held-out reward of one member of a mix, or of one level."),
    ),
    *_rows(
        "training/metrics.py",
        ("world/groups_{world}", "groups", "Groups that the step took from this member of a mix."),
        ("world/success_{world}", "share", "Success of this member's attempts; absent if none was judged."),
        ("world/reward_{world}", "reward", "Reward of this member's attempts, as the env gave it."),
        ("world/turns_{world}", "turns", "Turns of this member's attempts."),
        (
            "world/outcome_agreement_{world}",
            "share",
            "This member's attempts on which outcome model and verifier agree (reward.model).",
        ),
        ("world/tokens_{world}", "tokens", "Tokens that this member's attempts sampled; failed ones are not counted."),
        ("world/failed_{world}", "attempts", "Attempts of this member that failed through no fault of the policy."),
        ("curriculum/level_mean", "level", "Mean level of the groups that the step took."),
        ("curriculum/groups_{level}", "groups", "Groups of the step at this level."),
        (
            "curriculum/success_{level}",
            "share",
            "Success of the step's attempts at this level; absent if none.",
        ),
        ("curriculum/rate_{level}", "share", "Success rate of this level as the curriculum sees it after the step."),
        ("curriculum/chance_{level}", "share", "How likely the next group is to get this level."),
    ),
)

HEADER = """\
# Metrics

What a run writes down at every step: in `run.db`, to the loggers of `run.loggers`, and in `Run.metrics`. A name in
braces stands for several. The number of a step counts training steps; it counts warm-up steps for `warmup/`, and
batches of the critic's pre-training for `critic/`.

This page is made from the catalogue in [`watch/catalogue.py`](../src/turnwise/watch/catalogue.py)
(`python -m turnwise.watch.catalogue > docs/metrics.md`).
"""


def find_metric(name: str) -> Metric | None:
    """The row of a metric; None when there is none.

    >>> find_metric("rollout/stop_max_turns_share").name
    'rollout/stop_{end_reason}_share'
    """
    return next((metric for metric, pattern in _patterns() if pattern.fullmatch(name)), None)


def check_names(names: Iterable[str]) -> None:
    """Refuse names that are not in the catalogue. The test suite does so for everything that a run writes down."""
    for name in names:
        if find_metric(name) is None:
            near = did_you_mean(name, [metric.name for metric in CATALOGUE])
            raise ValueError(f"metric {name!r} is not in the catalogue{near}; add its row to watch/catalogue.py")


def metrics_page() -> str:
    """`docs/metrics.md`."""
    parts = [HEADER]
    for room in dict.fromkeys(metric.name.partition("/")[0] for metric in CATALOGUE):
        parts += [f"## {room}", "", "| Metric | Unit | Meaning | Emitted by |", "|---|---|---|---|"]
        for metric in CATALOGUE:
            if metric.name.startswith(f"{room}/"):
                cells = (f"`{metric.name}`", metric.unit, metric.meaning, f"`{metric.emitter}`")
                parts.append(f"| {' | '.join(cell.replace('||', chr(92) + '|' + chr(92) + '|') for cell in cells)} |")
        parts.append("")
    blanks = [f"- `{{{blank}}}`: {', '.join(known)}." for blank, known in BLANKS.items() if known is not None]
    return "\n".join([*parts, "## Names in braces", "", *blanks, ""])


@cache
def _patterns() -> list[tuple[Metric, re.Pattern[str]]]:
    """A pattern for each row. Plain names come first, so that a listed name does not match a pattern."""

    def fill(match: re.Match[str]) -> str:
        known = BLANKS[match.group(1)]
        return r"\w+" if known is None else f"(?:{'|'.join(map(re.escape, known))})"

    rows = sorted(CATALOGUE, key=lambda metric: "{" in metric.name)
    return [(metric, re.compile(re.sub(r"\{(\w+)\}", fill, metric.name))) for metric in rows]


if __name__ == "__main__":
    print(metrics_page(), end="")
