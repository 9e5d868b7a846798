"""The training API's vocabulary, named as Tinker and MinT name it.

Plain frozen dataclasses that check their values when they are made. This module imports numpy, but neither torch nor
pydantic. Everything is in token ids. A datum's tensors are aligned to `model_input`: position i predicts
`target_tokens[i]`, so a linear sequence x_0..x_N is sent as input x_0..x_{N-1} and targets x_1..x_N.

>>> from turnwise import types
>>> types.ModelInput.from_ints([1, 2, 3]).to_ints()
[1, 2, 3]
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import DataError

StopReason = Literal["stop", "length"]
LossFnType = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
TensorDtype = Literal["int64", "float32"]

INTEGER_KEYS = frozenset({"target_tokens"})
"""`loss_fn_inputs` that hold token ids; every other key holds float32."""


@dataclass(frozen=True, slots=True)
class EncodedTextChunk:
    """A sequence of token ids."""

    tokens: Sequence[int]
    type: Literal["encoded_text"] = "encoded_text"

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What the model reads, in chunks of token ids. `ModelInput.from_ints([1, 2, 3])` makes one."""

    chunks: Sequence[EncodedTextChunk] = ()

    @classmethod
    def from_ints(cls, tokens: Iterable[int]) -> ModelInput:
        return cls(chunks=[EncodedTextChunk(tokens=list(map(int, tokens)))])

    @classmethod
    def empty(cls) -> ModelInput:
        return cls(chunks=[])

    def to_ints(self) -> list[int]:
        return list(itertools.chain.from_iterable(chunk.tokens for chunk in self.chunks))

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: EncodedTextChunk) -> ModelInput:
        return ModelInput(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        return self.append(EncodedTextChunk(tokens=[int(token)]))


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class TensorData:
    """A flat list of numbers with its dtype and shape; `shape=None` means one-dimensional.

    A tensor that was made from an array stays an array until `data` is read: for a whole batch, building and reading
    Python lists takes longer than the upload to the device.
    """

    _values: Sequence[int] | Sequence[float] | NDArray[Any]
    dtype: TensorDtype
    shape: Sequence[int] | None

    def __init__(
        self,
        data: Sequence[int] | Sequence[float] | NDArray[Any],
        dtype: TensorDtype = "float32",
        shape: Sequence[int] | None = None,
    ) -> None:
        for name, value in (("_values", data), ("dtype", dtype), ("shape", shape)):
            object.__setattr__(self, name, value)

    @property
    def data(self) -> Sequence[int] | Sequence[float]:
        if isinstance(self._values, np.ndarray):
            object.__setattr__(self, "_values", self._values.tolist())
        return self._values  # pyright: ignore[reportReturnType] - no array any more

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> TensorData:
        dtype: TensorDtype = "int64" if np.issubdtype(array.dtype, np.integer) else "float32"
        return cls(data=array.astype(dtype).ravel(), dtype=dtype, shape=list(array.shape))

    @classmethod
    def from_torch(cls, tensor: Any) -> TensorData:
        return cls.from_numpy(tensor.detach().cpu().numpy())

    def to_numpy(self) -> NDArray[Any]:
        if isinstance(self._values, np.ndarray):
            array = self._values.astype(self.dtype)
        else:
            try:  # the fastest way for a long flat list, and most are flat
                array = np.fromiter(self._values, dtype=self.dtype, count=len(self._values))
            except ValueError:
                array = np.asarray(self._values, dtype=self.dtype)
        return array if self.shape is None else array.reshape(tuple(self.shape))

    def to_torch(self) -> Any:
        import torch  # the caller asked for a torch tensor, so torch is there

        return torch.tensor(self.to_numpy())

    def tolist(self) -> list[Any]:
        return self.to_numpy().tolist()

    def copy(self) -> TensorData:
        """A copy that does not change when the caller changes the original lists."""
        return TensorData(copy.copy(self._values), self.dtype, copy.copy(self.shape))

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return (self.data, self.dtype, self.shape) == (other.data, other.dtype, other.shape)

    __hash__ = None  # pyright: ignore[reportAssignmentType] - unhashable, like a list

    def __repr__(self) -> str:
        return f"TensorData(data={self.data!r}, dtype={self.dtype!r}, shape={self.shape!r})"


def to_tensor_data(key: str, value: Any) -> TensorData:
    """Turn a list, numpy array or torch tensor into the `TensorData` that `loss_fn_inputs[key]` holds."""
    if isinstance(value, TensorData):
        return value
    if hasattr(value, "detach"):
        return TensorData.from_torch(value)
    dtype: TensorDtype = "int64" if key in INTEGER_KEYS else "float32"
    try:
        is_array = isinstance(value, np.ndarray)
        array: NDArray[Any] = np.asarray(value, dtype=None if is_array and key not in INTEGER_KEYS else dtype)
        return TensorData.from_numpy(array)
    except (TypeError, ValueError, OverflowError) as cause:
        raise DataError(f"loss_fn_inputs[{key!r}] is not a list of numbers: {cause}") from cause


@dataclass(frozen=True, slots=True, init=False)
class Datum:
    """One training sequence and the per-token inputs of its loss.

    >>> Datum(model_input=ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7], "weights": [0.0, 1.0]})
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, TensorData]
    """`target_tokens` and, by loss: `weights`, `mask`, `logprobs`, `advantages`, `old_logprobs`, `old_share`,
    `ref_logprobs`, `temperature`, `clip_low_threshold`, `clip_high_threshold`, `sequence_ratio_mask`
    (docs/training_api.md)."""

    def __init__(self, model_input: ModelInput, loss_fn_inputs: Mapping[str, Any]) -> None:
        """Inputs may be lists, numpy arrays, torch tensors or `TensorData`."""
        object.__setattr__(self, "model_input", model_input)
        coerced = {key: to_tensor_data(key, value) for key, value in loss_fn_inputs.items()}
        object.__setattr__(self, "loss_fn_inputs", coerced)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens. `stop=None` stops at the model's end-of-sequence token; `stop=[]` stops at nothing."""

    max_tokens: int | None = None
    """At most this many new tokens; None fills the context."""
    seed: int | None = None
    """The same seed, prompt and weights give the same tokens, whatever else is in the batch."""
    stop: str | Sequence[str] | Sequence[int] | None = None
    """Stop strings, or stop token ids. The returned tokens include the stop."""
    stop_token_ids: Sequence[int] | None = None
    """More stop token ids (MinT's spelling); may be combined with `stop`."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise DataError(f"max_tokens={self.max_tokens}; expected at least 1, or None to fill the context")
        if not 0 <= self.temperature <= 100:
            raise DataError(f"temperature={self.temperature}; expected 0 (greedy) to 100")
        if not 0 < self.top_p <= 1:
            raise DataError(f"top_p={self.top_p}; expected more than 0 and at most 1 (1 is off)")
        if not 0 <= self.min_p < 1:
            raise DataError(f"min_p={self.min_p}; expected 0 (off) to below 1")
        if self.top_k < -1:
            raise DataError(f"top_k={self.top_k}; expected a positive number, or -1 or 0 for off")
        tokens: Sequence[Any] = self.stop_token_ids or ()
        for token in tokens:
            if not isinstance(token, int | np.integer):
                raise DataError(f"stop_token_ids holds {token!r}; expected token ids (is the tokenizer's eos set?)")

    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else [s for s in self.stop if isinstance(s, str)]

    def stop_ids(self, eos_ids: Sequence[int]) -> frozenset[int]:
        """The token ids that end a sequence: the end-of-sequence ids unless the caller named stops of its own."""
        named = [int(t) for t in self.stop_token_ids or ()]
        if self.stop is None:
            return frozenset(named or eos_ids)
        if isinstance(self.stop, str):
            return frozenset(named)
        return frozenset([*named, *(int(s) for s in self.stop if not isinstance(s, str))])


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What one call of `sample` asks for. Clients, the engine's worker and its sampler pass this on as it is."""

    prompt: Sequence[int]
    """Token ids."""
    sampling_params: SamplingParams = SamplingParams()
    num_samples: int = 1
    """Continuations to draw of the one prompt."""
    include_prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    """Return this many of the likeliest tokens, with their logprobs, at each prompt position; 0 is off."""
    prompt_alt_tokens_k: int = 0
    """Draw this many alternatives to each prompt token but the first; 0 is off. Only our own engine can."""

    @classmethod
    def scoring(cls, prompt: Sequence[int]) -> SampleRequest:
        """Ask for the logprobs of the prompt's own tokens; the one token that is drawn with them is of no interest."""
        return cls(prompt, SamplingParams(max_tokens=1), include_prompt_logprobs=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW's settings for one `optim_step`."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Clip the global gradient norm to this; 0 is off."""

    def __post_init__(self) -> None:
        for name, low, high in (("beta1", 0, 1), ("beta2", 0, 1)):
            if not low <= getattr(self, name) < high:
                raise DataError(f"{name}={getattr(self, name)}; expected {low} to below {high}")
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise DataError(f"{name}={value}; expected a finite number that is not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The shape of one adapter."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    train_router: bool = False
    """Adapt the routers of a mixture of experts."""
    expert_rank: int = 0
    """Rank of each expert's part; 0: `rank` divided by the experts that a token uses, at least 1."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise DataError(f"rank={self.rank}; expected at least 1")
        if self.expert_rank < 0:
            raise DataError(f"expert_rank={self.expert_rank}; expected 0 or more")
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise DataError("train_unembed, train_mlp and train_attn are all False; nothing would be trained")


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sampled continuation; `tokens` includes the stop token or the tokens of the stop string."""

    stop_reason: StopReason
    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None
    """Log-probability of each token at the sampling temperature (at 1 when greedy), over the whole vocabulary."""
    versions: Sequence[int] | None = None
    """The version of the weights that drew each token, where the weights changed meanwhile; None: all tokens are of
    the response's `policy_version`."""


@dataclass(frozen=True, slots=True)
class PromptAltTokens:
    """Tokens that the model might have said in place of the prompt's: independent draws at the request's temperature,
    from the whole vocabulary. Row i holds alternatives to prompt token i + 1."""

    tokens: TensorData
    """[prompt - 1, k] int64."""
    logprobs: TensorData
    """[prompt - 1, k] float32: the model's logprobs of them, at temperature 1 as all of the prompt's."""


@dataclass(frozen=True, slots=True)
class SampleResponse:
    sequences: Sequence[SampledSequence]
    prompt_logprobs: Sequence[float | None] | None = None
    """One per prompt token; the first is None, nothing predicts it."""
    topk_prompt_logprobs: Sequence[Sequence[tuple[int, float]] | None] | None = None
    prompt_alt_tokens: PromptAltTokens | None = None
    policy_version: int = 0
    """Which published weights sampled this."""
    num_cached_prompt_tokens: int = 0
    """Prompt tokens whose keys and values were already there."""
    num_draft_tokens: int = 0
    """Tokens that a sampler guessed and checked (`engine.speculation`)."""
    num_accepted_draft_tokens: int = 0
    """Those that it had guessed right: they are among the sampled ones."""
    type: Literal["sample"] = "sample"


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """What `forward` and `forward_backward` return."""

    loss_fn_output_type: str
    loss_fn_outputs: Sequence[Mapping[str, TensorData]]
    """One per datum: `logprobs`, aligned with its `target_tokens`, and `mask`: 1 where a logprob was computed
    (untrained positions are skipped by `forward_backward` and hold 0.0)."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """`name:reduction` keys; `loss:sum` is the loss as Tinker sums it."""

    @property
    def loss(self) -> float:
        """Mean loss over trained tokens."""
        return self.metrics["loss:sum"] / max(self.metrics["num_trained_tokens:sum"], 1.0)


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class SaveWeightsResponse:
    path: str
    type: Literal["save_weights"] = "save_weights"


@dataclass(frozen=True, slots=True)
class SaveWeightsForSamplerResponse:
    path: str
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


@dataclass(frozen=True, slots=True)
class LoadWeightsResponse:
    path: str
    type: Literal["load_weights"] = "load_weights"


@dataclass(frozen=True, slots=True)
class ModelData:
    arch: str
    model_name: str
    tokenizer_id: str


@dataclass(frozen=True, slots=True)
class GetInfoResponse:
    model_data: ModelData
    model_id: str
    is_lora: bool = True
    lora_rank: int | None = None
    model_name: str | None = None


@dataclass(frozen=True, slots=True)
class SupportedModel:
    model_name: str
    max_context_length: int | None = None


@dataclass(frozen=True, slots=True)
class GetServerCapabilitiesResponse:
    supported_models: Sequence[SupportedModel]
