"""The README.md of exported weights: what they are, how they were made, how good they are, and how to load them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from turnwise.config.config import Config
from turnwise.config.files import config_to_yaml
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.checkpoint import best_evaluation
from turnwise.training.policy import PolicySampler
from turnwise.watch.curve import CURVE_FILE, write_curve
from turnwise.watch.intervals import Interval
from turnwise.watch.report import certificate_line, drift_lines

CONFIG_COPY = "turnwise.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedAs:
    """What was written, in words for the card."""

    library: str
    """The library that loads it: `peft`, `transformers` or `gguf`."""
    load: str
    """The code that loads it."""
    notes: tuple[str, ...] = ()
    """What a reader must know to load it right."""


def write_card(policy: PolicySampler, directory: Path, written: ExportedAs) -> None:
    """Write README.md, and with it the curve and the config of the run, where the policy comes from a run."""
    config = policy.config
    base = Path(config.model.alias or config.model.name).name
    lines = [
        "---",
        f"library_name: {written.library}",
        f"base_model: {base}",
        "tags: [turnwise, reinforcement-learning]",
    ]
    lines += ["---", "", f"# {base}, trained on {_world(config)}", ""]
    if policy.data_dir is not None and is_run(policy.data_dir):
        with RunReader(policy.data_dir) as run:
            lines += _run_lines(run, policy, directory)
    lines += ["## Load it", "", "```python", written.load, "```", ""]
    lines += [f"- {note}" for note in written.notes]
    (directory / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _world(config: Config) -> str:
    return Path(config.env.name).name if "/" in config.env.name else config.env.name


def _run_lines(run: RunReader, policy: PolicySampler, directory: Path) -> list[str]:
    config, method = policy.config, policy.config.method_in_use
    anywhere = config.run.model_copy(
        update={"dir": "", "name": ""}
    )  # whoever trains it again has a directory of theirs
    (directory / CONFIG_COPY).write_text(config_to_yaml(config.model_copy(update={"run": anywhere})), encoding="utf-8")
    best = best_evaluation(run)
    trained = "all weights" if config.model.train == "full" else f"LoRA of rank {config.model.rank}"
    rows = {
        "World": _world(config),
        "Method": f"{config.method.name} with {method.loss}, {trained}, learning rate {config.train.learning_rate:g}",
        "Checkpoint": policy.why.partition(";")[0] or f"step {policy.step}",
        "Sampler": config.rollout.backend,
        "Certificate": certificate_line(run).partition(";")[0],
        **{"Drift" if index == 0 else "": line.strip() for index, line in enumerate(drift_lines(run)[:1])},
        "Command": f"`turnwise train {CONFIG_COPY}` (the file is beside this one)",
    }
    lines = ["| | |", "|---|---|", *(f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows.items())]
    evaluations = run.evaluations()
    if evaluations:
        lines += [
            "",
            "## Results",
            "",
            "Held-out tasks, 95 % intervals:",
            "",
            "| Step | Success | Reward |",
            "|---|---|---|",
        ]
        for row in evaluations:
            success = Interval(row.success, row.success_low, row.success_high).percent()
            reward = Interval(row.reward, row.reward_low, row.reward_high).number()
            lines.append(f"| {row.step} ({row.label}) | {success} | {reward} |")
        shutil.copyfile(write_curve(run, f"{_world(config)}, {config.method.name}", best), directory / CURVE_FILE)
        lines += ["", f"![Learning curve]({CURVE_FILE})"]
    return [*lines, ""]
