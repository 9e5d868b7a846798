"""What the real mindlab-toolkit 0.2.0 (MinT, over tinker 0.22.0) must see. Names are claims."""

import io
import math
import os
import tarfile
import urllib.request
import uuid
from typing import get_args

import mint
import mint.mint as mintx
import numpy as np
from mint import types
from runner import CALLED, _watch, public_methods
from tinker.lib.public_interfaces.rest_client import RestClient

CLIENTS = (mint.ServiceClient, mint.TrainingClient, mint.SamplingClient, RestClient)
ALL = {kind.__name__: public_methods(kind) for kind in CLIENTS}
for _kind in CLIENTS:
    _watch(_kind)

SERVICE = mint.ServiceClient()
REST = SERVICE.create_rest_client()
TOKENS = [5, 6, 7, 8, 9, 10, 11]


def _datum(tokens=TOKENS, **inputs):
    n = len(tokens) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **(inputs or {"weights": [0.0] + [1.0] * (n - 1)})},
    )


def _logprobs(output, index=0):
    return np.array(output.loss_fn_outputs[index]["logprobs"].tolist())


def _client(**options):
    return SERVICE.create_lora_training_client("tiny", **{"rank": 8, "seed": 1, **options})


def _train(client, steps=1, lr=1e-2, tokens=TOKENS):
    for _ in range(steps):
        client.forward_backward([_datum(tokens)], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=lr)).result()


def _scores(path):
    sampler = SERVICE.create_sampling_client(model_path=path)
    return np.array(sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:])


def a_key_of_mint_is_accepted():
    assert os.environ["MINT_API_KEY"].startswith("sk-")
    assert SERVICE.get_server_capabilities().supported_models[0].model_name == "tiny"


async def the_service_lists_its_models_async():
    assert (await SERVICE.get_server_capabilities_async()).supported_models


def losses_are_their_formulas_on_the_returned_logprobs():
    client = _client()
    p = _logprobs(client.forward([_datum()], "cross_entropy").result())
    rng = np.random.default_rng(0)
    q, a = p + rng.normal(0, 0.4, len(p)), rng.normal(0, 1, len(p))
    r = np.exp(p - q)
    datum = _datum(logprobs=q.tolist(), advantages=a.tolist())
    expected = {
        ("importance_sampling", ()): -(r * a).sum(),
        ("ppo", ()): -np.minimum(r * a, np.clip(r, 0.8, 1.2) * a).sum(),
        ("cispo", ()): -(np.clip(r, 0.8, 1.2) * p * a).sum(),
        ("dro", (("beta", 0.1),)): -(p * a - 0.05 * (p - q) ** 2).sum(),
    }
    for (loss, config), value in expected.items():
        output = client.forward_backward([datum], loss, dict(config) or None).result()
        np.testing.assert_allclose(_logprobs(output), p, atol=1e-5)
        assert math.isclose(output.metrics["loss:sum"], value, rel_tol=2e-4, abs_tol=2e-5), loss


def every_loss_that_the_sdk_names_is_trained():
    client = _client()
    for name in get_args(types.LossFnType):
        zeros = dict.fromkeys(("logprobs", "advantages"), [0.0] * 6)
        datum = _datum() if name == "cross_entropy" else _datum(**zeros)
        assert math.isfinite(client.forward_backward([datum], name).result().metrics["loss:sum"]), name


async def training_is_async_too():
    client = await SERVICE.create_lora_training_client_async("tiny", rank=8, seed=1)
    await (await client.forward_backward_async([_datum()], "cross_entropy")).result_async()
    await (await client.optim_step_async(types.AdamParams(learning_rate=1e-2))).result_async()
    path = (await (await client.save_state_async("a")).result_async()).path
    mine = _logprobs(await (await client.forward_async([_datum()], "cross_entropy")).result_async())
    for other in (
        await SERVICE.create_training_client_from_state_async(path),
        await SERVICE.create_training_client_from_state_with_optimizer_async(path),
    ):
        found = _logprobs(await (await other.forward_async([_datum()], "cross_entropy")).result_async())
        np.testing.assert_array_equal(found, mine)
    await (await client.load_state_async(path)).result_async()
    await (await client.load_state_with_optimizer_async(path)).result_async()
    assert (await client.get_info_async()).lora_rank == 8

    def loss(_data, logprobs):
        return -sum(lp.sum() for lp in logprobs), {}

    await (await client.forward_backward_custom_async([_datum()], loss)).result_async()


def saved_state_goes_on_exactly():
    client = _client()
    _train(client, 2)
    path = client.save_state("s").result().path
    _train(client, 2)
    expected = _logprobs(client.forward([_datum()], "cross_entropy").result())
    resumed = SERVICE.create_training_client_from_state_with_optimizer(path)
    _train(resumed, 2)
    np.testing.assert_array_equal(expected, _logprobs(resumed.forward([_datum()], "cross_entropy").result()))
    client.load_state(path).result()
    client.load_state_with_optimizer(path).result()
    assert SERVICE.create_training_client_from_state(path).get_info().lora_rank == 8


