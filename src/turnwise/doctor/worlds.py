"""What goes wrong in one world of a mix while the others learn."""

from __future__ import annotations

from turnwise.doctor.finding import Finding, Fix
from turnwise.doctor.history import RunHistory

MIN_GROUPS = 8
"""Groups of a world in the last steps that must end alike before this is reported."""


def idle_worlds(run: RunHistory) -> list[Finding]:
    """Members of a mix whose attempts of the last steps all failed, or all succeeded, while others differ."""
    found: list[Finding] = []
    rates = {name: run.recent(f"world/success_{name}") for name in run.config.env.mix}
    if len({rate for rate in rates.values() if rate is not None}) < 2:
        return found  # all of them are alike, or no other is judged: the findings about the whole run say so
    for name, rate in rates.items():
        num_groups = run.recent_sum(f"world/groups_{name}")
        if rate in (0.0, 1.0) and num_groups >= MIN_GROUPS:
            found.append(_finding(run, name, num_groups, is_solved=rate == 1.0))
    return found


def _finding(run: RunHistory, name: str, num_groups: float, *, is_solved: bool) -> Finding:
    member = run.config.env.mix[name]
    steps = run.config.warmup.steps
    smaller = Fix(option=f"env.mix.{name}.share={member.share / 2:g}", text="give the other worlds its groups")
    levels = Fix(option=f"env.mix.{name}.curriculum=true", text="if the world has a dial: choose levels by success")
    choices = () if member.curriculum or member.tasks or member.difficulty == 0 else (levels,)
    show = Fix(option=f"warmup.steps={2 * steps or 50}", text="show the policy what earns something in this world")
    return Finding(
        name="world_solved" if is_solved else "world_fails",
        seen=f"all attempts of the last {num_groups:g} groups in {name} {'succeeded' if is_solved else 'failed'}, "
        "and those in other worlds did not",
        why="groups in which every attempt ends alike teach nothing, and cost this world's share of the tokens",
        fixes=(*choices, smaller) if is_solved else (show, *choices, smaller),
        numbers={"groups": num_groups, "share": member.share},
    )
