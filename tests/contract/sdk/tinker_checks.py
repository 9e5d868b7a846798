"""What the real tinker 0.36.0 SDK must see. Runs in the SDK's own environment; names are claims."""

import asyncio
import datetime
import math
import pickle
import urllib.request
import uuid
from functools import partial
from typing import get_args

import numpy as np
import tinker
import torch
from runner import CALLED, _watch, public_methods
from tinker import types

CLIENTS = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient)
ALL = {kind.__name__: public_methods(kind) for kind in CLIENTS}
for _kind in CLIENTS:
    _watch(_kind)

SERVICE = tinker.ServiceClient(user_metadata={"purpose": "contract"})
REST = tinker.RestClient()
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


def _train(client, steps=1, lr=1e-2):
    for _ in range(steps):
        client.forward_backward([_datum()], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=lr)).result()


def _on_sdk_loop(coroutine):
    """The SDK's deprecated admin calls run on its own event loop only."""
    return REST.holder.run_coroutine_threadsafe(coroutine).result()


def _refused(call, *kinds):
    """The message of the error that `call` must end with."""
    try:
        call()
    except kinds as error:
        return str(error)
    raise AssertionError("it went through")


def _name():
    return "n-" + uuid.uuid4().hex[:10]


def the_service_lists_its_models():
    (model,) = SERVICE.get_server_capabilities().supported_models
    assert model.model_name == "tiny"
    assert model.max_context_length == 1024


async def the_service_lists_its_models_async():
    assert (await SERVICE.get_server_capabilities_async()).supported_models[0].model_name == "tiny"


def cross_entropy_is_the_formula_on_the_returned_logprobs():
    weights = [0.0, 0.5, 1.0, 2.0, 0.0, -1.0]
    output = _client().forward_backward([_datum(weights=weights)], "cross_entropy").result()
    p = _logprobs(output)
    assert (p < 0).all(), "a target without weight has a logprob too"
    assert math.isclose(output.metrics["loss:sum"], -(p * weights).sum(), rel_tol=1e-5)


def rl_losses_are_their_formulas_on_the_returned_logprobs():
    client = _client()
    p = _logprobs(client.forward([_datum()], "cross_entropy").result())
    rng = np.random.default_rng(0)
    q, a = p + rng.normal(0, 0.4, len(p)), rng.normal(0, 1, len(p))
    r = np.exp(p - q)
    datum = _datum(logprobs=q.tolist(), advantages=a.tolist())
    clipped = np.minimum(r * a, np.clip(r, 0.8, 1.2) * a)
    wide = np.minimum(r * a, np.clip(r, 0.5, 3.0) * a)
    expected = {
        ("importance_sampling", ()): -(r * a).sum(),
        ("ppo", ()): -clipped.sum(),
        ("ppo", (("clip_low_threshold", 0.5), ("clip_high_threshold", 3.0))): -wide.sum(),
        ("cispo", ()): -(np.clip(r, 0.8, 1.2) * p * a).sum(),
        ("dro", (("beta", 0.1),)): -(p * a - 0.05 * (p - q) ** 2).sum(),
    }
    for (loss, config), value in expected.items():
        output = client.forward_backward([datum], loss, dict(config) or None).result()
        np.testing.assert_allclose(_logprobs(output), p, atol=1e-5)
        assert math.isclose(output.metrics["loss:sum"], value, rel_tol=2e-4, abs_tol=2e-5), (loss, config)


def gspo_weighs_by_the_ratio_of_the_sequence():
    client = _client()
    p = _logprobs(client.forward([_datum()], "cross_entropy").result())
    q, a = p + 0.1, np.array([0.0, 1.0, -1.0, 2.0, 1.0, 0.5])
    mask = np.array([0.0, 1, 1, 1, 1, 1])
    s = np.exp(((p - q) * mask).sum() / mask.sum())
    datum = _datum(logprobs=q.tolist(), advantages=a.tolist(), sequence_ratio_mask=mask.tolist())
    config = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.2}
    output = client.forward_backward([datum], "gspo", config).result()
    value = -np.minimum(s * a, np.clip(s, 0.95, 1.2) * a).sum()
    assert math.isclose(output.metrics["loss:sum"], value, rel_tol=1e-4)


