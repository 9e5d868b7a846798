"""How a fleet speaks to samplers that are engines of ours: over links, not HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnwise.backends.servers.dialect import ServedWeights, ServerDialect, ServerFacts
from turnwise.backends.servers.http import ServerGoneError
from turnwise.engine.samplers.calls import FactsCall, GenerateCall, LoadCall, SamplerCall, UnloadCall
from turnwise.engine.samplers.links import SamplerLink
from turnwise.errors import CheckpointError, EngineStoppedError, ServiceError, TurnwiseError
from turnwise.types import SampleRequest, SampleResponse

FindLink = Callable[[], SamplerLink | None]
"""The way to a sampler as it is now; None while there is none."""


class SamplerDialect(ServerDialect):
    """One sampler, whatever process it is in now."""

    def __init__(self, url: str, find_link: FindLink, model: str) -> None:
        super().__init__(url)
        self._find_link = find_link
        self._model = model

    async def facts(self) -> ServerFacts:
        facts = await self._call(FactsCall())
        return ServerFacts(model=self._model, context_length=facts.context_length, vocabulary=facts.vocabulary)

    async def healthy(self) -> bool:
        try:
            await self._call(FactsCall())
        except TurnwiseError:
            return False
        return True

    async def generate(self, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
        return await self._call(GenerateCall(request, weights.name))

    async def load(self, weights: ServedWeights) -> None:
        assert weights.name is not None
        assert weights.adapter is not None
        link = self._link()
        files = None if link.sees_files else await asyncio.to_thread(_read_files, weights.adapter)
        try:
            await self._call(LoadCall(weights.name, weights.adapter.resolve(), files))
        except (CheckpointError, OSError) as error:
            raise ServiceError(f"{self.url} cannot load {weights.name}: {error}") from error

    async def unload(self, weights: ServedWeights) -> None:
        assert weights.name is not None
        await self._call(UnloadCall(weights.name))

    async def close(self) -> None:
        """Do nothing: the process that started the sampler ends it."""

    def _link(self) -> SamplerLink:
        link = self._find_link()
        if link is None:
            raise ServerGoneError(f"{self.url} is not there")
        return link

    async def _call(self, call: SamplerCall) -> Any:
        link = self._link()
        try:
            return await asyncio.wrap_future(link.call(call))
        except (OSError, EngineStoppedError, LookupError) as error:
            if isinstance(call, LoadCall) and not link.is_gone:
                raise  # its files
            raise ServerGoneError(f"{self.url} is gone: {error}") from error


def _read_files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir()) if file.is_file()}
