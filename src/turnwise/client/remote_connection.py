"""The connection to a service elsewhere: what answers there, the SDK that talks to it, and its futures as ours."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

from turnwise.client.futures import ApiFuture
from turnwise.client.remote_wire import Dialect
from turnwise.errors import ConfigError, ServiceError, TurnwiseError
from turnwise.models import store as model_store
from turnwise.models.tokenizer import load_tokenizer
from turnwise.runtime.network import is_on_this_machine

T = TypeVar("T")
Sdk = Any
"""The SDK's module or one of its objects; untyped, because the SDK is optional."""

PROBE_S = 10.0
KEY_ADVICE = (
    ". The service does not know the key: set TINKER_API_KEY (for MinT: MINT_API_KEY) to one of its keys; "
    "`turnwise keys create` makes one for a turnwise service"
)
LOCAL_KEY = "tml-no-key-needed"
"""The key for a service on this machine that needs none; the SDK requires one."""


class Connection:
    """One service, and what all its clients share."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        tokenizer: str | Path | None,
        dialect: Dialect | None,
        deadline_s: float,
    ) -> None:
        self.base_url = _checked_url(base_url)
        self.deadline_s = deadline_s
        self.dialect: Dialect = dialect or probe(self.base_url)
        self.key = api_key or os.environ.get("TINKER_API_KEY") or os.environ.get("MINT_API_KEY")
        if self.key is None and is_on_this_machine(self.base_url):
            self.key = LOCAL_KEY
        self.sdk = _load_sdk(self.key)
        self._tokenizer = tokenizer

    def tokenizer_of(self, base_model: str) -> Any:
        """The tokenizer in the base model's directory on this machine."""
        return load_tokenizer(model_store.resolve_model(str(self._tokenizer or base_model)).directory)

    def call(self, work: Callable[[], T], what: str) -> ApiFuture[T]:
        """Run one of the SDK's blocking calls in its own thread."""
        return self.future(_in_thread(work), _same, what)

    def future(self, source: Any, translate: Callable[[Any], T], what: str) -> ApiFuture[T]:
        """Turn one of the SDK's futures into ours, with the value translated, errors named, and this service's
        deadline."""
        inner = cast("Future[Any]", source if isinstance(source, Future) else source.future())
        what = f"{what} at {self.base_url}"
        outer: Future[T] = Future()

        def finish(done: Future[Any]) -> None:
            if not outer.set_running_or_notify_cancel():
                return
            try:
                outer.set_result(translate(done.result()))
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the future
                outer.set_exception(_to_error(error, what))

        def abandon(done: Future[T]) -> None:
            if done.cancelled():
                inner.cancel()

        outer.add_done_callback(abandon)
        inner.add_done_callback(finish)
        return ApiFuture(outer, what, on_abandoned=outer.cancel, deadline_s=self.deadline_s)


def probe(base_url: str) -> Dialect:
    """Find out which kind of service answers: a turnwise service says so at `/healthz`. No answer is an error."""
    try:
        with urllib.request.urlopen(f"{base_url}/healthz", timeout=PROBE_S) as answer:  # the scheme was checked
            body = json.loads(answer.read(10_000))
    except urllib.error.HTTPError:
        return "tinker"
    except (OSError, urllib.error.URLError) as cause:
        reason = getattr(cause, "reason", cause)
        raise ServiceError(f"no service answers at {base_url} ({reason}); is it running?") from cause
    except ValueError:
        return "tinker"
    is_ours = isinstance(body, dict) and cast("dict[str, Any]", body).get("service") == "turnwise"
    return "turnwise" if is_ours else "tinker"


def _checked_url(base_url: str) -> str:
    parts = urllib.parse.urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"base_url={base_url!r}; expected http://HOST:PORT or https://HOST")
    return base_url.rstrip("/")


def _load_sdk(key: str | None) -> Sdk:
    """Load Tinker's SDK. A key that starts with `sk-` is MinT's, and MinT's SDK patches Tinker's to accept it."""
    name, package = ("mint", "mindlab-toolkit") if key is not None and key.startswith("sk-") else ("tinker", "tinker")
    try:
        return import_module(name)
    except ImportError as cause:
        how = "pip install 'turnwise[remote]'" if name == "tinker" else "pip install mindlab-toolkit, in its own venv"
        raise ConfigError(f"the {package} SDK is not installed; {how}") from cause


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Run one of the SDK's blocking calls in its own thread; the SDK has its own deadlines."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the future
            future.set_exception(error)

    threading.Thread(target=run, name="turnwise remote call", daemon=True).start()
    return future


def _to_error(error: BaseException, what: str) -> BaseException:
    if isinstance(error, TurnwiseError | KeyboardInterrupt | SystemExit):
        return error
    said = str(error).partition(" for self.request_id")[0]  # after this, the SDK lists its internal variables
    if getattr(error, "status_code", None) == HTTPStatus.UNAUTHORIZED:
        said += KEY_ADVICE
    failed = ServiceError(f"{what}: {said or type(error).__name__}")
    failed.__cause__ = error
    return failed


def _same(value: T) -> T:
    return value