def every_loss_that_the_sdk_names_is_trained_or_refused_with_the_reason():
    client = _client()
    refused = {"stable_reinforce": "the SDK does not define it", "custom": "forward_backward_custom runs yours"}
    zeros = dict.fromkeys(("logprobs", "advantages"), [0.0] * 6)
    for name in get_args(types.LossFnType):
        datum = _datum() if name == "cross_entropy" else _datum(**zeros)
        if name in refused:
            call = partial(lambda d, name: client.forward_backward([d], name).result(), datum, name)
            assert refused.pop(name) in _refused(call, tinker.BadRequestError)
        else:
            assert math.isfinite(client.forward_backward([datum], name).result().metrics["loss:sum"]), name
    assert not refused
    _train(client)


def targets_of_several_columns_give_logprobs_of_their_shape():
    client = _client()
    targets = np.array([[t, t + 1, 3] for t in TOKENS[1:]])
    weights = np.random.default_rng(1).uniform(0, 1, targets.shape).astype(np.float32)
    both = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": torch.tensor(targets), "weights": torch.tensor(weights)},
    )
    output = client.forward_backward([both], "cross_entropy").result()
    p = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert p.shape == targets.shape
    for k in range(3):
        column = types.Datum(
            model_input=types.ModelInput.from_ints(TOKENS[:-1]),
            loss_fn_inputs={"target_tokens": targets[:, k].tolist(), "weights": weights[:, k].tolist()},
        )
        alone = _logprobs(client.forward([column], "cross_entropy").result())
        np.testing.assert_allclose(p[:, k], alone, atol=1e-5)
    assert math.isclose(output.metrics["loss:sum"], -(p * weights).sum(), rel_tol=1e-4)


def sparse_targets_are_read():
    client = _client()
    targets, weights = np.zeros((6, 40), dtype=np.int64), np.zeros((6, 40), dtype=np.float32)
    targets[:, 0], weights[:, 0] = TOKENS[1:], 1.0
    sparse = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": torch.tensor(targets), "weights": torch.tensor(weights)},
    )
    output = client.forward([sparse], "cross_entropy").result()
    plain = client.forward([_datum(weights=[1.0] * 6)], "cross_entropy").result()
    assert math.isclose(output.metrics["loss:sum"], plain.metrics["loss:sum"], rel_tol=1e-5)


async def async_training_takes_the_same_steps():
    one, other = _client(), await SERVICE.create_lora_training_client_async("tiny", rank=8, seed=1)
    _train(one, 2)
    for _ in range(2):
        await (await other.forward_backward_async([_datum()], "cross_entropy")).result_async()
        await (await other.optim_step_async(types.AdamParams(learning_rate=1e-2))).result_async()
    a = _logprobs(await (await one.forward_async([_datum()], "cross_entropy")).result_async())
    b = _logprobs(await (await other.forward_async([_datum()], "cross_entropy")).result_async())
    np.testing.assert_allclose(a, b, atol=1e-6)


def gradients_add_up_over_requests_until_the_step():
    whole, parts = _client(), _client()
    datums = [_datum([5 + i, 6, 7 + i, 8]) for i in range(4)]
    whole.forward_backward(datums, "cross_entropy").result()
    for datum in datums:
        parts.forward_backward([datum], "cross_entropy")
    norms = [c.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics["grad_norm"] for c in (whole, parts)]
    assert math.isclose(*norms, rel_tol=1e-4), norms


def a_batch_of_many_chunks_comes_back_in_order():
    client = _client()
    datums = [_datum([i % 400 + 3, (7 * i) % 400 + 3, 5]) for i in range(1500)]
    output = client.forward(datums, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 1500
    for index in (0, 777, 1400):
        alone = client.forward([datums[index]], "cross_entropy").result()
        np.testing.assert_allclose(_logprobs(output, index), _logprobs(alone), atol=1e-5)


def a_custom_loss_trains_like_the_built_in_one():
    built_in, custom = _client(), _client()
    datum = _datum(weights=[1.0] * 6)

    def loss(_data, logprobs):
        return -sum(lp.sum() for lp in logprobs), {"mine": 1.0}

    one = built_in.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]
    output = custom.forward_backward_custom([datum], loss).result()
    assert math.isclose(output.metrics["loss:sum"], one, rel_tol=1e-5)
    assert output.metrics["mine"] == 1.0
    norms = [c.optim_step(types.AdamParams()).result().metrics["grad_norm"] for c in (built_in, custom)]
    assert math.isclose(*norms, rel_tol=1e-4), norms


