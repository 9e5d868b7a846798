"""The protobuf messages of the protocol, as a table; `message_class("Datum")` returns a class.

Field numbers and types are the protocol's (package `tinker_public`). The table is turned into descriptors when this
module is imported, so no generated code is kept.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"

STOP_REASON_STOP, STOP_REASON_LENGTH = 0, 1
DTYPE_FLOAT32, DTYPE_INT64, DTYPE_INT32, DTYPE_BFLOAT16 = 1, 2, 3, 4

_ENUMS: dict[str, tuple[str, ...]] = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}

# message: (field, number, type); a type may be `repeated T`, `optional T`, `map T` (from strings) or `oneof:NAME T`.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "ForwardBackwardRequest": (
        ("model_id", 1, "string"),
        ("seq_id", 2, "int32"),
        ("data", 3, "repeated Datum"),
        ("loss_fn", 4, "string"),
        ("loss_fn_config", 5, "map double"),
        ("forward_only", 6, "bool"),
        ("loss_fn_config_v2", 7, "map LossConfigValue"),
    ),
    "LossConfigValue": (("number", 1, "oneof:value double"), ("text", 2, "oneof:value string")),
    "Datum": (
        ("model_input", 1, "repeated Chunk"),
        ("loss_fn_inputs", 2, "map Tensor"),
        ("model_input_spans", 3, "repeated ProvenanceSpan"),
        ("loss_fn_input_spans", 4, "repeated ProvenanceSpan"),
    ),
    "ProvenanceSpan": (
        ("prompt_tokens", 1, "oneof:span PromptProvenanceSpan"),
        ("sampled_tokens", 2, "oneof:span SampledProvenanceSpan"),
    ),
    "PromptProvenanceSpan": (("sequence_id", 1, "string"), ("offset", 2, "int64"), ("length", 3, "int64")),
    "SampledProvenanceSpan": (("sequence_id", 1, "string"), ("offset", 2, "int64"), ("length", 3, "int64")),
    "Chunk": (
        ("encoded_text", 1, "oneof:chunk EncodedTextChunk"),
        ("image", 2, "oneof:chunk ImageChunk"),
        ("dmel", 3, "oneof:chunk DmelChunk"),
    ),
    "EncodedTextChunk": (("tokens", 1, "bytes"),),
    "ImageChunk": (
        ("data", 1, "bytes"),
        ("format", 2, "string"),
        ("expected_tokens", 3, "optional int32"),
        ("override_dimensions", 4, "optional ImageDimensions"),
    ),
    "ImageDimensions": (("width", 1, "uint32"), ("height", 2, "uint32")),
    "DmelChunk": (("dmel", 1, "bytes"),),
    "Tensor": (
        ("dense", 1, "oneof:encoding bytes"),
        ("sparse_csr", 2, "oneof:encoding SparseCsr"),
        ("dtype", 3, "DType"),
        ("shape", 4, "repeated int64"),
    ),
    "SparseCsr": (("values", 1, "bytes"), ("crow_indices", 2, "bytes"), ("col_indices", 3, "bytes")),
    "ForwardBackwardOutput": (
        ("loss_fn_output_type", 1, "string"),
        ("loss_fn_outputs", 2, "repeated ArrayRecord"),
        ("metrics", 3, "map double"),
    ),
    "ArrayRecord": (("type_tag", 1, "string"), ("fields", 2, "map BatchedTensor"), ("num_datums", 3, "int64")),
    "BatchedTensor": (
        ("data", 1, "bytes"),
        ("offsets", 2, "bytes"),
        ("dtype", 3, "DType"),
        ("trailing_shape", 4, "repeated int64"),
    ),
    "SampleResponse": (
        ("sequences", 1, "repeated SampledSequence"),
        ("prompt_logprobs", 2, "optional bytes"),
        ("topk_prompt_logprobs", 3, "optional TopkLogprobs"),
        ("prompt_cache_hit_tokens", 4, "int32"),
        ("target_prompt_logprobs", 5, "optional Tensor"),
        ("prompt_alt_tokens", 6, "optional PromptAltTokens"),
    ),
    "SampledSequence": (
        ("stop_reason", 1, "StopReason"),
        ("tokens", 2, "bytes"),
        ("logprobs", 3, "optional bytes"),
        ("topk_sampled_logprobs", 4, "optional TopkLogprobs"),
    ),
    "TopkLogprobs": (("token_ids", 1, "bytes"), ("logprobs", 2, "bytes"), ("k", 3, "uint32"), ("length", 4, "uint32")),
    "PromptAltTokens": (("tokens", 1, "Tensor"), ("logprobs", 2, "Tensor")),
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
}


def _build_pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="turnwise_tinker_public.proto", package=PACKAGE, syntax="proto3")
    for name, members in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, member in enumerate(members):
            enum.value.add(name=member, number=number)
    for name, rows in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, spec in rows:
            _add_field(message, name, field_name, number, spec)
        # protobuf wants the oneofs that stand for `optional` after the real ones
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # pyright: ignore[reportAttributeAccessIssue] - the C implementation has it
    return pool


def _add_field(message: Any, owner: str, name: str, number: int, spec: str) -> None:
    label, _, kind = spec.rpartition(" ")
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if label == "map":
        entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind)
        field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{owner}.{entry.name}"
        return
    _set_type(field, kind)
    if label == "repeated":
        field.label = _Field.LABEL_REPEATED
    elif label == "optional":
        field.proto3_optional = True
    elif label.startswith("oneof:"):
        group = label.removeprefix("oneof:")
        names = [oneof.name for oneof in message.oneof_decl]
        if group not in names:
            message.oneof_decl.add(name=group)
            names.append(group)
        field.oneof_index = names.index(group)


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _Field.TYPE_ENUM if kind in _ENUMS else _Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{kind}"


_POOL = _build_pool()


def message_class(name: str) -> Any:
    """The message class of that name."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
