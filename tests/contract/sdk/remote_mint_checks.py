"""The remote client with MinT's SDK and an `sk-` key, in that SDK's own environment; names are claims."""

import os

import numpy as np

from turnwise import types
from turnwise.client.remote import RemoteServiceClient

SERVICE = RemoteServiceClient(os.environ["MINT_BASE_URL"])
IDS = [5, 6, 7, 8, 9]


def a_key_of_mints_is_taken_by_mints_sdk():
    import tinker

    assert tinker.__version__.startswith("0.22")
    assert SERVICE.sdk_name == "mint"


def it_trains_saves_and_samples():
    trainer = SERVICE.create_lora_training_client("tiny", rank=4, seed=1)
    datum = types.Datum(
        types.ModelInput.from_ints(IDS[:-1]), {"target_tokens": IDS[1:], "weights": [0.0, 1.0, 1.0, 1.0]}
    )
    first = trainer.forward_backward([datum], "cross_entropy").result(60)
    assert trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result(60).metrics["grad_norm"] > 0
    second = trainer.forward([datum], "cross_entropy").result(60)
    assert second.metrics["loss:sum"] < first.metrics["loss:sum"]
    sampler = trainer.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=4, seed=1)
    response = sampler.sample(types.ModelInput.from_ints(IDS), 1, params, include_prompt_logprobs=True).result(60)
    assert len(response.sequences[0].tokens) == len(response.sequences[0].logprobs) == 4
    assert len(response.prompt_logprobs) == 5
    path = trainer.save_state("m").result(60).path
    again = SERVICE.create_training_client_from_state_with_optimizer(path)
    assert again.get_info().lora_rank == 4
    SERVICE.delete_checkpoint(path)


def a_critic_learns_and_comes_back_from_its_checkpoint():
    critic = SERVICE.create_critic_training_client("tiny", rank=4, seed=1)
    returns = np.array([0.5, 1.0, -0.25, 2.0], np.float32)
    lesson = types.Datum(types.ModelInput.from_ints(IDS[:-1]), {"mask": np.ones(4, np.float32), "returns": returns})
    losses = []
    for _ in range(3):
        losses.append(critic.forward_backward([lesson], "value").result(60).metrics["loss:sum"])
        critic.optim_step(types.AdamParams(learning_rate=1e-2)).result(60)
    np.testing.assert_allclose(losses[0], (returns**2).sum() / 2, rtol=1e-5)
    assert losses[-1] < losses[0]
    path = critic.save_state("c", user_metadata={"left": "out"}).result(60).path
    again = SERVICE.create_training_client_from_state_with_optimizer(path)
    one, other = (
        c.forward([lesson], "value").result(60).loss_fn_outputs[0]["values"].tolist() for c in (critic, again)
    )
    assert one == other
    assert any(one)
