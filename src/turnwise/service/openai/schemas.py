"""What OpenAI clients send beside chats (`turnwise.envs.chat_api.bodies`): plain completions, and our captures."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from turnwise.envs.chat_api.bodies import (
    MAX_TOP_LOGPROBS,
    Items,
    ModelName,
    SampledBody,
    StrictBody,
    Text,
    Token,
    refused,
)
from turnwise.trajectory import RewardPart


class CompletionBody(SampledBody):
    prompt: Text | Items[Token] | Items[Text] | Items[Items[Token]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        self.refuse_penalties()
        if self.suffix:
            raise refused("suffix", "the model continues its prompt and cannot fill in text before a suffix")
        if self.best_of not in (None, 1, self.n):
            raise refused("best_of", "every sampled reply is returned; use n")
        if self.echo and self.stream:
            raise refused("echo", "it works only without stream")
        if self.max_tokens == 0 and not self.echo:
            raise refused("max_tokens", "expected at least 1; 0 scores a prompt, with echo=true")

    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)


class CaptureBody(StrictBody):
    """A trajectory to be recorded."""

    model: ModelName | None = None
    """Used instead of the model that the agent names. None: the agent's own choice."""
    task_id: Annotated[str, StringConstraints(min_length=1, max_length=1000)] = "captured"
    attempt: Annotated[int, Field(ge=0, le=2**53)] = 0
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    """Used instead of the agent's temperature; its top_p, top_k and min_p are ignored then."""


class RewardBody(StrictBody):
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    part: RewardPart = "outcome"
    turn: int | None = None
    """Which turn, from 0; negative counts from the end. None: the last."""
    is_success: bool | None = None
