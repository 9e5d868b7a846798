"""`turnwise compare`: several methods and seeds on one world, at equal sampled tokens.

Steps of different methods cost different amounts, and methods differ in how many of the sampled tokens they train on,
so neither steps nor trained tokens compare them fairly. Every run here may sample the same number of tokens, those of a
critic's pre-training included; what each trained on, and how long it took, is reported beside the result. A method that
reads stored data samples nothing and runs for its `train.steps`.

Runs of one seed start from the same weights and meet the same tasks, so methods are also compared seed by seed: that
difference holds less luck than the two numbers that it is of.

Every run is a run directory of its own, made by the same code as `turnwise train`.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from turnwise.errors import ConfigError, TurnwiseError
from turnwise.methods.config import METHOD_OPTIONS, READING_METHODS
from turnwise.runlog.reader import RunReader, is_run
from turnwise.train.commands import read_config, train
from turnwise.train.compare_figure import Curve, comparison_svg
from turnwise.train.config import Config
from turnwise.train.config_files import config_from_yaml, config_to_tree
from turnwise.train.intervals import Interval, mean_interval
from turnwise.train.tokens import num_drawn_tokens
from turnwise.train.view import format_duration

OWN_OPTIONS = ("methods", "env", "seeds", "tokens")
MANY_STEPS = 1_000_000
"""More than any run needs: the bound on tokens ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One method, with the options that set it apart."""

    label: str
    method: str
    overrides: tuple[str, ...]

    def directory(self, out: Path, seed: int) -> Path:
        return out / f"{re.sub(r'[^A-Za-z0-9_.=-]+', '-', self.label).strip('-')}-seed{seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be compared."""

    env: str
    variants: tuple[Variant, ...]
    seeds: int
    tokens: int
    """Sampled tokens per run; 0: what the first run samples in its `train.steps`."""
    overrides: tuple[str, ...]
    """For every run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One finished run."""

    label: str
    seed: int
    success: float
    success_low: float
    success_high: float
    """Of this run alone, over its held-out tasks."""
    reward: float
    start_success: float
    """Before the first step of the method, after a warm-up if there was one."""
    steps: int
    sampled_tokens: int
    trained_tokens: int
    duration_s: float
    """Of the steps, evaluations not counted."""
    curve: tuple[tuple[int, int, float], ...]
    """(sampled tokens, trained tokens, held-out success) at every evaluation."""


def run_compare(arguments: Sequence[str], *, out: str | None) -> int:
    """Run the command; returns the exit code."""
    request = parse_request(arguments)
    directory = Path(out).expanduser() if out else Path("runs") / f"compare-{Path(request.env).name.replace(':', '-')}"
    plans = {  # every mistake before the first token
        variant: read_config(request.env, _overrides(request, variant, directory, 0, 0)) for variant in request.variants
    }
    budget, results, failures = request.tokens, list[Result](), list[str]()
    for seed in range(request.seeds):
        for variant in request.variants:
            place = variant.directory(directory, seed)
            try:
                bound = budget if _samples(plans[variant]) else 0
                code = _train_quietly(request, variant, place, directory, seed, bound)
            except ConfigError:
                raise
            except TurnwiseError as error:
                failures.append(f"{variant.label}, seed {seed}: {error}")
                print(f"{variant.label:<24} seed {seed}  failed: {error}", flush=True)
                continue
            if code:
                print(f"stopped at {variant.label}, seed {seed}; the same command goes on from there", flush=True)
                return code
            results.append(read_result(variant.label, seed, place))
            budget = budget or results[-1].sampled_tokens
            print(_result_line(results[-1]), flush=True)
    if not results:
        raise ConfigError("no run came to its end; there is nothing to compare")
    _write(directory, request, results)
    print("\n".join(["", *table_lines(results), *failures, f"figure  {directory / 'compare.svg'}"]))
    return 0


