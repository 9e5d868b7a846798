"""What goes over Tinker's wire means what was asked for, or is refused by name before it is sent."""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from local_server import unused_address
from turnwise import types
from turnwise.client import remote_connection
from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.client.futures import ApiFuture
from turnwise.client.local import ServiceClient
from turnwise.client.local_clients import LocalSamplingClient, LocalTrainingClient
from turnwise.client.remote import RemoteSamplingClient, RemoteServiceClient, RemoteTrainingClient
from turnwise.client.remote_connection import Connection
from turnwise.client.remote_wire import CRITIC_METADATA, mask_of, to_columns, to_seed, to_stop
from turnwise.errors import ConfigError, DataError, ServiceError
from turnwise.service.store import store
from turnwise.types import Datum, ModelInput, SampleRequest, SamplingParams, TensorData

IDS = [5, 6, 7, 8, 9, 10, 11]
MASK = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]


def datum(**more: Any) -> Datum:
    inputs = {
        "target_tokens": IDS[1:],
        "mask": MASK,
        "weights": [0.0, 0.5, 0.25, 0.0, 0.125, 2.0],
        "logprobs": [0.0, -0.7, -0.9, 0.0, -0.6, -1.2],
        "advantages": [0.0, 1.0, -1.0, 0.0, -0.5, 0.5],
        "temperature": [1.0] * 6,
    }
    inputs = {key: value for key, value in {**inputs, **more}.items() if value is not None}
    return Datum(ModelInput.from_ints(IDS[:-1]), inputs)


