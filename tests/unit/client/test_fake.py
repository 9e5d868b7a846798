"""The shipped doubles stand where the real clients stand."""

from __future__ import annotations

import math

import pytest

from turnwise.client import base
from turnwise.client.fake import RecordingTrainer, ScriptedSampler
from turnwise.errors import ConfigError
from turnwise.types import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams, TensorData

PROMPT = ModelInput.from_ints([1, 2, 3])


async def test_a_script_is_replied_in_order_and_ends_loudly() -> None:
    sampler = ScriptedSampler([[5, 6], SampledSequence("stop", [7], [-0.25]), [8, 9]], policy_version=4)
    seam: base.SamplingClient = sampler
    first = (await seam.sample_async(PROMPT, num_samples=2)).sequences
    assert [sequence.tokens for sequence in first] == [[5, 6], [7]]
    assert first[1].logprobs == [-0.25]
    cut = seam.sample(PROMPT, 1, SamplingParams(max_tokens=1)).result()
    assert (cut.sequences[0].tokens, cut.sequences[0].stop_reason, cut.policy_version) == ([8], "length", 4)
    with pytest.raises(ConfigError, match="3 replies are used up"):
        await seam.sample(PROMPT)
    assert sampler.prompts == [[1, 2, 3]] * 3


async def test_a_function_may_answer_the_prompt() -> None:
    sampler = ScriptedSampler(lambda prompt: prompt[::-1], logprob=-2.0)
    response = await sampler.sample_async(PROMPT, include_prompt_logprobs=True)
    assert response.sequences[0].tokens == [3, 2, 1]
    assert response.prompt_logprobs == [None, -2.0, -2.0]
    assert await sampler.compute_logprobs_async(PROMPT) == [None, -2.0, -2.0]


async def test_a_trainer_records_what_it_was_asked() -> None:
    sampler = ScriptedSampler([[5]])
    trainer = RecordingTrainer(sampler)
    seam: base.TrainingClient = trainer
    datum = Datum(PROMPT, {"target_tokens": TensorData([2, 3, 4], "int64")})
    output = await seam.forward_backward([datum], "ppo")
    assert math.isnan(output.loss)
    await (await seam.optim_step_async(AdamParams(learning_rate=1.0)))
    saved = await seam.save_state_async("s").result_async()
    assert saved.path == "tinker://recorded/weights/s"
    assert await seam.save_weights_and_get_sampling_client_async() is sampler
    assert trainer.datums == [datum]
    assert [call.method for call in trainer.calls] == [
        "forward_backward",
        "optim_step",
        "save_state",
        "save_weights_and_get_sampling_client",
    ]
    assert trainer.calls[1].arguments["adam_params"].learning_rate == 1.0
