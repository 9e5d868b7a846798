"""Finds the options of a method by name, class or object.

    read_method({"name": "gigpo", "omega": 0.5})       # the section `method` of a config
    as_method_options("my_module:MyMethod")            # from Python: a name, a class, options, or a built method

The options of a config are chosen by `name`: a shipped method, or `module:Class` (`file.py:Class`) of a class that has
`Options`. An option that the chosen method does not read is refused, with the methods or losses that do read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, SerializeAsAny, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails

from turnwise.credit.gae import Gae
from turnwise.errors import ConfigError
from turnwise.losses.outside import is_outside
from turnwise.losses.table import LOSSES, Settings, losses_that_read
from turnwise.methods.base import AnyMethod, DataConfig, MethodSetup
from turnwise.methods.options import DECLARED, FreeLoss, MethodOptions, PolicyTerms, unknown_name
from turnwise.methods.registry import METHODS
from turnwise.rollout.sources import PlayBranches, PlayGroups, ReadDialogues, ReadPairs
from turnwise.runtime.import_path import import_path, is_importable, load_attribute
from turnwise.runtime.section import explain
from turnwise.runtime.suggest import nearest

SHIPPED: Mapping[str, type[MethodOptions]] = {
    method.Options.model_fields["name"].default: method.Options for method in METHODS
}
"""The options of every shipped method, by the method's name."""
DEFAULT_METHOD = "grpo"
_OBJECT = "object:"
"""Prefix of the name of a method that was passed as an object."""


def find_options(name: str) -> type[MethodOptions]:
    """The class of options that a method's name stands for."""
    if name in SHIPPED:
        return SHIPPED[name]
    if not is_outside(name):
        error = unknown_name("method", name, SHIPPED, "module:Class or path/to/file.py:Class")
        raise ValidationError.from_exception_data("method", [InitErrorDetails(type=error, loc=("name",), input=name)])
    if name in _PASSED:
        return PassedMethod
    if name in DECLARED:
        return DECLARED[name]
    if name.startswith(_OBJECT) or not is_importable(name):
        raise ConfigError(
            f"method {name} was passed as a Python object, and this process has none of that name; pass it again "
            "(method=...), or put its class into a module and name it as module:Class"
        )
    return _options_of(load_attribute(name), name)


def read_method(given: Any) -> MethodOptions:
    """The section `method`: a mapping with the method's name and its options, or what `as_method_options` takes."""
    if isinstance(given, MethodOptions):
        return given
    given = {"name": given} if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        return as_method_options(given)
    section = cast(Mapping[str, Any], given)
    name = str(section.get("name") or DEFAULT_METHOD)
    if name in _PASSED:
        unread = sorted(key for key, value in section.items() if key != "name" and not _is_at_rest(key, value))
        if unread:
            raise ConfigError(
                f"{unread[0]} is given beside a method that is built; give it to the method's constructor"
            )
        return _PASSED[name]
    options = find_options(name)
    kept = {key: value for key, value in section.items() if key in options.model_fields or not _is_at_rest(key, value)}
    for key in kept:
        if key not in options.model_fields:
            _refuse_unread(options, name, key)
    return options.model_validate({**kept, "name": name})


def read_stored_method(given: Any) -> MethodOptions | Any:
    """The section `method` of a run on disk. If the method cannot be found here, its stored options are kept: you can
    inspect the run, and resuming it tells what is missing."""
    if not isinstance(given, Mapping):
        return given
    section = cast(Mapping[str, Any], given)
    name = str(section.get("name") or "")
    if not is_outside(name) or name in _PASSED:
        return section
    try:
        find_options(name)
    except (ConfigError, ImportError) as cause:
        return MissingMethod.model_validate({**section, "why": str(cause)})
    return section


AnyMethodOptions = Annotated[SerializeAsAny[MethodOptions], BeforeValidator(read_method)]
"""The type of `Config.method`: the options of one method, told apart by `name`."""


