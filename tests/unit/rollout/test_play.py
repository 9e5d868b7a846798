"""One attempt: recorded exactly, ended with one reason, and its env closed whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from turnwise.client.fake import ScriptedSampler
from turnwise.credit.datums import num_trained_tokens, trajectory_to_datums
from turnwise.envs.base import EnvStep, as_action, user
from turnwise.errors import AttemptFailed, Party
from turnwise.renderers import get_renderer
from turnwise.renderers.base import Renderer
from turnwise.rollout.stats import RolloutStats, num_splits
from turnwise.trajectory import EndReason, Message
from turnwise.types import SampledSequence, SamplingParams
from unit.rollout.worlds import QUESTION, CountingEnv, play_env, saying

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_an_attempt_is_recorded_turn_by_turn_in_exact_ids(renderer: Renderer) -> None:
    sampler = saying(renderer)
    trajectory = await play_env(CountingEnv(num_turns=3), renderer, sampler, temperature=0.5)
    first, second, third = trajectory.turns
    assert [list(turn.prompt_ids) for turn in trajectory.turns] == sampler.prompts
    assert list(first.prompt_ids) == renderer.start([QUESTION])
    for last, turn in ((first, second), (second, third)):
        so_far = last.prompt_ids + last.sampled_ids
        assert turn.prompt_ids[: len(so_far)] == so_far
    assert list(first.sampled_ids) == renderer.encode_reply(first.reply)
    assert first.reply.content == "My guess is 5."
    assert first.observation == (user("Again, 1."),)
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.25, 1.0]
    assert (trajectory.end_reason, trajectory.is_success, trajectory.failure) == (EndReason.TERMINATED, True, None)
    assert (first.temperature, first.policy_version, first.is_cut) == (0.5, 1, False)
    assert trajectory.start == (QUESTION,)


async def test_the_sampler_is_asked_for_the_formats_stops_with_a_seed_per_turn(renderer: Renderer) -> None:
    asked: list[SamplingParams] = []

    class Asked(ScriptedSampler):
        async def sample_async(self, prompt: Any, num_samples: int = 1, sampling_params: Any = None, **_: Any) -> Any:
            asked.append(sampling_params)
            return await super().sample_async(prompt, num_samples, sampling_params)

    sampler = Asked(lambda _: [5, 2])
    await play_env(CountingEnv(), renderer, sampler, stop=("</a>",), max_tokens_per_turn=9, temperature=0.5)
    assert [params.max_tokens for params in asked] == [9, 9]
    assert [params.stop_ids([0]) for params in asked] == [frozenset({2})] * 2
    assert asked[0].stop_strings() == ["</a>"]
    assert asked[0].seed != asked[1].seed
    assert (asked[0].temperature, asked[0].top_p, asked[0].top_k) == (0.5, 1.0, -1)


async def test_turns_end_at_their_limit(renderer: Renderer) -> None:
    trajectory = await play_env(CountingEnv(num_turns=9), renderer, max_turns=3)
    assert (len(trajectory.turns), trajectory.end_reason) == (3, EndReason.MAX_TURNS)
    assert trajectory.is_success is None


async def test_a_full_context_ends_the_attempt_before_sampling(renderer: Renderer) -> None:
    sampler = saying(renderer)
    num_first = len(renderer.start([QUESTION]))
    env = CountingEnv(num_turns=9)
    trajectory = await play_env(env, renderer, sampler, max_trajectory_tokens=num_first + 3, max_tokens_per_turn=50)
    assert (len(trajectory.turns), trajectory.end_reason) == (1, EndReason.MAX_TOKENS)
    assert (len(trajectory.turns[0].sampled_ids), trajectory.turns[0].is_cut) == (3, True)
    assert len(sampler.prompts) == 1
    assert env.num_closed == 1


async def test_a_first_prompt_that_does_not_fit_is_a_failure_and_not_an_attempt(renderer: Renderer) -> None:
    trajectory = await play_env(CountingEnv(), renderer, max_trajectory_tokens=3)
    assert trajectory.failure is not None
    assert (trajectory.failure.party, trajectory.turns) == (Party.CONTEXT, ())
    needed = trajectory.failure.facts["needed_tokens"]
    assert f"first prompt needs {needed} tokens, the limit is 3" in trajectory.failure.detail
    assert trajectory.failure.facts["limit_tokens"] == 3


async def test_a_failure_keeps_the_frames_of_the_users_code_and_no_others(renderer: Renderer) -> None:
    env = CountingEnv(num_turns=2)

    async def broken(_: Message) -> EnvStep:
        raise KeyError("no such row")

    env.on_step = broken
    trajectory = await play_env(env, renderer)
    assert trajectory.failure is not None
    shown = trajectory.failure.traceback
    assert f'File "{__file__}"' in shown
    assert 'raise KeyError("no such row")' in shown
    assert shown.endswith("KeyError: 'no such row'")
    assert "turnwise/rollout" not in shown
    place = str(trajectory.failure.facts["place"])
    assert trajectory.failure.detail.endswith(f" at {place}")


async def test_an_attempt_that_fails_after_a_verdict_has_none(renderer: Renderer) -> None:
    env = CountingEnv()

    def broken(_: Message) -> EnvStep:
        if len(env.replies) > 1:
            raise KeyError("no such row")
        return EnvStep(messages=[user("Well done, go on.")], is_success=True)

    env.on_step = broken
    trajectory = await play_env(env, renderer)
    assert (len(trajectory.turns), trajectory.end_reason) == (1, EndReason.FAILED)
    assert trajectory.is_success is None, "whoever counts successes would count it"


async def test_time_that_runs_out_keeps_the_finished_turns(renderer: Renderer) -> None:
    env = CountingEnv(num_turns=99)

    async def slower(_: Message) -> EnvStep:
        if len(env.replies) == 3:
            await asyncio.sleep(60)
        return env.answer()

    env.on_step = slower
    trajectory = await play_env(env, renderer, attempt_deadline_s=2.0)
    assert trajectory.end_reason is EndReason.TIME_LIMIT
    assert len(trajectory.turns) == 2
    assert env.num_closed == 1


async def test_time_that_runs_out_before_any_turn_is_the_awaited_partys_failure(renderer: Renderer) -> None:
    async def hang(_: Message) -> None:
        await asyncio.sleep(60)

    trajectory = await play_env(CountingEnv(on_step=hang), renderer, attempt_deadline_s=0.5)
    assert trajectory.failure is not None
    assert trajectory.failure.party is Party.ENV


async def test_the_envs_own_end_comes_first(renderer: Renderer) -> None:
    cut = CountingEnv(on_step=lambda _: EnvStep(truncated=True, reward=0.5, is_success=False))
    trajectory = await play_env(cut, renderer, max_turns=1)
    assert (trajectory.end_reason, trajectory.is_success) == (EndReason.TRUNCATED, False)
    gibberish = CountingEnv(on_step=lambda _: EnvStep(terminated=True, is_unparsable=True))
    trajectory = await play_env(gibberish, renderer, on_unparsable="end")
    assert trajectory.end_reason is EndReason.TERMINATED


async def test_a_turn_keeps_whether_the_env_read_its_reply_as_an_action(renderer: Renderer) -> None:
    acts = CountingEnv(on_step=lambda _: as_action(EnvStep(terminated=True)))
    assert [turn.is_action for turn in (await play_env(acts, renderer)).turns] == [True]
    says = CountingEnv(on_step=lambda _: EnvStep(terminated=True))
    assert [turn.is_action for turn in (await play_env(says, renderer)).turns] == [False]


def unreadable_once(env: CountingEnv) -> CountingEnv:
    def step(_: Message) -> EnvStep:
        if len(env.replies) == 1:
            return EnvStep(messages=[user("What?")], reward={"penalty": -0.1}, is_unparsable=True)
        return env.answer()

    env.on_step = step
    return env


async def test_an_unreadable_reply_is_penalised_masked_or_the_end(renderer: Renderer) -> None:
    stats = RolloutStats()
    penalised = await play_env(
        unreadable_once(CountingEnv()), renderer, stats=stats, on_unparsable="penalise", unparsable_penalty=0.5
    )
    assert dict(penalised.turns[0].reward_parts) == {"penalty": pytest.approx(-0.6)}
    assert penalised.turns[0].is_trained
    assert stats.metrics()["rollout/unparsable_replies"] == 1
    masked = await play_env(unreadable_once(CountingEnv()), renderer, on_unparsable="mask")
    assert [turn.is_trained for turn in masked.turns] == [False, True]
    assert masked.turns[0].reward == pytest.approx(-0.1)
    ended = await play_env(unreadable_once(CountingEnv()), renderer, on_unparsable="end")
    assert (len(ended.turns), ended.end_reason) == (1, EndReason.UNPARSABLE)


GARBAGE: list[Callable[[], Any]] = [
    lambda: None,
    lambda: "You win!",
    lambda: (1.0, "obs", True),
    lambda: {"reward": 1.0},
    lambda: EnvStep(terminated=True, reward=float("nan")),
    lambda: EnvStep(terminated=True, reward={"outcome": float("inf")}),
    lambda: EnvStep(terminated=True, reward={"joy": 1.0}),
    lambda: EnvStep(messages="not a list"),  # type: ignore[arg-type]
    lambda: EnvStep(messages=["not a message"]),  # type: ignore[list-item]
    lambda: EnvStep(messages=[Message(role="wizard", content="x")]),  # type: ignore[arg-type]
    lambda: EnvStep(messages=[Message(role="user", content=5)]),  # type: ignore[arg-type]
    lambda: EnvStep(terminated="yes"),  # type: ignore[arg-type]
    lambda: EnvStep(terminated=True, is_success="yes"),  # type: ignore[arg-type]
    lambda: EnvStep(terminated=True, info={"x": "y"}),  # type: ignore[dict-item]
    lambda: EnvStep(terminated=True, info=5),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_garbage_from_an_env_is_a_failure_with_its_name(renderer: Renderer, garbage: Callable[[], Any]) -> None:
    env = CountingEnv(on_step=lambda _: garbage())
    trajectory = await play_env(env, renderer)
    assert trajectory.failure is not None
    assert trajectory.failure.party is Party.ENV
    assert trajectory.turns == ()
    assert env.num_closed == 1


@pytest.mark.parametrize("first", [(), "hello", None, [5]])
async def test_garbage_at_the_start_is_a_failure_too(renderer: Renderer, first: Any) -> None:
    class Odd(CountingEnv):
        async def start(self) -> Any:
            return first

    trajectory = await play_env(Odd(), renderer)
    assert trajectory.failure is not None
    assert trajectory.failure.party is Party.ENV


async def test_a_crash_keeps_the_turns_before_it_and_blames_the_env(renderer: Renderer) -> None:
    env = CountingEnv(num_turns=9)

    def crash(_: Message) -> EnvStep:
        if len(env.replies) == 3:
            raise RuntimeError("the sandbox died")
        return env.answer()

    env.on_step = crash
    trajectory = await play_env(env, renderer)
    assert trajectory.failure is not None
    assert (trajectory.failure.party, len(trajectory.turns)) == (Party.ENV, 2)
    assert "the sandbox died" in trajectory.failure.detail
    assert env.num_closed == 1


async def test_a_tool_that_broke_is_blamed_and_not_its_env(renderer: Renderer) -> None:
    def broken(_: Message) -> EnvStep:
        raise AttemptFailed(Party.TOOL, "search: no network")

    trajectory = await play_env(CountingEnv(on_step=broken), renderer)
    assert trajectory.failure is not None
    assert trajectory.failure.party is Party.TOOL


async def test_an_object_that_is_no_env_is_a_failure(renderer: Renderer) -> None:
    trajectory = await play_env(object(), renderer)
    assert trajectory.failure is not None
    assert "start" in trajectory.failure.detail


BAD_REPLIES = [
    SampledSequence("stop", [5, 2], None),
    SampledSequence("stop", [5, 2], [-1.0]),
    SampledSequence("stop", [], []),
    SampledSequence("stop", [5, 2], [-1.0, float("nan")]),
]


@pytest.mark.parametrize("bad", BAD_REPLIES, ids=["no logprobs", "too few", "no tokens", "nan"])
async def test_a_sampler_that_returns_what_cannot_be_trained_has_failed(
    renderer: Renderer, bad: SampledSequence
) -> None:
    trajectory = await play_env(CountingEnv(), renderer, ScriptedSampler([bad]))
    assert trajectory.failure is not None
    assert trajectory.failure.party is Party.SAMPLER


async def test_a_sampler_that_hangs_or_fails_is_blamed(renderer: Renderer) -> None:
    class Hanging(ScriptedSampler):
        async def sample_async(self, *_: Any, **__: Any) -> Any:
            await asyncio.sleep(60)

    hung = await play_env(CountingEnv(), renderer, Hanging([]), sample_deadline_s=0.05)
    empty = await play_env(CountingEnv(), renderer, ScriptedSampler([]))
    assert [t.failure.party for t in (hung, empty) if t.failure] == [Party.SAMPLER, Party.SAMPLER]


async def test_a_renderer_that_fails_is_blamed(renderer: Renderer) -> None:
    env = CountingEnv(first=[Message(role="user", content="\ud800")])
    trajectory = await play_env(env, renderer)
    assert trajectory.failure is not None
    assert trajectory.failure.party is Party.RENDERER
    assert env.num_closed == 1


async def test_a_close_that_fails_or_hangs_does_not_spoil_the_attempt(renderer: Renderer) -> None:
    def fail() -> None:
        raise RuntimeError("already closed")

    stats = RolloutStats()
    hanging = CountingEnv(on_close=lambda: asyncio.sleep(60))
    for env in (CountingEnv(on_close=fail), hanging):
        trajectory = await play_env(env, renderer, stats=stats, close_deadline_s=0.05)
        assert trajectory.end_reason is EndReason.TERMINATED
    assert stats.metrics()["rollout/close_failures"] == 2


async def test_the_envs_name_for_its_state_is_recorded_before_each_turn(renderer: Renderer) -> None:
    class Named(CountingEnv):
        def state_key(self) -> str:
            return f"after {len(self.replies)}"

    trajectory = await play_env(Named(), renderer)
    assert [turn.env_state for turn in trajectory.turns] == ["after 0", "after 1"]


async def test_numbers_to_log_keep_the_last_value(renderer: Renderer) -> None:
    env = CountingEnv(num_turns=1, on_step=lambda _: EnvStep(terminated=True, info={"moves": 3}))
    trajectory = await play_env(env, renderer)
    assert trajectory.metrics == {"moves": 3.0}


@pytest.mark.parametrize("multi_turn", [True, False])
async def test_both_conversation_forms_give_one_datum_of_all_turns(tokenizer: Any, multi_turn: bool) -> None:
    renderer = get_renderer(tokenizer, multi_turn=multi_turn)
    trajectory = await play_env(CountingEnv(num_turns=3), renderer)
    (datum,) = trajectory_to_datums(trajectory, [1.0] * 3)
    assert num_trained_tokens(datum) == trajectory.num_sampled_tokens
    assert num_splits(trajectory) == 0


async def test_forgotten_thinking_splits_the_trajectory_and_trains_the_same_tokens(tokenizer: Any) -> None:
    renderer = get_renderer(tokenizer, strip_thinking=True)
    trajectory = await play_env(
        CountingEnv(num_turns=3), renderer, saying(renderer, "<think>\nhm\n</think>\n\n5"), max_tokens_per_turn=64
    )
    datums = trajectory_to_datums(trajectory, [1.0] * 3)
    assert len(datums) == 3
    assert num_splits(trajectory) == 2
    assert sum(num_trained_tokens(datum) for datum in datums) == trajectory.num_sampled_tokens
    plain = get_renderer(tokenizer)
    said = [QUESTION, Message(role="assistant", content="5"), user("Again, 1.")]
    assert list(trajectory.turns[1].prompt_ids) == plain.start(said)
