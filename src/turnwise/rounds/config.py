"""The section `flywheel` of a flywheel's file; the other sections are those of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from turnwise.config.config import Config
from turnwise.config.files import (
    Tree,
    build_section,
    config_to_tree,
    names_in,
    override_config,
    parse_yaml,
    tree_to_config,
)
from turnwise.errors import ConfigError
from turnwise.rounds.tables import POOLS
from turnwise.runtime.section import Section
from turnwise.runtime.suggest import did_you_mean

SECTION = "flywheel"
PRESETS = resources.files("turnwise.rounds") / "presets"
WORDS = ("verifier", "judge", "pairwise", "none")
"""Sources of verdicts; anything else is the directory of an outcome model."""
Dial = Literal["rising", "fixed", "uniform"]


class FlywheelConfig(Section):
    """What a round does."""

    dir: str = Field(default="", description="Directory of the flywheel; empty: `runs/flywheel-` and the world.")
    rounds: int = Field(default=4, ge=1, description="Rounds to do; a higher number goes on with a finished flywheel.")
    tasks: int = Field(default=32, ge=1, description="Tasks that a round plays.")
    samples: int = Field(default=8, ge=2, description="Attempts at each task.")
    verdict: str = Field(
        default="verifier",
        min_length=1,
        description="Who says which attempts are good: `verifier` (the world), `judge` (a model scores each), "
        "`pairwise` (a model compares those of a group), `none` (all are good), or the directory of an outcome model.",
    )
    threshold: float = Field(default=0.5, description="An attempt with at least this score is good.")
    refresh_verdict: int = Field(
        default=0,
        ge=0,
        description="For the directory of an outcome model: number of rounds after which it is trained again, on the "
        "attempts so far that the world's verifier has judged; 0: never.",
    )
    judge_model: str = Field(default="", description="The judge's model; a name at judge_url, or a model of turnwise.")
    judge_url: str = Field(default="", description="An OpenAI-compatible address of the judge; empty: this process.")
    judge_key_variable: str = Field(default="", description="Environment variable with the key for judge_url.")
    rubric: str = Field(default="", description="What the judge looks for.")
    routing: bool = Field(
        default=True,
        description="Route attempts by their verdict. false imitates every good attempt, for as many steps in all.",
    )
    best_per_task: int = Field(default=2, ge=1, description="Good attempts at a task that go to the pool `sft`.")
    keep_rounds: int = Field(default=0, ge=0, description="Rounds whose samples are trained on; 0 takes all so far.")
    continued_steps: int = Field(
        default=0, ge=0, description="Steps on the world's words in bad attempts, without the replies; 0 is off."
    )
    sft_steps: int = Field(default=10, ge=0, description="Supervised steps on the best attempts; 0 is off.")
    preference_steps: int = Field(default=0, ge=0, description="DPO steps on pairs of a good and a bad attempt.")
    rl_steps: int = Field(default=10, ge=0, description="RL steps on tasks with good and bad attempts; 0 is off.")
    sft_learning_rate: float = Field(default=0.0, ge=0, description="Of continued and sft; 0 takes train's.")
    preference_learning_rate: float = Field(default=0.0, ge=0, description="Of preference; 0 takes train's.")
    dial: Dial = Field(
        default="rising",
        description="Difficulty of new tasks: `rising` goes up a level when the last is solved, `fixed` stays at "
        "start_level, `uniform` draws from all levels.",
    )
    start_level: int = Field(default=0, ge=0, description="Level of the first tasks, for a world with levels.")
    raise_at: float = Field(
        default=0.6, gt=0, le=1, description="Share of good attempts at the present level from which it is raised."
    )
    retire_at: float = Field(
        default=1.0, gt=0, le=1, description="A task is solved, and retired, from this share of good attempts on."
    )
    eval_tasks: int = Field(default=16, ge=1, description="Held-out tasks of each level, drawn once.")
    eval_levels: tuple[int, ...] = Field(default=(), description="Levels to evaluate on; empty: all of the world's.")

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        if not any(self.steps_of(stage) for stage in POOLS):
            raise ValueError("continued_steps, sft_steps, preference_steps and rl_steps are all 0; nothing would learn")
        if self.refresh_verdict and self.verdict in WORDS:
            raise ValueError(
                f"refresh_verdict is not read by verdict={self.verdict}; leave it out, or name an outcome model"
            )
        asks = self.verdict in ("judge", "pairwise")
        for name in ("judge_model", "judge_url", "judge_key_variable", "rubric"):
            if getattr(self, name) and not asks:
                raise ValueError(f"{name} is not read by verdict={self.verdict}; set verdict=judge or pairwise")
        if asks and not (self.judge_model and self.rubric):
            raise ValueError(f"verdict={self.verdict} needs judge_model and rubric")
        if self.verdict == "pairwise" and self.routing and self.rl_steps:
            raise ValueError(
                f"rl_steps={self.rl_steps}: a comparison inside a group gives no reward that the RL stage could learn "
                "from; set rl_steps=0, and preference_steps to learn from the pairs, or take verdict=judge"
            )
        if self.preference_learning_rate and not self.preference_steps:
            raise ValueError("preference_learning_rate is not read while preference_steps is 0; leave it out")
        self._check_of_routes(self.changed_options())
        if self.dial == "uniform" and self.start_level:
            raise ValueError("start_level is not read by dial=uniform; leave it out")
        if self.dial != "rising" and self.raise_at != type(self).model_fields["raise_at"].default:
            raise ValueError(f"raise_at is not read by dial={self.dial}; leave it out")
        return self

    def _check_of_routes(self, changed: Sequence[str]) -> None:
        """Refuse options of routes and verdicts that are off."""
        for name in ("threshold", "raise_at", "retire_at"):
            if self.verdict == "none" and name in changed:
                raise ValueError(f"{name} is not read by verdict=none, which knows no good attempts; leave it out")
        if self.routing:
            return
        for name in ("best_per_task", "preference_learning_rate"):
            if name in changed:
                raise ValueError(
                    f"{name} is not read by routing=false, which imitates every good attempt; leave it out"
                )

    def steps_of(self, stage: str) -> int:
        return int(getattr(self, f"{stage}_steps"))

    @property
    def stage_steps(self) -> Mapping[str, int]:
        """The steps of each stage that trains; without routing all of them are supervised."""
        if self.routing:
            return {stage: self.steps_of(stage) for stage in POOLS}
        total = sum(self.steps_of(stage) for stage in POOLS)
        return {stage: total if stage == "sft" else 0 for stage in POOLS}


class FlywheelFile(Section):
    """A flywheel's whole config."""

    flywheel: FlywheelConfig
    run: Config
    """What the runs of every round have in common."""

    @property
    def directory(self) -> Path:
        world = Path(self.run.env.name).name.replace(":", "-")
        return Path(self.flywheel.dir).expanduser() if self.flywheel.dir else Path("runs") / f"flywheel-{world}"

    def to_tree(self) -> Tree:
        return {SECTION: self.flywheel.model_dump(mode="json"), "run": config_to_tree(self.run)}


