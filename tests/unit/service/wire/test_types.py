"""Bodies become the same types whatever form they come in, and nothing that is no body becomes anything."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import ConfigError, DataError
from turnwise.service.training.operations import parse_request, sender_of
from turnwise.service.wire import results as wire_results
from turnwise.service.wire import schemas
from turnwise.service.wire import types as wire
from turnwise.service.wire.proto import message_class
from turnwise.types import Datum, ForwardBackwardOutput, ModelInput, SampledSequence, SampleResponse, TensorData
from unit.service.conftest import TOKENS, training_body, training_proto


def test_protobuf_and_json_give_the_same_batch() -> None:
    import json

    proto = parse_request("forward_backward.proto", training_proto("m", 3))
    plain = parse_request("forward_backward.json", json.dumps(training_body("m", 3)).encode())
    for request in (proto, plain):
        assert (request.model_id, request.seq) == ("m", 3)
        (datum,) = request.parsed.batch.datums
        assert datum.model_input.to_ints() == TOKENS[:-1]
        assert datum.loss_fn_inputs["target_tokens"].tolist() == TOKENS[1:]
        assert datum.loss_fn_inputs["mask"].tolist() == [1.0] * 6


def test_cross_entropy_without_weights_weighs_every_target() -> None:
    datum = Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]})
    (filled,) = wire.make_batch([datum], "cross_entropy", None).datums
    assert filled.loss_fn_inputs["weights"].tolist() == [1.0, 1.0]


def test_settings_that_tinker_leaves_out_are_tinkers() -> None:
    datum = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [2]})
    assert wire.make_batch([datum], "cispo", None).loss_fn_config == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 1.2,
    }
    assert wire.make_batch([datum], "cispo", {"clip_high_threshold": 5.0}).loss_fn_config["clip_high_threshold"] == 5.0


@pytest.mark.parametrize(("name", "why"), [("stable_reinforce", "does not define it"), ("custom", "on the client")])
def test_a_loss_that_the_sdk_names_and_nothing_defines_is_refused_with_the_reason(name: str, why: str) -> None:
    datum = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [2]})
    with pytest.raises(ConfigError, match=why):
        wire.make_batch([datum], name, None)


def test_target_columns_are_split_and_joined_in_their_places() -> None:
    targets = np.arange(6).reshape(3, 2)
    datum = Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": targets})
    single = Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [2]})
    batch = wire.make_batch([datum, single], "cross_entropy", None)
    assert batch.widths == [2, 0]
    assert [d.loss_fn_inputs["target_tokens"].tolist() for d in batch.datums] == [[0, 2, 4], [1, 3, 5], [2]]
    outputs = [{"logprobs": d.loss_fn_inputs["target_tokens"]} for d in batch.datums]
    joined = wire.join_columns(ForwardBackwardOutput("ArrayRecord", outputs, {}), batch.widths)
    assert joined.loss_fn_outputs[0]["logprobs"].tolist() == targets.tolist()
    assert joined.loss_fn_outputs[1]["logprobs"].tolist() == [2]


def test_sparse_tensors_are_written_out() -> None:
    body = schemas.TensorBody(
        data=[7, 8, 9], dtype="int64", shape=[2, 3], sparse_crow_indices=[0, 1, 3], sparse_col_indices=[2, 0, 1]
    )
    assert wire.read_tensor("x", body).tolist() == [[0, 0, 7], [8, 9, 0]]


@pytest.mark.parametrize(
    ("crow", "col", "shape"),
    [([0, 1], [0, 0, 0], [2, 3]), ([0, 1, 3], [0, 1, 3], [2, 3]), ([0, 2, 1], [0, 0, 0], [2, 3]), ([0, 3], [0], None)],
)
def test_sparse_indices_that_do_not_fit_are_refused(crow: list[int], col: list[int], shape: list[int] | None) -> None:
    body = schemas.TensorBody(data=[1, 2, 3], shape=shape, sparse_crow_indices=crow, sparse_col_indices=col)
    with pytest.raises(DataError, match="sparse"):
        wire.read_tensor("x", body)


def test_a_small_sparse_body_cannot_stand_for_a_huge_tensor() -> None:
    body = schemas.TensorBody(
        data=[], shape=[2**30, 2**30], sparse_crow_indices=[0], sparse_col_indices=[], dtype="int64"
    )
    with pytest.raises(DataError, match="at most"):
        wire.read_tensor("x", body)


@pytest.mark.parametrize("damage", ["short", "shape", "dtype", "image"])
def test_damaged_tensors_are_refused_by_name(damage: str) -> None:
    message = message_class("ForwardBackwardRequest")()
    message.ParseFromString(training_proto("m", 1))
    tensor = message.data[0].loss_fn_inputs["weights"]
    if damage == "short":
        tensor.dense = tensor.dense[:-1]
    elif damage == "shape":
        tensor.shape[0] = 5
    elif damage == "dtype":
        tensor.dtype = 0
    else:
        message.data[0].model_input.add().image.data = b"x"
    with pytest.raises(DataError, match="image" if damage == "image" else "weights"):
        wire.decode_forward_backward(message.SerializeToString())


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_bytes_that_are_no_request_are_refused_and_nothing_worse(noise: bytes, at: int) -> None:
    good = training_proto("m", 1)
    for body in (noise, good[:at] + noise + good[at:], good[: at % len(good)]):
        with contextlib.suppress(DataError):
            wire.decode_forward_backward(body)
        sender_of("forward_backward.proto", body)
        sender_of("optim_step", body)


def test_a_training_output_survives_the_journal() -> None:
    output = ForwardBackwardOutput(
        "ArrayRecord",
        [
            {"logprobs": TensorData.from_numpy(np.array([-1.5, -2.25], dtype=np.float32))},
            {"logprobs": TensorData.from_numpy(np.array([[-1.0, -2.0]], dtype=np.float32))},
            {"logprobs": TensorData.from_numpy(np.array([-3.0], dtype=np.float32))},
        ],
        {"loss:sum": 4.5},
    )
    back = wire_results.output_from_proto(wire_results.output_to_proto(output))
    assert back.metrics == {"loss:sum": 4.5}
    assert [entry["logprobs"].tolist() for entry in back.loss_fn_outputs] == [[-1.5, -2.25], [[-1.0, -2.0]], [-3.0]]


def test_a_sample_in_protobuf_marks_what_has_no_logprob() -> None:
    response = SampleResponse(
        sequences=[SampledSequence("stop", [1, 2], [-0.5, -1.0])],
        prompt_logprobs=[None, -2.0],
        topk_prompt_logprobs=[None, [(4, -0.1), (5, -0.2)]],
    )
    message = message_class("SampleResponse")()
    message.ParseFromString(wire_results.SampleReply(response=response).to_proto())
    assert np.frombuffer(message.sequences[0].tokens, dtype="<i4").tolist() == [1, 2]
    logprobs = np.frombuffer(message.prompt_logprobs, dtype="<f4")
    assert np.isnan(logprobs[0])
    assert logprobs[1] == -2.0
    table = np.frombuffer(message.topk_prompt_logprobs.token_ids, dtype="<i4").reshape(2, 2)
    assert table.tolist() == [[0, 0], [4, 5]]
