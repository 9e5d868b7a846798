"""What a person sees in `turnwise view`, looked at with a real Chromium. Runs in an environment that has Playwright.

    python view_checks.py CHROMIUM     prints {check: null, or what went wrong}

Every public function is a check; it gets a fresh page of a fresh profile. Where it looks is in the environment:
VIEW_URL (with its token), VIEW_EXPORT (an exported page), VIEW_LIVE (the name of a run that trains now).
"""

import inspect
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

URL = os.environ["VIEW_URL"]
EXPORT = Path(os.environ["VIEW_EXPORT"]).as_uri()
LIVE = os.environ["VIEW_LIVE"]
PAGES = {
    "runs": "#/",
    "run": "#/run/grpo-s0",
    "attempts": "#/attempts?run=grpo-s0",
    "groups": "#/attempts?run=grpo-s0&view=groups",
    "attempt": "#/attempt/grpo-s0/1?tokens=advantage",
    "pair": "#/pair/grpo-s0/1/2",
}
SOON_MS = 60_000
expect.set_options(timeout=SOON_MS)


def _open(page, where):
    page.goto(URL + PAGES.get(where, where))
    expect(page.get_by_role("heading", level=1)).to_be_visible()


# First, because the others are faster when no run trains beside them.
def a_live_run_is_followed_steered_stopped_and_resumed(page):
    _open(page, f"#/run/{LIVE}")
    step = page.locator(".run-head .progress span").first
    seen = step.inner_text()
    ends = time.monotonic() + SOON_MS / 1000
    while step.inner_text() == seen:  # the page follows without a reload
        assert time.monotonic() < ends, f"still {seen}"
        page.wait_for_timeout(100)
    expect(page.locator("#live")).to_have_text("live")
    page.get_by_label("Setting").select_option("train.steps")
    page.get_by_label("New value").fill("-3")
    page.get_by_role("button", name="Steer").click()
    expect(page.get_by_role("alert")).to_contain_text("train.steps")
    expect(page.get_by_role("alert").locator(".bad")).to_be_visible()
    page.get_by_label("Setting").select_option("train.steps")
    page.get_by_label("New value").fill("777")
    page.get_by_role("button", name="Steer").click()
    expect(page.get_by_role("alert")).to_contain_text("asked: train.steps=777")
    expect(step).to_contain_text("/ 777")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".title .pill").first).to_have_text("stopped")
    page.get_by_label("Changed options of the resumed run").fill("train.steps=888")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".title .pill").first).to_have_text("running")
    expect(step).to_contain_text("/ 888")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Stop now").click()
    expect(page.locator(".title .pill").first).to_have_text("stopped")


_UNNAMED = """[...document.querySelectorAll("button, a, input, select")].filter((one) => one.offsetParent !== null
  && !(one.ariaLabel || one.textContent.trim() || one.title || (one.labels && one.labels.length)))
  .map((one) => one.outerHTML)"""


def every_page_has_roles_and_no_errors(page):
    problems = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    titles = {
        "runs": "Runs",
        "run": "grpo-s0",
        "attempts": "Attempts",
        "groups": "Groups",
        "attempt": "Attempt #1",
        "pair": "Two attempts",
    }
    for where, title in titles.items():
        _open(page, where)
        expect(page.get_by_role("heading", level=1)).to_have_text(title)
        for role in ("banner", "main"):
            expect(page.get_by_role(role)).to_be_visible()
        expect(page.get_by_role("navigation", name="Breadcrumb")).to_be_visible()
        unnamed = page.evaluate(_UNNAMED)
        assert not unnamed, f"{where}: controls without a name: {unnamed}"
    assert not problems, problems


def runs_stand_side_by_side_with_seeds_grouped_and_the_damaged_one_named(page):
    _open(page, "runs")
    chart = page.get_by_role("img", name=re.compile("^eval.success: latest"))
    expect(chart).to_have_attribute("aria-label", re.compile(r"grpo \(2 seeds\) 71\.0 %"))
    expect(chart.locator("canvas")).to_be_visible()
    row = page.get_by_role("row").filter(has_text="broken")
    expect(row).to_contain_text("damaged")
    expect(row).to_contain_text("cannot be read")
    expect(page.get_by_role("row").filter(has_text="train.learning_rate")).to_contain_text("0.5")
    page.get_by_label("group seeds").uncheck()
    expect(page.get_by_role("listitem").filter(has_text="grpo-s1")).to_be_visible()
    page.get_by_label("metric", exact=True).select_option("rollout/reward_mean")
    expect(page.get_by_role("img", name=re.compile("^rollout.reward_mean: latest"))).to_be_visible()


