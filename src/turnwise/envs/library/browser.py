"""Pages in a real Chromium: shops, forums, mail, forms and MiniWoB++ tasks, seen as text and used by short actions.

    system     One action in a reply: click ID, type ID TEXT, ...
    user       Task: Add 1 x Light bag to the cart.
               page: / Welcome
               [1] link "Home"
               ...
               [11] link "Light bag"
    assistant  click 11
    user       page: /product/4 Light bag
               ...
               [7] button "Add to cart"
    assistant  click 7
    user       page: /cart Cart ...
    assistant  done                                outcome 1.0, terminated, a success

At our own sites an attempt ends with `done`, and the site's database decides: it must hold what was asked for, and
nothing else may have changed. A MiniWoB++ page ends the attempt itself. If the page or the browser dies, the env is to
blame: the attempt is played again and never scored.
"""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from turnwise.envs.base import EnvStep, Split, Task, as_action, system, user
from turnwise.envs.browser.challenge import AnyPage, Challenge, PageVerdict, SiteChallenge
from turnwise.envs.browser.expert import plan_player, random_player
from turnwise.envs.browser.miniwob import MAX_TURNS as MINIWOB_TURNS
from turnwise.envs.browser.miniwob import MiniWobChallenge, miniwob_pages
from turnwise.envs.browser.miniwob_experts import PAGE_LEVELS, PLANNERS, TEN_PAGES, miniwob_player
from turnwise.envs.browser.names import (
    NAME_RULES,
    NOTE,
    named_plan_player,
    named_random_player,
    read_named_reply,
)
from turnwise.envs.browser.page import PageOptions, PageSession
from turnwise.envs.browser.plain import PlainPage
from turnwise.envs.browser.sites.forum import Forum
from turnwise.envs.browser.sites.mail import Mail
from turnwise.envs.browser.sites.office import Office
from turnwise.envs.browser.sites.shop import Shop
from turnwise.envs.browser.sites.site import LEVELS, Site
from turnwise.envs.difficulty import Levels
from turnwise.envs.schema import check_fractions
from turnwise.envs.screen import ScreenAction, ScreenProtocol, read_screen_reply, screen_rules
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw_tasks, random_for
from turnwise.errors import ConfigError
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message

