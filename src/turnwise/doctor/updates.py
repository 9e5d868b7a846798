"""What is wrong with the updates: rates, gradients, drift, age, entropy.

The numbers that have a band are watched by `turnwise.watch.alarms`, live; here the same alarms go over the whole run.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean, median

from turnwise.doctor.finding import Finding, Fix
from turnwise.doctor.history import RunHistory
from turnwise.watch.alarms import Alarm, Alarms
from turnwise.watch.trends import STRETCH_STEPS, best_stretch, has_fallen, has_risen

ALARM_NAMES = {
    "kl": "weights_moved",
    "drift": "drift",
    "drift_growth": "drift_grows",
    "ess": "few_tokens_count",
    "stale": "stale",
    "entropy_low": "entropy_collapsed",
    "entropy_high": "entropy_exploded",
    "zero_gradient": "gradient_zero",
}
LASTING_SHARE = 0.2
"""An alarm counts if it lasts at the end of a run, or lasted for this share of its steps."""
SMALLEST_MOVE = 5e-5
"""Sum of the learning rates of a run below which no weight moves enough to matter: AdamW moves a weight by about the
learning rate in a step, and an adapter's weights are about 0.01 to 0.1."""
MUCH_CLIPPED = 10.0
"""How many times larger than its bound a gradient must be before clipping is reported."""
TINY_GRADIENT = 1e-6
LARGE_FALL = 0.1
"""Part of the best value that has to be lost."""


def alarms_last(run: RunHistory) -> list[Finding]:
    """Numbers out of their bands: drift, age, entropy, gradients of exactly 0."""
    alarms, started, counts = Alarms(run.config.alarms), dict[str, Alarm](), Counter[str]()
    for metrics in run.by_step:
        for alarm in alarms.check(metrics):
            if not alarm.is_over:
                started[alarm.name] = alarm
        counts.update(alarms.active.keys())
    lasting = [
        name for name, count in counts.items() if name in alarms.active or count >= LASTING_SHARE * len(run.steps)
    ]
    found: list[Finding] = []
    for name, word in ALARM_NAMES.items():
        if name not in lasting or (name == "entropy_low" and run.is_solving):
            continue
        alarm = started[name]
        found.append(
            Finding(
                name=word,
                seen=f"{alarm.what} was {alarm.value:.3g} when it left its band ({alarm.bound:.3g}), and stayed out "
                f"for {counts[name]} of {len(run.steps)} steps",
                why=alarm.why,
                fixes=_alarm_fixes(run, alarm),
                numbers={"value": alarm.value, "bound": alarm.bound, "steps": counts[name]},
            )
        )
    return found


def rate_too_high(run: RunHistory) -> Finding | None:
    """Success fell after its best; in a world without success, the reward did."""
    fall = _held_out_fall(run) or _train_fall(run)
    if fall is None:
        return None
    text, numbers = fall
    rate = run.config.train.learning_rate
    return Finding(
        name="rate_too_high",
        seen=text,
        why="the updates went too far: the policy lost what it could do",
        fixes=(
            Fix(option=f"train.learning_rate={rate / 5:g}", text=f"a fifth of {rate:g}, from the best checkpoint on"),
            Fix(option="method.kl_coef=0.01", text="stay near the policy of the start"),
            Fix(text="turnwise sample and export take the best checkpoint, not the last one"),
        ),
        numbers={**numbers, "learning_rate": rate},
    )


def rate_too_low(run: RunHistory) -> Finding | None:
    """The whole run may not move a weight enough to matter."""
    rates = run.values("train/learning_rate")
    if len(rates) < 3 or run.is_solving or _has_improved(run):
        return None
    steps = max(len(run.steps), run.config.train.steps)
    moved = fmean(rates) * steps * run.config.train.substeps
    if moved >= SMALLEST_MOVE:
        return None
    value = 10 ** round(math.log10(fmean(rates) * 20 * SMALLEST_MOVE / moved))
    return Finding(
        name="rate_too_low",
        seen=f"the learning rate is {fmean(rates):.1e}, so {steps} steps move a weight by {moved:.0e} at most",
        why="AdamW moves a weight by about the learning rate in each step, whatever the gradient; an adapter has to "
        "move a thousand times further",
        fixes=(
            Fix(option=f"train.learning_rate={value:g}", text="the usual range for adapters is 1e-5 to 1e-3"),
            Fix(option=f"train.steps={10 * steps}", text="or many more steps"),
        ),
        numbers={"learning_rate": fmean(rates), "moved": moved},
    )


def gradient_clipped(run: RunHistory) -> Finding | None:
    """Every gradient is many times larger than the bound that it is clipped to."""
    bound, norms = run.config.train.grad_clip_norm, run.values("train/grad_norm")
    if not bound or len(norms) < 3 or median(norms) < MUCH_CLIPPED * bound or run.is_solving:
        return None
    return Finding(
        name="gradient_clipped",
        seen=f"half of the {len(norms)} gradients have a norm of {median(norms):.3g} or more; they are clipped to "
        f"{bound:g}",
        why="the direction of a clipped gradient is that of its largest samples, and the scale of rewards is lost",
        fixes=(
            Fix(option=f"train.grad_clip_norm={_rounded(median(norms))}", text="clip only what is unusual"),
            Fix(text="scale the rewards to about 1"),
        ),
        numbers={"norm": median(norms), "bound": bound},
    )


