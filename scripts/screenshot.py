"""Makes docs/pictures/explorer.png: a tensor of the documentation's checkpoint with one rank's part in no file.

Needs a browser (Debian: apt-get install chromium) and the development environment: `python scripts/screenshot.py`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

TOP = Path(__file__).parents[1]
sys.path[:0] = [str(TOP / "src"), str(TOP / "tests")]

from support.explorer import serving, write_gap  # noqa: E402


def main() -> None:
    """Takes the picture."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        checkpoint = write_gap(Path(folder) / "step-400")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with serving([checkpoint]) as server:
            page = browser.new_page(viewport={"width": 900, "height": 900})
            page.goto(server.address + "#/tensor?place=0&key=param:0.weight")
            page.locator("#read").click()
            page.locator("svg.bars").wait_for()
            page.locator("svg.parts").focus()
            page.keyboard.press("End")
            page.locator(".finding summary").click()
            page.screenshot(path=TOP / "docs" / "pictures" / "explorer.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
