"""A Ray cluster, for code that starts processes on it. Waits have deadlines: a call to a lost node never returns."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from turnwise.errors import ConfigError

LOST = (
    *("RayActorError", "RaySystemError", "NodeDiedError", "WorkerCrashedError", "ObjectLostError"),
    *("ActorPlacementGroupRemoved", "ActorUnschedulableError"),
)
"""Errors of Ray that say that an actor, its node or its answer is gone."""


def connect_ray(address: str) -> Any:
    """Join the cluster at `cluster.address`. Returns the module `ray`."""
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError as cause:
        raise ConfigError(f"cluster.address={address} needs ray: pip install 'turnwise[ray]'") from cause
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as cause:
            raise ConfigError(
                f"cluster.address={address}: no Ray cluster answers ({cause}); start one: ray start --head"
            ) from cause
    return ray


class RayActor:
    """One actor, with a call that lasts as long as the actor does: so its end is seen without asking it."""

    def __init__(self, ray: Any, actor_class: type, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """`actor_class` has a method `live`, which never returns. Ray does not restart it: its state would be lost."""
        self._ray = ray
        remote = ray.remote(actor_class).options(**{"max_concurrency": 2, "max_restarts": 0, **options})
        self.handle: Any = remote.remote(*arguments)
        self._life = self.handle.live.remote()

    @property
    def name(self) -> str:
        return repr(self.handle)

    @property
    def is_gone(self) -> bool:
        return self.is_ready(self._life)

    def is_ready(self, reference: Any, wait_s: float = 0.0) -> bool:
        return bool(self._ray.wait([reference], timeout=wait_s)[0])

    def get(self, reference: Any, *, deadline_s: float) -> Any:
        """The result of a call. `OSError`: the actor or its answer is gone, or did not come in time."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=deadline_s)
        except errors.GetTimeoutError as cause:
            raise OSError(f"no answer within {deadline_s:g} s") from cause
        except tuple(getattr(errors, name) for name in LOST) as cause:
            raise OSError(str(cause).splitlines()[0]) from cause

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # the actor, its node or the cluster may be gone
            self._ray.kill(self.handle, no_restart=True)
