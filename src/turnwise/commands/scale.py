"""`turnwise scale`: success against what may be spent at inference, before and after training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.commands.play import open_policy
from turnwise.commands.train import say
from turnwise.errors import ConfigError
from turnwise.outcomes.model import open_outcome_model
from turnwise.runlog.reader import is_run
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.scale import OutcomeJudge, Scaling, critic_of, measure_scaling, start_of
from turnwise.watch.intervals import Interval
from turnwise.watch.scaling import ScaleChange, ScalePoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """What to play, and where the picture goes."""

    env: str | None = None
    step: str | None = None
    samples: int = 8
    orm: str | None = None
    critic: bool = False
    out: str = "scale.svg"
    as_json: bool = False


def run_scale(target: str, overrides: Sequence[str], options: ScaleOptions) -> ExitCode:
    """Play, print the table or JSON, and write the picture."""
    if options.env is None and not is_run(Path(target)):
        raise ConfigError(f"{target} does not say which world it is for; add --env NAME")
    if options.samples < 1:
        raise ConfigError(f"--samples {options.samples}; expected 1 or more")
    if any(override.startswith("eval.samples=") for override in overrides):
        raise ConfigError("eval.samples is set by --samples; expected one of the two: --samples N")
    if options.critic and options.orm is not None:
        raise ConfigError("--orm and --critic both pick the best of k; expected one of them")
    judge = None if options.orm is None else OutcomeJudge(model=open_outcome_model(options.orm))
    picture = Path(options.out).expanduser()
    if not picture.parent.is_dir():
        raise ConfigError(f"{picture.parent} is no directory; name a place for the picture that exists")
    policy = open_policy(target, options.env, options.step, [f"eval.samples={options.samples}", *overrides])
    judge = critic_of(policy) if options.critic else judge
    before = start_of(policy)
    if before is not None:
        say(f"before: {before.why}")
    policies = {"model": policy} if before is None else {"before": before, "after": policy}
    found = measure_scaling(policies, judge)
    model = policy.config.model.alias or policy.config.model.name
    picture.write_text(found.svg(f"{found.world}, {Path(model).name}"), encoding="utf-8")
    if options.as_json:
        print(json.dumps(found.to_json()))
        return ExitCode.OK
    print("\n".join(table_lines(found)))
    print(f"picture  {picture}")
    return ExitCode.OK


def table_lines(found: Scaling) -> list[str]:
    """One line per budget; a column per policy."""
    names = list(found.points)
    by_place = {name: {(point.kind, point.budget): point for point in points} for name, points in found.points.items()}
    places = list(dict.fromkeys(place for own in by_place.values() for place in own))
    kinds = list(dict.fromkeys(kind for kind, _ in places))
    places.sort(key=lambda place: (kinds.index(place[0]), place[1]))
    changes = {(one.kind, one.budget): _points_more(one) for one in found.changes}
    more = f"{'points more':<24}" if changes else ""
    lines = [f"{'budget':<20}" + "".join(f"{name:<28}" for name in names) + f"{more}tokens per task"]
    for kind, budget in places:
        own = [by_place[name].get((kind, budget)) for name in names]
        costs = [point.mean_tokens for point in own if point is not None and point.mean_tokens is not None]
        tokens = ", ".join(f"{cost:.0f}" for cost in costs)
        more = f"{changes.get((kind, budget), '-'):<24}" if changes else ""
        lines.append(f"{f'{kind} {budget}':<20}" + "".join(f"{_cell(point):<28}" for point in own) + more + tokens)
    lines += [f"{name}: {count} attempts failed and do not count" for name, count in found.num_failed.items() if count]
    return lines


def _points_more(one: ScaleChange) -> str:
    return f"{100 * one.change:+.1f} [{100 * one.change_low:+.1f}, {100 * one.change_high:+.1f}]"


def _cell(point: ScalePoint | None) -> str:
    return "-" if point is None else Interval(point.success, point.success_low, point.success_high).percent()
