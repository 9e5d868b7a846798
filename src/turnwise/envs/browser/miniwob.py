"""The pages of MiniWoB++ (package `miniwob`) as challenges, and experts for some of them.

A page draws its problem from a seed, says what it wants, and ends the attempt itself with a reward from -1 to 1. Its
clock is stopped: a model needs longer than a person, and how long says nothing about it.
The pages were made to be seen. What a page only shows by a colour, a shape or an icon gets that as its accessible name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from turnwise.envs.browser.challenge import AnyPage, PageVerdict
from turnwise.envs.browser.gateway import FolderApp
from turnwise.envs.browser.page import PageOptions, PageSession
from turnwise.errors import ConfigError

MAX_TURNS = 16
"""Turns of an attempt: the longest expert needs thirteen (twelve boxes and Submit), and a few more."""
NOT_BY_SEED = frozenset({"button-delay", "stock-market"})
"""Pages that do not repeat with their seed: they reward real seconds, or show what real time brings."""

_BEGIN = """async (seed) => {
  Math.seedrandom(seed);
  core.EPISODE_MAX_TIME = 2000000000;
  if (window.jQuery) jQuery.fx.off = true;  // what is about to go would be shown, or not, by chance
  const add = EventTarget.prototype.addEventListener, listening = new Set();
  EventTarget.prototype.addEventListener = function (kind, ...rest) {
    if (this instanceof Element && (kind === 'click' || kind === 'mousedown')) listening.add(this);
    return add.call(this, kind, ...rest);
  };
  core.startEpisodeReal();
  while (!WOB_TASK_READY) await new Promise((resolve) => setTimeout(resolve, 10));
  for (const id of ['query', 'reward-display', 'click-canvas']) {
    const box = document.getElementById(id);
    if (box) box.style.visibility = 'hidden';  // the goal is told once, and the clock is no part of the page
  }
  for (const part of listening) {  // what listens to clicks can be clicked, and is called as it looks
    if (part === document.body || ['area', 'wrap'].includes(part.id)) continue;
    part.style.cursor = 'pointer';
    if (part.tagName === 'SPAN' && !part.children.length && !part.role) part.role = 'link';
    const look = part.style.backgroundColor || part.getAttribute('fill') || part.getAttribute('class');
    if (!part.textContent.trim() && look && !part.labels) part.ariaLabel = look;
  }
  const said = core.getUtterance();
  return typeof said === 'string' ? said : said.utterance;
}"""
_END = "() => [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"


@cache
def miniwob_folder() -> Path:
    """The directory of the package's pages. It is found without being imported, because it imports selenium."""
    found = find_spec("miniwob")
    if found is None or found.origin is None:
        raise ConfigError("site=miniwob needs the pages of MiniWoB++: pip install 'turnwise[miniwob]'")
    return Path(found.origin).parent / "html"


@cache
def miniwob_pages() -> tuple[str, ...]:
    """The names of all pages that repeat with their seed."""
    names = (file.stem for file in (miniwob_folder() / "miniwob").glob("*.html"))
    return tuple(sorted(name for name in names if name not in NOT_BY_SEED))


class MiniWobChallenge:
    """One problem of one page."""

    def __init__(self, page: str, seed: int) -> None:
        self.app = FolderApp(miniwob_folder())
        self.path = f"/miniwob/{page}.html"
        self._seed = seed

    def options(self, given: PageOptions) -> PageOptions:
        return replace(given, every_id=True, waits_until_quiet=True, has_address=False)

    async def begin(self, page: AnyPage) -> str:
        assert isinstance(page, PageSession), "these pages have scripts"
        goal = await page.evaluate(_BEGIN, self._seed)
        return " ".join(str(goal).split())

    async def verdict(self, page: AnyPage, *, says_done: bool) -> PageVerdict | None:
        assert isinstance(page, PageSession), "these pages have scripts"
        is_over, reward = await page.evaluate(_END)
        if is_over:
            return PageVerdict(reward=max(0.0, float(reward)), is_success=reward > 0)
        return PageVerdict(reward=0.0, is_success=False) if says_done else None

    def progress(self) -> None:
        return None

    def state(self) -> None:
        return None

    def close(self) -> None:
        pass
