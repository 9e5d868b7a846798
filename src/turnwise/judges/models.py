"""Who is asked for a verdict: a model behind an OpenAI-compatible address, a sampler of ours, or a model by its name.

All answer one prompt with text, or raise: `JudgeBusyError` when asking again later may help, `JudgeFailedError` when
it will not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from turnwise.client.base import SamplingClient
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.models.directories import ADAPTER_CONFIG
from turnwise.renderers.base import Renderer
from turnwise.renderers.choose import get_renderer
from turnwise.runtime.network import tls_context
from turnwise.trajectory import Message
from turnwise.types import ModelInput, SamplingParams

MAX_ANSWER_BYTES = 4 << 20


class JudgeFailedError(TurnwiseError):
    """The model gave no answer, and will not give one to the same prompt."""


class JudgeBusyError(JudgeFailedError):
    """The model gave no answer this time."""

    def __init__(self, detail: str, *, wait_s: float | None = None, is_rate_limit: bool = False) -> None:
        super().__init__(detail)
        self.wait_s = wait_s
        """How long the other side asks us to wait; None when it does not say."""
        self.is_rate_limit = is_rate_limit
        """We asked too often."""


class JudgeModel(Protocol):
    """Answers a prompt."""

    @property
    def name(self) -> str:
        """Names the model and its settings; a kept answer belongs to one name."""
        ...

    async def answer(self, prompt: Sequence[Message]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressModel:
    """A model behind `POST base_url/chat/completions`. It holds no connection, so event loops may share it."""

    base_url: str
    """Such as http://127.0.0.1:8000/v1."""
    model: str
    api_key: str = field(default="", repr=False)
    temperature: float = 0.0
    max_tokens: int = 512
    timeout_s: float = 30.0
    """Time limit of one request."""
    asker: str = "a judge"
    """Who asks the model, for an error."""

    def __post_init__(self) -> None:
        if find_spec("httpx2") is None:
            raise ConfigError(f"{self.asker} behind an address needs the package httpx2: pip install 'turnwise[judge]'")
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"base_url={self.base_url!r}; expected an address such as http://127.0.0.1:8000/v1")
        if not self.model:
            raise ConfigError("model is empty; expected the name that the address knows its model by")
        if self.max_tokens < 1 or self.timeout_s <= 0 or self.temperature < 0:
            raise ConfigError("expected max_tokens of at least 1, timeout_s above 0 and temperature of 0 or more")

    @property
    def name(self) -> str:
        return json.dumps([self.base_url, self.model, self.temperature, self.max_tokens])

    async def answer(self, prompt: Sequence[Message]) -> str:
        status, headers, text = await self._post(
            {
                "model": self.model,
                "messages": [{"role": message.role, "content": message.content} for message in prompt],
                "temperature": self.temperature,
                "max_tokens": self.max_tokens,
            }
        )
        if status in (408, 409, 425, 429) or status >= 500:
            wait_s = _read_wait(headers.get("retry-after"))
            raise JudgeBusyError(f"status {status}: {text[:200]}", wait_s=wait_s, is_rate_limit=status == 429)
        if status != 200:
            raise JudgeFailedError(f"status {status}: {text[:200]}")
        return _read_content(text)

    async def _post(self, request: dict[str, Any]) -> tuple[int, Any, str]:
        import httpx2 as httpx

        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        address = f"{self.base_url.rstrip('/')}/chat/completions"
        try:
            async with (
                httpx.AsyncClient(timeout=self.timeout_s, verify=tls_context()) as client,
                client.stream("POST", address, json=request, headers=headers) as response,
            ):
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise JudgeFailedError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
                return response.status_code, response.headers, body.decode("utf-8", errors="replace")
        except httpx.HTTPError as cause:
            raise JudgeBusyError(f"{type(cause).__name__} at {address}") from cause


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerModel:
    """A model or adapter of ours, asked through its sampling client, without a server or a copy of the weights."""

    sampler: SamplingClient = field(repr=False)
    renderer: Renderer = field(repr=False)
    name: str
    """The name of the weights. Other weights need another name, or the cache would give them the old answers."""
    temperature: float = 0.0
    max_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.name or self.max_tokens < 1 or self.temperature < 0:
            raise ConfigError("expected a name, max_tokens of at least 1 and temperature of 0 or more")

    async def answer(self, prompt: Sequence[Message]) -> str:
        params = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            stop_token_ids=list(self.renderer.stop_ids),
        )
        try:
            prompt_ids = ModelInput.from_ints(self.renderer.start(prompt))
            response = await self.sampler.sample_async(prompt_ids, num_samples=1, sampling_params=params)
        except TurnwiseError as cause:  # for example a prompt that is too long, or a closed engine
            raise JudgeFailedError(str(cause)) from cause
        return self.renderer.parse(response.sequences[0].tokens).content


class SamplerSource(Protocol):
    """Makes sampling clients, as a service does."""

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient: ...


class EmbeddedModel:
    """A model or an adapter by name. `attach` loads it with the service that the run uses.

    If it has the policy's base model, the base weights are shared, not copied.
    """

    def __init__(self, model: str, *, temperature: float = 0.0, max_tokens: int = 512) -> None:
        """Load nothing yet.

        Args:
            model: A base model, or a checkpoint: its `tinker://` path, or its folder.
        """
        if not model:
            raise ConfigError("model is empty; expected a model's name or a checkpoint")
        folder = Path(model).expanduser()
        files = [file.stat().st_mtime_ns for file in folder.iterdir()] if folder.is_dir() else []
        self.name = json.dumps([model, max(files, default=0), temperature, max_tokens])
        """It includes the age of the files, because a folder that was trained again holds another judge."""
        self._model = str(folder) if folder.is_dir() else model
        self._is_checkpoint = "://" in model or (folder / ADAPTER_CONFIG).is_file()
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._asked: SamplerModel | None = None

    def attach(self, service: SamplerSource) -> None:
        """Load the model. The code that makes the clients of a run calls it before the run begins."""
        if self._is_checkpoint:
            sampler = service.create_sampling_client(model_path=self._model)
        else:
            sampler = service.create_sampling_client(base_model=self._model)
        self._asked = SamplerModel(
            sampler=sampler,
            renderer=get_renderer(sampler.get_tokenizer()),
            name=self.name,
            temperature=self._temperature,
            max_tokens=self._max_tokens,
        )

    async def answer(self, prompt: Sequence[Message]) -> str:
        if self._asked is None:
            raise JudgeFailedError(f"the model {self._model} is not loaded; call attach_judge(world, service) first")
        return await self._asked.answer(prompt)


def _read_content(text: str) -> str:
    try:
        content = json.loads(text)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as cause:
        raise JudgeBusyError(f"it answered {text[:120]!r}; expected a chat completion") from cause
    if not isinstance(content, str):
        raise JudgeBusyError(f"its message holds {content!r:.60}; expected text")
    return content


def _read_wait(header: str | None) -> float | None:
    """Read the header Retry-After, which holds seconds or a date."""
    if header is None:
        return None
    if header.strip().isdigit():
        return float(header)
    try:
        when = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (when.astimezone(UTC) - datetime.now(UTC)).total_seconds())
