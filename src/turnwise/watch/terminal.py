"""The progress of a run: a live panel in a terminal or a notebook, else one line per step.

All numbers come from the metrics of a step, which are in the run directory too.
"""

from __future__ import annotations

import html
import math
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from turnwise.runlog.schema import EvaluationRow
from turnwise.watch.intervals import Interval
from turnwise.watch.observer import Observer

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48
FIRST_TOLD_S = 10.0
"""Report a wait in its own line after this many seconds."""
LINES_APART_S = 3.0
"""Seconds between the plain view's lines about a warm-up or a critic's batches, of which there may be hundreds."""
RECENT_STEPS = 10
"""Number of last steps from which speed and time left are computed."""


def open_view(num_steps: int) -> Observer:
    """Choose the view: a panel if stdout is a terminal, a block in a notebook, else plain lines."""
    if in_notebook():
        return NotebookView(num_steps)
    return LiveView(num_steps) if sys.stdout.isatty() else LineView()


def sparkline(values: Sequence[float], *, low: float | None = None, high: float | None = None) -> str:
    """The latest values as bars, one character each; missing values are gaps."""
    shown = list(values)[-CURVE_WIDTH:]
    known = [value for value in shown if math.isfinite(value)]
    if not known:
        return ""
    bottom = min(known) if low is None else low
    top = max(known) if high is None else high
    span = (top - bottom) or 1.0

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return " "
        share = min(1.0, max(0.0, (value - bottom) / span))
        return BARS[min(len(BARS) - 1, int(share * len(BARS)))]

    return "".join(bar(value) for value in shown)


def format_duration(seconds: float) -> str:
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole:02d} s" if minutes else f"{whole} s"


def evaluation_line(row: EvaluationRow) -> str:
    success = Interval(row.success, row.success_low, row.success_high).percent()
    reward = Interval(row.reward, row.reward_low, row.reward_high).number()
    failed = f", {row.num_failed} failed" if row.num_failed else ""
    return (
        f"held-out ({row.label}, step {row.step}): success {success}, reward {reward}, "
        f"{row.num_attempts} attempts at {row.num_tasks} tasks{failed}"
    )


class _Clock:
    """Computes speed and time left from the last steps."""

    def __init__(self) -> None:
        self._ends = [time.monotonic()]

    def restart(self) -> None:
        """Start again, because another kind of work begins."""
        self._ends = [time.monotonic()]

    def tick(self) -> float:
        """Count a step that ended; returns its seconds."""
        self._ends.append(time.monotonic())
        return self._ends[-1] - self._ends[-2]

    def left(self, num_steps_left: int) -> float:
        recent = self._ends[-RECENT_STEPS - 1 :]
        return num_steps_left * (recent[-1] - recent[0]) / max(1, len(recent) - 1)


