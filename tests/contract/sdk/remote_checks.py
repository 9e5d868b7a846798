"""What the remote client must see at a service of ours. Runs in a process of its own; names are claims."""

import asyncio
import json
import os
import threading
import urllib.error
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import openai
import pytest

from turnwise import types
from turnwise.cli import main
from turnwise.client.local import ServiceClient
from turnwise.client.remote import RemoteServiceClient
from turnwise.config.config import Config
from turnwise.credit.datums import trajectory_to_datums
from turnwise.credit.weights import token_mean, weigh
from turnwise.envs.base import assistant
from turnwise.envs.registry import get_world
from turnwise.errors import AttemptFailed, ConfigError, Party, ServiceError
from turnwise.rollout.certify import certify
from turnwise.rollout.config import RolloutConfig
from turnwise.runlog.reader import RunReader
from turnwise.training.checkpoint import saved_critic
from turnwise.training.opponent_words import check_opponents
from turnwise.training.opponents import Opponents
from turnwise.trajectory import trajectory_from_json

URL = os.environ["TINKER_BASE_URL"]
IDS = [5, 6, 7, 8, 9, 10, 11]
OURS = RemoteServiceClient(URL)
TINKER = RemoteServiceClient(URL, dialect="tinker")
LOCAL = ServiceClient(data_dir=Path(os.environ["SCRATCH"]))
HOP_HEADERS = ("host", "content-length", "connection", "accept-encoding", "transfer-encoding")
"""Headers of one connection, which a proxy does not pass on."""
ADAM = types.AdamParams(learning_rate=1e-2)


def _datum(**more):
    inputs = {
        "target_tokens": IDS[1:],
        "mask": [0.0, 1.0, 1.0, 0.0, 1.0, 1.0],
        "weights": [0.0, 0.5, 0.25, 0.0, 0.125, 2.0],
        "logprobs": [0.0, -6.2, -5.9, 0.0, -6.0, -6.3],
        "advantages": [0.0, 1.0, -1.0, 0.0, -0.5, 0.5],
        "temperature": [1.0] * 6,
    }
    return types.Datum(types.ModelInput.from_ints(IDS[:-1]), {**inputs, **more})


def _post(path, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{URL}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def _get(path):
    with urllib.request.urlopen(f"{URL}{path}", timeout=120) as answer:
        return json.load(answer)


def _trainers(seed=3):
    return [one.create_lora_training_client("tiny", rank=8, seed=seed) for one in (LOCAL, OURS, TINKER)]


def a_service_of_ours_is_told_from_any_other():
    assert OURS.dialect == "turnwise"
    (model,) = OURS.get_server_capabilities().supported_models
    assert model.model_name == "tiny"


def training_there_is_training_here_in_either_dialect():
    """Loss, logprobs, gradient norm and weights after steps, for every loss that Tinker's wire can say."""
    for loss_fn in ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo"):
        found = []
        for trainer in _trainers():
            values = []
            for _ in range(2):
                output = trainer.forward_backward([_datum(), _datum()], loss_fn).result()
                stepped = trainer.optim_step(ADAM).result()
                values += [output.metrics["loss:sum"], stepped.metrics["grad_norm"]]
                assert output.metrics["num_trained_tokens:sum"] == 8
                mask = np.array(_datum().loss_fn_inputs["mask"].data) == 1
                values += output.loss_fn_outputs[0]["logprobs"].to_numpy()[mask].tolist()
            found.append(values)
        np.testing.assert_allclose(found[1], found[0], rtol=2e-4, atol=1e-5, err_msg=loss_fn)
        np.testing.assert_allclose(found[2], found[0], rtol=2e-4, atol=1e-5, err_msg=loss_fn)


def what_tinker_cannot_say_still_reaches_a_service_of_ours():
    local, ours, tinker = _trainers()
    warm = _datum(temperature=[1.0, 0.7, 0.7, 1.0, 0.7, 0.7])
    for datum, loss_fn, config in (
        (_datum(), "dro", {"beta": 0.1}),
        (_datum(), "ppo", {"dual_clip": 3.0}),
        (_datum(), "dppo_tv", None),
        (warm, "importance_sampling", None),
    ):
        here = local.forward([datum], loss_fn, config).result()
        there = ours.forward([datum], loss_fn, config).result()
        assert np.isclose(here.metrics["loss:sum"], there.metrics["loss:sum"], rtol=1e-4), loss_fn
        try:
            tinker.forward([datum], loss_fn, config)
        except ConfigError:
            continue
        raise AssertionError(f"{loss_fn} went through")


def sampling_there_is_sampling_here():
    local, ours, _ = _trainers()
    for trainer in (local, ours):
        trainer.forward_backward([_datum()], "cross_entropy")
        trainer.optim_step(ADAM).result()
    samplers = [trainer.save_weights_and_get_sampling_client() for trainer in (local, ours)]
    params = types.SamplingParams(max_tokens=12, seed=2**63 + 11, temperature=0.9, stop_token_ids=[3])
    prompt = types.ModelInput.from_ints(IDS)
    here, there = (s.sample(prompt, 2, params, include_prompt_logprobs=True).result() for s in samplers)
    for one, other in zip(here.sequences, there.sequences, strict=True):
        assert list(one.tokens) == list(other.tokens)
        assert one.stop_reason == other.stop_reason
        np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-4)
    np.testing.assert_allclose(there.prompt_logprobs[1:], here.prompt_logprobs[1:], atol=1e-4)
    scored = samplers[1].compute_logprobs(prompt).result()
    np.testing.assert_allclose(scored[1:], here.prompt_logprobs[1:], atol=1e-4)
    assert there.policy_version == 1
    assert samplers[1].get_tokenizer().decode(IDS) == samplers[0].get_tokenizer().decode(IDS)


