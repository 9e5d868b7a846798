"""`turnwise orm train`: outcome models from the labelled attempts of runs.

A classifier is a critic whose value at the end of a conversation learns 1 for a success and 0 for a failure. A
generative verifier is an ordinary run in the world of verdicts: a warm-up on scripted reasons, then RL on whether the
verdict is right. Both are measured on tasks that were held out, and keep what was measured in their directory:

    orm.json  attempts.jsonl  report.json  calibration.svg  progress.json  checkpoints/ (or run/)

The same call goes on with a training that was killed: from its last checkpoint, with the batches that were next.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from turnwise.client.base import TrainingClient
from turnwise.client.checkpoints import CheckpointStore
from turnwise.client.local import ServiceClient
from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml, load_config
from turnwise.errors import ConfigError
from turnwise.models.facts import read_facts
from turnwise.models.store import resolve_model
from turnwise.outcomes.labelled import LabelledAttempt, check_both_parts, read_labelled, write_labelled
from turnwise.outcomes.measure import Quality, calibration_svg, measure
from turnwise.outcomes.model import (
    Kind,
    OutcomeInfo,
    OutcomeModel,
    open_outcome_model,
    read_ids,
    value_lesson,
    value_question,
)
from turnwise.outcomes.verdict_world import is_cut_text
from turnwise.renderers import Renderer, get_renderer
from turnwise.rollout.seeds import derive_seed
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runlog.schema import AttemptRow
from turnwise.runtime.blocking import run_to_end
from turnwise.runtime.section import Section
from turnwise.training.assemble import make_optim
from turnwise.training.checkpoint import choose_checkpoint
from turnwise.training.run import Run
from turnwise.training.setup import AnyService, set_up_new, set_up_resume
from turnwise.training.stored import origin_of, own_task
from turnwise.training.task_order import ShuffledItems
from turnwise.types import Datum
from turnwise.watch.observer import Observer
from turnwise.watch.status import run_lock

ATTEMPTS, PROGRESS, REPORT, PICTURE = "attempts.jsonl", "progress.json", "report.json", "calibration.svg"
SETTINGS = "settings.json"
"""What a training was asked for, so that a resume is the same one."""
SCORED_AT_ONCE = 32
VERDICTS = "turnwise.outcomes.verdict_world:VerdictWorld"
"""The world of the generative kind."""
GENERATIVE_ONLY = ("rl_steps", "rl_learning_rate", "max_chars", "num_votes")
"""Options that a classifier does not read."""


class OrmConfig(Section):
    """Options of `turnwise orm train`."""

    kind: Kind = Field(default="classifier", description="A value head, or a model that writes a reason and a verdict.")
    model: str = Field(default="", description="The base model; empty: that of the runs.")
    rank: int = Field(default=16, ge=1, description="Rank of the LoRA adapter.")
    steps: int = Field(default=200, ge=1, description="Steps of the classifier; for generative, of the warm-up.")
    rl_steps: int = Field(default=50, ge=0, description="For generative: RL steps on the verdict's correctness.")
    batch_size: int = Field(default=32, ge=1, description="Attempts per supervised step.")
    learning_rate: float = Field(default=1e-3, gt=0, description="Learning rate of the supervised steps.")
    rl_learning_rate: float = Field(default=2e-4, gt=0, description="For generative: learning rate of RL.")
    save_every: int = Field(default=25, ge=1, description="Steps between checkpoints.")
    max_attempts: int = Field(
        default=20000, ge=10, description="Most attempts to take: an equal share of every source, its latest."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the adapter and of the batches.")
    max_chars: int = Field(default=6000, ge=200, description="For generative: longest text of an attempt.")
    num_votes: int = Field(default=4, ge=1, description="For generative: replies that vote on an attempt.")

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        changed = self.changed_options()
        if self.kind == "classifier":
            for name in (name for name in GENERATIVE_ONLY if name in changed):
                raise ValueError(f"{name} is not read by kind=classifier; leave it out, or set kind=generative")
        if not self.rl_steps and "rl_learning_rate" in changed:
            raise ValueError("rl_learning_rate is not read while rl_steps is 0; leave it out")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class OrmResult:
    """A trained outcome model."""

    directory: Path
    quality: Quality
    """How good the model is on the held-out tasks."""

    @property
    def model(self) -> OutcomeModel:
        return open_outcome_model(self.directory)


@dataclass(slots=True)
class _Progress:
    """How far a classifier has come, as `progress.json` says."""

    step: int = 0
    path: str = ""
    losses: list[float] = field(default_factory=list[float])

    @classmethod
    def read(cls, directory: Path) -> _Progress:
        file = directory / PROGRESS
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else cls()

    def write(self, directory: Path) -> None:
        part = directory / f"{PROGRESS}.part"
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(directory / PROGRESS)


def train_outcome_model(
    sources: Sequence[str | Path],
    directory: str | Path,
    options: OrmConfig | None = None,
    *,
    service: ServiceClient | None = None,
    observer: Observer | None = None,
) -> OrmResult:
    """Train an outcome model on the attempts of runs, or go on with one that was stopped.

    Args:
        sources: Run directories, or .jsonl files of labelled attempts.
        directory: Where the model is kept.
        service: Holds the models; default: one for this call.

    Raises:
        ConfigError: The attempts have one label only, or another training is kept in the directory.
    """
    place, options = Path(directory).expanduser(), options or OrmConfig()
    with run_lock(place):
        attempts, model = _dataset(place, sources, options)
        options = options.model_copy(update={"model": model})
        own = service or ServiceClient(data_dir=place)
        try:
            if options.kind == "classifier":
                info = run_to_end(_train_classifier(place, attempts, options, own.keeping_checkpoints_in(place)))
            else:
                info = _train_generative(place, attempts, options, observer or Observer())
            info.write(place)
            quality = measure_model(open_outcome_model(place), [one for one in attempts if one.split == "test"], own)
        finally:
            if service is None:
                own.close()
        _write_report(place, quality, f"{options.kind} on {', '.join(info.worlds)}")
    return OrmResult(directory=place, quality=quality)


def read_attempts(sources: Sequence[str | Path], max_attempts: int) -> tuple[list[LabelledAttempt], str]:
    """The attempts of runs that a verifier has judged, played for training; and the runs' base model, if there is one.

    What was played in an evaluation is left out: those tasks measure the policy, and nothing may learn from them.
    Where there are more than `max_attempts`, every source gives an equal share, its latest attempts; what a short
    source leaves over goes to the others.
    """
    opened = [_open_source(source) for source in sources]
    models = {one.model for one in opened if one.model}
    if len(models) > 1:
        raise ConfigError(f"the runs have several models, {', '.join(sorted(models))}; set model=NAME")
    shares = _equal_shares([len(one) for one in opened], max_attempts)
    found = [attempt for one, share in zip(opened, shares, strict=True) for attempt in one.latest(share)]
    return found, next(iter(models), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileSource:
    """A file of labelled attempts."""

    attempts: Sequence[LabelledAttempt]
    model: str = ""

    def __len__(self) -> int:
        return len(self.attempts)

    def latest(self, count: int) -> list[LabelledAttempt]:
        return list(self.attempts[len(self) - count :])


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunSource:
    """The training attempts of a run that a verifier has judged."""

    directory: Path
    config: Config
    rows: Sequence[AttemptRow]

    @property
    def model(self) -> str:
        return origin_of(self.config).model

    def __len__(self) -> int:
        return len(self.rows)

    def latest(self, count: int) -> list[LabelledAttempt]:
        with RunReader(self.directory) as run:
            return [self._labelled(run, row) for row in self.rows[len(self) - count :]]

    def _labelled(self, run: RunReader, row: AttemptRow) -> LabelledAttempt:
        world, task_id = own_task(self.config, row.task_id)
        messages = tuple(message for message, _ in run.dialogue(row.id))
        return LabelledAttempt(world=world, task_id=task_id, messages=messages, label=bool(row.is_success))


def _open_source(source: str | Path) -> _FileSource | _RunSource:
    path = Path(source).expanduser()
    if path.suffix == ".jsonl":
        return _FileSource(attempts=read_labelled(path))
    if not is_run(path):
        raise ConfigError(f"{source} is neither a run directory nor a .jsonl file of labelled attempts")
    with RunReader(path) as run:
        config = config_from_yaml(run.config_yaml, str(path))
        rows = [row for row in run.attempts(phase="train") if row.is_success is not None and row.outcome != "failed"]
    return _RunSource(directory=path, config=config, rows=rows)


def _equal_shares(counts: Sequence[int], most: int) -> list[int]:
    """How many to take of each, `most` in all: the same number of each, or all of one that has fewer."""
    shares = [0] * len(counts)
    for place, index in enumerate(sorted(range(len(counts)), key=counts.__getitem__)):
        shares[index] = min(counts[index], most // (len(counts) - place))
        most -= shares[index]
    return shares


def learned_tasks(directory: str | Path) -> set[tuple[str, str]]:
    """(world, task) of every attempt that an outcome model has learned from."""
    path = Path(directory).expanduser() / ATTEMPTS
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there; it says which tasks the model has learned from, and those are no measure: copy the "
            "whole directory that turnwise orm train made"
        )
    return {(one.world, one.task_id) for one in read_labelled(path) if one.split == "train"}


def measure_model(model: OutcomeModel, attempts: Sequence[LabelledAttempt], service: AnyService) -> Quality:
    """Score attempts and compare with their labels."""
    scores = score_conversations(model, [one.messages for one in attempts], service)
    return measure(scores, [one.label for one in attempts], [one.world for one in attempts])


def score_conversations(model: OutcomeModel, conversations: Sequence[Any], service: AnyService) -> list[float]:
    """Scores of many conversations."""
    if not model.is_attached:
        model.attach(service)  # pyright: ignore[reportArgumentType]

    async def score() -> list[float]:
        found: list[float] = []
        for first in range(0, len(conversations), SCORED_AT_ONCE):
            found += await model.score(conversations[first : first + SCORED_AT_ONCE])
        return found

    return run_to_end(score())


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfN:
    """Success of one attempt out of several at the same task."""

    num_groups: int
    num_left_out: int
    """Tasks that the model has learned from."""
    mean_size: float
    random: float
    """Success of an attempt taken at random."""
    picked: float
    """Success of the attempt with the highest score; of equal ones the first."""
    oracle: float
    """Success of the best attempt: whether any succeeded."""

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def best_of_n(
    model: OutcomeModel, directory: Path, service: AnyService, learned: Collection[tuple[str, str]] = ()
) -> BestOfN:
    """Let an outcome model pick among the attempts that the evaluations of a run played at each task.

    Args:
        learned: Tasks to leave out, because the model has learned from attempts at them.
    """
    groups: dict[tuple[int, str], list[tuple[Any, bool]]] = defaultdict(list)
    left_out: set[str] = set()
    with RunReader(directory) as run:
        config = config_from_yaml(run.config_yaml, str(directory))
        for row in run.attempts(phase="eval"):
            if own_task(config, row.task_id) in learned:
                left_out.add(row.task_id)
            elif row.is_success is not None and row.outcome != "failed":
                messages = [message for message, _ in run.dialogue(row.id)]
                groups[row.step, row.task_id].append((messages, row.is_success))
    several = [group for group in groups.values() if len(group) > 1]
    if not several and left_out:
        raise ConfigError(
            f"the outcome model has learned from the tasks of the evaluations of {directory}; name a run with others"
        )
    if not several:
        raise ConfigError(f"the evaluations of {directory} played no task twice; set eval.samples to 2 or more")
    scores = iter(score_conversations(model, [one for group in several for one, _ in group], service))
    picked: list[bool] = []
    for group in several:
        own = [next(scores) for _ in group]
        picked.append(group[own.index(max(own))][1])
    count = len(several)
    return BestOfN(
        num_groups=count,
        num_left_out=len(left_out),
        mean_size=sum(map(len, several)) / count,
        random=sum(sum(label for _, label in group) / len(group) for group in several) / count,
        picked=sum(picked) / count,
        oracle=sum(any(label for _, label in group) for group in several) / count,
    )


def _dataset(place: Path, sources: Sequence[str | Path], options: OrmConfig) -> tuple[list[LabelledAttempt], str]:
    """The attempts to learn from: those that were written down at the first call, so that a resume has the same."""
    settings = place / SETTINGS
    wanted = {"sources": [str(one) for one in sources], **options.model_dump(mode="json")}
    if settings.is_file():
        stored = json.loads(settings.read_text(encoding="utf-8"))
        model = stored.pop("found_model")
        for name, value in wanted.items():
            if stored.get(name) != value:
                raise ConfigError(
                    f"{place} holds a training with {name}={stored.get(name)}, and now it is {value}; choose another "
                    "directory, or leave it as it was"
                )
        return read_labelled(place / ATTEMPTS), model
    attempts, model = read_attempts(sources, options.max_attempts)
    model = options.model or model
    if not model:
        raise ConfigError("no run says which model to train; set model=NAME")
    check_both_parts(attempts)
    write_labelled(place / ATTEMPTS, attempts)
    part = place / f"{SETTINGS}.part"
    part.write_text(json.dumps({**wanted, "found_model": model}), encoding="utf-8")
    part.replace(settings)
    return read_labelled(place / ATTEMPTS), model


async def _train_classifier(
    place: Path, attempts: Sequence[LabelledAttempt], options: OrmConfig, service: ServiceClient
) -> OutcomeInfo:
    progress, store = _Progress.read(place), CheckpointStore(place)
    if progress.path:
        client: TrainingClient = await service.create_training_client_from_state_with_optimizer_async(progress.path)
    else:
        client = await service.create_critic_training_client_async(
            options.model, rank=options.rank, seed=derive_seed(options.seed, "orm")
        )
    renderer = get_renderer(client.get_tokenizer())
    limit = read_facts(resolve_model(options.model).directory).context_length
    train = [one for one in attempts if one.split == "train"]
    batches = ShuffledItems(train, options.batch_size, derive_seed(options.seed, "orm batches"))
    optim = make_optim(Config(), options.learning_rate)
    while progress.step < options.steps:
        output = await client.forward_backward(_lessons(renderer, batches.batch(progress.step), limit), "value")
        await client.optim_step(optim)
        progress.step += 1
        progress.losses.append(float(output.metrics["loss:sum"]))
        if progress.step % options.save_every == 0 or progress.step == options.steps:
            old = progress.path
            saved = await client.save_state(f"step-{progress.step:06d}", overwrite=True)
            progress.path = saved.path
            progress.write(place)
            store.keep_only([saved.path])
            assert old != saved.path, "a checkpoint is never written over"
    directory = store.directory(progress.path)
    return OutcomeInfo(
        kind="classifier",
        base_model=options.model,
        checkpoint=str(directory.relative_to(place)),
        worlds=tuple(sorted({one.world for one in attempts})),
        max_prompt_tokens=limit,
        num_cut=sum(len(read_ids(renderer, one.messages)) > limit for one in attempts),
    )


def _lessons(renderer: Renderer, batch: Sequence[LabelledAttempt], limit: int) -> list[Datum]:
    return [value_lesson(value_question(renderer, one.messages, limit), one.label, 1.0 / len(batch)) for one in batch]


def _train_generative(
    place: Path, attempts: Sequence[LabelledAttempt], options: OrmConfig, observer: Observer
) -> OutcomeInfo:
    """Train in the world of verdicts, with a run that is resumed like any other."""
    directory = place / "run"
    if not is_run(directory):
        overrides = [
            f"model={options.model}",
            f"model.rank={options.rank}",
            f"env.options.path={place.resolve() / ATTEMPTS}",
            f"env.options.max_chars={options.max_chars}",
            f"warmup.steps={options.steps}",
            f"warmup.batch_size={options.batch_size}",
            f"warmup.learning_rate={options.learning_rate}",
            f"warmup.demonstrations={max(64, 4 * options.batch_size)}",
            f"train.steps={options.rl_steps}",
            f"train.learning_rate={options.rl_learning_rate}",
            f"train.seed={options.seed}",
            f"train.save_every={options.save_every}",
            f"train.max_empty_steps={options.rl_steps + 1}",
            "eval.tasks=0",
            f"run.dir={directory}",
        ]
        Run.start(set_up_new(load_config(VERDICTS, overrides)), observer=observer)
    elif Run.open(directory).state != "finished":
        Run.start(set_up_resume(directory), observer=observer)
    with RunReader(directory) as run:
        row = choose_checkpoint(run, "last").row
    checkpoint = CheckpointStore(directory).directory(row.path)
    return OutcomeInfo(
        kind="generative",
        base_model=options.model,
        checkpoint=str(checkpoint.relative_to(place.resolve())),
        worlds=tuple(sorted({one.world for one in attempts})),
        num_cut=sum(is_cut_text(one.messages, options.max_chars) for one in attempts),
        max_chars=options.max_chars,
        num_votes=options.num_votes,
    )


def _write_report(place: Path, quality: Quality, title: str) -> None:
    (place / REPORT).write_text(json.dumps(quality.to_json(), indent=2) + "\n", encoding="utf-8")
    (place / PICTURE).write_text(calibration_svg(quality, title), encoding="utf-8")
