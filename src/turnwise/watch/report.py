"""The report of a finished run: success before and after, the curve, the certificate, and a few dialogues."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import AttemptRow, EvaluationRow
from turnwise.trajectory import Message
from turnwise.watch.curve import write_curve
from turnwise.watch.intervals import Interval

LABEL_WIDTH = 14


def report_lines(
    run: RunReader, best: EvaluationRow | None, *, title: str, num_dialogues: int, diagnosis: Sequence[str] = ()
) -> list[str]:
    """The lines of the report, from the run directory.

    Args:
        best: The evaluation of the best checkpoint.
        diagnosis: Why the run did not learn, in lines; empty if nothing was found.
    """
    evaluations = run.evaluations()
    lines = [
        *_before_and_after(evaluations, best),
        *_ended_early(run),
        *_not_moved(run),
        *_dropped(run),
        *_not_kept(run),
        *(
            ["", f"turnwise doctor {run.directory} finds:", *(f"  {line}" for line in diagnosis), ""]
            if diagnosis
            else []
        ),
    ]
    lines.append(f"{'curve':<{LABEL_WIDTH}}{write_curve(run, title, best)}")
    lines.append(f"{'certificate':<{LABEL_WIDTH}}{certificate_line(run)}")
    lines += [f"{'' if index else 'drift':<{LABEL_WIDTH}}{line}" for index, line in enumerate(drift_lines(run))]
    which = "" if best is None else f"  (step {best.step}, the best; --step last for the last)"
    lines.append(f"{'talk to it':<{LABEL_WIDTH}}turnwise sample {run.directory}{which}")
    lines.append(f"{'look at it':<{LABEL_WIDTH}}turnwise view {run.directory}")
    for row in _chosen(run, evaluations, num_dialogues):
        lines += ["", *dialogue_lines(run, row)]
    return lines


def _before_and_after(evaluations: Sequence[EvaluationRow], best: EvaluationRow | None) -> list[str]:
    shown = [row for row in evaluations if row.label in ("start", "warm-up", "end")] or list(evaluations)
    shown += [best] if best is not None and best not in shown else []
    lines: list[str] = []
    for row in shown:
        success = Interval(row.success, row.success_low, row.success_high).percent()
        reward = Interval(row.reward, row.reward_low, row.reward_high).number()
        is_best = row is best and row.label == "step"
        name = "best" if is_best else row.label
        name = f"{name} (step {row.step})" if name in ("best", "end") else name
        chosen = f"  chosen out of {len(evaluations)} evaluations on these tasks" if is_best else ""
        lines.append(f"{name:<{LABEL_WIDTH}}success {success:<24}  reward {reward}{chosen}")
    by_label = {row.label: row for row in shown}
    before, after = by_label.get("warm-up", by_label.get("start")), by_label.get("end")
    if before is not None and after is not None and math.isfinite(after.success - before.success):
        gain = 100 * (after.success - before.success)
        lines.append(f"{'by training':<{LABEL_WIDTH}}{gain:+.1f} points of held-out success since {before.label}")
    return lines


def _ended_early(run: RunReader) -> list[str]:
    """Why a run made fewer steps than the config asked for."""
    ends = [event for event in run.events() if event.kind in ("resumed", "solved", "tokens_spent")]
    if not ends or ends[-1].kind == "resumed":
        return []
    step, detail = ends[-1].step, ends[-1].detail
    if ends[-1].kind == "solved":
        why = f"after step {step}: every attempt of the last {detail['steps']} steps succeeded"
    else:
        sampled = f"{detail['sampled_tokens']:,} tokens are sampled"
        why = f"after step {step} of {detail['steps']}: {sampled}, train.max_sampled_tokens={detail['bound']}"
    return [f"{'ended early':<{LABEL_WIDTH}}{why}"]


def _not_moved(run: RunReader) -> list[str]:
    """A line that says why no step of the run changed the policy, if that is so."""
    ends = [event for event in run.events() if event.kind in ("resumed", "not_moved")]
    if not ends or ends[-1].kind == "resumed":
        return []
    return [f"{'not trained':<{LABEL_WIDTH}}no step moved the weights: {ends[-1].detail['why']}"]


def _dropped(run: RunReader) -> list[str]:
    """Attempts of the whole run that were not trained on, by reason."""
    totals = {name: sum(value for _, value in run.metric(name)) for name in run.metric_names() if "dropped_" in name}
    parts = [f"{count:.0f} {name.partition('dropped_')[2]}" for name, count in totals.items() if "method/" in name]
    attempts = [f"{count:.0f} {name.partition('dropped_')[2]}" for name, count in totals.items() if "rollout/" in name]
    lines = [f"{'groups out':<{LABEL_WIDTH}}{', '.join(parts)}"] if parts else []
    return lines + ([f"{'attempts out':<{LABEL_WIDTH}}{', '.join(attempts)}"] if attempts else [])


def _not_kept(run: RunReader) -> list[str]:
    """Attempts that were removed from run.db to keep it small."""
    counts: Counter[tuple[str, str]] = Counter()
    for event in run.events("dropped"):
        counts[event.detail["what"], event.detail["phase"]] += event.detail["num_trajectories"]
    said = ", ".join(f"{what} of {count} {phase} attempts" for (what, phase), count in counts.items())
    return (
        [f"{'not kept':<{LABEL_WIDTH}}{said}, the oldest ones, because run.max_size_mb limits run.db"] if said else []
    )


def certificate_line(run: RunReader) -> str:
    """Whether what was trained is what was sampled, in one line."""
    rows = run.certificates()
    if not rows:
        return "none: no step learned from attempts of this run"
    if not any(name.startswith("train/") for name in run.metric_names()):
        return f"no token was trained; turnwise certify {run.directory}"
    bad = [row.step for row in rows if not row.is_exact]
    steps = ", ".join(str(row.step) for row in rows)
    verdict = f"NOT exact at step {bad[0]}" if bad else "every trained token is a sampled token"
    return f"{verdict} (checked every step, kept of {steps}); turnwise certify {run.directory}"


def drift_lines(run: RunReader) -> list[str]:
    """How far the sampler was from the trainer on the same weights, and where most."""
    k2s, sizes, counts = (dict(run.metric(f"drift/{name}")) for name in ("k2", "abs_mean", "tokens"))
    steps = [step for step in k2s if math.isfinite(k2s[step])]
    num_tokens = sum(counts[step] for step in steps)
    if not num_tokens:
        return []
    k2, size = (sum(values[step] * counts[step] for step in steps) / num_tokens for values in (k2s, sizes))
    last = "" if len(steps) < 2 else f", {k2s[steps[-1]]:.1e} in the last step"
    lines = [f"mean k2 {k2:.1e}{last}, mean |gap| {size:.1e} over {num_tokens:,.0f} tokens"]
    events = run.events("worst_token")
    if events:
        worst = max(events, key=lambda event: event.detail["gap"])
        lines.append(f"worst {worst.detail['gap']:.1e}, step {worst.step}: {worst.detail['text']}")
    return lines


def _chosen(run: RunReader, evaluations: Sequence[EvaluationRow], count: int) -> list[AttemptRow]:
    """A success, a failure, and more successes of the last evaluation; without one, of the last steps."""
    step = evaluations[-1].step if evaluations else None
    rows = [row for row in run.attempts(phase="eval", step=step) if row.num_turns] if evaluations else []
    rows = rows or [row for row in run.attempts(phase="train") if row.num_turns][-count:]
    good = [row for row in rows if row.is_success]
    bad = [row for row in rows if not row.is_success]
    return [*good[:1], *bad[:1], *good[1:], *bad[1:]][:count]


def dialogue_lines(run: RunReader, row: AttemptRow) -> list[str]:
    """One attempt as a conversation, each reply with its reward."""
    verdict = {True: "success", False: "no success", None: row.end_reason}[row.is_success]
    lines = [f"--- attempt {row.id}: {row.task_id}, {verdict}, reward {row.reward:g}"]
    for message, reward in run.dialogue(row.id):
        lines.append(message_line(message, reward))
    failure = run.failure(row.id)
    if failure is not None:
        lines.append(f"{'failed':>9}  by {failure.party}: {failure.detail}")
        lines += [f"{'':>9}  {line}" for line in failure.traceback.splitlines()]
    return lines


def message_line(message: Message, reward: float | None) -> str:
    content = message.content.strip().replace("\n", "\n" + " " * 11)
    calls = "".join(f" [calls {call.name}({dict(call.arguments)})]" for call in message.tool_calls)
    return f"{message.role:>9}  {content}{calls}" + (f"   ({reward:+g})" if reward else "")