@pytest.fixture(scope="module")
def trainer(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ServiceClient(data_dir=tmp_path_factory.mktemp("data")) as service:
        yield service.create_lora_training_client(str(tiny_dir), rank=4, seed=1)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_folded_into_advantages_a_loss_and_its_gradient_are_the_weighted_ones(loss_fn: str, trainer: Any) -> None:
    """Tinker's side of it: every target counts, weights are 1, and there is no mask."""
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0} if loss_fn != "importance_sampling" else {}
    (columns,), sent = to_columns([datum()], loss_fn, config, "tinker")
    assert set(columns) <= {"target_tokens", "logprobs", "advantages", "sequence_ratio_mask"}
    ones = {"mask": np.ones(6, dtype=np.float32), "weights": np.ones(6, dtype=np.float32)}
    folded = Datum(ModelInput.from_ints(IDS[:-1]), {**columns, **ones})
    losses, norms = [], []
    for one, settings in ((datum(), config), (folded, sent)):
        losses.append(trainer.forward_backward([one], loss_fn, settings).result().metrics["loss:sum"])
        norms.append(trainer.optim_step(_no_step()).result().metrics["grad_norm"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert abs(losses[0]) > 1e-3


def _no_step() -> Any:
    from turnwise.types import AdamParams

    return AdamParams(learning_rate=0.0)


def test_imitation_keeps_its_weights_and_loses_the_rest() -> None:
    (columns,), sent = to_columns([datum()], "cross_entropy", {}, "tinker")
    assert set(columns) == {"target_tokens", "weights"}
    assert columns["weights"].tolist() == [0.0, 0.5, 0.25, 0.0, 0.125, 2.0]
    assert sent == {}


def test_a_service_of_ours_gets_every_column_and_our_own_bounds() -> None:
    (columns,), sent = to_columns([datum()], "cispo", {"kl_coef": 0.1}, "turnwise")
    assert set(columns) == {"target_tokens", "mask", "weights", "logprobs", "advantages", "temperature"}
    assert sent == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0, "kl_coef": 0.1}


def lesson() -> Datum:
    """What a critic learns."""
    inputs = {key: np.array([0.0, 1.0, 1.0], np.float32) for key in ("mask", "weights", "returns", "values")}
    return Datum(ModelInput.from_ints(IDS[:3]), inputs)


def test_a_critics_lessons_go_to_a_service_of_ours_as_they_are_and_to_no_other() -> None:
    (columns,), sent = to_columns([lesson()], "value", {"value_clip": 0.2}, "turnwise")
    assert set(columns) == {"mask", "weights", "returns", "values"}
    assert sent == {"value_clip": 0.2}
    with pytest.raises(ConfigError, match=r"'value' cannot run on this service: it has no such loss"):
        to_columns([lesson()], "value", {}, "tinker")


def test_a_critic_is_asked_for_in_the_words_that_the_service_reads() -> None:
    assert CRITIC_METADATA == {store.KIND_KEY: store.CRITIC}


def test_an_answer_without_values_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that ignores the metadata would train a policy in the critic's place."""
    monkeypatch.setattr(remote_connection, "import_module", lambda _: SimpleNamespace(types=types))
    connection = Connection("http://127.0.0.1:1", api_key=None, tokenizer=None, dialect="turnwise", deadline_s=5)
    done: Future[Any] = Future()
    logprobs = {"logprobs": TensorData.from_numpy(np.zeros(3, np.float32))}
    done.set_result(SimpleNamespace(loss_fn_output_type="x", loss_fn_outputs=[logprobs], metrics={}))
    sdk_client = SimpleNamespace(forward=lambda *_: done)
    critic = RemoteTrainingClient(connection, sdk_client, base_model="tiny")
    with pytest.raises(ServiceError, match="no values came back"):
        critic.forward([lesson()], "value").result()


@pytest.mark.parametrize(
    ("asking", "word"),
    [
        (SampleRequest(IDS, SamplingParams(min_p=0.1)), "min_p=0.1"),
        (SampleRequest(IDS, prompt_alt_tokens_k=2), "prompt_alt_tokens_k=2"),
    ],
)
def test_a_sample_askingthat_cannot_be_sent_whole_is_refused(
    asking: SampleRequest, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_connection, "import_module", lambda _: SimpleNamespace(types=types))
    connection = Connection("http://127.0.0.1:1", api_key=None, tokenizer=None, dialect="turnwise", deadline_s=5)
    asked: list[Any] = []
    sdk_client = SimpleNamespace(sample=lambda *arguments: asked.append(arguments))
    client = RemoteSamplingClient(connection, sdk_client, policy_version=0, base_model="tiny")
    with pytest.raises(ConfigError, match=word):
        client.submit(asking)
    assert asked == []


@pytest.mark.parametrize(
    ("loss_fn", "config", "more", "word"),
    [
        ("dro", {"beta": 0.1}, {}, "quadratic"),
        ("dppo_tv", {}, {}, "no such loss"),
        ("ppo", {"kl_coef": 0.1}, {}, "kl_coef"),
        ("ppo", {"dual_clip": 3.0}, {}, "dual_clip"),
        ("importance_sampling", {"entropy_coef": 0.01}, {}, "entropy_coef"),
        ("importance_sampling", {"correction": "token_mask"}, {}, "correction"),
        ("ppo", {}, {"old_logprobs": [0.0] * 6}, "old_logprobs"),
        ("ppo", {}, {"temperature": [1.0, 0.7, 0.7, 1.0, 0.7, 0.7]}, "temperature 0.7"),
        ("cross_entropy", {}, {"temperature": [1.0, 0.7, 0.7, 1.0, 0.7, 0.7]}, "temperature 0.7"),
    ],
)
def test_what_the_wire_cannot_say_is_refused_by_name(loss_fn: str, config: Any, more: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        to_columns([datum(**more)], loss_fn, config, "tinker")


def test_negative_weights_are_refused_because_a_clipped_loss_is_not_linear_in_them() -> None:
    with pytest.raises(DataError, match="negative weights"):
        to_columns([datum(weights=[0.0, -1.0, 0.0, 0.0, 1.0, 1.0])], "ppo", {}, "tinker")


def test_a_datum_without_a_mask_is_read_as_the_engine_reads_it() -> None:
    assert mask_of(datum(mask=None)).tolist() == [False, True, True, False, True, True]
    assert mask_of(datum(mask=None, weights=None)).all()


def test_a_stop_is_strings_or_ids_and_a_seed_keeps_its_bits() -> None:
    assert to_stop(SamplingParams(stop_token_ids=[3, 4])) == [3, 4]
    assert to_stop(SamplingParams(stop=["a"])) == ["a"]
    assert to_stop(SamplingParams(stop="a")) == ["a"]
    assert to_stop(SamplingParams(stop=[])) == []
    assert to_stop(SamplingParams()) is None
    with pytest.raises(ConfigError, match="not both"):
        to_stop(SamplingParams(stop=["a"], stop_token_ids=[3]))
    for seed in (0, 5, 2**63 - 1, 2**63, 2**64 - 1):
        sent = to_seed(seed)
        assert sent is not None
        assert -(2**63) <= sent < 2**63
        assert sent % 2**64 == seed


def test_nobody_at_the_address_is_told_at_once() -> None:
    with pytest.raises(ServiceError, match=r"no service answers at .* is it running"):
        RemoteServiceClient(unused_address())


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://"])
def test_an_address_is_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        RemoteServiceClient(url)


def test_a_missing_sdk_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(remote_connection, "import_module", missing)
    with pytest.raises(ConfigError, match=r"turnwise\[remote\]"):
        RemoteServiceClient("http://127.0.0.1:1", dialect="tinker")
    with pytest.raises(ConfigError, match="mindlab-toolkit"):
        RemoteServiceClient("http://127.0.0.1:1", dialect="tinker", api_key="sk-x")


def test_a_wait_without_a_timeout_ends_at_the_deadline() -> None:
    future: ApiFuture[int] = ApiFuture(Future(), "a request", deadline_s=0.01)
    with pytest.raises(ServiceError, match=r"a request: no answer within 0.01 s"):
        future.result()
    with pytest.raises(TimeoutError, match="still under way"):
        future.result(0.001)


async def test_an_awaited_askingends_at_the_deadline_too() -> None:
    future: ApiFuture[int] = ApiFuture(Future(), "a request", deadline_s=0.01)
    with pytest.raises(ServiceError, match="no answer"):
        await future


def test_every_client_has_the_methods_of_its_protocol_and_a_twin_with_the_same_arguments() -> None:
    for client in (RemoteTrainingClient, RemoteSamplingClient, LocalTrainingClient, LocalSamplingClient):
        assert not inspect.isabstract(client)
    for client in (
        ServiceClient,
        RemoteServiceClient,
        *SamplingClient.__subclasses__(),
        *TrainingClient.__subclasses__(),
    ):
        for name in (name for name in dir(client) if name.endswith("_async")):
            twin, plain = (inspect.signature(getattr(client, one)) for one in (name, name.removesuffix("_async")))
            assert list(twin.parameters) == list(plain.parameters), f"{client.__name__}.{name}"