async def a_traced_custom_loss_runs_too():
    client = _client()

    def negative(logprobs, weights):
        loss = -(logprobs * weights).sum()
        return loss, {"custom/negative:sum": loss}

    handle = SERVICE.create_custom_loss(negative, {"logprobs": 1, "weights": 1})
    handle = await handle
    output = await (await client.forward_backward_custom_async([_datum()], handle)).result_async()
    p = _logprobs(client_forward := await (await client.forward_async([_datum()], "cross_entropy")).result_async())
    assert client_forward is not None
    assert math.isclose(output.metrics["loss:sum"], -p[1:].sum(), rel_tol=1e-4)


def a_step_follows_adamw():
    client = _client()
    client.forward_backward([_datum()], "cross_entropy").result()
    metrics = client.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=0.5)).result().metrics
    assert metrics["optimizer_step"] == 1
    assert metrics["grad_norm"] > 0
    before = client.forward([_datum()], "cross_entropy").result().metrics["loss:sum"]
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    after = client.forward([_datum()], "cross_entropy").result().metrics["loss:sum"]
    assert before == after, "a step clears the gradient, and a rate of 0 changes nothing"


def saved_state_goes_on_exactly():
    client, name = _client(), _name()
    _train(client, 2)
    path = client.save_state(name).result().path
    assert path == f"tinker://{client.model_id}/weights/{name}"
    _train(client, 2)
    expected = client.forward([_datum()], "cross_entropy").result()
    resumed = SERVICE.create_training_client_from_state_with_optimizer(path)
    _train(resumed, 2)
    found = resumed.forward([_datum()], "cross_entropy").result()
    np.testing.assert_array_equal(_logprobs(expected), _logprobs(found))
    client.load_state_with_optimizer(path).result()
    _train(client, 2)
    again = client.forward([_datum()], "cross_entropy").result()
    np.testing.assert_array_equal(_logprobs(expected), _logprobs(again))


async def saved_state_loads_without_the_optimizer_too():
    client = _client()
    _train(client, 2)
    path = (await (await client.save_state_async(_name())).result_async()).path
    saved = _logprobs(client.forward([_datum()], "cross_entropy").result())
    for other in (
        await SERVICE.create_training_client_from_state_async(path),
        await SERVICE.create_training_client_from_state_with_optimizer_async(path),
    ):
        np.testing.assert_array_equal(saved, _logprobs(await (await other.forward_async([_datum()], "cross_entropy"))))
    fresh = _client(seed=9)
    await (await fresh.load_state_async(path)).result_async()
    step = await (await fresh.optim_step_async(types.AdamParams())).result_async()
    assert step.metrics["optimizer_step"] == 1, "load_state starts a new optimizer"
    await (await fresh.load_state_with_optimizer_async(path)).result_async()
    step = await (await fresh.optim_step_async(types.AdamParams())).result_async()
    assert step.metrics["optimizer_step"] == 3


def state_without_optimizer_starts_a_client():
    client = _client(train_unembed=False)
    _train(client)
    path = client.save_state(_name()).result().path
    other = SERVICE.create_training_client_from_state(path)
    assert other.get_info().lora_rank == 8
    assert _logprobs(other.forward([_datum()], "cross_entropy").result()).shape == (6,)
    client.load_state(path).result()


def a_name_that_is_taken_is_refused_and_may_be_overwritten():
    client, name = _client(), _name()
    path = client.save_state(name).result().path
    assert "exists" in _refused(lambda: client.save_state(name).result(), tinker.RequestFailedError)
    _train(client)
    assert client.save_state(name, overwrite=True).result().path == path
    client.load_state(path).result()