def parse_request(arguments: Sequence[str]) -> Request:
    own: dict[str, str] = {}
    rest: list[str] = []
    for text in arguments:
        key, _, value = text.partition("=")
        if key in OWN_OPTIONS:
            own[key] = value
        else:
            rest.append(text)
    for key in ("methods", "env"):
        if not own.get(key):
            raise ConfigError(f"{key} is missing; expected turnwise compare methods=grpo,ppo env=guess_number seeds=3")
    variants = tuple(_variant(item) for item in _split(own["methods"]))
    labels = [variant.label for variant in variants]
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise ConfigError(f"methods names {twice[0]} twice; set them apart by an option: {twice[0]}[option=value]")
    return Request(
        env=own["env"],
        variants=variants,
        seeds=_count("seeds", own.get("seeds", "3"), least=1),
        tokens=_count("tokens", own.get("tokens", "0"), least=0),
        overrides=tuple(rest),
    )


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    items = [item.strip() for item in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", text)]
    if text.count("[") != text.count("]") or not items:
        raise ConfigError(f"methods={text} cannot be read; expected grpo,ppo or grpo[credit=reward_to_go],grpo")
    return items


def _variant(item: str) -> Variant:
    method, _, options = item.rstrip("]").partition("[")
    method = method.strip()
    if method not in METHOD_OPTIONS:
        raise ConfigError(f"methods names {method!r}; expected some of {', '.join(METHOD_OPTIONS)}")
    overrides = [option.strip() for option in re.split(r"[,;]", options) if option.strip()]
    named = [option if "." in option.partition("=")[0] else f"method.{option}" for option in overrides]
    return Variant(label=item, method=method, overrides=tuple(named))


def _samples(config: Config) -> bool:
    """The run draws tokens to learn from; one that reads dialogues or pairs would never come to a bound on them."""
    return config.method.name not in READING_METHODS and not config.data.pairs


def _count(name: str, text: str, *, least: int) -> int:
    if not text.replace("_", "").isdigit() or int(text) < least:
        raise ConfigError(f"{name}={text}; expected a whole number from {least} up")
    return int(text)


def _overrides(request: Request, variant: Variant, place: Path, seed: int, budget: int) -> list[str]:
    bound = [f"train.steps={MANY_STEPS}", f"train.max_sampled_tokens={budget}"] if budget else []
    return [
        f"method={variant.method}",
        *request.overrides,
        *variant.overrides,
        *bound,
        f"train.seed={seed}",
        f"run.dir={place}",
        "run.dialogues=0",
    ]


def _train_quietly(request: Request, variant: Variant, place: Path, out: Path, seed: int, budget: int) -> int:
    """One run, unless it is there already; what it says goes to a file beside it."""
    overrides = _overrides(request, variant, place, seed, budget)
    resume = None
    if is_run(place):
        _check_same(place, read_config(request.env, overrides))
        if _is_finished(place):
            return 0
        resume = str(place)
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{place.name}.log").open("a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        if resume is not None:
            return train(None, [], only_plan=False, resume=resume)
        return train(request.env, overrides, only_plan=False, resume=None)


def _check_same(place: Path, wanted: Config) -> None:
    """A run of another comparison in the same place would be taken for this one's."""
    with RunReader(place) as run:
        stored = config_to_tree(config_from_yaml(run.config_yaml, str(place)))
    tree = config_to_tree(wanted)
    for section in stored.keys() - {"run"}:
        for key, value in stored[section].items():
            if tree[section][key] != value:
                raise ConfigError(
                    f"{place} holds a run with {section}.{key}={value}, and this comparison has {tree[section][key]}; "
                    "choose another --out, or remove it"
                )


def _is_finished(place: Path) -> bool:
    with RunReader(place) as run:
        return any(row.label == "end" for row in run.evaluations())


def read_result(label: str, seed: int, place: Path) -> Result:
    """What a finished run says of itself."""
    with RunReader(place) as run:
        rows = run.evaluations()
        ends = [row for row in rows if row.label == "end"]
        if not ends:
            raise ConfigError(f"{place} has no evaluation at its end; set eval.tasks")
        end = ends[-1]
        before = [row for row in rows if row.label in ("start", "warm-up")][-1]
        trained = run.metric("train/num_trained_tokens")

        def num_trained(step: int) -> int:
            return round(sum(value for at, value in trained if at <= step))

        shown = [row for row in rows if row.label != "start" or before.label == "start"]
        return Result(
            label=label,
            seed=seed,
            success=end.success,
            success_low=end.success_low,
            success_high=end.success_high,
            reward=end.reward,
            start_success=before.success,
            steps=end.step,
            sampled_tokens=num_drawn_tokens(run, end.step),
            trained_tokens=num_trained(end.step),
            duration_s=sum(value for _, value in run.metric("time/step_s")),
            curve=tuple(
                (num_drawn_tokens(run, row.step) if row.step else 0, num_trained(row.step), row.success)
                for row in shown
            ),
        )


def table_lines(results: Sequence[Result]) -> list[str]:
    """One line per method: means over seeds, with 95 % intervals where there are several."""
    labels = list(dict.fromkeys(result.label for result in results))
    header = ("method", "held-out success", "points more", "before", "reward", "sampled", "trained", "steps", "time")
    rows: list[tuple[str, ...]] = [header]
    for label in labels:
        own = [result for result in results if result.label == label]
        rows.append(
            (
                label,
                _interval(own).percent(),
                "" if label == labels[0] else _points(paired_difference(results, label, labels[0])),
                _share([result.start_success for result in own]),
                f"{np.mean([result.reward for result in own]):.3f}",
                f"{np.mean([result.sampled_tokens for result in own]):,.0f}",
                f"{np.mean([result.trained_tokens for result in own]):,.0f}",
                f"{np.mean([result.steps for result in own]):.0f}",
                format_duration(float(np.mean([result.duration_s for result in own]))),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    num_seeds = len({result.seed for result in results})
    note = (
        f"means over {num_seeds} seeds, Student's 95 % interval between seeds"
        if num_seeds > 1
        else "one seed, Wilson's 95 % interval over its held-out tasks"
    )
    more = f"; points more than {labels[0]}, seed by seed" if len(labels) > 1 else ""
    return [*lines, f"({note}{more}; sampled and trained are tokens)"]


def paired_difference(results: Sequence[Result], label: str, against: str) -> Interval:
    """How much more success, over the seeds that both methods have; unbounded where that is one seed."""
    by_seed = {(result.label, result.seed): result.success for result in results}
    both = [seed for name, seed in by_seed if name == label and (against, seed) in by_seed]
    found = [by_seed[label, seed] - by_seed[against, seed] for seed in both]
    return mean_interval([[value] for value in found if math.isfinite(value)])


def _points(difference: Interval) -> str:
    """In points of success: percent minus percent."""
    if math.isnan(difference.value):
        return "not measured"
    value, low, high = (100 * number for number in (difference.value, difference.low, difference.high))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]" if math.isfinite(low) else f"{value:+.1f}"


def _interval(own: Sequence[Result]) -> Interval:
    """Between seeds, inside [0, 1]; of a single seed, that of its held-out tasks."""
    if len(own) == 1:
        return Interval(own[0].success, own[0].success_low, own[0].success_high)
    found = mean_interval([[result.success] for result in own if math.isfinite(result.success)])
    return Interval(found.value, max(found.low, 0.0), min(found.high, 1.0))


def _share(values: Sequence[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    return f"{np.mean(known):.1%}" if known else "not measured"


def _result_line(result: Result) -> str:
    success = "not measured" if math.isnan(result.success) else f"{result.success:.1%}"
    tokens = f"{result.sampled_tokens:,} tokens sampled, {result.trained_tokens:,} trained"
    return f"{result.label:<24} seed {result.seed}  success {success}  {tokens}, {format_duration(result.duration_s)}"


def _write(directory: Path, request: Request, results: Sequence[Result]) -> None:
    content = {"request": asdict(request), "results": [asdict(result) for result in results]}
    text = json.dumps(content, indent=1).replace("NaN", "null")
    (directory / "compare.json").write_text(text + "\n", encoding="utf-8")
    (directory / "compare.txt").write_text("\n".join(table_lines(results)) + "\n", encoding="utf-8")
    curves = [Curve(label=result.label, points=result.curve) for result in results]
    title = f"{Path(request.env).name}: held-out success at equal sampled tokens"
    (directory / "compare.svg").write_text(comparison_svg(title, curves), encoding="utf-8")
