"""Make `docs/config.md` and the end of `turnwise train --help` from the config's fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from turnwise.config.config import Config, option_fields, options_of
from turnwise.config.spellings import ONLY_OFF, SPELLINGS
from turnwise.methods.lookup import SHIPPED, methods_that
from turnwise.methods.options import FreeLoss, MethodOptions, PolicyTerms

HEADER = """\
# Options

This page lists every option of a run. Set options on the command line,
`turnwise train NAME|FILE section.key=value ...`, or in a YAML file, by section:

```yaml
rollout:
  max_turns: 5
  temperature: 1.0
train:
  steps: 100
```

- **Short forms.** `model=NAME`, `method=NAME` and `env=NAME` set the section's `name`, `loss=NAME` sets
  `method.loss_fn`, and `base_url=URL` sets `model.base_url` (docs/service_openai.md). Values are YAML.
- **Refused options.** An unknown option is refused before the run begins, and so is an option that has no effect in the
  given combination.
- **Another method than the file's.** A file's section `method` belongs to the file's own method. If the command line or
  `turnwise compare` names another method, that method starts with its own defaults. With another `method.loss_fn` or
  `method.correction`, the file's bounds are dropped. The plan shows what was left out.
- **Turned off.** With `eval.tasks=0`, `warmup.steps=0` or `critic.pretrain_steps=0`, the file's other options of that
  part are ignored.
- **Record.** A run first writes its whole config, including defaults, to its directory.

This page is generated from the sections that `turnwise.config.config` puts together
(`python -m turnwise.config.reference > docs/config.md`).
"""

SPELLINGS_HEADER = """\
## Other spellings

SkyRL's names, and older names of options, work wherever an option is read. If two spellings of one option have
different values, the config is refused.
"""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the reference."""

    path: str
    kind: str
    default: str
    description: str


def options(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[Option]:
    return (_option(path, field) for path, field in option_fields(model, prefix))


def _option(path: str, field: FieldInfo) -> Option:
    return Option(path, _kind(field), _show(field.get_default(call_default_factory=True)), field.description or "")


def reference_page(config: type[BaseModel] = Config) -> str:
    """`docs/config.md`."""
    parts = [HEADER]
    for section, field in config.model_fields.items():
        assert isinstance(field.annotation, type)
        about = (field.annotation.__doc__ or "").splitlines()[0]
        parts += [f"## {section}", "", about, ""]
        if field.annotation is MethodOptions:
            parts += _method_tables()
        else:
            parts += _table([option for option in options(config) if option.path.startswith(f"{section}.")])
    return "\n".join([*parts, SPELLINGS_HEADER, *_spelling_rows(), ""])


def _table(rows: Sequence[Option]) -> list[str]:
    parts = ["| Option | Value | Default | Meaning |", "|---|---|---|---|"]
    for option in rows:
        kind, about = (text.replace("|", "\\|") for text in (option.kind, option.description))
        parts.append(f"| `{option.path}` | {kind} | `{option.default}` | {about} |")
    return [*parts, ""]


def _method_tables() -> list[str]:
    """The options that methods share, once, and those of each method with its own defaults."""
    parts = _table([_option("method.name", options_of(MethodOptions)["name"])])
    shared: dict[str, FieldInfo] = {"name": MethodOptions.model_fields["name"]}
    for title, mixin in (("Every loss that compares policies", PolicyTerms), ("A loss that can be chosen", FreeLoss)):
        own = {name: field for name, field in mixin.model_fields.items() if name not in shared}
        shared |= own
        readers = methods_that(lambda shipped, mixin=mixin: issubclass(shipped, mixin))
        parts += [f"### {title}", "", f"Read by {', '.join(f'`{name}`' for name in readers)}.", ""]
        parts += _table([_option(f"method.{name}", field) for name, field in own.items()])
    for name, shipped in SHIPPED.items():
        fields = shipped.model_fields.items()
        own = {key: field for key, field in fields if key != "name" and not _is_same(field, shared.get(key))}
        parts += [f"### method={name}", "", (shipped.__doc__ or "").splitlines()[0], ""]
        parts += _table([_option(f"method.{key}", field) for key, field in own.items()])
        for loss, settings in shipped.loss_defaults.items() if issubclass(shipped, FreeLoss) else ():
            listed = ", ".join(f"`method.{key}` {_show(value)}" for key, value in settings.items())
            parts += [f"Its own defaults with `method.loss_fn={loss}`: {listed}.", ""]
    return parts


def _is_same(field: FieldInfo, other: FieldInfo | None) -> bool:
    return other is not None and (field.default, field.description) == (other.default, other.description)


def _spelling_rows() -> list[str]:
    rows = [f"| `{spelling}` | `{option}` |" for spelling, option in SPELLINGS.items()]
    off = [f"| `{path}` | only {' or '.join(map(str, values))}, which is off |" for path, values in ONLY_OFF.items()]
    return ["| Spelling | Option |", "|---|---|", "| `generator.KEY`, any other | `rollout.KEY` |", *rows, *off]


def help_text(config: type[BaseModel] = Config) -> str:
    """The options for a terminal, one line each."""
    rows = list(options(config))
    width = max(len(f"{row.path}={row.default}") for row in rows)
    return "\n".join(f"  {f'{row.path}={row.default}':<{width}}  {row.description}" for row in rows)


def _kind(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    choices = [str(choice) for part in _literals(annotation) for choice in get_args(part)]
    if choices:
        return ", ".join((["a number"] if float in get_args(annotation) else []) + choices)
    if bool in get_args(annotation):
        return "true, false"
    names = {int: "whole number", float: "number", bool: "true, false", str: "text"}
    if annotation in names:
        return names[annotation]
    if get_origin(annotation) is tuple:
        return "list of texts"
    return "number or null" if float in get_args(annotation) else "keys and values"


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return [annotation]
    return [part for inner in get_args(annotation) for part in _literals(inner)]


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[]" if not value else ", ".join(cast(tuple[str, ...], value))
    return "''" if value == "" else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(reference_page(), end="")
