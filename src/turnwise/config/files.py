"""Reads a `Config` from YAML files and `section.key=value` overrides, and writes it back.

    config = load_config("guess_number", ["model=tiny", "train.steps=5", "rollout.temperature=0.8"])

A name is a shipped preset, a YAML file, or a world. One `ConfigError` reports all mistakes, with the nearest valid name
for an unknown one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError

from turnwise.config.config import Config, option_fields
from turnwise.config.critic import CriticConfig
from turnwise.config.spellings import (
    OTHER_WORDS,
    SPELLINGS,
    canonical_option,
    check_agreement,
    check_only_off,
    to_canonical,
)
from turnwise.config.training import EvalConfig
from turnwise.envs.config import MIX, EnvConfig, read_mix
from turnwise.envs.difficulty import levels_of
from turnwise.envs.registry import load_target, world_names
from turnwise.errors import ConfigError
from turnwise.losses.outside import is_outside
from turnwise.methods.lookup import (
    DEFAULT_METHOD,
    SHIPPED,
    choices_left_behind,
    every_option,
    find_options,
    read_stored_method,
)
from turnwise.models.config import ADAPTER_OPTIONS
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.server_options import NO_SERVERS, REACH_OPTIONS, SHARED_OPTIONS, START_OPTIONS
from turnwise.runtime.section import Section, explain
from turnwise.runtime.suggest import did_you_mean, nearest

AnySection = TypeVar("AnySection", bound=Section)
Tree = dict[str, Any]
"""A config as in YAML: sections of keys, not yet checked."""

SHORTHANDS = ("model", "method", "env")
"""Sections that a bare name may stand for: `model=tiny` is `model.name=tiny`."""
SHORT_KEYS = {"base_url": "model.base_url", "loss": "method.loss_fn"}
SWITCHES = {
    "eval.tasks": tuple(EvalConfig.model_fields),
    "warmup.steps": ("batch_size", "learning_rate"),
    "critic.pretrain_steps": tuple(name for name in CriticConfig.model_fields if name.startswith("pretrain_")),
}
"""Options that turn something off if they are 0, and the options that are then not read."""
PRESETS = resources.files("turnwise.config") / "presets"
YAML_SUFFIXES = (".yaml", ".yml")


def preset_names() -> list[str]:
    """The presets that ship with the package."""
    return names_in(PRESETS)


def names_in(folder: Traversable) -> list[str]:
    """The names of the YAML files in a folder."""
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a preset, a YAML file or a world, with `section.key=value` overrides on top."""
    tree = read_tree(name)
    _apply_all(tree, overrides, name)
    return tree_to_config(tree)


def left_out(start: str | Config, overrides: Sequence[str]) -> list[str]:
    """Sentences about the options of a file that `load_config` and `override_config` drop, because overrides choose
    another method, loss or backend."""
    tree = read_tree(start) if isinstance(start, str) else config_to_tree(start)
    return _apply_all(tree, overrides, start if isinstance(start, str) else "this run's config")


def override_config(config: Config, overrides: Sequence[str]) -> Config:
    """The same config with `section.key=value` overrides on top."""
    tree = config_to_tree(config)
    _apply_all(tree, overrides, "")
    return tree_to_config(tree)