def as_method_options(method: object, **options: Any) -> MethodOptions:
    """The section `method` for whatever a caller passes as `method=`.

    Args:
        method: a name (`grpo`, `module:Class`), a class with `Options`, options, or a method that is already built. A
            built method is known by name in this process; a run that was started with one is resumed with it too.
        options: options of the method; a built method has them already.
    """
    try:
        if isinstance(method, str):
            return read_method({"name": method, **options})
        if isinstance(method, MethodOptions):
            return type(method).model_validate({**method.model_dump(), **options}) if options else method
        if isinstance(method, type):
            return _options_of(method, import_path(method)).model_validate(options)
    except ValidationError as cause:
        raise ConfigError("; ".join(f"method.{explain(error)}" for error in cause.errors())) from None
    if not hasattr(method, "lessons") and not hasattr(method, "source"):
        raise ConfigError(
            f"method={method!r}; expected a name, `module:Class`, a class with Options, its options, or a method: an "
            "object with source, loss_fn, loss_config, keep(groups) and lessons(groups)"
        )
    if options:
        raise ConfigError(f"{min(options)} is given beside a method that is built; give it to the method's constructor")
    check_method(method)
    return PassedMethod.remember(method)


def check_method(method: object, maker: str = "") -> None:
    """Refuse an object that lacks something that the loop asks of a method.

    Args:
        maker: What made it, for the message: `MyMethod.Options.build(setup)`.
    """
    needed = ["source", "loss_fn", "loss_config", "lessons"]
    if isinstance(getattr(method, "source", None), PlayGroups | PlayBranches):
        needed.append("keep")
    missing = [name for name in needed if not hasattr(method, name)]
    if missing:
        said = f"{maker} returned {type(method).__name__}, which" if maker else f"method {type(method).__name__}"
        raise ConfigError(
            f"{said} has no {' and no '.join(missing)}; a method has source, loss_fn, loss_config, keep(groups) and "
            "lessons(groups) (docs/algorithms/README.md, your own method)"
        )


class MissingMethod(MethodOptions):
    """A method from outside the package that this process cannot find, with the options that a run wrote down."""

    model_config = ConfigDict(extra="allow")

    why: str = Field(default="", exclude=True)
    """Why it was not found."""

    @property
    def learns_from_one(self) -> bool:
        return True

    def build(self, setup: MethodSetup) -> AnyMethod:  # noqa: ARG002
        raise ConfigError(self.why)

    @classmethod
    def is_shipped(cls) -> bool:
        return False