def preset_names() -> list[str]:
    """The flywheels that ship with the package."""
    return names_in(PRESETS)


def read_file(target: str | Path, overrides: Sequence[str] = ()) -> FlywheelFile:
    """A flywheel from a YAML file or a preset, with `section.key=value` overrides; `flywheel` is one of the sections.

    Raises:
        ConfigError: An option is unknown or does not fit the others.
    """
    tree = parse_yaml(_text(target), str(target))
    own = tree.pop(SECTION, {})
    if not isinstance(own, dict):
        raise ConfigError(f"{target}: {SECTION} holds {own!r}; expected its options, such as rounds: 4")
    prefix = f"{SECTION}."
    for_run = [text for text in overrides if not text.startswith(prefix)]
    changed = [text.removeprefix(prefix) for text in overrides if text.startswith(prefix)]
    given = {key: value for key, value in cast(dict[str, Any], own).items() if not _is_said(key, changed)}
    return FlywheelFile(
        flywheel=build_section(FlywheelConfig, given, changed), run=override_config(tree_to_config(tree), for_run)
    )


def _is_said(key: str, overrides: Sequence[str]) -> bool:
    return any(text.partition("=")[0].strip() == key for text in overrides)


def _text(target: str | Path) -> str:
    if str(target) in preset_names():
        return (PRESETS / f"{target}.yaml").read_text(encoding="utf-8")
    path = Path(target).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        near = did_you_mean(str(target), preset_names())
        raise ConfigError(
            f"{target} cannot be read as a flywheel{near}; expected a YAML file, or one of {', '.join(preset_names())}"
        ) from cause
