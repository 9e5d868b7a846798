"""What a caller of `turnwise.train` passed, as a config and Python objects.

Keywords mean what the command line means: `train={"seed": 1}` is `train.seed=1`, `model="tiny"` is `model=tiny`. They
are turned into such overrides, so that one parser checks both and a wrong name gets the same answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from turnwise.config.config import Config
from turnwise.config.files import SHORTHANDS, YAML_SUFFIXES, left_out, option_paths, override_config, preset_names
from turnwise.config.spellings import SKYRL_SECTION
from turnwise.errors import ConfigError
from turnwise.losses.outside import as_loss_name
from turnwise.methods.lookup import as_method_options
from turnwise.runtime.suggest import did_you_mean
from turnwise.training.objects import NO_OBJECTS, PythonObjects, object_name
from turnwise.training.setup import read_config

Target = str | Path | Config | Any
"""What to train on: a preset, a YAML file, a world's name, a `Config`, an env class, or a world as an object."""
KEYWORDS = ("model", "method", "steps", "env", "directory", "loss", "reward", "loggers", "observer", "service")
"""Keywords of `turnwise.train` that are no sections, or more than a section."""


SHORT_KEYWORDS = {"steps": ("train", "steps"), "directory": ("run", "dir")}
"""Keywords that stand for one option of a section."""


def to_overrides(keywords: Mapping[str, Any], caller: str = "turnwise.train") -> list[str]:
    """Keyword sections as `section.key=value`; None means "not given".

    Args:
        caller: The function that was given the keywords, for messages.
    """
    known = list(Config.model_fields)
    overrides: list[str] = []
    _check_said_once(keywords)
    for name, value in keywords.items():
        if value is None:
            continue
        if name == "steps":
            overrides.append(f"train.steps={_to_text(value)}")
        elif name == "directory":
            overrides.append(f"run.dir={_to_text(value)}")
        elif name not in (*known, SKYRL_SECTION):
            raise ConfigError(
                f"{name} is no keyword of {caller}{_nearest_keyword(name) or '.'} The sections are {', '.join(known)}"
            )
        elif name in SHORTHANDS and isinstance(value, str):
            overrides.append(f"{name}={value}")
        else:
            overrides += _section_overrides(name, value)
    return overrides


def check_overrides_list(overrides: object) -> list[str]:
    """Refuse a text, which is a sequence too, and anything else that is no list of texts."""
    items: list[object] = list(cast(Sequence[object], overrides)) if isinstance(overrides, list | tuple) else [None]
    if not all(isinstance(item, str) for item in items):
        wanted = [overrides] if isinstance(overrides, str) else ["train.seed=1"]
        raise ConfigError(f"overrides={overrides!r}; expected a list, such as overrides={wanted}")
    return cast(list[str], items)


def _check_said_once(keywords: Mapping[str, Any]) -> None:
    """Refuse a keyword and a section that say different things about one option."""
    for keyword, (section, key) in SHORT_KEYWORDS.items():
        said, held = keywords.get(keyword), keywords.get(section)
        inside: Any = cast(Mapping[str, Any], held).get(key) if isinstance(held, Mapping) else None
        if said is not None and inside is not None and str(said) != str(inside):
            raise ConfigError(
                f"{keyword}={said!r} and {section}={{{key!r}: {inside!r}}} disagree; expected one of them"
            )


def _nearest_keyword(name: str) -> str:
    sections = [option.partition(".")[0] for option in option_paths() if option.partition(".")[2] == name]
    if sections:
        return f"; did you mean {'train' if 'train' in sections else sections[0]}={{{name!r}: ...}}?"
    return did_you_mean(name, [*Config.model_fields, *KEYWORDS])


def _section_overrides(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
    if not isinstance(value, Mapping):
        names = ", ".join(list(_fields(name))[:3])
        raise ConfigError(f"{name}={value!r}: {name} is a section; expected a dict of its options, such as {names}")
    for key, inner in cast(Mapping[str, Any], value).items():
        if isinstance(inner, Mapping | BaseModel) and inner:
            yield from _section_overrides(f"{name}.{key}", inner)
        else:
            yield f"{name}.{key}={_to_text(inner)}"


def _fields(path: str) -> Iterator[str]:
    section = Config.model_fields.get(path.partition(".")[0])
    if section is not None and isinstance(section.annotation, type) and issubclass(section.annotation, BaseModel):
        yield from section.annotation.model_fields


def _to_text(value: Any) -> str:
    """A value as the command line would write it; JSON is YAML."""
    if isinstance(value, Path):
        value = str(value)
    try:
        plain = list(cast(Iterable[object], value)) if isinstance(value, tuple | set) else value
        return json.dumps(plain, ensure_ascii=False)
    except TypeError as cause:
        raise ConfigError(f"{value!r} cannot be written into a config; expected text, numbers or lists") from cause


def read_arguments(
    target: Target, keywords: Mapping[str, Any], overrides: Sequence[str], objects: PythonObjects = NO_OBJECTS
) -> tuple[Config, PythonObjects, list[str]]:
    """The config, the objects, and notes about what the overrides left out of a file.

    Args:
        objects: What is known of them already; the target and the keywords env and reward join it where they are some.
    """
    if target is None:
        raise ConfigError(
            "turnwise.train(None): expected a preset, a YAML file, a world's name, a Config, an env class, or a world "
            "as an object"
        )
    keywords, overrides = dict(keywords), check_overrides_list(overrides)
    env, reward = keywords.get("env"), keywords.get("reward")
    if (loss := keywords.pop("loss", None)) is not None:
        objects = objects if isinstance(loss, str) else replace(objects, loss=loss)
        overrides = [f"method.loss_fn={_to_text(as_loss_name(loss))}", *overrides]
    method = keywords.get("method")
    if method is not None and not isinstance(method, str | Mapping):
        options = as_method_options(method)
        keywords["method"] = {"name": options.name, **options.model_dump(mode="json", exclude_unset=True)}
        objects = replace(objects, method=method)
    if callable(reward):
        objects, keywords["reward"] = replace(objects, reward=reward), None
    if not isinstance(target, str | Path | Config):
        if env is not None and (not isinstance(env, Mapping) or "name" in env):
            raise ConfigError(f"env={env!r} beside {object_name(target)}: both are worlds; expected one of them")
        objects, target = replace(objects, env=target), object_name(target)
    elif env is not None and not isinstance(env, str | Mapping | BaseModel):
        if not isinstance(target, Config) and str(target) not in preset_names() and not _is_file(target):
            raise ConfigError(f"env={object_name(env)} beside {target}: both are worlds; expected one of them")
        # A preset's options are those of the world that it names, not of this one.
        objects, keywords["env"] = replace(objects, env=env), {"name": object_name(env), "options": {}}
    chosen = [*to_overrides(keywords), *overrides]
    start = target if isinstance(target, Config) else str(target)
    config = override_config(start, chosen) if isinstance(start, Config) else read_config(start, chosen)
    return config, objects, left_out(start, chosen)


def _is_file(target: str | Path) -> bool:
    return Path(target).suffix in YAML_SUFFIXES or Path(target).is_file()
