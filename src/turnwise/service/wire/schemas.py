"""The JSON bodies that clients send, as pydantic models with limits; `wire/types.py` turns them into our types.

Fields that this service does not know are ignored, as newer SDKs send more. Absent and null mean the same. A list is
read up to its first wrong item (`Items`): a million mistakes are told no better than one, and take a minute to find.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
Id = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.:\-]+$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
TinkerPath = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Text = Annotated[str, StringConstraints(max_length=10_000)]
Seq = Annotated[int, Field(ge=0, le=2**63 - 1)]
Ttl = Annotated[int, Field(ge=1, le=10**10)]
MAX_METADATA = 1000


def _few(value: object) -> object:
    """Refuse a large dict before its items are looked at, one mistake each."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"{len(value)} entries; expected {MAX_METADATA} at most")
    return value


Metadata = Annotated[dict[Annotated[str, StringConstraints(max_length=1000)], Text], BeforeValidator(_few)]
Token = Annotated[int, Field(ge=-1, le=2**31 - 1)]
Dim = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=(), frozen=True)


class ClientConfigBody(Body):
    sdk_version: Text | None = None


class CreateSessionBody(Body):
    tags: Annotated[Items[Text], Field(max_length=1000)] = []
    user_metadata: Metadata | None = None
    sdk_version: Text | None = None
    project_id: Name | None = None
    display_name: Name | None = None


class SessionBody(Body):
    session_id: Id


class FinishBody(Body):
    reason: dict[str, Any] | None = None
    detail: Text | None = None


class ProjectBody(Body):
    project_id: Name | None = None


class SearchCursorBody(Body):
    last_created_at: AwareDatetime
    last_session_id: Name


class StatusBody(Body):
    type: Name
    reasons: Annotated[Items[Name], Field(max_length=10)] | None = None


class SearchBody(Body):
    session_id: Name | None = None
    display_name: Name | None = None
    project_ids: Annotated[Items[Name], Field(max_length=100)] | None = None
    user_metadata: Metadata = {}
    statuses: Annotated[Items[StatusBody], Field(max_length=10)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursorBody | None = None


class LoraBody(Body):
    rank: Annotated[int, Field(ge=1, le=4096)] = 32
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfigBody(Body):
    type: Name = "adamw"


class CreateModelBody(Body):
    session_id: Id
    model_seq_id: Seq
    base_model: ModelName
    user_metadata: Metadata | None = None
    lora_config: LoraBody = LoraBody()
    optimizer_config: OptimizerConfigBody = OptimizerConfigBody()


class ModelBody(Body):
    model_id: Id


class SenderBody(Body):
    """The two fields that say whose request it is. They are read even if the rest of the body is wrong."""

    model_id: Id
    seq_id: Seq


class LoadWeightsBody(Body):
    model_id: Id | None = None
    seq_id: Seq | None = None
    path: TinkerPath
    optimizer: bool = False
    session_id: Id | None = None
    """With `model_seq_id`, one request creates the model and loads the weights."""
    model_seq_id: Seq | None = None
    base_model: ModelName | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfigBody = OptimizerConfigBody()


class WeightsInfoBody(Body):
    tinker_path: TinkerPath


class SaveWeightsBody(Body):
    model_id: Id
    seq_id: Seq | None = None
    path: Name | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    sampling_session_seq_id: Seq | None = None


class CopyWeightsBody(Body):
    source_path: TinkerPath
    destination_project_id: Name | None = None
    ttl_seconds: Ttl | None = None


class TtlBody(Body):
    ttl_seconds: Ttl | None = None


class ChunkBody(Body):
    type: Literal["encoded_text", "image", "image_asset_pointer", "dmel"] = "encoded_text"
    tokens: Items[Token] = []


class ModelInputBody(Body):
    chunks: Items[ChunkBody] = []


class TensorBody(Body):
    data: Items[float] | float
    dtype: Literal["int64", "float32"] = "float32"
    shape: Annotated[Items[Dim], Field(max_length=8)] | None = None
    sparse_crow_indices: Items[Dim] | None = None
    sparse_col_indices: Items[Dim] | None = None


class DatumBody(Body):
    model_input: ModelInputBody
    loss_fn_inputs: Annotated[dict[str, TensorBody], Field(max_length=32)]


class ForwardBackwardInputBody(Body):
    data: Items[DatumBody]
    loss_fn: Name
    loss_fn_config: Annotated[dict[str, float | str], Field(max_length=64)] | None = None


class ForwardBackwardBody(Body):
    forward_backward_input: ForwardBackwardInputBody
    model_id: Id
    seq_id: Seq | None = None


class ForwardBody(Body):
    forward_input: ForwardBackwardInputBody
    model_id: Id
    seq_id: Seq | None = None


class AdamBody(Body):
    # These are the protocol's defaults. They must not change when `types.AdamParams` changes.
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(Body):
    model_id: Id
    seq_id: Seq | None = None
    adam_params: AdamBody | None = None
    optimizer_params: OptimizerConfigBody | None = None


class CreateSamplingSessionBody(Body):
    session_id: Id
    sampling_session_seq_id: Seq
    base_model: ModelName | None = None
    model_path: TinkerPath | None = None


class SamplingSessionBody(Body):
    sampling_session_id: Id


class SamplingParamsBody(Body):
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: (
        Text | Annotated[Items[Token], Field(max_length=1000)] | Annotated[Items[Text], Field(max_length=1000)] | None
    ) = None
    temperature: float = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    top_p: float = 1.0


class SampleBody(Body):
    sampling_session_id: Id
    seq_id: Seq
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    prompt: ModelInputBody
    sampling_params: SamplingParamsBody = SamplingParamsBody()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1000)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=1000)] = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=1000)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None


class RetrieveFutureBody(Body):
    request_id: Id
    allow_metadata_only: bool = False


class FuturesTargetBody(Body):
    sampling_session_id: Id
    cloned_sampler_id: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0


class RetrieveFuturesBody(Body):
    target: FuturesTargetBody
    prev_cursor: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    timeout: Annotated[float, Field(ge=0, le=3600)] | None = None
    retrieved_request_ids: Annotated[Items[Id], Field(max_length=100_000)] = []


class RequestBody(Body):
    request_id: Id


class ReverseKlDatumBody(Body):
    student_input: ModelInputBody
    reference_input: ModelInputBody
    target_tokens: TensorBody
    weights: TensorBody


class ReverseKlBody(Body):
    model_id: Id
    reference_model_path: TinkerPath
    data: Annotated[Items[ReverseKlDatumBody], Field(min_length=1, max_length=4096)]
    temperature: float = 1.0
    seq_id: Seq | None = None


class InterpolateBody(Body):
    source_paths: Annotated[Items[TinkerPath], Field(min_length=1, max_length=64)]
    coefficients: Annotated[Items[float], Field(min_length=1, max_length=64)]
    output_path: Name | None = None
    output_checkpoint_type: Name = "sampler"