def sampler_weights_sample_what_was_trained():
    client = _client()
    _train(client, 3)
    path = client.save_weights_for_sampler(_name()).result().path
    prompt = types.ModelInput.from_ints(TOKENS)
    trained = _logprobs(client.forward([_datum()], "cross_entropy").result())
    for sampler in (
        SERVICE.create_sampling_client(model_path=path),
        client.create_sampling_client(path),
        client.save_weights_and_get_sampling_client(),
    ):
        scored = sampler.compute_logprobs(prompt).result()
        assert scored[0] is None
        np.testing.assert_allclose(scored[1:], trained, atol=1e-4)


async def sampler_weights_work_async():
    client = _client()
    _train(client, 1)
    path = (await (await client.save_weights_for_sampler_async(_name(), ttl_seconds=3600)).result_async()).path
    prompt = types.ModelInput.from_ints(TOKENS)
    samplers = [
        await SERVICE.create_sampling_client_async(model_path=path),
        await client.create_sampling_client_async(path),
        await client.save_weights_and_get_sampling_client_async(),
    ]
    rows = [await sampler.compute_logprobs_async(prompt) for sampler in samplers]
    np.testing.assert_allclose(rows[0][1:], rows[1][1:], atol=1e-6)
    np.testing.assert_allclose(rows[0][1:], rows[2][1:], atol=1e-6)
    assert await samplers[0].get_base_model_async()


def samples_carry_the_trainers_logprobs():
    client = _client()
    _train(client, 2)
    sampler = client.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=6, seed=4, stop=[])
    response = sampler.sample(types.ModelInput.from_ints([5, 6]), 3, params).result()
    assert len(response.sequences) == 3
    for sequence in response.sequences:
        assert (sequence.stop_reason, len(sequence.tokens), len(sequence.logprobs)) == ("length", 6, 6)
        whole = [5, 6, *sequence.tokens]
        trained = _logprobs(client.forward([_datum(whole, weights=[1.0] * 7)], "cross_entropy").result())
        np.testing.assert_allclose(sequence.logprobs, trained[1:], atol=1e-4)
    assert len({sequence.sequence_id for sequence in response.sequences}) == 3


def a_seed_repeats_a_sample_and_a_stop_token_ends_it():
    sampler = SERVICE.create_sampling_client(base_model="tiny")
    prompt, params = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=12, seed=7, stop=[])
    one, two = (sampler.sample(prompt, 1, params).result().sequences[0].tokens for _ in range(2))
    assert one == two
    stopped = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=12, seed=7, stop=[one[3]])).result()
    first = one.index(one[3])
    assert stopped.sequences[0].tokens == one[: first + 1], "the stop token is part of the sample"
    assert stopped.sequences[0].stop_reason == "stop"


async def prompt_scores_come_in_every_form():
    sampler = await SERVICE.create_sampling_client_async(base_model="tiny")
    prompt = types.ModelInput.from_ints(TOKENS)
    scored = await sampler.compute_logprobs_async(prompt)
    asked = np.array([[t, 3] for t in TOKENS[1:]])
    response = await sampler.sample_async(
        prompt=prompt,
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=3, seed=1, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=4,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData(data=asked.ravel().tolist(), dtype="int64", shape=[6, 2]),
    )
    np.testing.assert_allclose(response.prompt_logprobs[1:], scored[1:], atol=1e-5)
    assert response.topk_prompt_logprobs_np.token_ids.shape == (7, 4)
    assert response.topk_prompt_logprobs_np.logprobs[0, 0] == np.float32(-99999.0)
    np.testing.assert_allclose(response.target_prompt_logprobs.to_numpy()[:, 0], scored[1:], atol=1e-4)
    assert response.sequences[0].topk_logprobs_np.token_ids.shape == (3, 2)
    drawn = await sampler.sample_async(
        prompt=prompt,
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1, temperature=0.0),
        topk_prompt_logprobs=1,
        prompt_alt_tokens_k=2,
    )
    best = drawn.topk_prompt_logprobs_np
    alternatives = drawn.prompt_alt_tokens
    assert alternatives.tokens.to_numpy().tolist() == [[token, token] for token in best.token_ids[1:, 0].tolist()]
    np.testing.assert_allclose(alternatives.logprobs.to_numpy()[:, 1], best.logprobs[1:, 0], atol=1e-5)
    last = await sampler.sample_async(
        prompt=prompt,
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=2,
    )
    assert last.prompt_logprobs[:5] == [None] * 5
    np.testing.assert_allclose(last.prompt_logprobs[5:], scored[5:], atol=1e-5)