async def everything_can_be_awaited_and_cancelled():
    trainer = await OURS.create_lora_training_client_async("tiny", rank=4, seed=1)
    future = await trainer.forward_backward_async([_datum()], "cross_entropy")
    stepped = await trainer.optim_step_async(ADAM)
    assert (await future).metrics["loss:sum"] > 0
    await stepped
    sampler = await trainer.save_weights_and_get_sampling_client_async()
    prompt = types.ModelInput.from_ints(IDS)
    response = await sampler.sample_async(prompt, 1, types.SamplingParams(max_tokens=3))
    assert len(response.sequences[0].tokens) == 3
    task = asyncio.create_task(sampler.sample_async(prompt, 64, types.SamplingParams(max_tokens=1000, stop=[])))
    await asyncio.sleep(0)
    task.cancel()
    (error,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(error, asyncio.CancelledError)
    assert (await trainer.get_info_async()).lora_rank == 4


def a_saved_state_goes_on_where_it_was():
    _, ours, _ = _trainers()
    ours.forward_backward([_datum()], "cross_entropy").result()
    ours.optim_step(ADAM).result()
    path = ours.save_state(f"s-{uuid.uuid4().hex[:6]}", user_metadata={"a": "b"}).result().path
    other = OURS.create_training_client_from_state_with_optimizer(path)
    norms = []
    for trainer in (ours, other):
        trainer.forward_backward([_datum()], "cross_entropy").result()
        norms.append(trainer.optim_step(ADAM).result().metrics["grad_norm"])
    assert np.isclose(norms[0], norms[1], rtol=1e-5)
    losses = [t.forward([_datum()], "cross_entropy").result().metrics["loss:sum"] for t in (ours, other)]
    assert np.isclose(losses[0], losses[1], rtol=1e-5)
    ours.load_state(path).result()
    sampler = OURS.create_sampling_client(ours.save_weights_for_sampler("named").result().path)
    assert len(sampler.sample(types.ModelInput.from_ints(IDS)).result(30).sequences) == 1
    OURS.delete_checkpoint(path)
    _refused(lambda: ours.load_state(path).result(), "not found")


def a_loss_of_ones_own_has_its_own_gradient():
    local, ours, _ = _trainers()

    def square(_, logprobs):
        return sum((one**2).sum() for one in logprobs), {}

    plain = types.Datum(types.ModelInput.from_ints(IDS[:-1]), {"target_tokens": IDS[1:], "weights": [1.0] * 6})
    norms, losses = [], []
    for trainer in (local, ours):
        losses.append(trainer.forward_backward_custom([plain], square).result().metrics["loss:sum"])
        norms.append(trainer.optim_step(ADAM).result().metrics["grad_norm"])
    assert np.isclose(losses[0], losses[1], rtol=1e-4)
    assert np.isclose(norms[0], norms[1], rtol=1e-3)


def _value_datum(**more):
    inputs = {
        "mask": [0.0, 1.0, 1.0, 0.0, 1.0, 1.0],
        "weights": [0.0, 0.5, 0.25, 0.0, 0.125, 2.0],
        "returns": [0.0, 0.5, 1.0, 0.0, -0.25, 2.0],
        "values": [0.0, 0.1, 0.0, 0.0, -0.1, 0.3],
    }
    arrays = {key: np.array(column, np.float32) for key, column in {**inputs, **more}.items()}
    return types.Datum(types.ModelInput.from_ints(IDS[:-1]), arrays)


def a_critic_there_is_a_critic_here():
    """Values, losses, gradient norms and what they are after a save and a load; `forward` needs no returns."""
    asked = types.Datum(types.ModelInput.from_ints(IDS), {"mask": np.ones(7, np.float32)})
    found = []
    for service in (LOCAL, OURS):
        critic = service.create_critic_training_client("tiny", rank=8, seed=3)
        numbers = [critic.forward([asked], "value").result().loss_fn_outputs[0]["values"].to_numpy().sum()]
        assert numbers == [0.0], "a new critic says 0 everywhere"
        for step in range(4):
            clip = {"value_clip": 0.2} if step % 2 else None
            output = critic.forward_backward([_value_datum(), _value_datum()], "value", clip).result()
            assert output.loss_fn_outputs[1]["mask"].tolist() == [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
            assert output.metrics["num_trained_tokens:sum"] == 8
            stepped = critic.optim_step(ADAM).result()
            numbers += [output.metrics["loss:sum"], output.metrics["value:mean"], stepped.metrics["grad_norm"]]
            numbers += output.loss_fn_outputs[0]["values"].tolist()
        path = critic.save_state(f"c-{uuid.uuid4().hex[:6]}", user_metadata={"a": "b"}).result().path
        for again in (service.create_training_client_from_state_with_optimizer(path), critic):
            again.forward_backward([_value_datum()], "value").result()
            numbers.append(again.optim_step(ADAM).result().metrics["grad_norm"])
            numbers += again.forward([asked], "value").result().loss_fn_outputs[0]["values"].tolist()
        fresh = service.create_training_client_from_state(path)
        numbers += fresh.forward([asked], "value").result().loss_fn_outputs[0]["values"].tolist()
        found.append(numbers)
    np.testing.assert_allclose(found[1], found[0], rtol=2e-4, atol=1e-5)
    assert max(abs(number) for number in found[0][-7:]) > 0.1, "it learned something"


def a_critic_is_refused_where_there_is_none():
    said = []
    for call in (
        lambda: TINKER.create_critic_training_client("tiny"),
        lambda: RemoteServiceClient(URL, dialect="tinker", needs_critics=True),
    ):
        try:
            call()
        except ConfigError as error:
            said.append(str(error))
    assert len(said) == 2
    assert all("has no critics" in text for text in said), said
    policy = OURS.create_lora_training_client("tiny", rank=4)
    _refused(lambda: policy.forward([_value_datum()], "value").result(), "value")


def ppo_there_is_ppo_here_and_goes_on_after_a_resume():
    """`turnwise train method=ppo`: 2 steps and a resumed one at the service, 3 steps in a row in this process."""
    scratch, of_others = Path(os.environ["SCRATCH"]), _checkpoint_paths()
    options = [
        *("train", f"{Path(__file__).parents[2] / 'e2e' / 'echo_world.py'}:EchoWorld", "model=tiny", "method=ppo"),
        *("train.tasks_per_step=2", "train.num_tasks=8", "train.learning_rate=1e-3", "train.save_every=1"),
        *("train.keep_checkpoints=1", "critic.pretrain_steps=2", "rollout.group_size=4"),
        *("eval.tasks=0", "run.dialogues=0"),
    ]
    assert main([*options, "train.steps=2", f"base_url={URL}", f"run.dir={scratch / 'there'}"]) == 0
    assert main(["train", "--resume", str(scratch / "there"), "train.steps=3"]) == 0
    assert main([*options, "train.steps=3", f"run.dir={scratch / 'here'}"]) == 0
    names = ("train/loss", "train/critic_loss", "train/critic_value", "train/critic_explained_variance", "critic/loss")
    with RunReader(scratch / "there") as there, RunReader(scratch / "here") as here:
        for name in names:
            found, expected = there.metric(name), here.metric(name)
            assert [step for step, _ in found] == [step for step, _ in expected], name
            assert len(expected) == (2 if name.startswith("critic/") else 3), name
            values = [value for _, value in expected]
            np.testing.assert_allclose([value for _, value in found], values, rtol=1e-3, atol=1e-4, err_msg=name)
        (row,) = there.checkpoints()
        critic = saved_critic(there.directory, row)
    assert critic is not None
    assert critic.num_pretrained == 2
    kept = _checkpoint_paths() - of_others
    assert {row.path, critic.path} <= kept
    assert not [path for path in kept if path.endswith(("step-000001", "step-000002"))], "the old ones are deleted"


def _checkpoint_paths():
    return {one["tinker_path"] for one in _get("/api/v1/checkpoints?limit=100")["checkpoints"]}


def _refused(call, word):
    said = ""
    try:
        call()
    except ServiceError as error:
        said = str(error)
    assert word in said, said or "it went through"
    assert URL in said


def what_the_service_refuses_is_told_with_its_words():
    _refused(lambda: OURS.create_lora_training_client("nope"), "is not served here")
    _refused(lambda: OURS.create_sampling_client("tinker://run/sampler_weights/absent"), "checkpoint not found")
    trainer = OURS.create_lora_training_client("tiny", rank=4)
    bad = types.Datum(types.ModelInput.from_ints([10**6]), {"target_tokens": [1], "weights": [1.0]})
    _refused(lambda: trainer.forward_backward([bad], "cross_entropy").result(), "token id 1000000")
    trainer.forward_backward([_datum()], "cross_entropy").result()  # the client goes on


async def a_tinker_service_plays_the_other_seat_with_a_base_model_or_with_saved_weights():
    trainer = OURS.create_lora_training_client("tiny", rank=8, seed=5)
    for _ in range(4):
        trainer.forward_backward([_datum()], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
    path = trainer.save_weights_for_sampler("opponent").result().path
    said = {}
    for words, model in (("base", ""), (f"tinker+{URL}", "tiny"), (f"tinker+{URL}", path)):
        world = get_world("negotiate", opponent=words)
        config = Config.model_validate(
            {
                "model": {"name": "tiny"},
                "env": {"name": "negotiate", "options": {"opponent": words}},
                "opponent": {"model": model} if model else {},
            }
        )
        check_opponents(config, world)
        rollout = RolloutConfig(max_trajectory_tokens=1024).for_world(world)
        with Opponents(config, world, LOCAL, rollout) as opponents:
            opponents.open()
            env = opponents.world.make_env(world.tasks("train", 1, 0)[0], 7)
            await env.start()
            step = await env.step(assistant("Hello."))
        assert step.labels["opponent"] == words
        said[model] = step.labels["opponent_said"]
    assert said["tiny"] == said[""], "the service samples what this process samples"
    assert said[path] != said["tiny"]


async def a_service_that_plays_and_then_dies_or_talks_garbage_is_to_blame():
    """A proxy stands before the service until the opponent is loaded; then it hangs up, or answers no protocol."""
    for mode in ("dead", "garbage"):
        with _Proxy() as proxy:
            words = f"tinker+http://127.0.0.1:{proxy.server_port}"
            world = get_world("negotiate", opponent=words)
            config = Config.model_validate(
                {
                    "model": {"name": "tiny"},
                    "env": {"name": "negotiate", "options": {"opponent": words}},
                    "opponent": {"model": "tiny", "deadline_s": 4},
                }
            )
            rollout = RolloutConfig(max_trajectory_tokens=1024).for_world(world)
            with Opponents(config, world, LOCAL, rollout) as opponents:
                opponents.open()
                env = opponents.world.make_env(world.tasks("train", 1, 0)[0], 7)
                await env.start()
                assert not (await env.step(assistant("Hello."))).terminated
                proxy.mode = mode
                with pytest.raises(AttemptFailed) as failure:
                    await env.step(assistant("Hello again."))
                assert failure.value.party is Party.OPPONENT, failure.value


class _Proxy(ThreadingHTTPServer):
    """Passes requests on to the service, until its mode is another one."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Passing)
        self.mode = "pass"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Passing(BaseHTTPRequestHandler):
    def _pass(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.server.mode == "dead":
            self.close_connection = True
            return
        status, kind, answer = 200, "text/html", b"<html>busy</html>"
        if self.server.mode == "pass":
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}
            request = urllib.request.Request(f"{URL}{self.path}", body or None, headers, method=self.command)
            try:
                with urllib.request.urlopen(request, timeout=120) as found:
                    status, kind, answer = found.status, found.headers["content-type"], found.read()
            except urllib.error.HTTPError as error:
                status, kind, answer = error.code, error.headers["content-type"], error.read()
        self.send_response(status)
        self.send_header("content-type", kind or "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_DELETE = _pass

    def log_message(self, *_):
        pass


def a_captured_agent_is_trained_exactly_on_what_it_sampled():
    """An agent of plain OpenAI calls -> trajectory -> datums -> one training step, with an exact certificate."""
    trainer = OURS.create_lora_training_client("tiny", rank=8, seed=5)
    trainer.forward_backward([_datum()], "cross_entropy").result()
    trainer.optim_step(ADAM).result()
    path = trainer.save_weights_for_sampler("agent").result().path
    trajectories = []
    for attempt, reward in enumerate((1.0, 0.0)):
        capture = _post("/v1/captures", {"model": path, "task_id": "find", "attempt": attempt, "temperature": 0.8})
        with openai.OpenAI(base_url=capture["base_url"], api_key="none", timeout=120) as agent:
            messages = [{"role": "system", "content": "You find."}, {"role": "user", "content": "First?"}]
            for turn in range(3):
                said = agent.chat.completions.create(
                    model="gpt-4o", messages=messages, max_tokens=10, seed=attempt * 10 + turn, stream=turn == 1
                )
                if turn == 1:
                    chunks = [c.choices[0].delta.content or "" for c in said if c.choices]
                    messages.append({"role": "assistant", "content": "".join(chunks)})
                else:
                    messages.append(said.choices[0].message)
                messages.append({"role": "user", "content": f"Higher than {turn}."})
        _post(f"/v1/captures/{capture['id']}/reward", {"reward": reward, "is_success": reward == 1.0})
        trajectories.append(trajectory_from_json(_get(f"/v1/captures/{capture['id']}")["trajectory"]))
    batch = [trajectory_to_datums(t, [t.total_reward - 0.5] * 3) for t in trajectories]
    assert [len(datums) for datums in batch] == [1, 1], "three turns of one conversation are one datum"
    weighted = weigh(batch, token_mean)
    datums = [datum for own in weighted for datum in own]
    output = trainer.forward_backward(datums, "importance_sampling").result()
    answers = [one["logprobs"].tolist() for one in output.loss_fn_outputs]
    certificate = certify(trajectories, lambda _: answers, datums=weighted)
    assert certificate.is_exact, "\n".join(certificate.lines())
    assert certificate.num_turns == 6
    assert certificate.max_gap < 1e-3
    assert certificate.num_tokens == sum(t.num_sampled_tokens for t in trajectories)
    assert trainer.optim_step(ADAM).result().metrics["grad_norm"] > 0
    after = trainer.forward(datums, "cross_entropy").result()
    assert after.loss_fn_outputs[0]["logprobs"].tolist() != answers[0]
