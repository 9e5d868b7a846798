"""Takes the pictures of docs/view.md: python view_screenshots.py CHROMIUM OUT NAME=ADDRESS ...

Runs in an environment that has Playwright. VIEW_URL is the address that `turnwise view` printed. A name may end in
`-dark`, and in `@800` for a narrower window.
"""

import os
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

HEIGHT = 860


def main(chromium, out, shots):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for shot in shots:
            name, _, address = shot.partition("=")
            name, _, width = name.partition("@")
            scheme = "dark" if name.endswith("-dark") else "light"
            size = {"width": int(width or 1280), "height": HEIGHT}
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.goto(os.environ["VIEW_URL"] + address)
            page.get_by_role("heading", level=1).wait_for()
            page.wait_for_timeout(1500)  # until charts are drawn and the doctor has answered
            page.screenshot(path=str(Path(out) / f"{name.removesuffix('-dark')}.png"))
            page.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
