"""Two seats, one policy: each seat is a trajectory like any other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from turnwise.client.fake import ScriptedSampler
from turnwise.envs.base import Task
from turnwise.envs.library.customer_service import CLERK, CUSTOMER, CustomerService
from turnwise.envs.library.tic_tac_toe import EMPTY, TicTacToe
from turnwise.errors import ConfigError, Party
from turnwise.renderers.base import Renderer
from turnwise.rollout.self_play import play_games, seat_task_id
from turnwise.rollout.stats import num_splits
from turnwise.trajectory import EndReason, Message, Trajectory
from unit.rollout.worlds import quick, saying

pytestmark = pytest.mark.usefixtures("no_leaks")

START = Task(id="start", data={"board": EMPTY, "opponent": 0})


def choosing(tokenizer: Any, renderer: Renderer, choose: Callable[[list[str]], str]) -> ScriptedSampler:
    """A sampler that reads the board out of the prompt's ids, as a model would."""

    def reply(prompt_ids: list[int]) -> list[int]:
        board = tokenizer.decode(prompt_ids).rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
        content = choose([cell for cell in board.split() if cell.isdigit()])
        return renderer.encode_reply(Message(role="assistant", content=content))

    return ScriptedSampler(reply)


@pytest.fixture
def first_free(tokenizer: Any, renderer: Renderer) -> ScriptedSampler:
    return choosing(tokenizer, renderer, lambda free: free[0])


def by_seat(result: Any) -> dict[str, tuple[Trajectory, ...]]:
    return {group.task_id: group.trajectories for group in result.groups}


async def test_both_seats_have_exact_ids_and_their_rewards_add_up_to_zero(tokenizer: Any, renderer: Renderer) -> None:
    rng = random.Random(0)
    sampler = choosing(tokenizer, renderer, rng.choice)
    tasks = TicTacToe().tasks("train", 4, 0)
    result = await play_games(TicTacToe(), tasks, sampler, renderer, quick(max_turns=6), seed=1)
    assert len(result.groups) == 8
    for task in tasks:
        first, second = (by_seat(result)[seat_task_id(task.id, seat)] for seat in (0, 1))
        for one, other in zip(first, second, strict=True):
            assert one.attempt == other.attempt
            assert one.total_reward + other.total_reward == 0
            assert one.end_reason is other.end_reason is EndReason.TERMINATED
            for trajectory in (one, other):
                assert num_splits(trajectory) == 0
                for turn in trajectory.turns:
                    assert tokenizer.decode(turn.sampled_ids) == f"{turn.reply.content}<|im_end|>"
                    assert list(turn.sampled_ids) == renderer.encode_reply(turn.reply)
                for turn, after in zip(trajectory.turns, trajectory.turns[1:], strict=False):
                    grown = renderer.extend(
                        list(turn.prompt_ids), turn.sampled_ids, turn.observation, history=trajectory.start
                    )
                    assert list(after.prompt_ids) == grown.ids


async def test_a_game_is_seen_from_both_sides(renderer: Renderer, first_free: ScriptedSampler) -> None:
    result = await play_games(TicTacToe(), [START], first_free, renderer, quick(max_turns=6), seed=1)
    x, o = (by_seat(result)[seat_task_id("start", seat)][0] for seat in (0, 1))
    assert [turn.reply.content for turn in x.turns] == ["1", "3", "5", "7"]  # 3 5 7 is a row
    assert [turn.reply.content for turn in o.turns] == ["2", "4", "6"]
    assert (x.total_reward, x.is_success, o.total_reward, o.is_success) == (1.0, True, -1.0, False)
    assert (x.labels["result"], o.labels["result"]) == ("won", "lost")
    assert x.start[0].content.startswith("You are X.")
    assert o.start[0].content.startswith("You are O.")
    assert o.start[1].content == "X 2 3\n4 5 6\n7 8 9"  # it moves second, so it sees the first move
    assert x.turns[0].observation[0].content == "X O 3\n4 5 6\n7 8 9"
    assert o.turns[-1].observation == ()
    assert x.turns[0].env_state == "......... illegal 0 0"


async def test_a_group_is_one_seat_of_all_games_of_a_task(renderer: Renderer, first_free: ScriptedSampler) -> None:
    result = await play_games(
        TicTacToe(), [START, START], first_free, renderer, quick(max_turns=6, group_size=3, max_concurrency=2), seed=1
    )
    assert [group.task_id for group in result.groups] == ["start/seat-0", "start/seat-1"] * 2
    assert [[t.attempt for t in group.trajectories] for group in result.groups] == [[0, 1, 2]] * 4
    assert result.stats.metrics()["rollout/attempts_kept"] == 12
    seeds = [t.branch.seed for group in result.groups for t in group.trajectories if t.branch is not None]
    assert len(set(seeds)) == len(seeds)


async def test_the_games_of_a_task_are_drawn_alike_unless_each_is_to_be_its_own(
    renderer: Renderer, first_free: ScriptedSampler
) -> None:
    class Drawn(TicTacToe):
        def make_game(self, task: Task, seed: int) -> Any:
            drawn.append(seed)
            return super().make_game(task, seed)

    for same_start, num_drawn in ((True, 2), (False, 6)):
        drawn: list[int] = []
        config = quick(max_turns=6, group_size=3, same_start=same_start)
        await play_games(Drawn(), [START, START], first_free, renderer, config, seed=1)
        assert (len(drawn), len(set(drawn))) == (6, num_drawn)