def a_sampler_travels_to_other_processes():
    sampler = SERVICE.create_sampling_client(base_model="tiny")
    prompt, params = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=4, seed=7)
    tokens = sampler.sample(prompt, 1, params).result().sequences[0].tokens
    by_handle = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
    by_pickle = pickle.loads(pickle.dumps(sampler))  # noqa: S301 - it is our own
    for other in (by_handle, by_pickle):
        assert other.sample(prompt, 1, params).result().sequences[0].tokens == tokens


def tokenizers_and_names_come_from_the_server():
    client = _client()
    info = client.get_info()
    assert (info.model_id, info.lora_rank, info.model_name) == (client.model_id, 8, "tiny")
    sampler = SERVICE.create_sampling_client(base_model="tiny")
    assert len(client.get_tokenizer()) == len(sampler.get_tokenizer()) > 100
    assert sampler.get_base_model()


async def get_info_is_async_too():
    assert (await (_client()).get_info_async()).is_lora


def two_clients_do_not_touch_each_other():
    alone, first, second = _client(), _client(), _client(rank=4, seed=2)
    _train(alone, 3)
    expected = _logprobs(alone.forward([_datum()], "cross_entropy").result())
    futures = []
    for _ in range(3):  # interleaved, so that their batches share passes
        for client, tokens in ((first, TOKENS), (second, TOKENS[::-1])):
            futures.append(client.forward_backward([_datum(tokens)], "cross_entropy"))
            futures.append(client.optim_step(types.AdamParams(learning_rate=1e-2)))
    for future in futures:
        future.result()
    np.testing.assert_allclose(_logprobs(first.forward([_datum()], "cross_entropy").result()), expected, atol=2e-5)
    other = _logprobs(second.forward([_datum()], "cross_entropy").result())
    assert np.abs(other - expected).max() > 0.1


def bad_data_fails_alone_and_the_client_goes_on():
    client = _client()
    for loss, datum, words in (
        ("cross_entropy", _datum([5, 6, 10**6]), "token id"),
        ("ppo", _datum(), "logprobs"),
        ("no_such_loss", _datum(), "unknown"),
    ):
        call = partial(lambda d, name: client.forward_backward([d], name).result(), datum, loss)
        assert words in _refused(call, tinker.RequestFailedError, tinker.BadRequestError)
    _train(client)
    assert client.forward([_datum()], "cross_entropy").result().metrics["loss:sum"] > 0


def what_does_not_exist_is_not_found():
    for wrong in (
        lambda: SERVICE.create_sampling_client(model_path="tinker://nobody/weights/nothing"),
        lambda: REST.get_training_run("nobody").result(),
        lambda: REST.get_weights_info_by_tinker_path("tinker://nobody/weights/x").result(),
        lambda: REST.get_session("nobody").result(),
    ):
        _refused(wrong, tinker.NotFoundError)


def a_base_model_that_is_not_served_is_refused():
    assert "tiny" in _refused(lambda: SERVICE.create_lora_training_client("no/such-model"), tinker.BadRequestError)


def runs_and_checkpoints_are_listed():
    client = _client(user_metadata={"renderer_name": "chatml"})
    weights = client.save_state("w", user_metadata={"step": "1"}).result().path
    sampler = client.save_weights_for_sampler("s").result().path
    run = REST.get_training_run(client.model_id).result()
    assert (run.base_model, run.lora_rank, run.user_metadata["renderer_name"]) == ("tiny", 8, "chatml")
    assert (run.last_checkpoint.tinker_path, run.last_sampler_checkpoint.tinker_path) == (weights, sampler)
    assert REST.get_training_run_by_tinker_path(weights).result().training_run_id == client.model_id
    listed = REST.list_checkpoints(client.model_id).result().checkpoints
    assert {c.tinker_path for c in listed} == {weights, sampler}
    assert {c.checkpoint_id for c in listed} == {"weights/w", "sampler_weights/s"}
    assert all(c.size_bytes > 0 for c in listed)
    newest = REST.list_user_checkpoints(limit=1).result()
    assert newest.checkpoints[0].tinker_path == sampler
    page = REST.list_training_runs(limit=1, offset=0).result()
    assert page.training_runs[0].training_run_id == client.model_id
    assert page.cursor.total_count > 1
    info = REST.get_weights_info_by_tinker_path(sampler).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("tiny", 8, True)


