"""The in-process sampling client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turnwise.client.engines import LoadedModel
from turnwise.client.futures import ApiFuture
from turnwise.errors import DataError
from turnwise.types import ModelInput, SampleRequest, SampleResponse, SamplingParams

if TYPE_CHECKING:
    from turnwise.engine.model.lora import Policy

DEFAULT_SAMPLING_PARAMS = SamplingParams()


class SamplingClient:
    """Draws tokens from one published version of the weights; training goes on without changing it.

    >>> client.sample(types.ModelInput.from_ints(ids), 8, types.SamplingParams(max_tokens=64)).result().sequences
    """

    def __init__(self, model: LoadedModel, policy: Policy) -> None:
        """Clients create these: `save_weights_and_get_sampling_client`, `create_sampling_client`."""
        self._model = model
        self._policy = policy

    @property
    def policy_version(self) -> int:
        """Names the weights that this client samples from; every `SampleResponse` carries it."""
        return self._policy.version

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams = DEFAULT_SAMPLING_PARAMS,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> ApiFuture[SampleResponse]:
        """Draw `num_samples` continuations of one prompt; cancelling the future stops them."""
        tokens = _prompt_tokens(prompt)
        request = SampleRequest(tokens, sampling_params, num_samples, include_prompt_logprobs, topk_prompt_logprobs)
        future = self._model.worker.sample(request, self._policy)
        what = f"sample of {num_samples} from a prompt of {len(tokens)} tokens on {self._model.name}"
        return ApiFuture(future, what, on_abandoned=future.cancel)

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams = DEFAULT_SAMPLING_PARAMS,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> SampleResponse:
        """`sample`, awaited; cancelling the task that awaits it stops the sampling."""
        return await self.sample(prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs)

    def compute_logprobs(self, prompt: ModelInput) -> ApiFuture[list[float | None]]:
        """The logprob of each prompt token; None for the first, which nothing predicts."""
        tokens = _prompt_tokens(prompt)
        future = self._model.worker.compute_logprobs(tokens, self._policy)
        what = f"compute_logprobs of a prompt of {len(tokens)} tokens on {self._model.name}"
        return ApiFuture(future, what, on_abandoned=future.cancel)

    async def compute_logprobs_async(self, prompt: ModelInput) -> list[float | None]:
        return await self.compute_logprobs(prompt)

    def warm_up(self, max_context: int = 4096) -> ApiFuture[int]:
        """Make the first requests as fast as the later ones, for dialogues of up to `max_context` tokens.

        On a GPU this captures the graphs that decoding replays, a few seconds that can be waited for or not; without
        it, each is captured when it is first needed. The result is how many were captured: 0 on a CPU.
        """
        if max_context < 1:
            raise DataError(f"max_context={max_context}; expected at least 1 token")
        future = self._model.worker.run_steps("warm-up", lambda engine: engine.warm_up(self._policy, max_context))
        return ApiFuture(future, f"warm_up of {self._model.name}", on_abandoned=future.cancel)

    async def warm_up_async(self, max_context: int = 4096) -> int:
        return await self.warm_up(max_context)

    def get_tokenizer(self) -> Any:
        """The base model's transformers tokenizer."""
        return self._model.get_tokenizer()

    def get_base_model(self) -> str:
        return self._model.name

    async def get_base_model_async(self) -> str:
        return self._model.name


def _prompt_tokens(prompt: object) -> list[int]:
    if not isinstance(prompt, ModelInput):
        raise DataError(f"prompt is a {type(prompt).__name__}; expected a ModelInput: ModelInput.from_ints(token_ids)")
    return prompt.to_ints()