class LineView(Observer):
    """One line per step, for logs and pipes."""

    def __init__(self) -> None:
        self._clock = _Clock()
        self._told_s = FIRST_TOLD_S
        self._next_line_s = 0.0

    def message(self, text: str) -> None:
        print(text, flush=True)

    def waiting(self, text: str, seconds: float) -> None:
        """Print a line if a wait takes long: after ten seconds, twenty, forty ..."""
        if seconds < FIRST_TOLD_S:
            self._told_s = FIRST_TOLD_S
        elif seconds >= self._told_s:
            self._told_s *= 2
            print(f"waiting for {text}", flush=True)

    def phase(self, name: str) -> None:
        self._clock.restart()
        print(f"{name} ...", flush=True)

    def warmup(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._progress("warm-up", step, num_steps, f"loss {metrics['warmup/loss']:.3f}")

    def critic(self, batch: int, num_batches: int, metrics: Mapping[str, float]) -> None:
        self._progress("critic", batch, num_batches, _critic_summary(metrics))

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._progress("step", step, num_steps, _summary(metrics))

    def _progress(self, what: str, number: int, count: int, summary: str) -> None:
        """A line for each step of a run; of what comes before, the first, the last, and one every few seconds."""
        took, now_s = self._clock.tick(), time.monotonic()
        if what != "step" and 1 < number < count and now_s < self._next_line_s:
            return
        self._next_line_s = now_s + LINES_APART_S
        ahead = f", about {format_duration(self._clock.left(count - number))} left" if number < count else ""
        print(f"{what} {number}/{count}  {summary}  {took:.1f} s{ahead}", flush=True)

    def evaluation(self, row: EvaluationRow) -> None:
        self._clock.restart()
        print(evaluation_line(row), flush=True)


class LiveView(Observer):
    """A panel that is redrawn in place; lines that stay are printed above it."""

    def __init__(self, num_steps: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self._clock = _Clock()
        self._console = Console(highlight=False)
        self._rewards: list[float] = []
        self._successes: list[float] = []
        self._held_out: list[float] = []
        self._phase = "starting"
        self._progress = (0, num_steps)
        self._summary = ""
        self._waiting = ""
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def message(self, text: str) -> None:
        self._console.print(text, markup=False)

    def waiting(self, text: str, seconds: float) -> None:
        self._waiting = f"waiting for {text}" if seconds >= 1 else ""
        self._draw()

    def phase(self, name: str) -> None:
        self._phase = name
        self._draw()

    def warmup(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._phase = f"warming up, {step}/{num_steps}, loss {metrics['warmup/loss']:.3f}"
        self._draw()

    def critic(self, batch: int, num_batches: int, metrics: Mapping[str, float]) -> None:
        self._phase = f"training the critic, {batch}/{num_batches}, {_critic_summary(metrics)}"
        self._draw()

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._clock.tick()
        self._phase, self._progress = "training", (step, num_steps)
        self._rewards.append(metrics.get("rollout/reward_mean", math.nan))
        self._successes.append(metrics.get("rollout/success_mean", math.nan))
        self._summary = _summary(metrics)
        self._draw()

    def evaluation(self, row: EvaluationRow) -> None:
        self._held_out.append(row.success)
        self._console.print(evaluation_line(row), markup=False)
        self._draw()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        self._live.update(self.panel())

    def panel(self) -> Any:
        """The current view as a rich object."""
        from rich.console import Group
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        step, num_steps = self._progress
        rows = Table.grid(padding=(0, 2))
        for name, values, bounds in (
            ("reward", self._rewards, (None, None)),
            ("success", self._successes, (0.0, 1.0)),
            ("held-out success", self._held_out, (0.0, 1.0)),
        ):
            latest = f"{values[-1]:.3f}" if values and math.isfinite(values[-1]) else "-"
            rows.add_row(name, sparkline(values, low=bounds[0], high=bounds[1]), latest)
        left = f", about {format_duration(self._clock.left(num_steps - step))} left" if step else ""
        title = Text(f"{self._phase}  step {step}/{num_steps}{left}")
        bar = Padding(ProgressBar(total=max(1, num_steps), completed=step), 0)  # a bare bar ends no line
        lines = [Text(self._summary, overflow="ellipsis", no_wrap=True)] if self._summary else []
        lines += [Text(self._waiting, overflow="fold")] if self._waiting else []  # never cut: it says who is slow
        return Panel(Group(title, bar, rows, *lines), expand=False)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows HTML."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookView(Observer):
    """One block below the cell that is redrawn in place, with the curve as bars; evaluations and messages remain."""

    def __init__(self, num_steps: int) -> None:
        display: Any = import_module("IPython.display").display  # there is one: `in_notebook`
        self._num_steps = num_steps
        self._rewards: list[float] = []
        self._kept: list[str] = []
        self._now = "starting"
        self._last_step = ""
        self._handle: Any = display(self, display_id=True)

    def __repr__(self) -> str:
        lines = [*self._kept, self._now, f"reward {sparkline(self._rewards)}" if self._rewards else ""]
        return "\n".join(line for line in lines if line)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def message(self, text: str) -> None:
        self._kept.append(text)
        self._draw()

    def phase(self, name: str) -> None:
        self._show(f"{name} ...")

    def warmup(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._show(f"warm-up {step}/{num_steps}  loss {metrics['warmup/loss']:.3f}")

    def critic(self, batch: int, num_batches: int, metrics: Mapping[str, float]) -> None:
        self._show(f"critic {batch}/{num_batches}  {_critic_summary(metrics)}")

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self._rewards.append(metrics.get("rollout/reward_mean", math.nan))
        self._last_step = f"step {step}/{num_steps}  {_summary(metrics)}"
        self._show(self._last_step)

    def evaluation(self, row: EvaluationRow) -> None:
        self.message(evaluation_line(row))

    def close(self) -> None:
        self._show(self._last_step)  # a run that is over is not "evaluating ..."

    def _show(self, text: str) -> None:
        self._now = text
        self._draw()

    def _draw(self) -> None:
        self._handle.update(self)


def _critic_summary(metrics: Mapping[str, float]) -> str:
    return (
        f"loss {metrics['critic/loss']:.4f}  explained variance {metrics['critic/explained_variance']:.2f}  "
        f"mean return {metrics['critic/return']:.3f}"
    )


def _summary(metrics: Mapping[str, float]) -> str:
    """A step in one line, without the numbers that were not measured."""
    parts: list[str] = []
    for label, key, form in (
        ("reward", "rollout/reward_mean", ".3f"),
        ("success", "rollout/success_mean", ".1%"),
        ("groups", "method/groups_trained", ".0f"),
        ("tokens/s", "rollout/sampled_tokens_per_s", ".0f"),
        ("entropy", "rollout/entropy_estimate", ".2f"),
        ("k2", "train/kl_sampler_trainer_k2", ".1e"),
        ("drift", "drift/abs_mean", ".1e"),
        ("worst", "drift/abs_max", ".1e"),
        ("grad", "train/grad_norm", ".2g"),
        ("critic EV", "train/critic_explained_variance", ".2f"),
        ("lag", "pool/staleness_mean", ".1f"),
    ):
        value = metrics.get(key, math.nan)
        if math.isfinite(value):
            parts.append(f"{label} {value:{form}}")
    return "  ".join([*parts, *_dropped(metrics)])


def _dropped(metrics: Mapping[str, float]) -> list[str]:
    """Attempts of a step that are not learned from, by reason; empty if there are none."""
    prefix = "rollout/dropped_"
    counts = [f"{value:.0f} {key.removeprefix(prefix)}" for key, value in metrics.items() if key.startswith(prefix)]
    return [f"dropped {', '.join(counts)}"] if counts else []