async def runs_and_checkpoints_are_listed_async():
    client = _client()
    path = client.save_state("w").result().path
    assert (await REST.get_training_run_async(client.model_id)).training_run_id == client.model_id
    assert (await REST.get_training_run_by_tinker_path_async(path)).training_run_id == client.model_id
    assert (await REST.list_training_runs_async(limit=2)).training_runs
    assert len((await REST.list_checkpoints_async(client.model_id)).checkpoints) == 1
    assert (await REST.list_user_checkpoints_async(limit=5)).checkpoints


def checkpoints_are_published_timed_and_deleted():
    client = _client()
    path = client.save_state("w").result().path
    REST.publish_checkpoint_from_tinker_path(path).result()
    assert REST.list_checkpoints(client.model_id).result().checkpoints[0].public
    REST.unpublish_checkpoint_from_tinker_path(path).result()
    REST.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    (row,) = REST.list_checkpoints(client.model_id).result().checkpoints
    left = row.expires_at - datetime.datetime.now(datetime.UTC)
    assert not row.public
    assert 3500 < left.total_seconds() <= 3600
    REST.set_checkpoint_ttl_from_tinker_path(path, None).result()
    REST.delete_checkpoint_from_tinker_path(path).result()
    assert REST.list_checkpoints(client.model_id).result().checkpoints == []
    client.save_state("v").result()
    REST.delete_checkpoint(client.model_id, "weights/v").result()
    assert "not found" in _refused(lambda: client.load_state(path).result(), tinker.RequestFailedError)


async def checkpoints_are_published_timed_and_deleted_async():
    client = _client()
    path = client.save_state("w").result().path
    await REST.publish_checkpoint_from_tinker_path_async(path)
    await REST.unpublish_checkpoint_from_tinker_path_async(path)
    await REST.set_checkpoint_ttl_from_tinker_path_async(path, 7200)
    await REST.delete_checkpoint_from_tinker_path_async(path)
    client.save_state("v").result()
    await REST.delete_checkpoint_async(client.model_id, "weights/v")
    assert (await REST.list_checkpoints_async(client.model_id)).checkpoints == []


async def external_weights_are_peft_files_behind_links():
    client = _client()
    path = client.save_weights_external("e").result().path
    assert path.endswith("external_weights/e")
    found = REST.get_external_weights_urls(path).result()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(found.urls)
    config = urllib.request.urlopen(found.urls["adapter_config.json"]).read()
    assert b'"LORA"' in config
    assert b'"base_model_name_or_path": "tiny"' in config, "no path of the server's machine leaves it"
    path = (await (await client.save_weights_external_async("f")).result_async()).path
    again = await REST.get_external_weights_urls_async(path)
    assert urllib.request.urlopen(again.urls["adapter_model.safetensors"]).read(8)


async def a_copy_is_ones_own():
    client = _client()
    _train(client)
    path = client.save_weights_for_sampler("s").result().path
    expected = SERVICE.create_sampling_client(model_path=path).compute_logprobs(types.ModelInput.from_ints(TOKENS))
    copies = [
        SERVICE.copy_weights(path, ttl_seconds=3600).result(),
        REST.copy_weights(path).result(),
        await REST.copy_weights_async(path),
    ]
    REST.delete_checkpoint_from_tinker_path(path).result()
    for copy in copies:
        sampler = SERVICE.create_sampling_client(model_path=copy)
        np.testing.assert_array_equal(
            expected.result()[1:], sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:]
        )