SITES: dict[str, type[Site]] = {site.name: site for site in (Shop, Forum, Mail, Office)}
PLAIN_SITES = ("shop", "forum", "mail")
"""Sites that show the same without a browser. The office does not, and needs one."""
NUM_SEEDS = 100_000
"""Number of different contents of a site."""
MAX_TURNS = {0: 5, 1: 8, 2: 12, 3: 24, 4: 40, 5: 60}
"""Turns of an attempt by level: what the expert needs, and about a third more."""
DEMONSTRATIONS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserWorld:
    """The world `browser`."""

    name: ClassVar[str] = "browser"
    difficulties: ClassVar[Levels] = tuple({"level": level} for level in range(6))
    max_tokens: ClassVar[int] = 48

    site: Literal["shop", "forum", "mail", "office", "miniwob"] = "shop"
    """One of our own sites, or the pages of MiniWoB++."""
    pages: list[str] | None = None
    """Pages of MiniWoB++, by name. The default is a set of ten; `all` takes all."""
    level: int = 1
    """Difficulty, 1 to 5: how much is asked for, and how much is on the site. The shop has a level 0 too."""
    engine: Literal["chromium", "plain"] = "chromium"
    """Who shows the pages: a Chromium, or, for shop, forum and mail by name, a plain reader of HTML (faster)."""
    protocol: ScreenProtocol = "text"
    """Actions as lines of text, or as tool calls."""
    by_name: bool = False
    """Short observations and actions in which elements have names instead of ids, for small models."""
    max_turns: int = 0
    """Turns of an attempt. 0 takes the level's number."""
    max_chars: int = 1200
    """Budget of an observation. What does not fit is reached by scrolling."""
    screenshots: Literal["none", "last", "all"] = "none"
    """Pictures of the page that are kept with an attempt, for the viewer."""
    demonstration_skill: float = 1.0
    """Share of demonstrations that reach the goal. The others leave a step out."""
    chromium: str = ""
    """Path of a Chromium, instead of the one that is found."""

    @staticmethod
    def levels_for(options: Mapping[str, Any]) -> Levels:
        """The levels of a site: of our own ones how much is asked for, of MiniWoB++ pages by the expert's actions."""
        site = options.get("site", "shop")
        if site == "miniwob":
            return tuple({"pages": list(pages)} for pages in PAGE_LEVELS)
        return tuple({"level": level} for level in (LEVELS if site != "shop" else (0, *LEVELS)))

    def __post_init__(self) -> None:
        if self.level not in LEVELS and (self.level, self.site) != (0, "shop"):
            raise ConfigError(f"level={self.level}; expected {LEVELS[0]} to {LEVELS[-1]}, and for site=shop 0 too")
        if self.engine == "plain" and (not self.by_name or self.site not in PLAIN_SITES or self.screenshots != "none"):
            raise ConfigError(
                f"engine=plain shows {', '.join(PLAIN_SITES)} by name, and takes no pictures; got site={self.site}, "
                f"by_name={str(self.by_name).lower()}, screenshots={self.screenshots}"
            )
        if self.max_turns < 0:
            raise ConfigError(f"max_turns={self.max_turns}; expected 0 or more")
        check_fractions(self, "demonstration_skill")
        if self.by_name and self.protocol != "text":
            raise ConfigError(f"by_name=true and protocol={self.protocol}; elements have names in protocol=text only")
        _ = self.page_options
        if self.site != "miniwob" and self.pages is not None:
            raise ConfigError(f"pages={self.pages} are pages of site=miniwob; site={self.site} has none")
        if self.site == "miniwob":
            self._check_pages()
            if self.level != 1:
                raise ConfigError(f"level={self.level} is for our own sites; with site=miniwob choose pages instead")
        if self.max_turns == 0:
            turns = MINIWOB_TURNS if self.site == "miniwob" else MAX_TURNS[self.level]
            object.__setattr__(self, "max_turns", turns)

    @property
    def page_options(self) -> PageOptions:
        return PageOptions(
            max_chars=self.max_chars,
            chromium=self.chromium or None,
            by_name=self.by_name,
            has_address=not self.by_name,
        )

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw_tasks(self._draw_task, split, count, random_for(self.name, self.site, split, seed))

    def make_env(self, task: Task, seed: int) -> BrowserEnv:  # noqa: ARG002 - the content is drawn with the task
        return BrowserEnv(self, self.make_challenge(task))

    def make_challenge(self, task: Task) -> Challenge:
        data = task.data
        if data["site"] == "miniwob":
            return MiniWobChallenge(data["page"], data["seed"])
        return SiteChallenge(SITES[data["site"]], data["seed"], data["level"])

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        if self.site == "miniwob" and (missing := sorted(set(self.miniwob_pages) - set(PLANNERS))):
            raise ConfigError(f"no demonstrations of {', '.join(missing[:5])}; pages with them: {', '.join(PLANNERS)}")
        return play_demonstrations(
            self,
            lambda task: self.expert(task, random_for("demo", seed, task.id)),
            count,
            seed,
            concurrency=DEMONSTRATIONS_AT_ONCE,
        )

    def expert(self, task: Task, rng: random.Random) -> ScriptedPlayer:
        """A player that knows the way. With probability 1 - `demonstration_skill` it forgets a step."""
        forgets = rng.randrange(1000) if rng.random() >= self.demonstration_skill else None
        data = task.data
        if data["site"] == "miniwob":
            return miniwob_player(data["page"], self.protocol, forgets, by_name=self.by_name)
        plan = list(SITES[data["site"]].draw_task(data["seed"], data["level"]).plan)
        if forgets is not None:
            plan.pop(forgets % len(plan))
        return named_plan_player(plan) if self.by_name else plan_player(plan, self.protocol)

    def random_player(self, task: Task, seed: int) -> ScriptedPlayer:
        """A player that does anything to any element."""
        rng, words = random_for("random", seed, task.id), task.id.split("-")
        return named_random_player(rng, words) if self.by_name else random_player(rng, words, self.protocol)

    def _draw_task(self, rng: random.Random) -> Task:
        seed = rng.randrange(NUM_SEEDS)
        if self.site == "miniwob":
            page = rng.choice(self.miniwob_pages)
            return Task(id=f"{page}-{seed}", data={"site": self.site, "page": page, "seed": seed})
        data = {"site": self.site, "level": self.level, "seed": seed}
        return Task(id=f"{self.site}-{self.level}-{seed}", data=data)

    @property
    def miniwob_pages(self) -> Sequence[str]:
        if self.pages is None:
            return TEN_PAGES
        return miniwob_pages() if self.pages == ["all"] else self.pages

    def _check_pages(self) -> None:
        known = miniwob_pages()
        unknown = [page for page in self.miniwob_pages if page not in known]
        if unknown or not self.miniwob_pages:
            near = did_you_mean(unknown[0], known) if unknown else ""
            raise ConfigError(f"no page {', '.join(unknown[:5]) or 'at all'}{near}; `all` takes all {len(known)}")