def a_custom_loss_trains_like_the_built_in_one():
    built_in, custom = _client(), _client()
    datum = _datum(weights=[1.0] * 6)
    built_in.forward_backward([datum], "cross_entropy").result()

    def loss(_data, logprobs):
        return -sum(lp.sum() for lp in logprobs), {"mine": 1.0}

    custom.forward_backward_custom([datum], loss).result()
    norms = [c.optim_step(types.AdamParams()).result().metrics["grad_norm"] for c in (built_in, custom)]
    assert math.isclose(*norms, rel_tol=1e-4), norms


async def samples_carry_the_trainers_logprobs():
    client = _client()
    _train(client, 2)
    path = client.save_weights_for_sampler("s").result().path
    other = (await (await client.save_weights_for_sampler_async("t")).result_async()).path
    trained = _logprobs(client.forward([_datum()], "cross_entropy").result())
    samplers = [
        client.save_weights_and_get_sampling_client(),
        await client.save_weights_and_get_sampling_client_async(),
        client.create_sampling_client(path),
        await client.create_sampling_client_async(other),
        await SERVICE.create_sampling_client_async(model_path=path),
    ]
    prompt = types.ModelInput.from_ints(TOKENS)
    for sampler in samplers:
        np.testing.assert_allclose((await sampler.compute_logprobs_async(prompt))[1:], trained, atol=1e-4)
    params = types.SamplingParams(max_tokens=5, seed=3, stop=[])
    one = samplers[0].sample(prompt, 2, params).result()
    two = await samplers[2].sample_async(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=3)
    assert [s.tokens for s in one.sequences] == [s.tokens for s in two.sequences]
    assert len(two.topk_prompt_logprobs[3]) == 3
    assert two.prompt_logprobs[0] is None
    whole = [*TOKENS, *one.sequences[0].tokens]
    again = _logprobs(client.forward([_datum(whole, weights=[1.0] * 11)], "cross_entropy").result())
    np.testing.assert_allclose(one.sequences[0].logprobs, again[6:], atol=1e-4)
    assert await samplers[0].get_base_model_async()


def tokenizers_and_names_come_from_the_server():
    client = _client()
    sampler = SERVICE.create_sampling_client(base_model="tiny")
    assert len(client.get_tokenizer()) == len(sampler.get_tokenizer()) > 100
    assert sampler.get_base_model()
    assert client.get_info().model_name == "tiny"
    for provider in (client, sampler, SERVICE, REST):
        assert provider.get_telemetry() is not None


def two_clients_do_not_touch_each_other():
    alone, first, second = _client(), _client(), _client(rank=4, seed=2)
    _train(alone, 2)
    expected = _logprobs(alone.forward([_datum()], "cross_entropy").result())
    futures = []
    for _ in range(2):
        for client, tokens in ((first, TOKENS), (second, TOKENS[::-1])):
            futures.append(client.forward_backward([_datum(tokens)], "cross_entropy"))
            futures.append(client.optim_step(types.AdamParams(learning_rate=1e-2)))
    for future in futures:
        future.result()
    np.testing.assert_allclose(_logprobs(first.forward([_datum()], "cross_entropy").result()), expected, atol=2e-5)


async def the_rest_client_works():
    client = _client()
    path = client.save_state("w").result().path
    run_id = client.model_id
    assert REST.get_training_run(run_id).result().training_run_id == run_id
    assert (await REST.get_training_run_async(run_id)).base_model == "tiny"
    assert REST.get_training_run_by_tinker_path(path).result().training_run_id == run_id
    assert (await REST.get_training_run_by_tinker_path_async(path)).training_run_id == run_id
    assert REST.get_weights_info_by_tinker_path(path).result().lora_rank == 8
    assert REST.list_training_runs(limit=3).result().training_runs
    assert (await REST.list_training_runs_async(limit=3)).training_runs
    assert REST.list_checkpoints(run_id).result().checkpoints[0].tinker_path == path
    assert (await REST.list_checkpoints_async(run_id)).checkpoints[0].checkpoint_type == "training"
    assert REST.list_user_checkpoints().result().checkpoints[0].tinker_path == path
    assert (await REST.list_user_checkpoints_async()).checkpoints
    REST.publish_checkpoint_from_tinker_path(path).result()
    REST.unpublish_checkpoint_from_tinker_path(path).result()
    await REST.publish_checkpoint_from_tinker_path_async(path)
    await REST.unpublish_checkpoint_from_tinker_path_async(path)
    REST.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    await REST.set_checkpoint_ttl_from_tinker_path_async(path, None)
    REST.delete_checkpoint_from_tinker_path(path).result()
    for name, delete in (
        ("x", REST.delete_checkpoint_from_tinker_path_async),
        ("y", lambda _: REST.delete_checkpoint_async(run_id, "weights/y")),
    ):
        await delete(client.save_state(name).result().path)
    client.save_state("z").result()
    REST.delete_checkpoint(run_id, "weights/z").result()
    assert REST.list_checkpoints(run_id).result().checkpoints == []