def read_tree(name: str) -> Tree:
    """The content of a preset, a YAML file or a world, before defaults and checks."""
    if name in preset_names():
        return parse_yaml((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"), f"preset {name}")
    path = Path(name).expanduser()
    if path.suffix in YAML_SUFFIXES or path.is_file():
        try:
            return parse_yaml(path.read_text(encoding="utf-8"), str(path))
        except OSError as cause:
            raise ConfigError(f"{path} cannot be read: {cause.strerror}; presets: {_listed_presets()}") from cause
        except UnicodeDecodeError as cause:
            raise ConfigError(f"{path} is not a text file; expected YAML") from cause
    near = nearest(name, [*preset_names(), *world_names()], cutoff=0.8)
    if near in preset_names() and near not in world_names() and name not in world_names() and ":" not in name:
        raise ConfigError(f"no preset and no world {name!r}; did you mean {near!r}? Presets: {_listed_presets()}")
    return {"env": {"name": name}}


def parse_yaml(text: str, source: str, *, is_stored: bool = False) -> Tree:
    """A YAML text as sections of keys; `model: tiny` stands for `model: {name: tiny}`.

    Args:
        is_stored: A run wrote the text; other spellings of options mean what they meant then.
    """
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as cause:
        raise ConfigError(f"{source} is not valid YAML: {cause}") from cause
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{source} holds {type(content).__name__}; expected sections: {', '.join(_sections())}")
    tree: Tree = {}
    for section, value in cast(dict[object, Any], content).items():
        is_bare = section in SHORTHANDS and isinstance(value, str)
        tree[str(section)] = {"name": value} if is_bare else {} if value is None else value
    return to_canonical(tree, is_stored=is_stored)


def tree_to_config(tree: Tree) -> Config:
    """Make a checked config. Raises NotImplementedError for a pair of rollout options that no backend supports."""
    try:
        return Config.model_validate(tree)
    except ValidationError as cause:
        lines = [_explain(error) for error in cause.errors()]
        text = lines[0] if len(lines) == 1 else "\n".join(["the config has mistakes:", *(f"  - {x}" for x in lines)])
        raise ConfigError(text) from None


def config_to_tree(config: Config) -> Tree:
    return config.model_dump(mode="json")


def config_to_yaml(config: Config) -> str:
    """The config as YAML, every option with its value; `config_from_yaml` reads it back."""
    return yaml.safe_dump(config_to_tree(config), sort_keys=False, allow_unicode=True)


def config_from_yaml(text: str, source: str) -> Config:
    """The config that a run stored. Options that are newer than the run get the value that the run had."""
    tree = parse_yaml(text, source, is_stored=True)
    _fill_in(tree)
    _turn_off(tree, None)
    tree["method"] = read_stored_method(tree["method"])
    return tree_to_config(tree)


def _fill_in(tree: Tree) -> None:
    """Set options that are newer than the run to what the run did."""
    rollout, train, method = (tree.setdefault(name, {}) for name in ("rollout", "train", "method"))
    if rollout.get("backend", "local") in NO_SERVERS:  # nothing read these, and their defaults were others once
        for name in (*REACH_OPTIONS, *START_OPTIONS):
            rollout.pop(name, None)
    if "same_start" in rollout or "group_size" not in rollout:
        return
    name = str(method.get("name") or DEFAULT_METHOD)
    options = SHIPPED[name]() if name in SHIPPED else None
    is_stored = (options is not None and options.only_stored) or bool(tree.get("data", {}).get("pairs"))
    rollout["same_start"] = is_stored or (options is not None and options.why_not_own_worlds() is not None)
    if name == "refuel" and not is_stored:
        rollout["group_size"] = 2
    train.setdefault("eps", 1e-12)
    if is_stored:  # older versions accepted these and did not read them
        for section in ("reward", "alarms"):
            tree.pop(section, None)
        train.pop("max_empty_steps", None)
        rollout.pop("min_group_size", None)


def build_section(kind: type[AnySection], given: Mapping[str, Any], overrides: Sequence[str]) -> AnySection:
    """Build a single section, such as a service's, from values by dotted name and `key=value` overrides.

    An override that contradicts `given` is refused, because the user wrote both.
    """
    known, values = list(option_paths(kind)), dict(given)
    for text in overrides:
        key, separator, value = (part.strip() for part in text.partition("="))
        if not separator:
            raise ConfigError(f"{text!r} is not an option; expected key=value, for example {known[-1]}=...")
        if key not in known:
            raise ConfigError(f"{key} is not an option{did_you_mean(key, known)}; there are {', '.join(known)}")
        read = _read_value(key, value)
        if values.setdefault(key, read) != read:
            raise ConfigError(f"{key}={read} contradicts a flag that sets {values[key]}; give one of them")
    tree: Tree = {}
    for key, value in values.items():
        _apply(tree, key.split("."), value)
    return kind(**tree)


def option_paths(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every option's full name."""
    return (path for path, _ in option_fields(model, prefix))


def _apply_all(tree: Tree, overrides: Sequence[str], source: str) -> list[str]:
    """Apply the overrides. Returns sentences about options of the file that were dropped because nothing reads them."""
    given: Tree = {}
    written: dict[str, str] = {}
    for text in overrides:
        spelling, value = _parse(text)
        if check_only_off(spelling, value):
            continue
        option = canonical_option(spelling)
        value = _read_mix(value) if option == "env.mix" else value
        if option in given:
            check_agreement(spelling, written[option], (value, given[option]))
        given[option], written[option] = value, spelling
    notes = [
        *_leave_world_behind(tree, given, source),
        *_leave_level_behind(tree, given, source),
        *_leave_adapter_behind(tree, given, source),
        *_leave_servers_behind(tree, given, source),
        *_leave_behind(tree, given, source),
    ]
    _turn_off(tree, given)
    for path, value in given.items():
        _apply(tree, path.split("."), value)
    return notes


def _read_mix(value: Any) -> Any:
    """The members of `env.mix=a,b`, so that `env.mix.a.share=2` may follow."""
    try:
        return read_mix(value)
    except ValueError as cause:
        raise ConfigError(f"env.mix: {cause}") from None


def _leave_world_behind(tree: Tree, given: Mapping[str, Any], source: str) -> list[str]:
    """Drop a file's world where overrides name a mix, and a file's mix where they name a world."""
    env = tree.get("env")
    own = cast(Tree, env) if isinstance(env, dict) else {}
    if any(key == "env.mix" or key.startswith("env.mix.") for key in given) and own.get("name", MIX) != MIX:
        named, gone = "env.mix", {key: own.pop(key) for key in list(own) if key != "mix"}
    elif given.get("env.name", MIX) != MIX and own.get("mix"):
        named, gone = f"env.name={given['env.name']}", {"mix": own.pop("mix")}
    else:
        return []
    usual = EnvConfig()
    said = [f"env.{key}" for key, value in gone.items() if key == "name" or value != getattr(usual, key, None)]
    return [f"left out, because {named} names the worlds: {', '.join(said)} of {source}"]


def _leave_level_behind(tree: Tree, given: Mapping[str, Any], source: str) -> list[str]:
    """Drop a file's options that the level, or the curriculum, of an override sets."""
    env = tree.get("env")
    level, name = given.get("env.difficulty", -1), given.get("env.name", "")
    is_level = isinstance(level, int) and level >= 0
    if not (is_level or given.get("env.curriculum") is True) or not isinstance(env, dict):
        return []
    own = cast(Tree, cast(Tree, env).get("options") or {})
    world = name or cast(Tree, env).get("name", EnvConfig().name)
    levels = levels_of(load_target(world), own) if world != MIX else ()
    set_by_levels = {option for one in levels for option in one}
    gone = [f"env.options.{key}={own.pop(key)}" for key in sorted(set_by_levels) if key in own]
    why = f"env.difficulty={level}" if is_level else "env.curriculum=true"
    return [f"left out, because {why} sets it: {', '.join(gone)} of {source}"] if gone else []


def _leave_adapter_behind(tree: Tree, given: Mapping[str, Any], source: str) -> list[str]:
    """Drop a file's options for an adapter where an override trains all weights."""
    model = tree.get("model")
    if given.get("model.train") != "full" or not isinstance(model, dict):
        return []
    own = cast(Tree, model)
    gone = [f"model.{key}={own.pop(key)}" for key in ADAPTER_OPTIONS if key in own]
    return [f"{', '.join(gone)} of {source} is for a LoRA adapter and is left out"] if gone else []


def _leave_servers_behind(tree: Tree, given: Mapping[str, Any], source: str) -> list[str]:
    """Drop a file's options for servers where an override names another backend, or servers that run already."""
    rollout = tree.get("rollout")
    if not isinstance(rollout, dict):
        return []
    own, usual = cast(Tree, rollout), RolloutConfig()
    backend = given.get("rollout.backend", own.get("backend", usual.backend))
    unread = [*START_OPTIONS, *SHARED_OPTIONS] if given.get("rollout.url") else []
    unread += [*REACH_OPTIONS, *START_OPTIONS] if backend != own.get("backend", usual.backend) else []
    gone = {key: own.pop(key) for key in dict.fromkeys(unread) if key in own}
    said = [f"rollout.{key}={value}" for key, value in gone.items() if value and value != getattr(usual, key)]
    return [f"left out, because {source} sets it for other servers: {', '.join(said)}"] if said else []


def _leave_behind(tree: Tree, given: Mapping[str, Any], source: str) -> list[str]:
    """Drop a file's options for a method, a loss or a correction that is not in use.

    A file's section `method` is written for its own method; another method starts with its own defaults. Options on the
    command line are never dropped. A key that is no option is not dropped either, but reported as a mistake.
    """
    if not isinstance(tree.get("method"), dict):
        return []
    method: Tree = tree["method"]
    name = str(method.get("name") or DEFAULT_METHOD)
    if name not in SHIPPED and not is_outside(name):
        return []
    if given.get("method.name", name) != name:
        return _forget(method, [*every_option(), *find_options(name).model_fields], f"method={name}", source)
    notes: list[str] = []
    for choice, (chosen, options) in choices_left_behind(method).items():
        if given.get(f"method.{choice}", chosen) != chosen:
            notes += _forget(method, options, f"{choice}={chosen}", source)
    return notes


def _forget(method: Tree, options: Sequence[str], owner: str, source: str) -> list[str]:
    fields = find_options(str(method.get("name") or DEFAULT_METHOD)).model_fields
    gone = {key: method.pop(key) for key in sorted(method) if key in options and key != "name"}
    said = [
        f"method.{key}={value}"
        for key, value in gone.items()
        if value is not None and (key not in fields or value != fields[key].get_default(call_default_factory=True))
    ]
    return [f"left out, because {source} sets it for {owner}: {', '.join(said)}"] if said else []


def _parse(text: str) -> tuple[str, Any]:
    """Split `section.key=value` into the option and its value; short forms become full names."""
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError(f"{text!r} is not an override; expected section.key=value, for example train.steps=20")
    if key in SHORTHANDS:
        key = f"{key}.name"
    key = SHORT_KEYS.get(key, key)
    if key in _sections():
        first = next(option_paths(Config.model_fields[key].annotation, f"{key}."))  # pyright: ignore[reportArgumentType]
        raise ConfigError(f"{text!r}: {key} is a section; expected {key}.KEY=value, such as {first}")
    if "." not in key:
        raise ConfigError(f"{key!r} is not an option{_nearest(key)}; expected section.key=value")
    return key, _read_value(key, value)


def _read_value(key: str, text: str) -> Any:
    """Read the value of an override as YAML. A leading `@`, which YAML reserves, marks the name of a file."""
    if text.startswith("@"):
        return text
    try:
        return yaml.load(text, Loader=_Loader) if text.strip() else ""
    except yaml.YAMLError as cause:
        raise ConfigError(f"{key}={text} is not valid YAML: {cause}") from cause


def _apply(tree: Tree, path: Sequence[str], value: Any) -> None:
    *parents, last = path
    branch = tree
    for parent in parents:
        held: Any = branch.setdefault(parent, {})
        if not isinstance(held, dict):
            key = ".".join(path)
            raise ConfigError(f"{key} is not an option: {parent} holds {held!r}{_nearest(key)}")
        branch = cast(Tree, held)
    branch[last] = value


def _turn_off(tree: Tree, given: Mapping[str, Any] | None) -> None:
    """Drop the options of a part that is turned off by an override or, if `given` is None, by the file itself."""
    for switch, options in SWITCHES.items():
        section, _, key = switch.partition(".")
        if not isinstance(tree.get(section), dict):
            continue
        held: Tree = tree[section]
        if (held.get(key) if given is None else given.get(switch)) == 0:
            tree[section] = {name: value for name, value in held.items() if name not in options} | {key: 0}


def _explain(error: Mapping[str, Any]) -> str:
    """A sentence about a mistake; for an unknown option it suggests the nearest one."""
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return explain(error)
    about = f"{path} is not an option{_nearest(path)}"
    return f"{about}; a world's own options go under env.options" if path.startswith("env.") else about


def _nearest(path: str) -> str:
    """The end of a sentence about an unknown option: the nearest valid one."""
    known = list(option_paths())
    section, _, leaf = path.rpartition(".")
    leaf = OTHER_WORDS.get(leaf, leaf)
    if f"{section}.{leaf}" in known:
        return f"; did you mean {section}.{leaf}?"
    by_leaf = {option.rpartition(".")[2]: option for option in known}
    by_leaf |= {spelling.rpartition(".")[2]: option for spelling, option in SPELLINGS.items()}
    same_leaf = [option for option in known if option.rpartition(".")[2] == leaf] or [by_leaf.get(leaf)]
    same_leaf.sort(key=lambda option: not (option or "").startswith("train."))  # the section that is meant most often
    near_leaf = nearest(leaf, by_leaf, cutoff=0.7)
    groups = {option.rpartition(".")[0] for option in known if option.count(".") > 1}
    near = (
        same_leaf[0]
        or (None if "." in path else nearest(path, _sections(), cutoff=0.7))
        or (nearest(path, groups, cutoff=0.8) if path.count(".") == 1 else None)
        or nearest(path, known, cutoff=0.75)
        or (near_leaf and by_leaf[near_leaf])
    )
    if near:
        return f"; did you mean {near}?"
    section = path.partition(".")[0]
    inside = [option for option in known if option.startswith(f"{section}.")]
    return f"; expected one of {', '.join(inside or _sections())}"


def _sections() -> list[str]:
    return list(Config.model_fields)


def _listed_presets() -> str:
    return ", ".join(preset_names())


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-5 as a number and refuses a key that comes twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        construct = cast(Callable[..., object], self.construct_object)  # pyright: ignore[reportUnknownMemberType]
        keys = [construct(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
