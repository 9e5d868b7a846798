"""How fast pages of `turnwise view` appear: python view_paint.py CHROMIUM ADDRESS ... prints a JSON list.

Runs in an environment that has Playwright. VIEW_URL is the address that `turnwise view` printed. Every page is opened
in a profile without a cache. `first_paint_ms` is the browser's first contentful paint; `content_ms` is the time until
the page shows its heading, which it does when its data is there.
"""

import json
import os
import sys
import time

from playwright.sync_api import sync_playwright


def main(chromium, addresses):
    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for address in addresses:
            context = browser.new_context()
            page = context.new_page()
            started = time.perf_counter()
            page.goto(os.environ["VIEW_URL"] + address)
            page.get_by_role("heading", level=1).wait_for()
            content_ms = 1000 * (time.perf_counter() - started)
            paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            found.append({"address": address, "first_paint_ms": round(paint_ms), "content_ms": round(content_ms)})
            context.close()
        browser.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
