"""What `module:Name` and `path/to/file.py:Name` stand for: worlds, methods and losses from outside the package."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from turnwise.errors import ConfigError
from turnwise.runtime.suggest import did_you_mean


def load_attribute(target: str) -> Any:
    """The attribute that `module:Name` or `file.py:Name` names, imported."""
    path, _, attribute = target.rpartition(":")
    module = _load_file(Path(path)) if path.endswith(".py") else _load_module(path)
    if not attribute or not hasattr(module, attribute):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(f"{path} has no {attribute!r}{did_you_mean(attribute, own)}")
    return getattr(module, attribute)


def import_path(value: Any) -> str:
    """`module:Name` of a class or function."""
    return f"{value.__module__}:{value.__qualname__}"


def is_importable(path: str) -> bool:
    """Another process would find it: it was not defined in a function, a notebook or the script itself."""
    module, _, name = path.rpartition(":")
    return "<locals>" not in name and module not in ("__main__", "")


def add_current_folder() -> str:
    """Let modules of the current folder be imported, as `python -m` does; the folder."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    return here


def _load_module(name: str) -> ModuleType:
    here = add_current_folder()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        if cause.name is None or not f"{name}.".startswith(f"{cause.name}."):
            raise  # the module is there; something that it imports is not
        raise ConfigError(f"no module {name!r}; looked on Python's path and in {here}") from cause


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"no file {path}; expected path/to/file.py:Class")
    name = f"turnwise_user_{path.stem}_{hashlib.sha256(str(path).encode('utf-8')).hexdigest()[:8]}"
    known = sys.modules.get(name)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    if str(path.parent) not in sys.path:  # it may import the files beside it, as `python file.py` lets it
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
