"""The body of a chat request as OpenAI's clients send it. An option that would change the answer and is not supported
is refused by name; one that changes nothing (`user`, `metadata`, ...) is taken and not used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from turnwise.errors import DataError

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that is read up to its first wrong item, so that a million mistakes make one message."""
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20

Text = Annotated[str, StringConstraints(max_length=16_000_000)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
FunctionName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class LooseBody(BaseModel):
    """Unknown fields are allowed, because clients send messages back with fields of their own."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class PartBody(LooseBody):
    type: Annotated[str, StringConstraints(max_length=100)]
    text: Text | None = None


class FunctionCallBody(LooseBody):
    name: FunctionName
    arguments: Text = "{}"


class ToolCallBody(LooseBody):
    id: Annotated[str, StringConstraints(max_length=200)] = ""
    type: Literal["function"] = "function"
    function: FunctionCallBody


class MessageBody(LooseBody):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Items[PartBody] | None = None
    name: Annotated[str, StringConstraints(max_length=200)] | None = None
    tool_calls: Items[ToolCallBody] | None = None
    tool_call_id: Annotated[str, StringConstraints(max_length=200)] | None = None


class FunctionBody(LooseBody):
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(LooseBody):
    type: Literal["function"]
    function: FunctionBody


class StreamOptionsBody(StrictBody):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class SampledBody(StrictBody):
    """What chat and plain completions share."""

    model: ModelName
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[Items[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptionsBody | None = None
    return_token_ids: bool | None = None
    """An option of our own: add `prompt_token_ids` to the answer and `token_ids` to each choice."""
    # Refused, unless the value changes nothing.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Accepted and ignored.
    user: str | None = None

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def refuse_penalties(self) -> None:
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                raise refused(name, "replies are drawn from the model's own distribution; leave it out")
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "it works only with stream=true")


class ChatBody(SampledBody):
    messages: Annotated[Items[MessageBody], Field(min_length=1, max_length=100_000)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    tools: Annotated[Items[ToolBody], Field(max_length=1000)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = None
    modalities: Items[str] | None = None
    audio: Any = None
    prediction: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def wants_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def check(self) -> None:
        """Refuse options that would change the answer and are not supported."""
        self.refuse_penalties()
        for name, advice in _REFUSED.items():
            if getattr(self, name) is not None:
                raise refused(name, advice)
        if self.tool_choice not in (None, "auto", "none"):
            raise refused("tool_choice", "the model chooses freely: send auto or none")
        if self.parallel_tool_calls is False:
            raise refused("parallel_tool_calls", "a reply may hold several calls; leave it out")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise refused("response_format", "replies are not constrained; ask for JSON in the prompt")
        if self.modalities not in (None, ["text"]):
            raise refused("modalities", "text is all there is")
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "set logprobs=true with it")
        if self.max_tokens == 0:
            raise refused("max_tokens", "expected at least 1")


_REFUSED: Mapping[str, str] = {
    "audio": "text is all there is",
    "prediction": "predicted outputs are not supported",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "reasoning_effort": "this server does not steer thinking",
    "verbosity": "this server does not steer length; use max_completion_tokens",
    "web_search_options": "this server does not search",
}


class RefusedOption(DataError):  # noqa: N818 - it is an answer
    """An option that is not supported."""

    def __init__(self, name: str, advice: str) -> None:
        super().__init__(f"{name} is not supported here: {advice}")
        self.param = name


def refused(name: str, advice: str) -> RefusedOption:
    """The answer to an option that is not supported."""
    return RefusedOption(name, advice)


def read_arguments(call: ToolCallBody) -> dict[str, Any]:
    try:
        value = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as cause:
        raise DataError(f"the arguments of the tool call {call.function.name[:100]!r} are not JSON") from cause
    if not isinstance(value, dict):
        raise DataError(f"the arguments of the tool call {call.function.name[:100]!r} are not an object")
    return cast(dict[str, Any], value)
