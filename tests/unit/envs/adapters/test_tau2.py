"""tau2-bench's tasks from inspect-evals, with its own data, tools and rules of success."""

from __future__ import annotations

import pytest

inspect_evals = pytest.importorskip("inspect_evals", reason="run by tests/contract/test_service_packages.py")

from attempts import play, said  # noqa: E402 - after the check that the library is there
from turnwise.envs.adapters.tau2 import Tau2World, solves_itself  # noqa: E402
from turnwise.envs.adapters.tau2_tools import DOMAINS, read_cases, read_splits  # noqa: E402
from turnwise.envs.base import Task, assistant  # noqa: E402
from turnwise.envs.check import check_env  # noqa: E402
from turnwise.envs.registry import get_world  # noqa: E402
from turnwise.envs.tools import format_tool_call as call  # noqa: E402
from turnwise.errors import ConfigError  # noqa: E402

# inspect-ai uses what newer versions of its libraries call deprecated, when it is imported
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SHIRTS = Task(id="retail-3", data={"case": "3"})
YUSUF = call("find_user_id_by_name_zip", first_name="Yusuf", last_name="Rossi", zip="19122")
CHANGE = call(
    "modify_pending_order_items",
    order_id="#W4776164",
    item_ids=["8349118980"],
    new_item_ids=["9647292434"],
    payment_method_id="credit_card_9513926",
)
MORE = "Is there anything else?"


def _replies(world: Tau2World, task: Task) -> list[str]:
    player = world.expert(task)
    return [player(()) for _ in range(world.max_turns)]


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_domain_keeps_the_rules(domain: str) -> None:
    report = check_env(get_world(f"tau2:{domain}"), num_tasks=2, deadline_s=120.0)
    assert report.is_ok, report


@pytest.mark.parametrize("domain", DOMAINS)
async def test_the_answers_calls_solve_held_out_tasks_and_a_clerk_who_only_says_done_solves_none(domain: str) -> None:
    world = Tau2World(domain)
    for task in {task.id: task for task in world.tasks("test", 12, 0)}.values():
        _, steps = await play(world, _replies(world, task), task)
        assert (steps[-1].is_success, steps[-1].reward) == (True, 1.0), task.id
        _, steps = await play(world, ["It is done."] * world.max_turns, task)
        assert (steps[-1].is_success, steps[-1].reward) == (False, 0.0), task.id


async def test_the_customer_tells_its_story_bit_by_bit_and_ends_the_talk_when_nothing_is_asked() -> None:
    start, steps = await play(Tau2World("retail"), [MORE, "What is your name?", MORE, "Bye."], SHIRTS)
    assert start[1].content.startswith("I want to know how many tshirt options are available")
    assert said(steps)[:2] == ["I am Yusuf Rossi in zipcode 19122.", "I am Yusuf Rossi in zipcode 19122."]
    assert steps[-1].messages[0].content != "###STOP###"
    _, steps = await play(Tau2World("retail"), [MORE] * 3 + ["Bye."], SHIRTS)
    assert said(steps)[-1] == "###STOP###"
    assert (steps[-1].terminated, steps[-1].is_success) == (True, False)


async def test_the_right_change_without_the_number_that_was_asked_for_is_no_success() -> None:
    world = Tau2World("retail")
    _, told = await play(world, [MORE] * 3 + [YUSUF, CHANGE, "There are 10."], SHIRTS)
    _, untold = await play(world, [MORE] * 3 + [YUSUF, CHANGE, "It is done."], SHIRTS)
    assert (told[-1].is_success, untold[-1].is_success) == (True, False)


async def test_one_change_too_many_is_no_success_and_looking_around_does_no_harm() -> None:
    world = Tau2World("retail", partial_credit=0.5)
    address = dict.fromkeys(("address1", "address2", "city", "state", "country", "zip"), "X")
    extra = call("modify_user_address", user_id="yusuf_rossi_9620", **address)
    _, spoilt = await play(world, [MORE] * 3 + [CHANGE, extra, "There are 10."], SHIRTS)
    looked = [MORE] * 3 + [call("list_all_product_types"), CHANGE, "There are 10."]
    _, fine = await play(world, looked, SHIRTS)
    assert (spoilt[-1].is_success, fine[-1].is_success) == (False, True)
    assert 0 < spoilt[-1].reward_parts["outcome"] < 0.5


async def test_attempts_and_forks_share_no_database() -> None:
    world = Tau2World("retail")
    env = world.make_env(SHIRTS, 0)
    await env.start()
    twin = env.fork()
    assert env.state_key() == twin.state_key()
    (changed,) = (await env.step(assistant(CHANGE))).messages
    (again,) = (await twin.step(assistant(CHANGE))).messages
    (twice,) = (await twin.step(assistant(CHANGE))).messages
    assert changed == again
    assert twice.content.startswith("Error")
    _, steps = await play(world, [CHANGE], SHIRTS)
    assert steps[0].messages == [changed]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("initialize"), "Error: no tool 'initialize'"),
        (call("get_order_details", order="#W1"), "Error: get_order_details takes order_id; check 'order'"),
        (call("get_order_details", order_id="#W1"), "Error: Order not found"),
        (call("calculate", expression="__import__('os')"), "Error: "),
    ],
)
async def test_a_wrong_call_is_answered_with_an_error(text: str, answer: str) -> None:
    _, steps = await play(Tau2World("retail"), [text], SHIRTS)
    assert steps[0].messages[0].content.startswith(answer)
    assert not steps[0].is_over


async def test_a_telecom_customer_does_on_the_phone_what_the_clerk_names() -> None:
    name = "[mobile_data_issue]data_mode_off|data_usage_exceeded[PERSONA:None]"
    task = Task(id=f"telecom-{name}", data={"case": name})
    _, steps = await play(Tau2World("telecom"), ["Please use toggle_data.", "Please run speed test."], task)
    heard = said(steps)
    assert heard[0].startswith("It says: Mobile Data is now ON")
    assert heard[1].startswith("It says: ")


def test_the_splits_are_the_benchmarks_and_variants_of_held_out_tasks_are_held_out() -> None:
    for domain in DOMAINS:
        world = Tau2World(domain, idle_tasks=True)
        for split in ("train", "test"):
            assert {task.data["case"] for task in world.tasks(split, 80, 0)} == read_splits(domain)[split]
    full = {
        split: {
            task.data["case"].partition("[PERSONA")[0]
            for task in Tau2World("telecom", pool="full").tasks(split, 3000, 0)
        }
        for split in ("train", "test")
    }
    assert not full["train"] & full["test"]


def test_tasks_that_doing_nothing_solves_are_left_out_unless_asked_for() -> None:
    idle = {name for name in read_cases("airline") if solves_itself("airline", name)}
    assert len(idle) == 19
    kept = {task.data["case"] for task in Tau2World("airline").tasks("train", 50, 0)}
    assert not kept & idle


def test_nonsense_is_refused_and_says_what_is_there() -> None:
    with pytest.raises(ConfigError, match="expected retail, airline, telecom"):
        get_world("tau2:retial")
    with pytest.raises(ConfigError, match="expected base, or for telecom full"):
        get_world("tau2:retail", pool="full")
    with pytest.raises(ConfigError, match="raise max_calls"):
        get_world("tau2:retail", max_calls=0).tasks("test", 1, 0)
