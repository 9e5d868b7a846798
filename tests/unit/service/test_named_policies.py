"""Policies that are served by name: who answers, what is listed, and what stays when their files change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

from turnwise.client.checkpoints import CheckpointStore
from turnwise.errors import ConfigError
from turnwise.renderers import get_renderer
from turnwise.service.named_policies import ChatSettings, NamedPolicy, check_names
from turnwise.trajectory import Message
from unit.service.conftest import Serve, Wire

HELLO = [{"role": "user", "content": "Say a number."}]


async def trained(wire: Wire, place: Path, rate: float) -> Path:
    """A checkpoint, as a run has them."""
    model = await wire.model()
    await wire.result(await wire.train(model, 1))
    await wire.result(await wire.step(model, 2, rate))
    saved = await wire.result(await wire.ok("/save_weights", {"model_id": model, "seq_id": 3, "path": "one"}))
    files = CheckpointStore(wire.service.config.data_dir).directory(saved["path"])
    return Path(shutil.copytree(files, place))


async def logprobs(wire: Wire, model: str) -> Any:
    """What the policy makes of one fixed text."""
    body = {"model": model, "prompt": [5, 6, 7, 8, 9], "echo": True, "max_tokens": 0, "logprobs": 0}
    answer = await wire.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"][1:]


async def test_each_name_is_another_policy_on_the_openai_routes_and_for_the_sdks(serve: Serve, tmp_path: Path) -> None:
    async with serve() as wire:
        places = [await trained(wire, tmp_path / name, rate) for name, rate in (("a", 1e-2), ("b", 5e-2))]
    policies = [NamedPolicy(name=place.name, base_model="tiny", directory=place) for place in places]
    async with serve(policies=policies) as wire:
        listed = [model["id"] for model in (await wire.http.get("/v1/models")).json()["data"]]
        assert listed == ["tiny", "a", "b"]
        base, one, other = [await logprobs(wire, name) for name in listed]
        assert len({tuple(base), tuple(one), tuple(other)}) == 3
        chat = {"model": "a", "messages": HELLO, "max_tokens": 4}
        said = (await wire.http.post("/v1/chat/completions", json=chat)).json()
        assert said["model"] == "a"
        body = {"session_id": await wire.session(), "sampling_session_seq_id": 0, "base_model": "b"}
        sampler = (await wire.ok("/create_sampling_session", body))["sampling_session_id"]
        ask = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [5, 6, 7, 8, 9]}]}}
        ask |= {"prompt_logprobs": True, "sampling_params": {"max_tokens": 1}}
        sampled = await wire.result(await wire.ok("/asample", ask))
        assert sampled["prompt_logprobs"][1:] == pytest.approx(other)


async def test_a_policy_keeps_its_weights_while_its_run_goes_on(serve: Serve, tmp_path: Path) -> None:
    async with serve() as wire:
        place = await trained(wire, tmp_path / "a", 1e-2)
        changed = await trained(wire, tmp_path / "changed", 5e-2)
    policy = NamedPolicy(name="a", base_model="tiny", directory=place)
    async with serve(policies=[policy]) as wire:
        shutil.rmtree(place)
        changed.rename(place)
        before = await logprobs(wire, "a")
    async with serve(policies=[policy]) as wire:
        assert await logprobs(wire, "a") != before, "a restart takes the weights that are there now"
    async with serve() as wire:
        answer = await wire.http.post("/v1/completions", json={"model": "a", "prompt": [5], "max_tokens": 1})
        assert answer.status_code == 404
        assert "no model 'a'" in answer.json()["error"]["message"]


async def test_a_chat_is_written_as_the_run_wrote_it_and_ends_at_the_runs_own_stops(
    serve: Serve, tmp_path: Path, tiny_dir: Path
) -> None:
    async with serve() as wire:
        place = await trained(wire, tmp_path / "a", 1e-2)
    run = ChatSettings(strip_thinking=True, stop=("e", " "))
    policies = [
        NamedPolicy(name=name, base_model="tiny", directory=place, chat=chat)
        for name, chat in (("plain", ChatSettings()), ("trained", run))
    ]

    async def chat(model: str, messages: list[dict[str, str]]) -> tuple[list[int], list[int], str]:
        ask = {"model": model, "messages": messages, "max_tokens": 60, "seed": 3, "return_token_ids": True}
        answer = (await wire.http.post("/v1/chat/completions", json=ask)).json()
        (choice,) = answer["choices"]
        return answer["prompt_token_ids"], choice["token_ids"], choice["message"]["content"]

    thought = [*HELLO, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n5"}, *HELLO]
    async with serve(policies=policies) as wire:
        (prompt, whole, _), (same, ids, text) = [await chat(name, HELLO) for name in ("plain", "trained")]
        (kept, _, _), (stripped, _, _) = [await chat(name, thought) for name in ("plain", "trained")]
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    messages = [Message(role=cast(Any, one["role"]), content=one["content"]) for one in thought]
    assert [kept, stripped] == [get_renderer(tokenizer, strip_thinking=on).start(messages) for on in (False, True)]
    assert len(stripped) < len(kept)
    assert same == prompt
    assert ids == whole[: len(ids)]
    assert len(ids) < len(whole)
    before, said = (tokenizer.decode(tokens) for tokens in (ids[:-1], ids))
    assert not any(stop in before for stop in run.stop)
    assert any(stop in said for stop in run.stop)
    assert text == said, "the stop stays in the reply, as in training"


async def test_a_policy_cannot_be_trained_as_a_base_model(serve: Serve, tmp_path: Path) -> None:
    async with serve() as wire:
        place = await trained(wire, tmp_path / "a", 1e-2)
    async with serve(policies=[NamedPolicy(name="a", base_model="tiny", directory=place)]) as wire:
        body = {"session_id": await wire.session(), "model_seq_id": 0, "base_model": "a", "lora_config": {"rank": 4}}
        answer = await wire.post("/create_model", body)
    assert answer.status_code == 400
    assert "its base model is tiny" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a", "a"), "are both called 'a'"),
        (("tiny",), "the base model tiny are both called 'tiny'"),
        (("a b",), "cannot be the name of a policy"),
    ],
)
def test_names_that_clients_could_not_use_are_refused(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    policies = [NamedPolicy(name=name, base_model="tiny", directory=tmp_path / str(i)) for i, name in enumerate(names)]
    with pytest.raises(ConfigError, match=message):
        check_names(policies, ["tiny"])
