"""The world `customer_service`: its rules, what counts as settled, and who may play the customer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import turnwise as tw
from cases import for_each
from turnwise.commands.inspect import run_replay
from turnwise.envs.base import EnvStep, Task, assistant
from turnwise.envs.check import check_env
from turnwise.envs.difficulty import level_options
from turnwise.envs.library.customer_service import LEVELS, CustomerService
from turnwise.envs.library.customer_service_rules import ShopPolicy, decide
from turnwise.envs.library.customer_service_shop import Customer, Request, ShopData, ShopOrder
from turnwise.envs.scripted import ScriptedPlayer
from turnwise.envs.tools import format_tool_call
from turnwise.errors import ConfigError
from turnwise.opponents import players
from turnwise.runlog.reader import RunReader
from turnwise.runtime.blocking import run_to_end
from turnwise.trajectory import Message
from turnwise.types import SamplingParams

ALL_LEVELS = range(len(LEVELS))


def make_shop(**order: Any) -> ShopData:
    """Ann has order 412 with a red lamp and a red bag; Ben has order 500 with a blue cap."""
    ann = {"customer": "Ann", "status": "delivered", "day": 92, "address": "5 Oak Street", "receipt": "R100"}
    rows = {
        412: ShopOrder(**{**ann, "items": ["red lamp", "red bag"], **order}),
        500: ShopOrder(**{**ann, "customer": "Ben", "items": ["blue cap"]}),
    }
    customers = {
        "Ann": Customer(name="Ann", pin=4417, is_member=False),
        "Ben": Customer(name="Ben", pin=1111, is_member=True),
    }
    stock = {"red lamp": 1, "blue lamp": 2, "white lamp": 0, "red bag": 1, "blue cap": 1}
    return ShopData(customers=customers, orders=rows, stock=stock)


def make_task(request: Request, *, pin: int = 4417, shop: ShopData | None = None, **policy: Any) -> Task:
    rules = ShopPolicy(**{"verifies": True, "asks_receipts": True, **policy})
    data = {"shop": (shop or make_shop()).to_json(), "caller": "Ann", "pin": pin}
    return Task(id="desk-own", data={**data, "policy": rules.to_json(), "requests": [request.to_json()]})


REFUND = Request(kind="refund", order=412, item="red lamp", receipt="R100")
BAG = Request(kind="refund", order=412, item="red bag", receipt="R100")
WORLD = CustomerService(level=3, protocol="line")


def last_step(task: Task, replies: Sequence[str], world: CustomerService = WORLD) -> EnvStep:
    async def go() -> EnvStep:
        env = world.make_env(task, 0)
        await env.start()
        steps = [await env.step(assistant(reply)) for reply in replies]
        assert [step.is_over for step in steps] == [False] * (len(steps) - 1) + [True]
        return steps[-1]

    return run_to_end(go())


def played(world: CustomerService, task: Task, player: ScriptedPlayer) -> EnvStep:
    async def go() -> EnvStep:
        env = world.make_env(task, 0)
        await env.start()
        while not (step := await env.step(assistant(player([])))).is_over:
            pass
        return step

    return run_to_end(go())


@for_each("level", ALL_LEVELS)
@for_each("protocol", ["line", "tool_call"])
def test_the_expert_settles_every_case_within_the_turns_and_closing_at_once_settles_none(
    level: int, protocol: Any
) -> None:
    world = CustomerService(level=level, protocol=protocol)
    close = "close" if protocol == "line" else '<tool_call>{"name": "close"}</tool_call>'
    for task in [*world.tasks("train", 25, seed=0), *world.tasks("test", 15, seed=1)]:
        step = played(world, task, world.expert(task, 0))
        assert step.is_success, (task, step)
        assert step.reward == 1.0
        nothing = last_step(task, [close], world)
        assert not nothing.is_success
        assert nothing.reward == 0


@for_each(
    ("change", "request", "pin", "expected"),
    [
        ({}, REFUND, 4417, "refund"),
        ({}, BAG, 4417, "refund"),
        ({}, replace(BAG, receipt="R999"), 4417, "no_receipt"),
        ({}, replace(REFUND, receipt="R999"), 4417, "refund"),  # below the price that needs a receipt
        ({}, REFUND, 1234, "not_verified"),
        ({"day": 86}, REFUND, 4417, "refund"),
        ({"day": 85}, REFUND, 4417, "too_late"),
        ({"status": "shipped"}, REFUND, 4417, "not_delivered"),
        ({}, Request(kind="cancel", order=412), 4417, "shipped"),
        ({"status": "processing"}, Request(kind="cancel", order=412), 4417, "cancel"),
        ({"status": "processing"}, Request(kind="address", order=412, wanted="x"), 4417, "change_address"),
        ({}, replace(REFUND, kind="exchange", wanted="blue lamp"), 4417, "exchange"),
        ({}, replace(REFUND, kind="exchange", wanted="white lamp"), 4417, "no_stock"),
        ({}, replace(REFUND, kind="exchange", wanted="white lamp", takes_refund=True), 4417, "refund"),
    ],
)
def test_the_rules_decide_by_identity_status_time_stock_and_proof(
    change: dict[str, Any], request: Request, pin: int, expected: str
) -> None:
    decision = decide(ShopPolicy(verifies=True, asks_receipts=True), make_shop(**change), request, pin)
    assert expected in (decision.tool, decision.arguments.get("reason"))


def test_a_member_has_more_time() -> None:
    shop = make_shop(day=80)
    assert decide(ShopPolicy(), shop, REFUND, 0).arguments["reason"] == "too_late"
    shop.customers["Ann"].is_member = True
    assert decide(ShopPolicy(), shop, REFUND, 0).tool == "refund"


CHECKED = ["verify 412, 4417"]


@for_each(
    ("task", "replies", "blamed"),
    [
        (make_task(REFUND), ["refund 412, red lamp", *CHECKED, "close"], "violations"),  # the PIN comes too late
        (make_task(BAG), [*CHECKED, "refund 412, red bag", "check_receipt 412, R100", "close"], "violations"),
        (make_task(REFUND, shop=make_shop(day=20)), [*CHECKED, "refund 412, red lamp", "close"], "violations"),
        (make_task(REFUND), [*CHECKED, "refund 412, red lamp", "refuse 500, too_late", "close"], "damaged_orders"),
        (make_task(REFUND), [*CHECKED, "refund 412, red lamp", "cancel 500", "close"], "damaged_orders"),
        (make_task(REFUND, pin=1), ["refuse 412, not_verified", "close"], "missed_checks"),  # a guess
        (make_task(replace(BAG, receipt="R9")), [*CHECKED, "refuse 412, no_receipt", "close"], "missed_checks"),
    ],
)
def test_what_breaks_a_rule_does_damage_or_is_guessed_is_a_failure_without_reward(
    task: Task, replies: list[str], blamed: str
) -> None:
    step = last_step(task, replies)
    assert not step.is_success
    assert step.reward == 0
    assert step.info[blamed] == 1


@for_each(
    ("task", "replies"),
    [
        (make_task(REFUND), [*CHECKED, "refuse 412, too_late", "close"]),  # it was allowed
        (make_task(REFUND), [*CHECKED, "refund 412, red bag", "check_receipt 412, R100", "close"]),
        (make_task(REFUND), [*CHECKED, "refund 412, red lamp", "refuse 412, too_late", "close"]),
        (make_task(REFUND), [*CHECKED, "refund 412, red lamp", *["Anything else?"] * 13]),  # never closed
        (make_task(REFUND, shop=make_shop(day=20)), [*CHECKED, "refuse 412, not_delivered", "close"]),
    ],
)
def test_the_wrong_change_the_wrong_reason_and_an_open_desk_are_failures(task: Task, replies: list[str]) -> None:
    step = last_step(task, replies)
    assert not step.is_success
    assert step.reward == 0


def test_the_right_calls_succeed_whatever_was_said_and_in_one_reply() -> None:
    assert last_step(make_task(REFUND), ["Go away.", *CHECKED, "refund 412, red lamp", "close"]).is_success
    calls = [("verify", {"order": 412, "pin": 4417}), ("refund", {"order": 412, "item": "red lamp"}), ("close", {})]
    reply = "".join(format_tool_call(name, **arguments) for name, arguments in calls)
    assert last_step(make_task(REFUND), [reply], CustomerService(level=3)).is_success


def test_part_of_the_requests_pays_part_only_if_the_rest_is_untouched() -> None:
    world = CustomerService(level=5, protocol="line")
    task = next(task for task in world.tasks("train", 20, 0) if len(task.data["requests"]) == 3)
    said: list[str] = []
    expert = world.expert(task, 0)

    def remember(dialogue: Sequence[Message]) -> str:
        said.append(expert(dialogue))
        return said[-1]

    played(world, task, remember)
    until = said.index("Anything else?")
    step = last_step(task, [*said[:until], "close"], world)
    assert not step.is_success
    assert step.reward == pytest.approx(0.3 / 3)


async def test_the_customer_tells_one_thing_at_a_time_when_it_is_asked() -> None:
    env = WORLD.make_env(make_task(BAG), 0)
    first = (await env.start())[-1].content
    assert "red bag" in first
    assert not any(word in first for word in ("412", "4417", "R100"))
    for question, fact in (("And your PIN?", "4417"), ("Which order is it?", "412"), ("Hm?", "R100")):
        step = await env.step(assistant(question))
        heard = step.messages[0].content
        assert [word for word in ("412", "4417", "R100") if word in heard] == [fact]
    assert (await env.step(assistant("Anything else?"))).messages[0].content == "That is all, thank you."


async def test_a_call_is_an_action_and_a_question_to_the_customer_is_text() -> None:
    world = CustomerService(level=0, protocol="line")
    env = world.make_env(world.tasks("train", 1, 0)[0], 0)
    await env.start()
    asked, closed = [await env.step(assistant(reply)) for reply in ("How can I help?", "close")]
    assert (asked.is_action, closed.is_action, closed.terminated) == (False, True, True)


async def test_the_customer_speaks_no_more_often_than_its_budget_and_is_cut() -> None:
    world = replace(WORLD, user_replies=2, user_words=3)
    env = world.make_env(make_task(BAG), 0)
    assert (await env.start())[-1].content == "I want my"
    answers = [(await env.step(assistant("Your PIN?"))).messages[0].content for _ in range(2)]
    assert answers[0] in ("My PIN is", "It is 4417.")
    assert answers[1] == "(The customer says nothing more.)"


def test_the_seed_chooses_the_words_and_nothing_else() -> None:
    world = CustomerService(level=4, protocol="line")
    (task,) = world.tasks("train", 1, 0)

    async def dialogue(seed: int) -> list[str]:
        env, expert = world.make_env(task, seed), world.expert(task, 0)
        heard = [message.content for message in await env.start()]
        while not (step := await env.step(assistant(expert([])))).is_over:
            heard += [message.content for message in step.messages]
        assert step.is_success
        return heard

    found = [run_to_end(dialogue(seed)) for seed in range(6)]
    assert run_to_end(dialogue(0)) == found[0]
    assert any(other != found[0] for other in found)


def test_it_keeps_the_rules_of_a_world_and_its_splits_share_no_task() -> None:
    for world in (CustomerService(level=0), CustomerService(level=5, protocol="line")):
        report = check_env(world, num_tasks=1, deadline_s=120)
        assert report.is_ok, report
        train, test = ({str(task.data) for task in world.tasks(split, 300, 0)} for split in ("train", "test"))
        assert not train & test


def test_random_play_does_not_settle_anything_beyond_the_first_levels() -> None:
    for level, most in ((1, 3), (3, 0)):
        world = CustomerService(level=level, protocol="line")
        tasks = world.tasks("test", 60, seed=0)
        assert sum(bool(played(world, task, world.random_player(task, 0)).is_success) for task in tasks) <= most


@for_each("kind", ["cancel", "address", "refund", "exchange"])
def test_every_kind_of_request_can_be_drawn_alone_and_be_settled(kind: str) -> None:
    world = CustomerService(level=3, kinds=[kind])
    for task in world.tasks("train", 10, 0):
        assert {request["kind"] for request in task.data["requests"]} == {kind}
        assert played(world, task, world.expert(task, 0)).is_success


def test_the_dial_sets_the_level_and_nonsense_is_refused() -> None:
    assert level_options(CustomerService, 4, {"protocol": "line"}, "x") == {"protocol": "line", "level": 4}
    refused: list[dict[str, Any]] = [
        {"level": 6},
        {"kinds": ["buy"]},
        {"protocol": "xml"},
        {"side": "owner"},
        {"user_words": 0},
        {"partial_credit": 2.0},
    ]
    for options in (*refused, {"side": "customer", "demonstration_skill": 0.7}):
        with pytest.raises(ConfigError):
            CustomerService(**options)


@for_each("level", [0, 2, 5])
def test_a_policy_that_plays_the_customer_succeeds_if_it_tells_what_it_is_asked_for(level: int) -> None:
    world = CustomerService(level=level, side="customer")
    for task, dialogue in zip(world.tasks("train", 10, 0), world.demonstrations(10, 0), strict=True):
        right = [message.content for message in dialogue if message.role == "assistant"]
        assert last_step(task, right, world).is_success
        wrong = last_step(task, ["Hello.", *right[1:]], world)
        assert (wrong.is_success, wrong.info["user_errors"], wrong.reward) == (False, 1.0, 0.0)


@for_each("level", [2, 5])
def test_a_customer_that_recites_its_whole_brief_is_seen_and_its_seat_does_not_succeed(level: int) -> None:
    clerk, world = CustomerService(level=level), CustomerService(level=level, side="customer")
    for task, dialogue in zip(world.tasks("train", 5, 0), world.demonstrations(5, 0), strict=True):
        right = [message.content for message in dialogue if message.role == "assistant"]
        assert last_step(task, right, world).info["user_unasked"] == 0
        everything = " ".join(right)
        step = last_step(task, [everything, *right[1:]], world)
        assert (step.is_success, step.info["user_errors"]) == (False, 0.0)
        assert step.info["user_unasked"] > 0
        assert played(clerk, task, clerk.expert(task, 0)).info["user_unasked"] == 0


@pytest.mark.model
def test_a_model_plays_the_customer_with_its_own_budget_and_the_attempt_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[int] = []

    def watched(**given: Any) -> SamplingParams:
        allowed.append(given["max_tokens"])
        return SamplingParams(**given)

    monkeypatch.setattr(players, "SamplingParams", watched)
    run = tw.train(
        "customer_service",
        model="tiny",
        steps=1,
        directory=tmp_path / "run",
        env={"options": {"opponent": "base", "level": 0, "protocol": "line", "max_turns": 2, "user_replies": 1}},
        opponent={"max_tokens": 4},
        eval={"tasks": 1},
        warmup={"steps": 0},
        rollout={"group_size": 2, "max_tokens_per_turn": 6},
        train={"tasks_per_step": 2, "num_tasks": 8},
        observer=tw.Observer(),
    )
    with RunReader(run.directory) as reader:
        (first, *_) = [row for row in reader.attempts() if row.phase == "train"]
        labels = reader.attempt(first.id).trajectory.labels
    assert labels["opponent"] == "base"
    assert len(json.loads(labels["opponent_said"])) == 1
    assert set(allowed) == {4}
    assert run_replay(str(run.directory), first.id) == 0
    assert "replayed exactly" in capsys.readouterr().out
    run.close()