class BrowserEnv:
    """One attempt at one page."""

    def __init__(self, world: BrowserWorld, challenge: Challenge) -> None:
        self._world = world
        self._challenge = challenge
        self._page: AnyPage | None = None
        self._turn = 0
        self._replies: list[str] = []
        self._pictures: dict[str, str] = {}

    async def start(self) -> Sequence[Message]:
        world, challenge = self._world, self._challenge
        if world.engine == "plain":
            self._page = PlainPage.open(challenge.app, world.max_chars, challenge.path)
        else:
            options = challenge.options(world.page_options)
            self._page = await PageSession.open(challenge.app, options, path=challenge.path, name=world.site)
        goal = await challenge.begin(self._page)
        observation = await self._page.observe()
        await self._keep_picture()
        rules = NAME_RULES if self._world.by_name else screen_rules(self._world.protocol)
        return [system(rules), user(f"Task: {goal}\n{observation}")]

    async def step(self, reply: Message) -> EnvStep:
        page = self._opened()
        self._turn += 1
        self._replies.append(reply.content)
        action = self._read(reply, page)
        if isinstance(action, str):
            return await self._answer(action, None, is_unparsable=not action.startswith(NOTE))
        says_done = action.kind == "done"
        observation = "" if says_done else await page.act(action)
        return as_action(await self._answer(observation, await self._challenge.verdict(page, says_done=says_done)))

    def _read(self, reply: Message, page: AnyPage) -> ScreenAction | str:
        if self._world.by_name:
            return read_named_reply(reply.content, page.elements)
        return read_screen_reply(reply, self._world.protocol)

    async def close(self) -> None:
        page, self._page = self._page, None
        try:
            if page is not None:
                await page.close()
        finally:
            self._challenge.close()

    def state_key(self) -> str:
        """The state of the site and of the page; where the page has a state of its own, all that was done to it."""
        site = self._challenge.state()
        shown = [str(element) for element in self._opened().elements]
        parts = self._replies if site is None else [site, self._opened().place, *shown]
        return f"turn {self._turn} {hashlib.sha256(chr(10).join(parts).encode('utf-8', 'replace')).hexdigest()[:16]}"

    def potential(self) -> float:
        """The share of the goal that is reached, where the site can tell."""
        return self._challenge.progress() or 0.0

    def _opened(self) -> AnyPage:
        if self._page is None:
            raise RuntimeError("this env was not started, or is closed")
        return self._page

    async def _answer(self, observation: str, verdict: PageVerdict | None, *, is_unparsable: bool = False) -> EnvStep:
        is_last = verdict is not None or self._turn >= self._world.max_turns
        if self._world.screenshots == "all" or (self._world.screenshots == "last" and is_last):
            await self._keep_picture()
        reached = self._challenge.progress() if is_last else None
        pictures, self._pictures = self._pictures, {}
        return EnvStep(
            messages=[user(observation)] if observation else [],
            reward=verdict.reward if verdict is not None else 0.0,
            terminated=is_last,
            is_success=(verdict is not None and verdict.is_success) if is_last else None,
            is_unparsable=is_unparsable,
            info={"actions": self._turn, **({} if reached is None else {"progress": reached})} if is_last else {},
            labels=pictures,
        )

    async def _keep_picture(self) -> None:
        page = self._opened()
        if isinstance(page, PageSession) and (self._world.screenshots == "all" or self._turn):
            picture = base64.b64encode(await page.screenshot()).decode("ascii")
            self._pictures[f"screenshot.{self._turn}"] = f"data:image/jpeg;base64,{picture}"