def gradient_vanishes(run: RunHistory) -> Finding | None:
    """Gradients are not 0, and too small to be anything but rounding."""
    norms = run.values("train/grad_norm")
    if len(norms) < 3 or not 0 < median(norms) < TINY_GRADIENT:
        return None
    return Finding(
        name="gradient_vanishes",
        seen=f"half of the {len(norms)} gradients have a norm of {median(norms):.1e} or less",
        why="nothing pulls the policy anywhere: advantages, weights or rewards are next to 0",
        fixes=(
            Fix(text="scale the rewards to about 1 (reward.weights.outcome)"),
            Fix(text="see with turnwise replay whether the advantages of an attempt are all 0"),
        ),
        numbers={"norm": median(norms)},
    )


def not_finite(run: RunHistory) -> Finding | None:
    """A loss or a gradient is not a number."""
    bad = [
        step
        for name in ("train/loss", "train/grad_norm")
        for step, value in run.metric(name)
        if not math.isfinite(value)
    ]
    if not bad:
        return None
    rate = run.config.train.learning_rate
    return Finding(
        name="not_finite",
        seen=f"loss or gradient is not a finite number since step {min(bad)}, in {len(set(bad))} steps",
        why="such a step changes nothing, or destroys the weights",
        fixes=(
            Fix(option=f"train.learning_rate={rate / 10:g}", text=f"a tenth of {rate:g}"),
            Fix(option="engine.dtype=float32", text="if the model runs in half precision"),
        ),
        numbers={"step": min(bad), "steps": len(set(bad))},
    )


def tokens_left_out(run: RunHistory) -> Finding | None:
    """Most tokens are clipped or rejected, so that few are learned from."""
    clipped = sum(run.recent(f"train/clip_fraction_{side}") or 0.0 for side in ("low", "high", "dual"))
    rejected = run.recent("train/rejected_fraction") or 0.0
    if max(clipped, rejected) < 0.5:
        return None
    what = "clipped" if clipped >= rejected else "rejected by the mask (method.correction)"
    return Finding(
        name="tokens_left_out",
        seen=f"{max(clipped, rejected):.0%} of the trained tokens of the last steps were {what}",
        why="a clipped or rejected token has no gradient",
        fixes=(
            Fix(option=f"train.learning_rate={run.config.train.learning_rate / 5:g}", text="smaller steps"),
            Fix(option="train.substeps=1", text="fewer updates from one batch"),
        ),
        numbers={"clipped": clipped, "rejected": rejected},
    )


def not_exact(run: RunHistory) -> Finding | None:
    """The certificate says that something else was trained than what was sampled."""
    if not run.has_inexact_certificate:
        return None
    return Finding(
        name="not_exact",
        seen="a certificate of the run is not exact: trained tokens or their logprobs are not those of the sampler",
        why="the gradient belongs to dialogues that the policy did not have",
        fixes=(
            Fix(
                text="turnwise certify RUN --turns names the turn; a backend with other weights or another "
                "temperature is the usual reason"
            ),
            Fix(option="rollout.backend=local", text="sample with the engine that trains"),
        ),
    )


def _alarm_fixes(run: RunHistory, alarm: Alarm) -> tuple[Fix, ...]:
    train, fixes = run.config.train, [Fix(text=alarm.remedy)]
    slower = Fix(option=f"train.learning_rate={train.learning_rate / 5:g}", text="smaller steps")
    fresher = Fix(option=f"train.max_staleness={max(0, train.max_staleness - 1)}", text="fresher attempts")
    match alarm.name:
        case "kl" | "ess":
            fixes = [fresher if train.max_staleness else slower, *fixes]
        case "drift" | "drift_growth":
            fixes = [*fixes, Fix(option="rollout.backend=local", text="sample with the engine that trains")]
        case "stale":
            fixes = [Fix(option=f"train.max_wait={train.max_staleness}", text="wait for long dialogues"), *fixes]
        case "entropy_low" | "entropy_high":
            fixes = [slower, *fixes]
        case _:
            pass
    return tuple(fixes)


def _held_out_fall(run: RunHistory) -> tuple[str, dict[str, float]] | None:
    rows = [row for row in run.evaluations if math.isfinite(row.success)]
    if len(rows) < 2:
        return None
    best, last = max(rows, key=lambda row: row.success), rows[-1]
    if not (last.success_high < best.success_low and best.success - last.success > LARGE_FALL * best.success):
        return None
    text = (
        f"held-out success fell from {best.success:.0%} ({best.label}, step {best.step}) to {last.success:.0%} (step "
        f"{last.step}), by more than chance explains"
    )
    return text, {"best": best.success, "last": last.success, "best_step": best.step}


def _train_fall(run: RunHistory) -> tuple[str, dict[str, float]] | None:
    name = "rollout/success_mean" if run.values("rollout/success_mean") else "rollout/reward_mean"
    rows = [(step, value) for step, value in run.metric(name) if math.isfinite(value)]
    if len(rows) < 2 * STRETCH_STEPS:
        return None
    values = [value for _, value in rows]
    start, best = best_stretch(values[:-STRETCH_STEPS])
    last = values[-STRETCH_STEPS:]
    scale = max(abs(value) for value in values)
    if not has_fallen(best, last) or fmean(best) - fmean(last) < max(LARGE_FALL * scale, LARGE_FALL * abs(fmean(best))):
        return None
    what = "success" if "success" in name else "reward"
    text = (
        f"the {what} of training fell from {fmean(best):.3g} (steps {rows[start][0]} to "
        f"{rows[start + len(best) - 1][0]}) to {fmean(last):.3g} in the last {len(last)}, by more than chance explains"
    )
    return text, {"best": fmean(best), "last": fmean(last), "best_step": rows[start][0]}


def _has_improved(run: RunHistory) -> bool:
    values = run.values("rollout/reward_mean")
    return len(values) >= 2 * STRETCH_STEPS and has_risen(values[:STRETCH_STEPS], values[-STRETCH_STEPS:])


def _rounded(value: float) -> str:
    return f"{float(f'{value:.1g}'):g}"
