"""Runs a file of checks inside an SDK's own environment, one after the other, and prints what became of each.

Also counts which public methods of the SDK's clients were called, so that a check can say that none was left out.
"""

import asyncio
import importlib.util
import inspect
import json
import logging
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

CALLED = {}


def _watch(kind):
    """Note every call of a public method of `kind`, and count none twice."""
    called = CALLED.setdefault(kind.__name__, set())
    for name, method in list(vars(kind).items()):
        if name.startswith("_") or not inspect.isfunction(method):
            continue

        def noted(*args, _name=name, _method=method, **kwargs):
            called.add(_name)
            return _method(*args, **kwargs)

        noted.__wrapped__ = method
        setattr(kind, name, noted)


def public_methods(kind):
    return {name for name, method in vars(kind).items() if not name.startswith("_") and inspect.isfunction(method)}


def main(path):
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    sys.modules["runner"] = sys.modules["__main__"]
    spec = importlib.util.spec_from_file_location("checks", path)
    checks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checks)
    results = {}
    for name, check in list(vars(checks).items()):
        if name.startswith("_") or not inspect.isfunction(check) or check.__module__ != "checks":
            continue
        started = time.perf_counter()
        try:
            found = check()
            if inspect.iscoroutine(found):
                asyncio.run(found)
            results[name] = None
        except Exception:  # noqa: BLE001 - whatever a check ends with is reported
            results[name] = traceback.format_exc()
        print(f"{name} {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(results), flush=True)
    os._exit(0)  # the SDK's threads would hold the process for seconds


if __name__ == "__main__":
    main(Path(sys.argv[1]))