async def sessions_are_listed():
    client = _client()
    session_id = client.model_id.partition(":")[0]
    assert client.model_id in REST.get_session(session_id).result().training_run_ids
    assert client.model_id in (await REST.get_session_async(session_id)).training_run_ids
    assert session_id in REST.list_sessions().result().sessions
    assert session_id in (await REST.list_sessions_async()).sessions
    REST.assign_session_project(session_id, "p").result()
    await REST.assign_session_project_async(session_id, "q")
    client.save_weights_and_get_sampling_client()
    sampler_id = REST.get_session(session_id).result().sampler_ids[-1]
    assert REST.get_sampler(sampler_id).result().sampler_id == sampler_id
    assert (await REST.get_sampler_async(sampler_id)).base_model
    assert REST.get_audit_log().result().entries == []


async def an_archive_holds_peft_files():
    client = _client()
    path = client.save_weights_for_sampler("s").result().path
    links = [
        REST.get_checkpoint_archive_url(client.model_id, "sampler_weights/s").result(),
        await REST.get_checkpoint_archive_url_async(client.model_id, "sampler_weights/s"),
        REST.get_checkpoint_archive_url_from_tinker_path(path).result(),
        await REST.get_checkpoint_archive_url_from_tinker_path_async(path),
    ]
    for link in links:
        with tarfile.open(fileobj=io.BytesIO(urllib.request.urlopen(link.url).read())) as archive:
            assert {"adapter_config.json", "adapter_model.safetensors"} <= set(archive.getnames())


def interpolation_adds_up_what_the_sources_change():
    one, two = _client(), _client(rank=4, seed=5)
    _train(one, 2)
    _train(two, 2, tokens=TOKENS[::-1])
    paths = [c.save_weights_for_sampler("s").result().path for c in (one, two)]
    name = "mix-" + uuid.uuid4().hex[:8]
    done = mintx.interpolate_checkpoints(SERVICE, source_paths=paths, coefficients=[1.0, 0.0], output_path=name)
    assert done.path.startswith("tinker://")
    assert done.path.endswith(name)
    np.testing.assert_allclose(_scores(done.path), _scores(paths[0]), atol=1e-4)
    halves = mintx.interpolate_checkpoints(SERVICE, source_paths=[paths[0]] * 2, coefficients=[0.5, 0.5])
    np.testing.assert_allclose(_scores(halves.path), _scores(paths[0]), atol=1e-4)
    nothing = mintx.interpolate_checkpoints(SERVICE, source_paths=paths, coefficients=[0.0, 0.0])
    base = SERVICE.create_sampling_client(base_model="tiny")
    expected = base.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:]
    np.testing.assert_allclose(_scores(nothing.path), expected, atol=1e-4)


def reverse_kl_is_its_definition_and_pulls_towards_the_reference():
    teacher = _client(seed=7)
    _train(teacher, 4)
    reference = teacher.save_weights_for_sampler("s").result().path
    student = _client()
    targets, weights = TOKENS[1:], [0.0, 1.0, 1.0, 0.5, 1.0, 1.0]
    inputs = types.ModelInput.from_ints(TOKENS[:-1])
    datum = mintx.ReverseKLDatum(
        student_input=inputs,
        reference_input=inputs,
        target_tokens=types.TensorData(data=targets, dtype="int64", shape=[6]),
        weights=types.TensorData(data=weights, dtype="float32", shape=[6]),
    )
    p = _logprobs(student.forward([_datum()], "cross_entropy").result())
    q = _scores(reference)
    done = mintx.forward_backward_reverse_kl(student, reference_model_path=reference, data=[datum])
    np.testing.assert_allclose(done.outputs[0].loss.data, np.array(weights) * (p - q) ** 2 / 2, rtol=1e-3, atol=1e-5)
    assert math.isclose(done.metrics["loss:sum"], sum(done.outputs[0].loss.data), rel_tol=1e-5)
    first = done.metrics["loss:sum"]
    for _ in range(4):
        student.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        done = mintx.forward_backward_reverse_kl(student, reference_model_path=reference, data=[datum])
    assert done.metrics["loss:sum"] < first / 2


def targets_of_a_reverse_kl_may_be_the_end_of_the_input():
    student = _client()
    short = mintx.ReverseKLDatum(
        student_input=types.ModelInput.from_ints([5, 6, 7]),
        reference_input=types.ModelInput.from_ints([9, 6, 7]),
        target_tokens=types.TensorData(data=[7, 8], dtype="int64"),
        weights=types.TensorData(data=[1.0, 1.0], dtype="float32"),
    )
    done = mintx.forward_backward_reverse_kl(student, reference_model_path="tiny", data=[short], temperature=0.7)
    assert len(done.outputs[0].loss.data) == 2


def no_public_method_was_left_out():
    internal = {"create", "on_queue_state_change"}
    left = {name: sorted(ALL[name] - CALLED[name] - internal) for name in ALL}
    assert not any(left.values()), left