async def test_each_seat_may_have_a_sampler_of_its_own(
    tokenizer: Any, renderer: Renderer, first_free: ScriptedSampler
) -> None:
    last_free = choosing(tokenizer, renderer, lambda free: free[-1])
    result = await play_games(TicTacToe(), [START], [first_free, last_free], renderer, quick(max_turns=6), seed=1)
    x, o = (by_seat(result)[seat_task_id("start", seat)][0] for seat in (0, 1))
    assert x.turns[0].reply.content == "1"
    assert o.turns[0].reply.content == "9"
    with pytest.raises(ConfigError, match="1 samplers for 2 seats"):
        await play_games(TicTacToe(), [START], [first_free], renderer, quick(), seed=1)


async def test_a_seat_that_never_moves_has_no_trajectory(renderer: Renderer) -> None:
    """X forfeits at once, so O wins without a word; there is nothing of O to learn from."""
    world = TicTacToe(max_illegal=0)
    result = await play_games(world, [START], saying(renderer, "what?"), renderer, quick(), seed=1)
    (x,) = result.groups
    assert x.task_id == "start/seat-0"
    assert {t.total_reward for t in x.trajectories} == {-1.0}
    (o,) = result.dropped
    assert (o.task_id, o.why, o.trajectories) == ("start/seat-1", "group_too_small", ())


async def test_a_seat_says_which_of_its_replies_were_actions(tokenizer: Any, renderer: Renderer) -> None:
    def reply(prompt_ids: list[int]) -> str:
        return "close" if "You are the clerk" in tokenizer.decode(prompt_ids) else "I want my money back."

    world = CustomerService(level=0, protocol="line")
    result = await play_games(world, world.tasks("train", 2, 0), saying(renderer, reply), renderer, quick(), seed=0)
    found = by_seat(result)
    for seat, is_action in ((CLERK, True), (CUSTOMER, False)):
        turns = [
            turn for name, own in found.items() if name.endswith(f"seat-{seat}") for one in own for turn in one.turns
        ]
        assert turns
        assert {turn.is_action for turn in turns} == {is_action}, seat


async def test_a_limit_that_ends_one_seat_truncates_the_other(renderer: Renderer, first_free: ScriptedSampler) -> None:
    result = await play_games(TicTacToe(), [START], first_free, renderer, quick(max_turns=2), seed=1)
    x, o = (by_seat(result)[seat_task_id("start", seat)][0] for seat in (0, 1))
    assert (x.end_reason, len(x.turns)) == (EndReason.MAX_TURNS, 2)
    assert (o.end_reason, len(o.turns)) == (EndReason.TRUNCATED, 2)
    assert x.total_reward == o.total_reward == 0.0


async def test_the_seats_of_a_game_fail_together_and_the_game_is_played_again(
    tokenizer: Any, renderer: Renderer
) -> None:
    num_calls = 0

    def choose(free: list[str]) -> str:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise RuntimeError("the sampler broke")
        return free[0]

    sampler = choosing(tokenizer, renderer, choose)
    config = quick(max_turns=6, group_size=2, max_retries=1, max_concurrency=1)
    result = await play_games(TicTacToe(), [START], sampler, renderer, config, seed=1)
    assert [len(group.trajectories) for group in result.groups] == [2, 2]
    assert result.stats.metrics()["rollout/retries"] == 1
    assert result.stats.metrics()["rollout/failures_sampler"] == 2


async def test_a_game_that_stays_failed_is_scored_for_no_seat(tokenizer: Any, renderer: Renderer) -> None:
    def break_for_o(free: list[str]) -> str:
        if len(free) % 2 == 0:
            raise RuntimeError("the sampler broke")
        return free[0]

    sampler = choosing(tokenizer, renderer, break_for_o)
    result = await play_games(TicTacToe(), [START], sampler, renderer, quick(max_turns=6), seed=1)
    assert result.groups == ()
    x, o = result.dropped
    assert all(t.failure is not None and t.failure.party is Party.SAMPLER for t in (*x.failed, *o.failed))
    assert "another seat of the game failed" in str(x.failed[0].failure)


class HangingSampler(ScriptedSampler):
    """Never answers; the engine is gone, say."""

    def sample_async(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        return asyncio.sleep(60)


async def test_a_sampler_that_hangs_ends_the_game_at_its_deadline(
    renderer: Renderer, first_free: ScriptedSampler
) -> None:
    config = quick(max_turns=6, group_size=2, sample_deadline_s=0.1)
    result = await asyncio.wait_for(
        play_games(TicTacToe(), [START], [first_free, HangingSampler([])], renderer, config, seed=1), timeout=10
    )
    assert result.groups == ()
    details = {t.failure.detail for dropped in result.dropped for t in dropped.failed if t.failure is not None}
    assert any("no answer within 0.1 s" in detail for detail in details)


async def test_cancelling_leaves_nothing_running(renderer: Renderer, first_free: ScriptedSampler) -> None:
    config = quick(max_turns=6)
    task = asyncio.create_task(
        play_games(TicTacToe(), [START], [first_free, HangingSampler([])], renderer, config, seed=1)
    )
    for _ in range(50):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
