"""Other spellings of options: SkyRL's, and options that this project had in another section.

A spelling in this table means the same as the option it stands for, in a YAML file, on the command line and in Python.
No other code knows it. If a config contains both, they must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from turnwise.errors import ConfigError

SPELLINGS: Mapping[str, str] = {
    "generator.n_samples_per_prompt": "rollout.group_size",
    "generator.sampling_params.max_generate_length": "rollout.max_tokens_per_turn",
    "generator.sampling_params.temperature": "rollout.temperature",
    "generator.inference_engine_tensor_parallel_size": "rollout.tensor_parallel_size",
    "generator.engine_init_kwargs": "rollout.server_args",
    "model.from": "model.start_from",
    "model.device": "engine.device",
    "model.dtype": "engine.dtype",
    "train.micro_batch_tokens": "engine.micro_batch_tokens",
}
"""The option of each spelling. SkyRL's section `generator` means `rollout` for every option that is not listed."""
STORED_SPELLINGS: Mapping[str, str] = {
    "generator.max_num_seqs": "engine.max_num_seqs",
    "generator.gpu_memory_utilization": "engine.gpu_memory_utilization",
}
"""What these stood for in the configs of runs that wrote a section `generator`. Such runs sampled in the engine, and
wrote its values down there also where they were its defaults."""
OTHER_WORDS: Mapping[str, str] = {
    "lr": "learning_rate",
    "epochs": "steps",
    "max_steps": "steps",
    "num_steps": "steps",
    "num_generations": "group_size",
    "max_new_tokens": "max_tokens_per_turn",
    "max_tokens": "max_tokens_per_turn",
    "beta": "kl_coef",
    "max_grad_norm": "grad_clip_norm",
}
"""What other tools call an option: not accepted, but a message names the option that is meant."""
ONLY_OFF: Mapping[str, tuple[float, ...]] = {
    "generator.sampling_params.top_p": (1,),
    "generator.sampling_params.top_k": (-1, 0),
}
"""SkyRL's options that may only be off here, and the values that mean off."""
SKYRL_SECTION, SKYRL_SAMPLING = "generator", "generator.sampling_params"
SECTION = "rollout"

Tree = dict[str, Any]


def canonical_option(path: str) -> str:
    """The option that a dotted path stands for; other paths are returned unchanged.

    >>> canonical_option("generator.n_samples_per_prompt"), canonical_option("generator.max_turns")
    ('rollout.group_size', 'rollout.max_turns')
    """
    if path in SPELLINGS:
        return SPELLINGS[path]
    section, dot, key = path.partition(".")
    return f"{SECTION}.{key}" if dot and section == SKYRL_SECTION and "." not in key else path


def check_only_off(path: str, value: Any) -> bool:
    """Whether `path` is an option that must be off; refuses a value that is not."""
    if path not in ONLY_OFF:
        return False
    if value not in ONLY_OFF[path]:
        name = path.rpartition(".")[2]
        raise ConfigError(
            f"{path}={value} would sample from a truncated distribution, whose logprobs the loss does not know; "
            f"leave {name} out, and use rollout.temperature to sharpen"
        )
    return True


def check_agreement(path: str, other: str, values: tuple[Any, Any]) -> None:
    """Refuse two spellings of one option with different values."""
    if path != other and values[0] != values[1]:
        raise ConfigError(
            f"{path}={values[0]} and {other}={values[1]} are two spellings of {canonical_option(path)}; "
            "expected one of them"
        )


def to_canonical(tree: Mapping[str, Any], *, is_stored: bool = False) -> Tree:
    """A config as in YAML, with every spelling replaced by its option.

    Args:
        is_stored: A run wrote the config down; spellings mean what they meant then.
    """
    older: Mapping[str, str] = STORED_SPELLINGS if is_stored else {}
    result: Tree = {name: value for name, value in tree.items() if name != SKYRL_SECTION}
    for path, value in _other_spellings(tree):
        if check_only_off(path, value):
            continue
        section, _, key = older.get(path, canonical_option(path)).partition(".")
        held: Tree = result.get(section) or {}
        if key in held:
            check_agreement(path, f"{section}.{key}", (value, held[key]))
        result[section] = {**held, key: value}
        written, _, gone = path.partition(".")
        if written in result and path != f"{section}.{key}":
            rest: Tree = result[written]
            result[written] = {name: kept for name, kept in rest.items() if name != gone}
    return result


def _other_spellings(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, value) of everything in the tree that is another spelling."""
    for path in SPELLINGS:
        section, _, key = path.partition(".")
        held = tree.get(section)
        if section != SKYRL_SECTION and isinstance(held, Mapping) and key in held:
            yield path, cast(Tree, held)[key]
    skyrl = tree.get(SKYRL_SECTION)
    if skyrl is not None and not isinstance(skyrl, Mapping):
        raise ConfigError(f"{SKYRL_SECTION} holds {skyrl!r}; expected the options of {SECTION}")
    for key, value in cast(Tree, skyrl or {}).items():
        path = f"{SKYRL_SECTION}.{key}"
        if path == SKYRL_SAMPLING and isinstance(value, Mapping):
            for inner, setting in cast(Tree, value).items():
                yield f"{path}.{inner}", setting
        else:
            yield path, value
