"""Which files of turnwise run code, phase by phase: a program that traces a run of `tiny`, or one request.

    python tests/walks.py run DIRECTORY        # prints {"set-up": [...], "step": [...]} as JSON
    python tests/walks.py http DIRECTORY       # prints {"http": [...]}: a forward_backward over HTTP and its answer

It is a program because what a process did before (imports, caches, loaded engines) would hide files.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import turnwise

SOURCE = Path(turnwise.__file__).parent
SET_UP, FIRST_STEP, STEP, HTTP = "set-up", "first step", "step", "http"


class Walk:
    """Notes the files whose functions are called, under the phase that is set; what runs at an import is left out."""

    def __init__(self) -> None:
        self.phase = ""
        """Nothing is noted while it is empty."""
        self.files: dict[str, set[str]] = {}
        self._imports = threading.local()
        self._prefix = f"{SOURCE}/"

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Watch this thread and all that start from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name == "<module>":
            self._imports.depth = self._depth() + 1
        elif event == "return" and code.co_name == "<module>":
            self._imports.depth = self._depth() - 1
        elif event == "call" and self.phase and code.co_filename.startswith(self._prefix) and not self._depth():
            self.files.setdefault(self.phase, set()).add(code.co_filename.removeprefix(self._prefix))

    def _depth(self) -> int:
        return getattr(self._imports, "depth", 0)


class StepWatch(turnwise.Observer):
    """Begins the walk of a step after the first one, when everything was done once."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        self._walk.phase = {1: STEP}.get(step, "")


def walk_a_run(directory: Path) -> dict[str, list[str]]:
    """Train `tiny` for three steps as the tour does; the set-up ends where the loop begins."""
    from turnwise.training.loop import Loop

    walk = Walk()
    original = Loop.run

    async def run(self: Loop, *arguments: Any, **options: Any) -> Any:
        walk.phase = FIRST_STEP
        return await original(self, *arguments, **options)

    Loop.run = run  # pyright: ignore[reportAttributeAccessIssue]
    quick: dict[str, Any] = {"eval": {"tasks": 0}, "warmup": {"steps": 0}, "observer": StepWatch(walk)}
    with walk.recorded():
        walk.phase = SET_UP
        turnwise.train("guess_number", model="tiny", steps=3, directory=directory / "run", **quick)
    return {phase: sorted(files) for phase, files in walk.files.items()}


async def walk_a_request(directory: Path) -> dict[str, list[str]]:
    """Send `forward_backward` twice to the service, in process; the second one is walked, with its answer."""
    import httpx2

    from turnwise.service.app import create_app
    from turnwise.service.config import ServeConfig
    from turnwise.service.engines import load_models
    from turnwise.service.store.store import Store
    from unit.service.conftest import ENGINE, Wire

    walk = Walk()
    config = ServeConfig(models=("tiny",), data_dir=directory / "data", hold_s=10.0, engine=ENGINE)
    with walk.recorded():
        app = create_app(config, Store(directory / "data"), load_models(config.models, config.engine))
        transport = httpx2.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http,
        ):
            wire = Wire(http, app.state.service)
            model = await wire.model()
            for number, phase in enumerate(("", HTTP), start=1):
                walk.phase = phase
                await wire.result(await wire.train(model, number))
                walk.phase = ""
    return {phase: sorted(files) for phase, files in walk.files.items()}


if __name__ == "__main__":
    place = Path(sys.argv[2])
    os.environ["TURNWISE_HOME"] = str(place / "home")  # a fresh one: in the caller's `tiny` may have been made
    print(json.dumps(walk_a_run(place) if sys.argv[1] == "run" else asyncio.run(walk_a_request(place))))