def one_run_shows_areas_findings_plan_and_units(page):
    _open(page, "run")
    for title in ("Success", "Reward", "Where the time goes", "Entropy", "How attempts end", "Staleness", "Drift"):
        expect(page.get_by_role("region", name=title, exact=True).get_by_role("img")).to_be_visible()
    expect(page.get_by_role("region", name="Entropy")).to_contain_text("turn 2")
    page.get_by_label("Search metrics").fill("gradient")
    expect(page.get_by_text("Norm of the gradient before clipping. (norm)")).to_be_visible()
    expect(page.get_by_text("Nothing to report.").or_(page.get_by_role("list", name="Findings"))).to_be_visible()
    page.get_by_text("Plan", exact=True).click()
    expect(page.get_by_text("world        guess_number")).to_be_visible()


def filters_narrow_the_list_and_live_in_the_address(page):
    _open(page, "attempts")
    expect(page.get_by_role("status").filter(has_text="5 attempts")).to_be_visible()
    page.get_by_label("end reason").select_option("max_turns")
    expect(page.get_by_role("link", name=re.compile("^attempt "))).to_have_count(1)
    assert "stop_reason=max_turns" in page.url
    page.go_back()
    expect(page.get_by_role("link", name=re.compile("^attempt "))).to_have_count(5)
    page.get_by_label("search").fill("paris")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name=re.compile("^attempt "))).to_have_count(1)
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_role("link", name=re.compile("^attempt "))).to_have_count(5)  # the cleared form is there
    page.get_by_role("group", name="reward").get_by_label("from").fill("0.9")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name=re.compile("^attempt "))).to_have_count(1)
    page.get_by_role("button", name="groups").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Groups")
    expect(page.get_by_role("list", name="Attempts of the group").get_by_role("listitem")).to_have_count(3)


def a_world_can_be_chosen_in_a_run_that_mixes_worlds(page):
    for start in (URL, EXPORT):
        page.goto(f"{start}#/attempts?run=mixed")
        expect(page.get_by_role("link", name=re.compile("^attempt "))).to_have_count(2)
        page.get_by_label("world").select_option("key_door")
        expect(page.get_by_role("link", name=re.compile("^attempt "))).to_have_count(1)
        expect(page.get_by_role("row").nth(1)).to_contain_text("key_door/t1")
    _open(page, "#/run/mixed")
    expect(page.get_by_text("mix of guess_number, key_door")).to_be_visible()


def a_screenshot_of_the_world_is_shown_where_it_was_seen(page):
    for start in (URL, EXPORT):
        page.goto(f"{start}#/attempt/mixed/1")
        picture = page.get_by_role("img", name="screenshot of the world")
        expect(picture).to_be_visible()
        assert picture.evaluate("image => image.naturalWidth") == 1, "the browser could not read it"
        expect(page.get_by_role("region", name="turn 1").get_by_role("img")).to_have_count(1)


def an_attempt_shows_tools_rewards_tokens_and_its_tree(page):
    _open(page, "attempt")
    turn = page.get_by_role("region", name="turn 3")
    expect(turn).to_contain_text("query=weather")
    expect(turn).to_contain_text("outcome +1")
    expect(turn).to_contain_text("advantage +0.5")
    page.get_by_role("button", name="critic's value").click()
    turn.locator(".tok").nth(2).hover()
    tip = page.get_by_role("tooltip")
    for text in ("sampler logprob", "-0.3", "trainer logprob", "-0.2", "policy version"):
        expect(tip).to_contain_text(text)
    turn.get_by_text("12 tokens after a prompt of").click()
    expect(turn.get_by_role("row")).to_have_count(13)
    tree = page.get_by_role("group", name="Tree of 3 attempts")
    expect(tree.get_by_role("link")).to_have_count(3)
    tree.get_by_role("link", name="attempt 3, reward 0.25").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Attempt #3")


def a_branched_attempt_marks_what_its_group_shares(page):
    _open(page, "#/attempt/branched/1")
    expect(page.get_by_role("region", name="turn 1")).to_contain_text("shared by the group")
    expect(page.get_by_role("region", name="turn 2")).not_to_contain_text("shared by the group")
    expect(page.locator(".tree .node")).to_have_count(3)  # one shared turn, two own ones


def two_attempts_part_at_a_token(page):
    _open(page, "#/pair/branched/1/2")
    expect(page.get_by_role("note")).to_have_text("They part in turn 2, at token 3.")
    expect(page.locator(".tok.parts")).to_have_count(2)
    expect(page.locator(".tok.same")).to_have_count(4)
    shared = page.get_by_role("region", name="turn 1")  # said once, and taught to each in its own way
    expect(shared).to_contain_text("#1 advantage -0.5")
    expect(shared).to_contain_text("#2 advantage +0.5")


