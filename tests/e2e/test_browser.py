"""The world `browser` in a real Chromium: experts, rules, load, kills, replay, training and the viewer's pictures."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from campaigns.browser_load import footprint, play_under_load
from campaigns.miniwob_pages import compare_pages
from command_line import run_here
from turnwise.envs.base import Task, assistant
from turnwise.envs.browser.miniwob import miniwob_pages
from turnwise.envs.browser.miniwob_experts import PAGE_LEVELS, TEN_PAGES
from turnwise.envs.browser.pool import close_pools
from turnwise.envs.check import check_env
from turnwise.envs.library.browser import SITES, BrowserWorld
from turnwise.envs.library.workspace import Workspace
from turnwise.envs.library.workspace_office import Interface
from turnwise.envs.scripted import ScriptedPlayer, play_script
from turnwise.rollout.branch import check_can_branch
from turnwise.rollout.limits import RolloutLimits
from turnwise.runlog.reader import RunReader
from turnwise.trajectory import Message
from turnwise.view.one_attempt import attempt_json

pytest.importorskip("playwright", reason="run by tests/contract/test_browser_packages.py")
pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(autouse=True, scope="module")
def _browsers_end() -> Iterator[None]:
    yield
    close_pools()


async def play(world: BrowserWorld | Workspace, task: Task, player: ScriptedPlayer) -> Any:
    """The last step of an attempt."""
    env = world.make_env(task, 0)
    try:
        dialogue = list(await env.start())
        while True:
            dialogue.append(assistant(player(dialogue)))
            step = await env.step(dialogue[-1])
            dialogue += step.messages
            if step.is_over:
                return step
    finally:
        await env.close()


async def play_all(world: BrowserWorld, tasks: Sequence[Task], skill: float = 1.0) -> list[bool]:
    skilled = BrowserWorld(site=world.site, level=world.level, pages=world.pages, demonstration_skill=skill)
    steps = await asyncio.gather(*(play(world, task, skilled.expert(task, random.Random(1))) for task in tasks))
    return [step.is_success for step in steps]


async def test_experts_reach_every_goal_and_a_forgotten_step_is_seen() -> None:
    for site in SITES:
        world = BrowserWorld(site=site, level=3)  # type: ignore[arg-type]
        assert await play_all(world, world.tasks("train", 1, seed=3)) == [True], site
    world = BrowserWorld(site="office", level=1)
    assert await play_all(world, world.tasks("test", 1, seed=3), skill=0.0) == [False]


async def test_experts_solve_the_ten_pages_of_miniwob() -> None:
    pytest.importorskip("miniwob")
    world = BrowserWorld(site="miniwob")
    tasks = {task.data["page"]: task for task in world.tasks("train", 60, seed=0)}
    assert len(tasks) == 10
    solved = dict(zip(tasks, await play_all(world, list(tasks.values())), strict=True))
    assert solved == dict.fromkeys(tasks, True)


async def test_the_pages_of_a_level_take_the_expert_its_number_of_actions() -> None:
    pytest.importorskip("miniwob")
    for pages, (fewest, most) in zip(PAGE_LEVELS, [(1, 1), (2, 2), (1, 13)], strict=True):
        world = BrowserWorld(site="miniwob", pages=list(pages))
        tasks = {task.data["page"]: task for task in world.tasks("train", 60, seed=0)}
        steps = await asyncio.gather(*(play(world, one, world.expert(one, random.Random(1))) for one in tasks.values()))
        for page, step in zip(tasks, steps, strict=True):
            assert step.is_success, page
            assert fewest <= step.info["actions"] <= most, page


async def test_a_page_of_miniwob_shows_the_same_with_the_same_seed() -> None:
    pytest.importorskip("miniwob")
    reports = await compare_pages([*miniwob_pages()[:4], *TEN_PAGES[:4]], seed=5, actions=2)
    assert [report.problem for report in reports] == [""] * 8


async def test_experts_work_by_name_too() -> None:
    pytest.importorskip("miniwob")
    for world in (BrowserWorld(site="miniwob", by_name=True, max_chars=400), BrowserWorld(level=3, by_name=True)):
        tasks = world.tasks("train", 4 if world.site == "miniwob" else 1, seed=0)
        steps = [await play(world, task, world.expert(task, random.Random(1))) for task in tasks]
        assert all(step.is_success for step in steps), world.site


async def test_an_office_with_pages_is_worked_by_clicks_alone_or_with_the_shell_and_replays_the_same() -> None:
    interfaces: tuple[Interface, ...] = ("screen", "both")
    worlds: dict[str, Any] = {each: Workspace(interface=each, browser=True, reports_only=True) for each in interfaces}
    shell = Workspace(interface="shell", reports_only=True)
    (task,) = shell.tasks("test", 1, seed=4)
    for world in worlds.values():
        assert world.tasks("test", 1, seed=4) == [task]  # one task, one goal, whatever there is to do it with
        first = await play_script(world.make_env(task, 0), world.expert(task, 0), world.max_turns)
        assert first[1].content.startswith((await shell.make_env(task, 0).start())[1].content)
        replies = [message.content for message in first if message.role == "assistant"]

        def say_again(heard: Sequence[Message], before: list[Message] = first, said: list[str] = replies) -> str:
            assert list(heard) == before[: len(heard)]
            return said[len(heard) // 2 - 1]

        assert (await play(world, task, say_again)).is_success
        spoiled = [reply.replace("type 5 ", "type 5 9") for reply in replies]
        assert not (await play(world, task, lambda heard, said=spoiled: said[len(heard) // 2 - 1])).is_success
        assert await check_can_branch(world, RolloutLimits()) == "replay"  # a page cannot be forked


async def test_a_download_is_a_file_of_the_shell_which_has_no_network() -> None:
    world = Workspace(interface="both", browser=True, reports_only=True)
    env = world.make_env(world.tasks("test", 1, seed=4)[0], 0)
    try:
        await env.start()
        ports = "python3 -c \"import os; print(sum(len(open(f).readlines()) - 1 for f in ['/proc/net/tcp']))\""
        replies = ["click 2", "click 4", "$ wc -l < orders.csv; ls", f"$ {ports}"]
        heard = [(await env.step(assistant(reply))).messages[0].content for reply in replies]
    finally:
        await env.close()
    assert heard[1].startswith("orders.csv was saved to /work.")
    assert heard[2:] == ["17\nnotes\norders.csv", "0"]  # nobody listens there, the browser's gateway neither


async def test_random_actions_rarely_reach_a_goal_and_are_always_understood() -> None:
    world = BrowserWorld(site="shop", level=2)
    players = [(task, world.random_player(task, 0)) for task in world.tasks("train", 4, seed=0)]
    steps = await asyncio.gather(*(play(world, task, player) for task, player in players))
    assert not any(step.is_success for step in steps)
    assert not any(step.is_unparsable for step in steps)


def test_the_world_keeps_the_rules() -> None:
    report = check_env(BrowserWorld(site="mail"), num_tasks=1, deadline_s=60)
    assert report.is_ok, report


async def test_a_killed_browser_is_blamed_and_played_again_and_nothing_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await asyncio.to_thread(close_pools)
    folder = tempfile.TemporaryDirectory(prefix="tw")  # not `tmp_path`: Chromium needs a short path for a socket
    monkeypatch.setenv("TMPDIR", folder.name)
    monkeypatch.setattr(tempfile, "tempdir", None)
    (Path(folder.name) / "tw-chromium-99999999-dead").mkdir()  # of a process that was killed
    report = await play_under_load(12, 6, kills=2, levels=[1])
    await asyncio.to_thread(close_pools)
    assert (report.attempts, report.successes, report.lost) == (12, 12, 0)
    assert report.kills == 2
    assert report.failed_tries >= 1
    assert report.blamed == {"env"}
    assert report.rows[0][1].temporary >= 1  # it looks where browsers leave things
    left = footprint()
    assert (left.processes, left.temporary) == (0, 0)
    folder.cleanup()


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_trains_replays_exactly_and_its_pictures_are_shown(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    small = ("model=tiny", "train.steps=1", "train.tasks_per_step=1", "rollout.group_size=2", "eval.tasks=0")
    world = ("env.options.site=forum", "env.options.max_turns=2", "env.options.screenshots=all")
    warm = ("warmup.steps=1", "warmup.demonstrations=2", "warmup.batch_size=1")
    limits = ("env.options.max_chars=300", "rollout.step_deadline_s=120", "rollout.max_trajectory_tokens=1000")
    run_here("train", "browser", *small, *world, *warm, *limits, f"run.dir={directory}")
    with RunReader(directory) as run:
        rows = run.attempts()
        shown = attempt_json(run, rows[0].id, "tiny")
    assert "replayed exactly" in run_here("replay", str(directory), "--attempt", str(rows[0].id))
    said = [message for turn in shown["turns"] for message in [*turn["observation"], turn["reply"]]]
    pictures = [image for message in said for image in message.get("images", [])]
    assert len(pictures) == len(shown["turns"])
    assert all(picture.startswith("data:image/jpeg;base64,") for picture in pictures)
    assert not any("screenshot" in name for name in shown["labels"])


@pytest.mark.usefixtures("tiny_dir")
def test_an_attempt_at_a_page_of_miniwob_replays_exactly_from_its_record(tmp_path: Path) -> None:
    pytest.importorskip("miniwob")
    directory = tmp_path / "run"
    short = ("train.steps=1", "train.tasks_per_step=1", "rollout.group_size=4", "eval.tasks=0")
    page = ("env.options.pages=[click-button-sequence]", "env.options.demonstration_skill=1.0")
    warm = ("warmup.steps=150", "warmup.demonstrations=8", "warmup.batch_size=8")
    run_here("train", "browser_miniwob", *short, *page, *warm, f"run.dir={directory}")
    with RunReader(directory) as run:
        attempts = {row.id: attempt_json(run, row.id, "tiny")["turns"] for row in run.attempts()}
    said = {number: [turn["reply"]["content"] for turn in turns] for number, turns in attempts.items()}
    played = [number for number, replies in said.items() if "click ONE" in replies]
    assert played, said
    assert "replayed exactly" in run_here("replay", str(directory), "--attempt", str(played[0]))
