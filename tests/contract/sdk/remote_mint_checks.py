"""The remote client with MinT's SDK and an `sk-` key, in that SDK's own environment; names are claims."""

import os

from turnwise import types
from turnwise.client.remote import RemoteServiceClient

SERVICE = RemoteServiceClient(os.environ["MINT_BASE_URL"])
IDS = [5, 6, 7, 8, 9]


def a_key_of_mints_is_taken_by_mints_sdk():
    import mint
    import tinker

    assert tinker.__version__.startswith("0.22")
    assert SERVICE._connection.sdk is mint


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
