"""How outcome models read conversations: several at once, and only a part of one that is too long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from turnwise.client.fake import ScriptedSampler
from turnwise.client.futures import ApiFuture
from turnwise.client.local import ServiceClient
from turnwise.envs.base import assistant, user
from turnwise.models.tokenizer import load_tokenizer
from turnwise.outcomes.labelled import LabelledAttempt, write_labelled
from turnwise.outcomes.model import OutcomeInfo, OutcomeModel, cut_middle
from turnwise.renderers import get_renderer
from turnwise.training.orm import OrmConfig, score_conversations, train_outcome_model
from turnwise.trajectory import Message
from turnwise.types import SampleRequest, SampleResponse

LONGER_THAN_TINY_S = 60.0


class AnswersWhenAllHaveAsked(ScriptedSampler):
    """Answers no question before `count` were asked."""

    def __init__(self, reply: Sequence[int], count: int, tokenizer: Any) -> None:
        super().__init__(lambda _: list(reply), tokenizer=tokenizer)
        self._count = count
        self._waiting: list[tuple[Future[SampleResponse], SampleResponse]] = []

    def submit(self, request: SampleRequest) -> ApiFuture[SampleResponse]:
        future: Future[SampleResponse] = Future()
        self._waiting.append((future, super().submit(request).result()))
        if len(self._waiting) == self._count:
            for one, response in self._waiting:
                one.set_result(response)
        return ApiFuture(future, "sample")


def test_a_generative_model_is_asked_about_all_conversations_at_once(tiny_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_dir)
    reply = get_renderer(tokenizer).encode_reply(assistant("The door is open. Verdict: yes"))
    sampler = AnswersWhenAllHaveAsked(reply, 3, tokenizer)

    class Source:
        def create_sampling_client(self, **_: object) -> ScriptedSampler:
            return sampler

    info = OutcomeInfo(kind="generative", base_model="tiny", checkpoint="none", worlds=("w",), num_votes=2)
    model = OutcomeModel(tmp_path, info)
    model.attach(cast(Any, Source()))
    conversations = [[user(f"go {number}"), assistant("gone")] for number in range(3)]
    assert asyncio.run(asyncio.wait_for(model.score(conversations), LONGER_THAN_TINY_S)) == [1.0, 1.0, 1.0]


def _votes(tiny_dir: Path, directory: Path, *said: str) -> float:
    """The score of a generative model whose votes are these."""
    tokenizer = load_tokenizer(tiny_dir)
    replies = iter([get_renderer(tokenizer).encode_reply(assistant(text)) for text in said])

    class Source:
        def create_sampling_client(self, **_: object) -> ScriptedSampler:
            return ScriptedSampler(lambda _: next(replies), tokenizer=tokenizer)

    info = OutcomeInfo(kind="generative", base_model="tiny", checkpoint="none", worlds=("w",), num_votes=len(said))
    model = OutcomeModel(directory, info)
    model.attach(cast(Any, Source()))
    return asyncio.run(model.score([[user("go"), assistant("gone")]]))[0]


def test_a_vote_without_a_verdict_is_no_yes(tiny_dir: Path, tmp_path: Path) -> None:
    assert _votes(tiny_dir, tmp_path, "Verdict: yes", "well", "Verdict: no", "well") == 0.25
    assert _votes(tiny_dir, tmp_path, "well", "well") == 0


def test_of_a_long_conversation_the_beginning_and_the_newest_part_are_kept() -> None:
    ids = list(range(100))
    assert cut_middle(ids, 0) == cut_middle(ids, 100) == ids
    assert cut_middle(ids, 8) == [0, 1, 94, 95, 96, 97, 98, 99]


def _attempt(number: int, num_turns: int) -> LabelledAttempt:
    turns: list[Message] = []
    for turn in range(num_turns):
        turns += [assistant(f"go to room {turn}"), user("It is dark here, and the door is shut.")]
    is_right = number % 2 == 0
    messages = (user(f"Find the key number {number}."), *turns, assistant("yes" if is_right else "no"))
    return LabelledAttempt(world="w", task_id=str(number), messages=messages, label=is_right)


@pytest.mark.model
def test_a_classifier_learns_from_and_scores_attempts_longer_than_its_context(tiny_dir: Path, tmp_path: Path) -> None:
    attempts = [_attempt(number, num_turns=80 if number < 30 else 1) for number in range(40)]
    renderer = get_renderer(load_tokenizer(tiny_dir))
    assert [len(renderer.start(list(one.messages))) > 1024 for one in attempts] == [True] * 30 + [False] * 10
    write_labelled(tmp_path / "data.jsonl", attempts)
    options = OrmConfig(model="tiny", steps=1, batch_size=4)
    result = train_outcome_model([tmp_path / "data.jsonl"], tmp_path / "orm", options)
    assert (result.model.info.max_prompt_tokens, result.model.info.num_cut) == (1024, 30)
    model = result.model
    with ServiceClient() as service:
        scores = score_conversations(model, [attempts[0].messages, attempts[-1].messages], service)
        assert [model.cuts(one.messages) for one in (attempts[0], attempts[-1])] == [True, False]
    assert all(0 <= score <= 1 for score in scores)