def sessions_know_their_runs_and_samplers():
    client = _client()
    sampler = client.save_weights_and_get_sampling_client()
    session_id = client.model_id.partition(":")[0]
    session = REST.get_session(session_id).result()
    assert client.model_id in session.training_run_ids
    assert session.user_metadata == {"purpose": "contract"}
    assert session_id in REST.list_sessions(limit=50).result().sessions
    row = REST.get_sampler(f"{session_id}:sample:{len(session.sampler_ids) - 1}").result()
    assert row.sampler_id in session.sampler_ids
    assert sampler is not None
    REST.assign_session_project(session_id, "project-1").result()
    request = types.SessionSearchRequest(session_id=session_id)
    (found,) = REST.search_sessions(request).result().sessions
    assert (found.project_id, found.status.type) == ("project-1", "active")


async def sessions_are_async_too():
    client = _client()
    session_id = client.model_id.partition(":")[0]
    sampler = await client.save_weights_and_get_sampling_client_async()
    assert client.model_id in (await REST.get_session_async(session_id)).training_run_ids
    assert session_id in (await REST.list_sessions_async(limit=50)).sessions
    await REST.assign_session_project_async(session_id, "project-2")
    page = await REST.search_sessions_async(types.SessionSearchRequest(user_metadata={"purpose": "contract"}))
    assert session_id in [s.session_id for s in page.sessions]
    sampler_id = (await REST.get_session_async(session_id)).sampler_ids[-1]
    assert (await REST.get_sampler_async(sampler_id)).sampler_id == sampler_id
    assert sampler.get_telemetry() is not None


def the_account_calls_answer():
    me = REST.whoami().result()
    assert me.user_urn
    assert me.org_urn
    day = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    assert REST.get_audit_log().result().entries == []
    assert _on_sdk_loop(REST.get_audit_log_async()).entries == []
    assert REST.get_billing_usage(day, day + datetime.timedelta(days=1)).result().data == []
    assert _on_sdk_loop(REST.get_billing_usage_async(day, day + datetime.timedelta(days=1))).data == []
    assert REST.get_current_checkpoint_storage_usage().result().data[0].size_bytes > 0
    assert _on_sdk_loop(REST.get_current_checkpoint_storage_usage_async()).data[0].checkpoint_count > 0


def a_trace_is_refused_with_a_reason():
    session_id = _client().model_id.partition(":")[0]
    assert "no traces" in _refused(lambda: REST.export_session_trace(session_id).result(), RuntimeError)
    coroutine = REST.export_session_trace_async(session_id)
    assert "no traces" in _refused(lambda: asyncio.run(coroutine), RuntimeError)


def a_closed_session_is_finished():
    service = tinker.ServiceClient()
    client = service.create_lora_training_client("tiny", rank=4)
    session_id = client.model_id.partition(":")[0]
    assert service.get_console_url()
    assert client.get_console_url()
    assert service.get_telemetry() is not None
    assert client.get_telemetry() is not None
    assert REST.get_telemetry() is None or REST.get_telemetry()
    assert service.create_rest_client().get_session(session_id).result().training_run_ids == [client.model_id]
    service.close("success", detail="done").result()
    (found,) = REST.search_sessions(types.SessionSearchRequest(session_id=session_id)).result().sessions
    assert (found.status.type, found.status.reason.type) == ("client_finished", "success")


def a_critic_is_asked_for_in_the_metadata():
    """An extension of ours that needs nothing but what the SDK passes through."""
    critic = _client(rank=4, user_metadata={"turnwise.kind": "critic"})
    returns = [0.0, 0.5, 1.0, -0.5, 0.25, 2.0]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:6]),
        loss_fn_inputs={
            key: types.TensorData(data=data, dtype="float32", shape=[6])
            for key, data in (("mask", [1.0] * 6), ("returns", returns))
        },
    )
    losses = []
    for _ in range(10):
        output = critic.forward_backward([datum], "value").result()
        critic.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(output.metrics["loss:sum"])
    assert math.isclose(losses[0], sum(r * r for r in returns) / 2, rel_tol=1e-5)
    assert losses[-1] < losses[0]
    assert len(output.loss_fn_outputs[0]["values"].tolist()) == 6


def no_public_method_was_left_out():
    CALLED["ServiceClient"].add("holder")
    internal = {"create", "on_queue_state_change"}  # called by the SDK itself, on the way of others
    left = {name: sorted(ALL[name] - CALLED[name] - internal) for name in ALL}
    assert not any(left.values()), left
