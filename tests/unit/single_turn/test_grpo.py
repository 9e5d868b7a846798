"""run_grpo over test doubles where the loop's own claims are at stake, and over `tiny` where the numbers are."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from turnwise.client.fake import RecordingTrainer, ScriptedSampler
from turnwise.client.futures import ApiFuture
from turnwise.client.local import LocalTrainingClient, ServiceClient
from turnwise.errors import ConfigError, DataError
from turnwise.single_turn import AdapterError, RLAdapter, RLConfig, RunResult, StepRecord, run_grpo
from turnwise.single_turn.config import POLICY_LOSSES
from turnwise.single_turn.grpo import response_to_datum
from turnwise.types import AdamParams, Datum, ModelInput, SampledSequence, SampleResponse, SamplingParams

EOS = 0


class Letters:
    """A tokenizer with one id per character; id 0 ends a sequence."""

    eos_token_id = EOS

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(token) for token in ids if token != EOS)


@dataclass
class Words(RLAdapter[str]):
    """Rewards come from a function of response and sample."""

    samples: list[str]
    score: Callable[[str, str], Any] = lambda response, _: float(len(response))
    evaluated: list[tuple[int, list[float], int]] = field(default_factory=list)

    def build_dataset(self) -> list[str]:
        return self.samples

    def make_prompt(self, sample: str, tokenizer: Any) -> list[int]:
        return tokenizer.encode(sample)

    def compute_reward(self, response_text: str, sample: str) -> float:
        return self.score(response_text, sample)

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        self.evaluated.append((step, rewards, num_datums))


@dataclass
class Service:
    """Hands out one training client, whatever is asked for."""

    trainer: Any
    asked: dict[str, Any] = field(default_factory=dict)

    def create_lora_training_client(self, base_model: str, **settings: Any) -> Any:
        self.asked = {"base_model": base_model, **settings}
        return self.trainer


def numbered_replies() -> Callable[[list[int]], SampledSequence]:
    """Replies of 1, 2, 3, 1, 2, 3 ... letters, no two logprobs alike."""
    count = iter(range(10**6))

    def reply(_: list[int]) -> SampledSequence:
        number = next(count)
        tokens = [ord("a")] * (number % 3 + 1) + [EOS]
        return SampledSequence("stop", tokens, [-0.01 * number - 0.001 * i for i in range(len(tokens))])

    return reply


def scripted_run(
    adapter: RLAdapter[Any], sampler: Any = None, **settings: Any
) -> tuple[RunResult, RecordingTrainer, list[StepRecord]]:
    sampler = sampler or ScriptedSampler(numbered_replies())
    trainer = RecordingTrainer(sampler, tokenizer=Letters())
    records: list[StepRecord] = []
    config = RLConfig(**{"num_steps": 1, "group_size": 3, "batch_size": 2, "deadline_s": 20.0, **settings})
    result = run_grpo(adapter, config, service_client=Service(trainer), on_step=records.append)
    return result, trainer, records


def columns(datum: Datum) -> dict[str, Any]:
    return {key: pytest.approx(tensor.tolist()) for key, tensor in datum.loss_fn_inputs.items()}


# --- datums ---


def test_a_datum_predicts_each_response_token_from_the_position_before_it() -> None:
    response = SampledSequence("stop", [7, 8], [-0.1, -0.2])
    datum = response_to_datum([1, 2, 3], response, 0.5, RLConfig(temperature=0.8))
    assert datum.model_input.to_ints() == [1, 2, 3, 7]
    assert columns(datum) == {
        "target_tokens": [2, 3, 7, 8],
        "weights": [0, 0, 1, 1],
        "logprobs": [0, 0, -0.1, -0.2],
        "advantages": [0, 0, 0.5, 0.5],
        "temperature": [1, 1, 0.8, 0.8],
    }


def test_gspo_datums_say_which_tokens_enter_the_sequence_ratio() -> None:
    response = SampledSequence("stop", [7, 8], [-0.1, -0.2])
    datum = response_to_datum([1, 2], response, 0.0, RLConfig(loss_fn="gspo"))
    assert datum.loss_fn_inputs["sequence_ratio_mask"].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (SampledSequence("stop", [7, 8], None), "2 tokens with no logprobs"),
        (SampledSequence("stop", [7, 8], [-0.1]), "2 tokens with 1 logprobs"),
        (SampledSequence("stop", [], []), "a response of no tokens"),
    ],
)
def test_a_response_that_lacks_tokens_or_logprobs_is_refused(response: SampledSequence, message: str) -> None:
    rewards = itertools.count()
    with pytest.raises(DataError, match=message):
        scripted_run(Words(["a"], score=lambda *_: next(rewards)), ScriptedSampler(lambda _: response))


def test_sampled_ids_and_logprobs_are_trained_exactly_as_they_were_returned() -> None:
    replies: list[SampledSequence] = []
    make_reply = numbered_replies()

    def reply(prompt: list[int]) -> SampledSequence:
        replies.append(make_reply(prompt))
        return replies[-1]

    _, trainer, _ = scripted_run(Words(["one", "two"]), ScriptedSampler(reply))
    trained = [
        ([int(token) for token in d.loss_fn_inputs["target_tokens"].tolist()[2:]],
         d.loss_fn_inputs["logprobs"].tolist()[2:])
        for d in trainer.datums
    ]  # fmt: skip
    assert [ids for ids, _ in trained] == [list(reply.tokens) for reply in replies]
    for (_, logprobs), reply_ in zip(trained, replies, strict=True):
        assert logprobs == pytest.approx(reply_.logprobs)


def test_rewards_are_centred_inside_each_group() -> None:
    _, trainer, records = scripted_run(Words(["x", "y"]), group_size=3)
    assert records[0].rewards == (1, 2, 3, 1, 2, 3)
    last_advantages = [datum.loss_fn_inputs["advantages"].tolist()[-1] for datum in trainer.datums]
    assert last_advantages == pytest.approx([-1, 0, 1, -1, 0, 1])


# --- the loop ---


def test_a_step_is_one_forward_backward_and_one_optim_step() -> None:
    config = {"num_steps": 2, "learning_rate": 3e-4, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    result, trainer, _ = scripted_run(Words(["x", "y"]), loss_fn="ppo", **config)
    step = ["save_weights_and_get_sampling_client", "forward_backward", "optim_step"]
    assert [call.method for call in trainer.calls] == [*step, *step, "save_weights_for_sampler"]
    assert trainer.calls[1].arguments["loss_fn"] == "ppo"
    expected = AdamParams(learning_rate=3e-4, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1)
    assert trainer.calls[2].arguments["adam_params"] == expected
    assert result.path == "tinker://recorded/sampler_weights/grpo"
    assert [record.step for record in result.steps] == [0, 1]


def test_the_training_client_is_asked_for_with_the_configs_shape() -> None:
    service = Service(RecordingTrainer(ScriptedSampler(numbered_replies()), tokenizer=Letters()))
    config = RLConfig(base_model="some/model", rank=4, seed=7, train_mlp=False, num_steps=1)
    run_grpo(Words(["x"]), config, service_client=service, on_step=lambda _: None)
    assert service.asked == {
        "base_model": "some/model",
        "rank": 4,
        "seed": 7,
        "train_mlp": False,
        "train_attn": True,
        "train_unembed": True,
    }


class RequestRecorder(ScriptedSampler):
    """Keeps the sampling parameters, and answers nobody before `num_expected` prompts are under way."""

    def __init__(self, num_expected: int = 1) -> None:
        super().__init__(numbered_replies())
        self.num_expected = num_expected
        self.waiting: list[tuple[Future[SampleResponse], SampleResponse]] = []
        self.params: list[SamplingParams] = []

    def sample(self, prompt: ModelInput, num_samples: int = 1, sampling_params: Any = None, *_: Any) -> Any:
        self.params.append(sampling_params)
        future: Future[SampleResponse] = Future()
        self.waiting.append((future, super().sample(prompt, num_samples, sampling_params).result()))
        if len(self.waiting) == self.num_expected:
            for waiting, response in self.waiting:
                waiting.set_result(response)
            self.waiting.clear()
        return ApiFuture(future, "gathered sample")


def test_all_prompts_of_a_batch_are_under_way_before_the_first_is_waited_for() -> None:
    _, _, records = scripted_run(Words(list("abcd")), RequestRecorder(num_expected=4), batch_size=4)
    assert records[0].num_groups == 4


def test_sampling_stops_at_the_tokenizers_end_token_with_the_configs_settings() -> None:
    sampler = RequestRecorder()
    scripted_run(Words(["x"]), sampler, batch_size=2, num_steps=2, max_tokens=5, temperature=0.7)
    assert {(p.max_tokens, p.temperature, tuple(p.stop_token_ids or ())) for p in sampler.params} == {(5, 0.7, (EOS,))}
    assert len({p.seed for p in sampler.params}) == 4  # else the groups of one prompt would be copies


def test_every_epoch_visits_each_sample_once_in_an_order_of_its_own() -> None:
    sampler = ScriptedSampler(numbered_replies())
    scripted_run(Words(list("abcdef")), sampler, batch_size=2, num_steps=6)
    visited = [chr(prompt[0]) for prompt in sampler.prompts]
    first, second = visited[:6], visited[6:]
    assert sorted(first) == sorted(second) == list("abcdef")
    assert first != second
    assert first != list("abcdef")


def test_the_seed_decides_the_order_of_the_dataset() -> None:
    def visited(seed: int) -> list[list[int]]:
        sampler = ScriptedSampler(numbered_replies())
        scripted_run(Words(list("abcdef")), sampler, num_steps=3, seed=seed)
        return sampler.prompts

    assert visited(1) == visited(1) != visited(2)


def test_groups_with_equal_rewards_are_dropped_and_counted() -> None:
    adapter = Words(["same", "differs"], score=lambda response, sample: 0.5 if sample == "same" else len(response))
    _, trainer, (record,) = scripted_run(adapter)
    assert (record.num_groups, record.num_equal_groups, record.num_dropped_groups, record.num_datums) == (2, 1, 1, 3)
    assert {datum.model_input.to_ints()[0] for datum in trainer.datums} == {ord("d")}
    assert len(record.rewards) == 6  # they count as results all the same


def test_a_step_in_which_every_group_is_equal_is_recorded_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    result, trainer, records = scripted_run(Words(["x", "y"], score=lambda *_: 1.0), num_steps=2)
    assert [call.method for call in trainer.calls] == [
        "save_weights_and_get_sampling_client",
        "save_weights_for_sampler",
    ]
    assert all(record.is_skipped and record.loss is None for record in records)
    assert records == list(result.steps)
    assert caplog.text.count("skipped") == 2


def test_with_a_kl_term_equal_groups_are_trained_with_advantage_0() -> None:
    adapter = Words(["x", "y"], score=lambda *_: 1.0)
    _, trainer, (record,) = scripted_run(adapter, kl_penalty_coef=0.1)
    assert (record.num_equal_groups, record.num_dropped_groups, record.num_datums) == (2, 0, 6)
    assert all(set(datum.loss_fn_inputs["advantages"].tolist()) == {0.0} for datum in trainer.datums)
    assert trainer.calls[1].arguments["loss_fn_config"] == {
        "kl_coef": 0.1,
        "kl_estimator": "k2",
        "kl_reference": "base",
    }


def test_evaluate_is_called_after_each_step_with_all_rewards() -> None:
    adapter = Words(["same", "differs"], score=lambda response, sample: 0.5 if sample == "same" else len(response))
    scripted_run(adapter, num_steps=2)
    assert [(step, len(rewards), num_datums) for step, rewards, num_datums in adapter.evaluated] == [
        (0, 6, 3),
        (1, 6, 3),
    ]


def test_one_readable_line_is_printed_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = RecordingTrainer(ScriptedSampler(numbered_replies()), tokenizer=Letters())
    run_grpo(Words(["x", "y"]), RLConfig(num_steps=2, group_size=3, batch_size=2), service_client=Service(trainer))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1/2  reward 2.000  groups 2 used, 0 dropped  loss nan  tokens 18")


def test_on_step_takes_the_place_of_printing(capsys: pytest.CaptureFixture[str]) -> None:
    scripted_run(Words(["x"]))
    assert capsys.readouterr().out == ""


# --- what goes wrong ---


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "1.0"])
def test_a_reward_that_is_no_finite_number_is_an_error_that_names_the_sample(reward: Any) -> None:
    with pytest.raises(AdapterError, match=r"Words.compute_reward on sample 0, 'the one',.*expected a finite number"):
        scripted_run(Words(["the one"], score=lambda *_: reward))


def test_an_adapter_that_raises_is_an_error_that_names_the_sample() -> None:
    def score(*_: str) -> float:
        raise KeyError("gold")

    with pytest.raises(AdapterError, match=r"sample 0, 'the one', raised KeyError\('gold'\)") as caught:
        scripted_run(Words(["the one"], score=score))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("ids", [[], "text", (1, 2), [1.5], None])
def test_a_prompt_that_is_no_list_of_ids_is_an_error_that_names_the_sample(ids: Any) -> None:
    class Wrong(Words):
        def make_prompt(self, *_: Any) -> list[int]:
            return ids

    with pytest.raises(AdapterError, match=r"make_prompt on sample 0, 'x', returned"):
        scripted_run(Wrong(["x"]))


def test_a_dataset_without_samples_is_refused() -> None:
    with pytest.raises(AdapterError, match="returned no samples"):
        scripted_run(Words([]))


def test_numpy_rewards_and_bools_are_numbers() -> None:
    import numpy as np

    _, _, (record,) = scripted_run(Words(["x"], score=lambda response, _: np.float32(len(response))))
    assert record.rewards[:3] == (1.0, 2.0, 3.0)
    _, _, (record,) = scripted_run(Words(["x"], score=lambda response, _: len(response) == 1))
    assert record.rewards[:3] == (1.0, 0.0, 0.0)


def test_a_sampler_that_never_answers_ends_at_the_deadline_and_is_cancelled() -> None:
    sampler = RequestRecorder(num_expected=10**6)
    with pytest.raises(TimeoutError, match="gathered sample"):
        scripted_run(Words(["x"]), sampler, deadline_s=0.05)
    assert all(future.cancelled() for future, _ in sampler.waiting)


def test_weights_that_are_never_published_end_at_the_deadline() -> None:
    class Stuck(RecordingTrainer):
        def save_weights_and_get_sampling_client(self, *_: Any) -> Any:
            threading.Event().wait(5)

    config = RLConfig(deadline_s=0.05)
    with pytest.raises(TimeoutError, match="publishing weights"):
        run_grpo(Words(["x"]), config, service_client=Service(Stuck(tokenizer=Letters())))


def test_a_sampler_that_returns_another_number_of_responses_is_refused() -> None:
    class Stingy(ScriptedSampler):
        def sample(self, prompt: ModelInput, num_samples: int = 1, *rest: Any) -> Any:
            return super().sample(prompt, num_samples - 1, *rest)

    with pytest.raises(DataError, match="returned 2 responses; 3 were asked for"):
        scripted_run(Words(["x"]), Stingy(numbered_replies()))


# --- settings ---


def test_defaults_are_mints() -> None:
    config = RLConfig()
    table = {f.name: getattr(config, f.name) for f in fields(config)}
    assert table == {
        "loss_fn": "importance_sampling",
        "group_size": 4,
        "batch_size": 8,
        "max_tokens": 16,
        "learning_rate": 2e-5,
        "temperature": 0.8,
        "kl_penalty_coef": 0.0,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "base_model": "Qwen/Qwen3-0.6B",
        "rank": 16,
        "train_mlp": True,
        "train_attn": True,
        "train_unembed": True,
        "num_steps": 5,
        "seed": 0,
        "save_name": "grpo",
        "deadline_s": 600.0,
    }


def test_groups_per_batch_is_the_other_spelling_of_batch_size() -> None:
    assert RLConfig(groups_per_batch=3).batch_size == 3
    assert RLConfig(batch_size=3, groups_per_batch=3).batch_size == 3
    with pytest.raises(ConfigError, match="two names of one setting"):
        RLConfig(batch_size=3, groups_per_batch=4)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_fn": "cross_entropy"},
        {"group_size": 1},
        {"group_size": 2.0},
        {"batch_size": 0},
        {"groups_per_batch": 0},
        {"max_tokens": 0},
        {"num_steps": 0},
        {"seed": -1},
        {"temperature": 0.0},
        {"temperature": math.nan},
        {"kl_penalty_coef": -0.1},
        {"deadline_s": 0.0},
        {"learning_rate": -1.0},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"eps": math.inf},
        {"weight_decay": -1.0},
        {"rank": 0},
        {"train_mlp": False, "train_attn": False, "train_unembed": False},
        {"save_name": "no/slashes"},
    ],
)
def test_settings_that_cannot_work_are_refused_at_construction(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RLConfig(**settings)


def test_a_misspelt_loss_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cispo'"):
        RLConfig(loss_fn="crispo")


# --- with a model ---


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with ServiceClient(data_dir=tmp_path_factory.mktemp("data")) as service:
        yield service


PROMPTS = ["What is the number?", "Guess again.", "You find a key."]


def run_tiny(service: Any, adapter: RLAdapter[Any], **settings: Any) -> tuple[StepRecord, ...]:
    config = RLConfig(**{"base_model": "tiny", "max_tokens": 6, "num_steps": 2, "batch_size": 3, **settings})
    return run_grpo(adapter, config, service_client=service, on_step=lambda _: None).steps


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
@pytest.mark.parametrize("kl_penalty_coef", [0.0, 0.1])
def test_every_loss_trains_and_meets_its_sampler_at_the_sampling_temperature(
    service: ServiceClient, loss_fn: str, kl_penalty_coef: float
) -> None:
    steps = run_tiny(service, Words(PROMPTS), loss_fn=loss_fn, temperature=0.6, kl_penalty_coef=kl_penalty_coef)
    for record in steps:
        assert record.metrics["grad_norm"] > 0
        assert record.metrics["kl_sampler_trainer_k2:mean"] < 1e-9
        assert record.metrics["ratio:mean"] == pytest.approx(1, abs=1e-4)
        assert (record.kl is not None) == (kl_penalty_coef > 0)


def test_the_same_seed_gives_the_same_run(service: ServiceClient) -> None:
    def rewards(seed: int) -> list[tuple[float, ...]]:
        steps = run_tiny(service, Words(PROMPTS), seed=seed, learning_rate=1e-3)
        return [record.rewards for record in steps]

    assert rewards(1) == rewards(1) != rewards(2)


def test_a_rewarded_habit_is_learned(service: ServiceClient) -> None:
    adapter = Words(PROMPTS, score=lambda response, _: sum(letter.isdigit() for letter in response) / 3)
    settings = {"num_steps": 25, "group_size": 16, "max_tokens": 3, "learning_rate": 1e-2, "temperature": 1.0}
    steps = run_tiny(service, adapter, **settings)
    assert steps[0].reward_mean < 0.1
    assert steps[-1].reward_mean > 0.6


def displaced_client(service: ServiceClient) -> LocalTrainingClient:
    """A policy that was taught, away from the base model, to say one thing."""
    trainer = service.create_lora_training_client("tiny", rank=16, seed=3)
    tokenizer = trainer.get_tokenizer()
    for _ in range(10):
        datums: list[Datum] = []
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt + " My guess is 5.")
            inputs: dict[str, Any] = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
            datums.append(Datum(ModelInput.from_ints(ids[:-1]), inputs))
        trainer.forward_backward(datums, "cross_entropy").result(60)
        trainer.optim_step(AdamParams(learning_rate=1e-2)).result(60)
    return trainer


def test_without_kl_a_constant_reward_trains_nothing(service: ServiceClient) -> None:
    trainer = displaced_client(service)
    before = logprobs_of(trainer)
    steps = run_tiny(Service(trainer), Words(PROMPTS, score=lambda *_: 1.0), learning_rate=1e-2)
    assert all(record.is_skipped for record in steps)
    assert logprobs_of(trainer) == before


def test_the_kl_penalty_pulls_a_displaced_policy_back_to_the_base_model(service: ServiceClient) -> None:
    trainer = displaced_client(service)
    steps = run_tiny(
        Service(trainer),
        Words(PROMPTS, score=lambda *_: 1.0),
        kl_penalty_coef=1.0,
        learning_rate=2e-3,
        num_steps=12,
        group_size=16,
    )
    first, last = steps[0].kl, steps[-1].kl
    assert first is not None
    assert last is not None
    assert first > 0.05
    assert last < 0.5 * first


def logprobs_of(trainer: LocalTrainingClient) -> list[float]:
    sampler = trainer.save_weights_and_get_sampling_client()
    ids = trainer.get_tokenizer().encode(PROMPTS[0] + " My guess is 5.")
    return [
        logprob for logprob in sampler.compute_logprobs(ModelInput.from_ints(ids)).result(60) if logprob is not None
    ]


def test_the_kl_is_measured_at_the_sampling_temperature(service: ServiceClient) -> None:
    trainer = displaced_client(service)
    trained: list[Datum] = []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(trainer, name)

        def forward_backward(self, data: Sequence[Datum], *rest: Any) -> Any:
            trained.extend(data)
            return trainer.forward_backward(data, *rest)

    (record,) = run_tiny(Service(Spy()), Words(PROMPTS), kl_penalty_coef=0.1, temperature=0.5, num_steps=1)
    base = service.create_lora_training_client("tiny", rank=1)  # a new adapter changes nothing: it is the base model
    outputs = base.forward(trained, "importance_sampling").result(60).loss_fn_outputs
    gaps = [
        sampled - reference
        for datum, output in zip(trained, outputs, strict=True)
        for sampled, reference, weight in zip(
            datum.loss_fn_inputs["logprobs"].tolist(),
            output["logprobs"].tolist(),
            datum.loss_fn_inputs["weights"].tolist(),
            strict=True,
        )
        if weight
    ]
    assert record.kl == pytest.approx(sum(gap**2 / 2 for gap in gaps) / len(gaps), rel=1e-3)


@pytest.mark.usefixtures("tiny_dir")
def test_without_a_service_the_run_makes_its_own_and_leaves_weights_that_can_be_sampled() -> None:
    config = RLConfig(base_model="tiny", num_steps=1, max_tokens=4)
    result = run_grpo(Words(PROMPTS), config, on_step=lambda _: None)
    with ServiceClient() as service:
        sampler = service.create_sampling_client(model_path=result.path)
        response = sampler.sample(ModelInput.from_ints([5, 6]), 1, SamplingParams(max_tokens=2)).result(60)
        assert len(response.sequences[0].tokens) <= 2