def text_of_a_world_never_runs(page):
    for where in (
        "#/attempts?run=hostile",
        "#/attempts?run=hostile&view=groups",
        "#/attempt/hostile/1",
        "#/pair/hostile/1/2",
        "#/run/hostile",
    ):
        _open(page, where)
    _open(page, "#/attempt/hostile/1?tokens=sampler")
    expect(page.get_by_text("<script>window.pwned = 1</script>").first).to_be_visible()
    page.wait_for_timeout(200)
    assert page.evaluate("window.pwned") is None
    assert page.locator("main script, main img[src='x']").count() == 0
    page.goto(f"{EXPORT}#/attempt/hostile/1")
    expect(page.get_by_text("<script>window.pwned = 1</script>").first).to_be_visible()
    assert page.evaluate("window.pwned") is None


def the_keyboard_is_enough(page):
    _open(page, "attempts")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.get_by_role("link", name="attempt 4")).to_be_focused()
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Attempt #5")
    page.keyboard.press("u")
    expect(page.get_by_role("heading", level=1)).to_have_text("Attempts")
    page.keyboard.press("/")
    expect(page.get_by_label("search")).to_be_focused()
    _open(page, "#/attempt/grpo-s0/1")
    page.keyboard.press("]")
    expect(page.get_by_role("heading", level=1)).to_have_text("Attempt #2")
    page.keyboard.press("c")
    expect(page.get_by_role("heading", level=1)).to_have_text("Two attempts")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).not_to_be_visible()


_COLORS = """(names) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  return names.map((name) => {
    canvas.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  });
}"""
_INK_ON_GROUND = (
    *(("--text", "--card"), ("--muted", "--card"), ("--muted", "--bg"), ("--accent", "--card")),
    *(("--good", "--good-soft"), ("--bad", "--bad-soft"), ("--warn", "--warn-soft"), ("--accent", "--accent-soft")),
)


def _luminance(color):
    parts = [one / 255 for one in color[:3]]
    red, green, blue = (one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def dark_and_light_are_both_legible(page):
    grounds = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        _open(page, "runs")
        grounds.add(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
        for pair in _INK_ON_GROUND:
            dark, light = sorted(_luminance(color) for color in page.evaluate(_COLORS, list(pair)))
            ratio = (light + 0.05) / (dark + 0.05)
            assert ratio >= 4.5, f"{scheme}: {pair} have a contrast of {ratio:.2f}; WCAG asks for 4.5"
    page.keyboard.press("t")  # the switch wins over the system, and stays
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert len(grounds) == 2


def narrow_windows_do_not_scroll_sideways(page):
    for width in (1280, 800):
        page.set_viewport_size({"width": width, "height": 900})
        for where in PAGES:
            _open(page, where)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{where} is {wide} wide in a window of {width}"


def the_token_leaves_the_address_and_a_wrong_one_is_refused(page):
    _open(page, "runs")
    assert "token" not in page.url
    page.evaluate("localStorage.setItem('turnwise-token', 'wrong')")
    page.reload()
    expect(page.get_by_text("the token is missing or wrong")).to_be_visible()


def an_exported_page_works_from_a_file_and_asks_nobody(page):
    asked = []
    page.on("request", lambda request: asked.append(request.url) if request.url.startswith("http") else None)
    page.goto(EXPORT)
    expect(page.get_by_role("img", name=re.compile("^eval.success: latest"))).to_be_visible()
    page.goto(f"{EXPORT}#/attempts?run=grpo-s0&text=paris")
    expect(page.get_by_text(re.compile("this file holds 1?[0-9] of 1?[0-9] attempts"))).to_be_visible()
    page.get_by_role("link", name="attempt 1", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Attempt #1")
    expect(page.get_by_role("region", name="turn 3")).to_contain_text("query=weather")
    page.goto(f"{EXPORT}#/run/grpo-s0")
    expect(page.get_by_role("region", name="Success", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("Resume|Stop"))).to_have_count(0)
    assert not asked, asked


def main(chromium):
    results = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, check in list(globals().items()):
            is_check = inspect.isfunction(check) and check.__module__ == "__main__" and name != "main"
            if not is_check or name.startswith("_"):
                continue
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            started = time.perf_counter()
            try:
                check(context.new_page())
                results[name] = None
            except Exception:  # noqa: BLE001 - whatever a check ends with is reported
                results[name] = traceback.format_exc()
            context.close()
            print(f"{name} {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        browser.close()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
