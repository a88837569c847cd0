"""A real browser. Debian's package is used as it is; nothing is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

from support.browser import Opener, View

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS = 120_000  # guards against hanging: other tests run beside these
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)} (Debian: apt-get install chromium)")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=ARGUMENTS, timeout=PATIENCE_MS)
        yield started
        started.close()


@pytest.fixture
def open_url(browser: Any) -> Iterator[Opener]:
    with ExitStack() as stack:

        def open_one(url: str, width: int = 1280, theme: str = "light", **options: Any) -> View:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, **options)
            context.set_default_timeout(PATIENCE_MS)
            stack.callback(context.close)
            view = View(context.new_page())
            view.page.on("console", lambda message: view.complaints.append(message.text))
            view.page.on("pageerror", lambda error: view.complaints.append(str(error)))
            view.page.on("request", lambda request: view.requests.append(request.url))
            view.page.goto(url)
            return view

        yield open_one
