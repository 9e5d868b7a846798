"""A judge against a real local HTTP server, and against a sampler of ours."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from local_server import serving, unused_address
from turnwise.client.fake import ScriptedSampler
from turnwise.envs.base import assistant, user
from turnwise.errors import AttemptFailed, ConfigError, DataError, Party
from turnwise.judges import AddressModel, Judge, JudgeLimits, Rubric, SamplerModel
from turnwise.judges.cache import FileCache
from turnwise.judges.judge import Fallback
from turnwise.models.tiny import END_TOKEN
from turnwise.renderers.choose import get_renderer

DIALOGUE = [user("Say hello."), assistant("Hello!")]
RUBRIC = Rubric(criteria="It is polite.")


def completion(text: object) -> str:
    return json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]})


class Provider:
    """An OpenAI-compatible address that answers from a script, the last entry for ever.

    An entry is the text of a completion, or (status, body), or (status, body, headers).
    """

    def __init__(self, *script: Any, hold_s: float = 0.0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.most_at_once = 0
        self._at_once = 0
        self._script = script
        self._hold_s = hold_s
        self.app = FastAPI()
        self.app.post("/v1/chat/completions", response_model=None)(self.complete)

    async def complete(self, request: Request) -> Response:
        self.times.append(time.monotonic())
        number = len(self.requests)
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(self._hold_s)
        self._at_once -= 1
        entry: Any = self._script[min(number, len(self._script) - 1)]
        entry = entry() if callable(entry) else entry
        status, body, *rest = (200, completion(entry)) if isinstance(entry, str) else entry
        headers = dict(rest[0]) if rest else {}
        return Response(body, status_code=status, headers=headers, media_type="application/json")


@contextmanager
def judge_at(
    provider: Provider, *, cache: FileCache | None = None, api_key: str = "", **limits: Any
) -> Iterator[Judge]:
    with serving(provider.app) as address:
        model = AddressModel(base_url=f"{address}/v1", model="small", api_key=api_key, timeout_s=30.0)
        yield Judge(model, RUBRIC, cache=cache, limits=JudgeLimits(**limits))


@pytest.fixture(autouse=True)
def _short_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.judges.judge.BACK_OFF_S", 0.01)


async def test_a_score_comes_from_the_address_with_the_key_and_the_rubric() -> None:
    provider = Provider("Polite.\nScore: 8")
    with judge_at(provider, api_key="s3cret") as judge:
        verdict = await judge.score(DIALOGUE)
    assert (verdict.score, verdict.answer, verdict.problem) == (0.8, "Polite.\nScore: 8", "")
    (request,) = provider.requests
    assert request["model"] == "small"
    assert request["temperature"] == 0
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert "It is polite." in request["messages"][0]["content"]
    assert "[assistant] Hello!" in request["messages"][1]["content"]
    assert provider.keys == ["Bearer s3cret"]


def test_the_key_is_not_printed() -> None:
    assert "s3cret" not in repr(AddressModel(base_url="http://x/v1", model="m", api_key="s3cret"))


async def test_the_same_question_is_asked_once() -> None:
    provider = Provider("Score: 5")
    with judge_at(provider) as judge:
        first = await judge.score(DIALOGUE)
        again = await judge.score(DIALOGUE)
        other = await judge.score([*DIALOGUE[:1], assistant("Hi.")])
    assert first == again
    assert other.score == 0.5
    assert len(provider.requests) == 2
    assert dict(judge.counts) == {"scores": 3, "requests": 2, "cache_hits": 1}


async def test_attempts_that_ask_the_same_at_once_share_one_request() -> None:
    provider = Provider("Score: 5", hold_s=0.1)
    with judge_at(provider) as judge:
        verdicts = await asyncio.gather(*(judge.score(DIALOGUE) for _ in range(5)))
    assert [verdict.score for verdict in verdicts] == [0.5] * 5
    assert len(provider.requests) == 1
    assert judge.counts["shared"] == 4


async def test_one_who_leaves_does_not_take_the_answer_from_the_others() -> None:
    provider = Provider("Score: 5", hold_s=0.2)
    with judge_at(provider) as judge:
        first = asyncio.create_task(judge.score(DIALOGUE))
        second = asyncio.create_task(judge.score(DIALOGUE))
        while not provider.requests:
            await asyncio.sleep(0.01)
        first.cancel()
        assert (await second).score == 0.5
    assert first.cancelled()


async def test_a_file_spares_the_next_run_the_question(tmp_path: Path) -> None:
    provider = Provider("Score: 5", "Score: 9")
    with serving(provider.app) as address:
        model = AddressModel(base_url=f"{address}/v1", model="small")
        for _ in range(2):
            cache = FileCache(tmp_path / "judge.db")
            assert (await Judge(model, RUBRIC, cache=cache).score(DIALOGUE)).score == 0.5
            cache.close()
    assert len(provider.requests) == 1


async def test_a_busy_address_is_asked_again_when_it_says() -> None:
    provider = Provider((429, "slow down", {"Retry-After": "2"}), (503, "busy"), "Score: 6")
    with judge_at(provider) as judge:
        assert (await judge.score(DIALOGUE)).score == 0.6
    first, second, third = provider.times
    assert 2.0 <= second - first < 20
    assert third - second < 2, "a refusal that names no time is not waited for as long"
    assert judge.counts["failed_requests"] == 2


async def test_retry_after_may_be_a_date() -> None:
    def refuse() -> tuple[int, str, dict[str, str]]:
        soon = format_datetime(datetime.now(UTC) + timedelta(seconds=3), usegmt=True)
        return 429, "slow down", {"Retry-After": soon}

    provider = Provider(refuse, "Score: 6")
    with judge_at(provider) as judge:
        assert (await judge.score(DIALOGUE)).score == 0.6
    assert 0.5 < provider.times[1] - provider.times[0] < 20


async def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    provider = Provider((429, "slow down", {"Retry-After": "3600"}))
    with judge_at(provider, deadline_s=5.0) as judge, pytest.raises(AttemptFailed, match="asks for 3600 s"):
        await judge.score(DIALOGUE)
    assert len(provider.requests) == 1


@pytest.mark.parametrize(
    ("script", "num_requests", "problem"),
    [
        ([(500, "boom")], 3, "3 tries: status 500: boom"),
        ([(401, "who are you?")], 1, "status 401: who are you"),
        (["I would rather not say."], 3, "3 tries: no score in its answer 'I would rather not say.'"),
        (["Score: 99"], 3, "no score in its answer"),
        ([(200, "<html>")], 3, "it answered '<html>'; expected a chat completion"),
        ([(200, '{"choices": []}')], 3, "expected a chat completion"),
        ([(200, completion(None))], 3, "its message holds None; expected text"),
        ([(200, "[" * 5000)], 3, "expected a chat completion"),
    ],
)
async def test_no_score_is_the_judges_fault(script: list[Any], num_requests: int, problem: str) -> None:
    provider = Provider(*script)
    with judge_at(provider) as judge, pytest.raises(AttemptFailed) as failed:
        await judge.score(DIALOGUE)
    assert failed.value.party is Party.JUDGE
    assert problem in failed.value.detail
    assert len(provider.requests) == num_requests
    assert judge.counts["fallbacks"] == 1


async def test_an_answer_without_a_score_is_not_kept() -> None:
    provider = Provider("Hm.", "Hm.", "Hm.", "Score: 3")
    with judge_at(provider, fallback="skip") as judge:
        assert (await judge.score(DIALOGUE)).score is None
        assert (await judge.score(DIALOGUE)).score == 0.3


@pytest.mark.parametrize(("fallback", "value", "score"), [("value", 0.25, 0.25), ("skip", None, None)])
async def test_the_fallback_decides_what_a_missing_score_counts(
    fallback: Fallback, value: float | None, score: float | None
) -> None:
    provider = Provider((500, "boom"))
    with judge_at(provider, fallback=fallback, fallback_value=value) as judge:
        verdict = await judge.score(DIALOGUE)
    assert verdict.score == score
    assert verdict.problem == "3 tries: status 500: boom"


async def test_an_address_that_hangs_costs_the_deadline_and_no_more() -> None:
    provider = Provider("Score: 5", hold_s=3.0)
    with judge_at(provider, deadline_s=0.3) as judge, pytest.raises(AttemptFailed, match=r"within 0.3 s") as failed:
        await judge.score(DIALOGUE)
    assert failed.value.party is Party.JUDGE


async def test_one_who_joins_late_is_told_of_the_judge_and_not_of_a_timeout() -> None:
    provider = Provider("Score: 5", hold_s=4.0)
    with judge_at(provider, deadline_s=2.0) as judge:
        first = asyncio.create_task(judge.score(DIALOGUE))
        while not provider.requests:
            assert not first.done()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # so that the shared question gives up before this one's own deadline
        results = await asyncio.gather(first, judge.score(DIALOGUE), return_exceptions=True)
    assert [type(result) for result in results] == [AttemptFailed, AttemptFailed]
    assert len(provider.requests) == 1


async def test_an_address_that_is_away_is_named() -> None:
    judge = Judge(AddressModel(base_url=unused_address(), model="m"), RUBRIC)
    with pytest.raises(AttemptFailed, match="ConnectError at http"):
        await judge.score(DIALOGUE)


async def test_no_more_questions_at_once_than_allowed() -> None:
    provider = Provider("Score: 5", hold_s=0.05)
    with judge_at(provider, max_concurrency=2) as judge:
        await asyncio.gather(*(judge.score([user(str(number))]) for number in range(8)))
    assert len(provider.requests) == 8
    assert provider.most_at_once == 2


async def test_requests_keep_the_rate() -> None:
    provider = Provider("Score: 5")
    with judge_at(provider, requests_per_minute=600) as judge:
        began = time.monotonic()
        await asyncio.gather(*(judge.score([user(str(number))]) for number in range(5)))
    arrivals = sorted(arrival - began for arrival in provider.times)
    assert all(arrival >= 0.1 * number - 0.01 for number, arrival in enumerate(arrivals))


def test_a_judge_works_in_one_event_loop_after_the_other() -> None:
    provider = Provider("Score: 5")
    with judge_at(provider, max_concurrency=1) as judge:
        for name in "ab":
            asyncio.run(_ask_twice(judge, name))
    assert len(provider.requests) == 4


async def _ask_twice(judge: Judge, name: str) -> None:
    await asyncio.gather(*(judge.score([user(f"{name}{number}")]) for number in range(2)))


@pytest.mark.parametrize(
    "limits",
    [
        {"deadline_s": 0},
        {"max_tries": 0},
        {"max_concurrency": 0},
        {"requests_per_minute": -1},
        {"fallback": "zero"},
        {"fallback": "value"},
        {"fallback_value": 0.5},
        {"fallback": "value", "fallback_value": 2.0},
    ],
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"expected|needs"):
        JudgeLimits(**limits)


@pytest.mark.parametrize("url", ["", "localhost/v1", "file:///etc/passwd"])
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected an address such as"):
        AddressModel(base_url=url, model="m")


async def test_a_sampler_of_ours_is_asked_in_its_own_format(tiny_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_dir)
    sampler = ScriptedSampler([tokenizer.encode(f"Good.\nScore: 9{END_TOKEN}")], tokenizer=tokenizer)
    model = SamplerModel(sampler=sampler, renderer=get_renderer(tokenizer), name="tiny-1")
    assert (await Judge(model, RUBRIC).score(DIALOGUE)).score == 0.9
    asked = tokenizer.decode(sampler.prompts[0])
    assert "It is polite." in asked
    assert asked.endswith("<|im_start|>assistant\n")


async def test_a_sampler_that_refuses_is_the_judges_fault() -> None:
    model = SamplerModel(sampler=ScriptedSampler([]), renderer=_Refusing(), name="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(AttemptFailed, match="the prompt is too long") as failed:
        await Judge(model, RUBRIC).score(DIALOGUE)
    assert failed.value.party is Party.JUDGE


class _Refusing:
    stop_ids = (2,)

    def start(self, messages: object) -> list[int]:  # noqa: ARG002
        raise DataError("the prompt is too long")


async def test_an_embedded_model_that_knows_nothing_gives_no_score(tiny_dir: Path) -> None:  # noqa: ARG001
    """`tiny` is random: what it says is no verdict, and is not made into one."""
    from turnwise import ServiceClient

    service = ServiceClient()
    try:
        sampler = service.create_sampling_client(base_model="tiny")
        model = SamplerModel(sampler=sampler, renderer=get_renderer(sampler.get_tokenizer()), name="tiny", max_tokens=8)
        verdict = await Judge(model, RUBRIC, limits=JudgeLimits(fallback="skip", max_tries=2)).score(DIALOGUE)
    finally:
        service.close()
    assert verdict.score is None
    assert "2 tries: no score in its answer" in verdict.problem
