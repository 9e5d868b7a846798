"""The request of a comparison: methods x worlds x seeds, and how many tokens each run may sample.

    methods=grpo,grpo[credit=reward_to_go],ppo worlds=study_chain,study_luck[tokens=30000] seeds=10 jobs=8

An option in brackets belongs to one method or one world; every other `section.key=value` is for all runs. `{seed}` in
a value is the run's seed: `refuel[data.pairs=pairs-{seed}.parquet]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.config.config import Config
from turnwise.config.files import left_out
from turnwise.errors import ConfigError
from turnwise.losses.outside import is_outside
from turnwise.methods.lookup import SHIPPED
from turnwise.training.setup import read_config

OWN_OPTIONS = ("methods", "env", "worlds", "seeds", "tokens", "jobs", "dir")
EXAMPLE = "turnwise compare methods=grpo,ppo worlds=guess_number seeds=3"
SEED = "{seed}"
"""Stands for a run's seed in the value of an option."""
MANY_STEPS = 1_000_000
"""More steps than any run needs: the limit on tokens ends the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One method with its own options."""

    label: str
    method: str
    overrides: tuple[str, ...]

    @property
    def slug(self) -> str:
        return slug(self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedWorld:
    """A world, a preset or a config file, with its own options."""

    label: str
    name: str
    tokens: int
    """Sampled tokens per run; 0 takes the preset's limit, or what the first run samples in its `train.steps`."""
    overrides: tuple[str, ...]

    @property
    def slug(self) -> str:
        return slug(self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """What is to be compared."""

    variants: tuple[Variant, ...]
    worlds: tuple[ComparedWorld, ...]
    seeds: int
    jobs: int
    """Number of runs at the same time."""
    overrides: tuple[str, ...]
    """Options for every run."""
    directory: Path

    def config(self, world: ComparedWorld, variant: Variant, seed: int) -> Config:
        """The config of one run, before its limit on tokens is known."""
        own = [text.replace(SEED, str(seed)) for text in self._overrides(world, variant)]
        return read_config(world.name, [*own, f"train.seed={seed}", "run.dialogues=0"])

    def notes(self) -> list[str]:
        """Notes about options of a world's file that this method does not read, or that the limit on tokens
        replaces."""
        given = {text.partition("=")[0] for text in self.overrides}
        replaced = [name for name in ("train.steps", "train.max_empty_steps") if name in given]
        bound = [f"{name} is not read, because the number of sampled tokens limits the run" for name in replaced]
        return bound + [
            f"{world.label}, {variant.label}: {note}"
            for world in self.worlds
            for variant in self.variants
            for note in left_out(world.name, self._overrides(world, variant))
        ]

    def _overrides(self, world: ComparedWorld, variant: Variant) -> list[str]:
        return [f"method={variant.method}", *self.overrides, *world.overrides, *variant.overrides]


def slug(label: str) -> str:
    """A label as a file name."""
    return re.sub(r"[^A-Za-z0-9_.=-]+", "-", label).strip("-")


def samples(config: Config) -> bool:
    """Whether the run samples tokens to learn from; a run that reads stored data would never reach a limit on them."""
    return not config.reads_stored


def bounded(config: Config, tokens: int) -> Config:
    """The config with a limit on sampled tokens instead of steps. A run with nothing left to learn, because all
    attempts or none succeed, continues to its limit like the others."""
    if not tokens or not samples(config):
        return config
    bound = {"steps": MANY_STEPS, "max_sampled_tokens": tokens, "max_empty_steps": MANY_STEPS}
    return config.model_copy(update={"train": config.train.model_copy(update=bound)})


def parse_request(arguments: Sequence[str], out: str | None = None) -> CompareRequest:
    own: dict[str, str] = {}
    rest: list[str] = []
    for text in arguments:
        key, _, value = text.partition("=")
        if key in OWN_OPTIONS:
            own[key] = value
        else:
            rest.append(text)
    if own.get("env") and own.get("worlds"):
        raise ConfigError("env and worlds are both given and mean the same; leave one of them out")
    if out and own.get("dir"):
        raise ConfigError("--out and dir= are both given and mean the same; leave one of them out")
    own["worlds"] = own.get("worlds") or own.get("env", "")
    for key, name in (("methods", "methods"), ("worlds", "worlds (or env)")):
        if not own.get(key):
            raise ConfigError(f"{name} is missing; expected {EXAMPLE}")
    tokens = count("tokens", own.get("tokens", "0"), least=0)
    variants = tuple(_variant(item) for item in _split("methods", own["methods"]))
    worlds = tuple(_world(item, tokens) for item in _split("worlds", own["worlds"]))
    _check_names("methods", [variant.label for variant in variants])
    _check_names("worlds", [world.label for world in worlds])
    place = out or own.get("dir") or str(Path("runs") / "-".join(["compare", *(world.slug for world in worlds)])[:100])
    return CompareRequest(
        variants=variants,
        worlds=worlds,
        seeds=count("seeds", own.get("seeds", "3"), least=1),
        jobs=count("jobs", own.get("jobs", "1"), least=1),
        overrides=tuple(rest),
        directory=Path(place).expanduser(),
    )


def count(name: str, text: str, *, least: int) -> int:
    if not text.replace("_", "").isdigit() or int(text) < least:
        raise ConfigError(f"{name}={text}; expected a whole number from {least} up")
    return int(text)


def _split(option: str, text: str) -> list[str]:
    """Split a text at commas outside of brackets."""
    items = [item.strip() for item in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", text)]
    if text.count("[") != text.count("]") or not items:
        raise ConfigError(f"{option}={text} cannot be read; expected NAME,NAME or NAME[option=value;option=value],NAME")
    return items


def _check_names(option: str, labels: Sequence[str]) -> None:
    """Refuse two labels with the same file name: labels name directories."""
    slugs = [slug(label) for label in labels]
    for label, name in zip(labels, slugs, strict=True):
        if slugs.count(name) > 1:
            raise ConfigError(f"{option} names {label} twice; set them apart by an option: {label}[option=value]")


def _options(text: str) -> list[str]:
    return [option.strip() for option in re.split(r"[,;]", text) if option.strip()]


def _variant(item: str) -> Variant:
    method, _, options = item.rstrip("]").partition("[")
    method = method.strip()
    if method not in SHIPPED and not is_outside(method):
        raise ConfigError(f"methods names {method!r}; expected some of {', '.join(SHIPPED)}, or module:Class")
    named = [option if "." in option.partition("=")[0] else f"method.{option}" for option in _options(options)]
    return Variant(label=item, method=method, overrides=tuple(named))


def _world(item: str, tokens: int) -> ComparedWorld:
    name, _, options = item.rstrip("]").partition("[")
    overrides: list[str] = []
    for option in _options(options):
        key, _, value = option.partition("=")
        if key == "tokens":
            tokens = count(f"tokens of {name}", value, least=1)
        else:
            overrides.append(option)
    label = Path(name.strip()).name.replace(":", "-")
    shown = f"{label}[{';'.join(overrides)}]" if overrides else label
    return ComparedWorld(label=shown, name=name.strip(), tokens=tokens, overrides=tuple(overrides))
