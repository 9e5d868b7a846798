"""The world `workspace`: one state behind shell, Python, SQL and screens; what counts is what is there at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cases import for_each
from turnwise.envs.base import EnvStep, assistant
from turnwise.envs.library.workspace import Workspace, WorkspaceEnv
from turnwise.envs.library.workspace_office import Interface, OfficeChore, OfficeWork, expert_replies
from turnwise.envs.sandbox import Sandbox, SandboxResult
from turnwise.envs.scripted import play_script
from turnwise.errors import ConfigError, SandboxError
from turnwise.runtime.blocking import run_to_end

ENDLESS = (
    "CREATE VIEW customers AS WITH RECURSIVE n(name, balance) AS (SELECT 1, 1 UNION ALL SELECT name, 1 FROM n) "
    "SELECT * FROM n WHERE balance > 1"
)
ORDERS = [(100, "Ann", 17), (101, "Ben", 5), (102, "Ann", 28)]


def office(interface: Interface, *chores: OfficeChore) -> OfficeWork:
    return OfficeWork(
        orders=ORDERS,
        balances={"Ann": 1, "Ben": 2},
        notes={"n0.txt": "parcel\n", "n1.txt": "garden\n"},
        chores=chores,
        interface=interface,
    )


async def play(given: OfficeWork, replies: Sequence[str], *, by_name: bool = False) -> list[EnvStep]:
    world = Workspace(interface=given.interface, chores=max(1, len(given.chores)), by_name=by_name)
    env = WorkspaceEnv(world, Sandbox(), given)
    try:
        await env.start()
        return [await env.step(assistant(reply)) for reply in replies]
    finally:
        await env.close()


def said(step: EnvStep) -> str:
    return step.messages[0].content


async def test_shell_python_and_sql_see_the_same_files() -> None:
    steps = await play(
        office("shell", OfficeChore(kind="balance", name="Ann", value="42")),
        [
            "$ cd notes; X=3; echo 5 > x",
            "```python\nprint(open('x').read().strip() + '1')\n```",
            "```sql\nSELECT * FROM customers\n```",
            "```sql\nUPDATE customers SET balance = 42 WHERE name = 'Ann'\n```",
            "```sql\nSELECT nonsense\n```",
            "$ echo $X; ls /work",
            "done",
        ],
    )
    assert [said(step) for step in steps[1:6]] == [
        "51",
        "Ann | 1\nBen | 2\n[done]",
        "[1 rows changed]",
        "error: no such column: nonsense",
        "3\nnotes\norders.csv\nshop.db",
    ]
    assert steps[-1].is_success


async def test_what_a_click_downloads_the_shell_reads_and_a_form_sends() -> None:
    replies = ["$ ls", "click 1", "click 3", "$ grep -c Ann orders.csv", "back", "click 2", "type 4 Ann", "type 5 2"]
    steps = await play(office("both", OfficeChore(kind="count", name="Ann", value="2")), [*replies, "click 6", "done"])
    assert "orders.csv" not in said(steps[0])
    assert said(steps[2]).startswith("orders.csv was saved to /work.")
    assert said(steps[3]) == "2"
    assert 'text "sent: Ann 2"' in said(steps[8])
    assert steps[-1].is_success
    assert steps[-1].reward == 1.0


def test_a_folder_in_the_place_of_a_download_is_told_to_the_policy_and_is_no_failure_of_the_env() -> None:
    replies = ["click 1", "$ mkdir -p orders.csv/x", "click 3", "$ rm -r orders.csv", "click 3", "$ wc -l < orders.csv"]
    steps = run_to_end(play(office("both", OfficeChore(kind="count", name="Ann", value="2")), replies))
    assert said(steps[2]).startswith("orders.csv was not saved to /work: Is a directory.")
    assert said(steps[4]).startswith("orders.csv was saved to /work.")
    assert said(steps[5]) == "4"


class BusySandbox(Sandbox):
    """A sandbox on a machine under load: whatever runs outside of a session takes too long."""

    async def run(self, argv: Sequence[str], **rest: Any) -> SandboxResult:  # noqa: ARG002
        limits = rest.get("limits") or self.limits
        return SandboxResult(ending="timeout", exit_code=None, stdout="", stderr="", wall_s=9.0, limits=limits)


async def test_a_database_that_cannot_be_made_is_the_envs_failure_each_time() -> None:
    given = replace(office("shell", OfficeChore(kind="balance", name="Ann", value="4")), balances={"it's": 1})
    env = WorkspaceEnv(Workspace(interface="shell"), Sandbox(), given)
    await env.start()
    for _ in range(2):  # a session without its database is not kept
        with pytest.raises(SandboxError, match="database of the office was not made"):
            await env.step(assistant("$ ls"))
    await env.close()


async def test_a_short_limit_on_commands_does_not_keep_the_database_from_being_made() -> None:
    world = Workspace(interface="shell", chores=12, command_s=0.001)
    (task,) = world.tasks("train", 1, 0)
    assert any(chore["kind"] == "balance" for chore in task.data["chores"])
    env = world.make_env(task, 0)
    await env.start()
    assert said(await env.step(assistant("$ sleep 1"))).startswith("[stopped: not done after 0.001 s")
    await env.close()


async def test_a_database_that_could_not_be_read_in_time_is_the_envs_failure() -> None:
    given = office("shell", OfficeChore(kind="balance", name="Ann", value="4"))
    env = WorkspaceEnv(Workspace(interface="shell"), BusySandbox(), given)
    await env.start()
    await env.step(assistant("$ ls"))
    with pytest.raises(SandboxError, match="database of the office was not read: stopped: not done after"):
        await env.step(assistant("done"))
    await env.close()


@for_each(
    ("chore", "replies"),
    [
        (OfficeChore(kind="count", name="Ann", value="2"), ["$ mkdir reports; echo 3 > reports/Ann.txt"]),
        (OfficeChore(kind="count", name="Ann", value="2"), ["$ mkdir reports; ln -s /etc/passwd reports/Ann.txt"]),
        (OfficeChore(kind="notes", name="parcel"), ["$ mkdir done; cp notes/n0.txt done"]),
        (OfficeChore(kind="notes", name="parcel"), ["$ mkdir done; rm notes/n0.txt; touch done/n0.txt"]),
        (OfficeChore(kind="notes", name="parcel"), ["$ mkdir done; mv notes/* done"]),
        (OfficeChore(kind="notes", name="parcel"), ["$ mkdir done; cp notes/* done; rm notes/n0.txt"]),
        (OfficeChore(kind="notes", name="parcel"), ["$ mkdir done; mv notes/n0.txt done; echo x >> notes/n1.txt"]),
        (OfficeChore(kind="notes", name="parcel"), ["$ mkdir done; mv notes/n0.txt done; rm notes/n1.txt"]),
        (
            OfficeChore(kind="count", name="Ann", value="2"),
            ["$ mkdir reports; echo 2 > reports/Ann.txt; rm -r notes"],
        ),
        (OfficeChore(kind="balance", name="Ann", value="42"), ["```sql\nUPDATE customers SET balance = 42\n```"]),
        (
            OfficeChore(kind="balance", name="Ann", value="42"),
            ["```sql\nUPDATE customers SET balance = 42.7 WHERE name = 'Ann'\n```"],
        ),
        (
            OfficeChore(kind="balance", name="Ann", value="42"),
            [
                "```sql\nUPDATE customers SET balance = 42 WHERE name = 'Ann'\n```",
                "```sql\nINSERT INTO customers VALUES ('Zoe', 1)\n```",
            ],
        ),
        (OfficeChore(kind="balance", name="Ann", value="42"), ["$ echo rubbish > shop.db"]),
        (
            OfficeChore(kind="balance", name="Ann", value="42"),
            [
                "```sql\nDROP TABLE customers\n```",
                f"```sql\n{ENDLESS}\n```",
            ],
        ),
        (
            OfficeChore(kind="balance", name="Ann", value="42"),
            [
                "```sql\nUPDATE customers SET balance = 42 WHERE name = 'Ann'\n```",
                "```sql\nDELETE FROM customers WHERE name = 'Ben'\n```",
            ],
        ),
    ],
)
def test_half_done_or_done_with_damage_is_no_success(chore: OfficeChore, replies: list[str]) -> None:
    last = run_to_end(play(office("shell", chore), [*replies, "done"]))[-1]
    assert last.is_success is False
    assert sum(last.reward_parts.values()) <= 0.5


def test_every_interface_has_the_same_tasks_and_the_expert_does_them_in_fewer_actions_with_both() -> None:
    interfaces: tuple[Interface, ...] = ("shell", "screen", "both")
    worlds = {each: Workspace(interface=each, chores=2, orders=64, reports_only=True) for each in interfaces}
    tasks = {each: world.tasks("test", 2, seed=5) for each, world in worlds.items()}
    assert tasks["shell"] == tasks["screen"] == tasks["both"]
    turns = {each: [0.0] for each in interfaces}
    for each, world in worlds.items():
        for task in tasks[each]:
            dialogue = run_to_end(play_script(world.make_env(task, 0), world.expert(task, 0), world.max_turns))
            turns[each].append(sum(message.role == "assistant" for message in dialogue))
    assert sum(turns["shell"]) < sum(turns["both"]) < sum(turns["screen"])


def test_a_careless_expert_leaves_a_step_of_a_chore_out_and_fails_for_it() -> None:
    interfaces: tuple[Interface, ...] = ("shell", "screen", "both")
    for interface in interfaces:
        for by_name in (False, True):
            world = Workspace(interface=interface, by_name=by_name, reports_only=True, demonstration_skill=0.0)
            skilled = replace(world, demonstration_skill=1.0)
            for task in world.tasks("train", 3, 0):
                given = OfficeWork.from_json(task.data, interface)
                short, whole = (
                    [m.content for m in run_to_end(play_script(one.make_env(task, 0), one.expert(task, 1), 99))[2::2]]
                    for one in (world, skilled)
                )
                assert len(short) == len(whole) - 1
                assert not run_to_end(play(given, short, by_name=by_name))[-1].is_success
                assert run_to_end(play(given, whole, by_name=by_name))[-1].is_success


def test_screens_by_name_are_short_and_take_a_report_in_one_box() -> None:
    world = Workspace(interface="screen", chores=1, by_name=True)
    given = office("screen", OfficeChore(kind="count", name="Ann", value="2"))

    async def go() -> list[EnvStep]:
        env = WorkspaceEnv(world, Sandbox(), given)
        opening = await env.start()
        assert opening[1].content.endswith("\n\nAnn 17\nBen 5\nAnn 28\ntextbox Report\nbutton Send")
        replies = ["click Download", "type Ann = 2", "type Report = Ann", "click Send", "type Report = Ann 2"]
        steps = [await env.step(assistant(reply)) for reply in replies]
        fork = env.fork()
        return [*steps, *[await fork.step(assistant(reply)) for reply in ("click Send", "done")]]

    steps = run_to_end(go())
    assert said(steps[0]).startswith("note: there is no Download on the page\n\nAnn 17\n")
    assert not steps[0].is_unparsable
    assert "there is no Ann" in said(steps[1])
    assert said(steps[2]) == "textbox Report = Ann"
    assert said(steps[3]) == "Fill in NAME VALUE first.\n\n(nothing new on the screen)"
    assert said(steps[5]) == "sent: Ann 2\ntextbox Report"
    assert steps[-1].is_success


def test_by_name_too_every_interface_has_the_same_tasks_and_an_expert_who_does_them() -> None:
    kinds, options = {"count"}, {"orders": 4, "customers": 2, "chores": 1, "reports_only": True, "by_name": True}
    worlds = [Workspace(interface=each, reports=sorted(kinds), **options) for each in ("shell", "screen", "both")]
    tasks = [world.tasks("test", 1, seed=5) for world in worlds]
    assert tasks[0] == tasks[1] == tasks[2]
    assert {chore["kind"] for (task,) in tasks for chore in task.data["chores"]} == kinds
    assert {name for _, name, _ in tasks[0][0].data["orders"]} <= {"Ann", "Ben"}
    for world, (task,) in zip(worlds, tasks, strict=True):
        given = OfficeWork.from_json(task.data, world.interface)
        assert run_to_end(play(given, expert_replies(given, by_name=True), by_name=True))[-1].is_success


def test_a_fork_has_its_own_screens_shell_and_database() -> None:
    world = Workspace(chores=4, orders=16)
    (task,) = world.tasks("train", 1, seed=2)
    replies = [m.content for m in world.demonstrations(1, seed=2)[0] if m.role == "assistant"]
    half = len(replies) // 2

    async def go() -> list[EnvStep]:
        env = world.make_env(task, 0)
        await env.start()
        for reply in replies[:half]:
            await env.step(assistant(reply))
        fork = env.fork()
        for spoil in ("$ rm -rf /work/*", "click 1", "```sql\nDELETE FROM customers\n```"):
            await env.step(assistant(spoil))
        try:
            return [await fork.step(assistant(reply)) for reply in replies[half:]]
        finally:
            await env.close()
            await fork.close()

    assert run_to_end(go())[-1].is_success


def test_a_replayed_attempt_hears_the_same() -> None:
    world = Workspace(chores=3)
    (task,) = world.tasks("test", 1, seed=9)
    player = world.expert(task, 0)
    first = run_to_end(play_script(world.make_env(task, 0), player, world.max_turns))
    replies = iter([message.content for message in first if message.role == "assistant"])
    assert run_to_end(play_script(world.make_env(task, 1), lambda _: next(replies), world.max_turns)) == first


def test_random_play_does_not_solve_it() -> None:
    world = Workspace(chores=1, orders=8)

    async def is_solved(number: int) -> bool:
        task = world.tasks("test", 4, seed=0)[number]
        env, player = world.make_env(task, 0), world.random_player(task, 0)
        dialogue = list(await env.start())
        while True:
            dialogue.append(assistant(player(dialogue)))
            step = await env.step(dialogue[-1])
            if step.is_over:
                await env.close()
                return bool(step.is_success)

    assert not any(run_to_end(is_solved(number)) for number in range(4))


def test_more_reports_than_customers_are_refused_and_all_that_are_asked_for_are_drawn() -> None:
    ways: tuple[dict[str, Any], ...] = ({"interface": "screen"}, {"reports_only": True})
    for options in ways:
        with pytest.raises(ConfigError, match="customers=10, orders=40 have 10; ask for 10 chores at most"):
            Workspace(chores=12, orders=40, **options)
    for chores, customers, orders in ((10, 10, 12), (2, 2, 4)):
        world = Workspace(chores=chores, customers=customers, orders=orders, reports_only=True)
        tasks = world.tasks("train", 30, 0)
        assert {len(task.data["chores"]) for task in tasks} == {chores}
        assert all(len(task.data["orders"]) == orders for task in tasks)


@for_each(
    "options",
    [
        {"interface": "voice"},
        {"chores": 0},
        {"orders": 3},
        {"customers": 1},
        {"reports": []},
        {"reports": ["average"]},
        {"browser": True, "by_name": True},
        {"command_s": 0.0},
        {"partial_credit": -1.0},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Workspace(**options)