class PassedMethod(MethodOptions):
    """A method that was passed as a built object. It has no options; what it needs is read from the object."""

    _method: Any = PrivateAttr(default=None)

    @classmethod
    def remember(cls, method: Any) -> PassedMethod:
        """The options that stand for this very object, under the same name each time."""
        base = name = f"{_OBJECT}{type(method).__module__}.{type(method).__qualname__}"
        number = 1
        while name in _PASSED and _PASSED[name]._method is not method:
            number += 1
            name = f"{base}#{number}"
        if name not in _PASSED:
            _PASSED[name] = cls.model_construct(name=name)
            _PASSED[name]._method = method
        return _PASSED[name]

    @property
    def loss(self) -> str:
        return self._method.loss_fn

    @property
    def loss_config(self) -> Settings:
        return dict(self._method.loss_config)

    @property
    def learns_from_one(self) -> bool:
        """The method's `keep` decides."""
        return True

    @property
    def branches(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return isinstance(self._method.source, PlayBranches)

    @property
    def only_stored(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return isinstance(self._method.source, ReadDialogues | ReadPairs)

    @property
    def needs_critic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(getattr(self._method, "needs_values", False))

    def make_gae(self) -> Gae:
        return self._method.gae if isinstance(getattr(self._method, "gae", None), Gae) else super().make_gae()

    def build(self, setup: MethodSetup) -> AnyMethod:  # noqa: ARG002
        return self._method


_PASSED: dict[str, PassedMethod] = {}
"""Methods that were passed as objects, by the name that stands for them in a config."""


def every_option() -> Mapping[str, FieldInfo]:
    """Every option of a shipped method; where methods differ in a default, the first of them counts."""
    about = MethodOptions.model_fields["name"].description
    found = {"name": FieldInfo(annotation=str, default=DEFAULT_METHOD, description=about)}
    for options in SHIPPED.values():
        for name, field in options.model_fields.items():
            found.setdefault(name, field)
    return found


def methods_that(has: Callable[[type[MethodOptions]], bool]) -> tuple[str, ...]:
    """The names of the shipped methods for which `has` is true."""
    return tuple(name for name, options in SHIPPED.items() if has(options))


def check_data(data: DataConfig, method: MethodOptions) -> None:
    """Refuse stored data that the method does not read."""
    for option in DataConfig.model_fields:
        if getattr(data, option) and option not in method.data_options:
            readers = ", ".join(methods_that(lambda options, option=option: option in options.data_options))
            raise ValueError(f"data.{option} is not read by method={method.name}, only by {readers}; leave it out")
    if data.world and (not data.dialogues or data.dialogues.endswith(".jsonl")):
        raise ValueError(f"data.world={data.world} is a member of a run; set data.dialogues to a run directory too")


def choices_left_behind(method: Mapping[str, Any]) -> Mapping[str, tuple[str, tuple[str, ...]]]:
    """The choices in a file's section `method`: each with its value and the options that belong to that value.

    A clip of `ppo` means nothing to `cispo`; the bounds of one correction mean nothing to another.
    """
    if method.get("name") in _PASSED:
        return {}
    options = find_options(str(method.get("name") or DEFAULT_METHOD))
    loss = method.get("loss_fn")
    loss_fn = options.default_loss if loss in (None, "auto") else str(loss)
    own = (*{option: None for info in LOSSES.values() for option in info.own_options}, "loss_options")
    return {
        "loss_fn": (loss_fn, own),
        "correction": (str(method.get("correction") or "none"), ("correction_low", "correction_high")),
    }


def _options_of(found: Any, name: str) -> type[MethodOptions]:
    is_options = isinstance(found, type) and issubclass(found, MethodOptions)
    options: object = cast(object, found) if is_options else getattr(cast(object, found), "Options", None)
    if isinstance(options, type) and not issubclass(options, MethodOptions):
        raise ConfigError(
            f"method {name}: its Options does not inherit from MethodOptions; write `class Options(FreeLoss)`, or "
            "another of turnwise.methods.options (docs/algorithms/README.md, your own method)"
        )
    if options is None or not isinstance(options, type):
        raise ConfigError(
            f"method {name} has no Options; expected a class with `class Options(FreeLoss)` inside, whose build(setup) "
            "makes the method (docs/algorithms/README.md, your own method)"
        )
    return options


def _is_at_rest(option: str, value: Any) -> bool:
    """Whether an option has no effect: null, or a term of losses over policies at its default."""
    term = PolicyTerms.model_fields.get(option)
    if (option, value) == ("correction", "none"):
        return True
    return value in (None, {}) or (option != "name" and term is not None and value == term.default)


def _refuse_unread(options: type[MethodOptions], name: str, option: str) -> None:
    """Refuse an option of another method or loss. Pydantic reports a name that is no option at all."""
    loss = options.default_loss
    if option in PolicyTerms.model_fields:
        raise ConfigError(f"{option} is not read by {loss}, the loss of method={name}; leave it out")
    losses = losses_that_read(option)
    if losses and not issubclass(options, FreeLoss):
        raise ConfigError(f"{option} is not read by loss_fn={loss}, only by {', '.join(losses)}; leave it out")
    methods = methods_that(lambda shipped: option in shipped.model_fields)
    if methods:
        raise ConfigError(f"{option} is not read by method={name}, only by {', '.join(methods)}; leave it out")
    near = nearest(option, options.model_fields, cutoff=0.6)
    if not options.is_shipped() and near is not None:  # what a shipped method reads, the config suggests itself
        raise ConfigError(f"method.{option} is not an option of {name}; did you mean method.{near}?")
