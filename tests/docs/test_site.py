"""The documentation site: built strictly, every link and anchor leads somewhere, no page needs the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from samerun.cli import VERBS
from samerun.web.lab.page import render_lab

TOP = Path(__file__).parents[2]
OUTSIDE = (TOP / "README.md", TOP / "CONTRIBUTING.md", TOP / "examples" / "pytorch" / "README.md")
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)")


class _Page(HTMLParser):
    """What a page leads to, what it loads, and what can be led to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "preconnect", "dns-prefetch"):
            self.loads.append(values.get("href", ""))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed here: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("site")
    path = os.pathsep.join(filter(None, [str(TOP / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=TOP,
        env={**os.environ, "PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, _Page]:
    return {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}


def lost_links(site: Path, pages: dict[Path, _Page]) -> list[str]:
    """Returns the links within the site that lead to no file, or to no anchor of a page."""
    lost: list[str] = []
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else None
            if not target.is_file() or (
                anchors is not None and address.fragment and unquote(address.fragment) not in anchors
            ):
                lost.append(f"{path.relative_to(site)} -> {link}")
    return lost


def test_every_link_and_anchor_leads_somewhere(site: Path, pages: dict[Path, _Page]) -> None:
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert lost_links(site, pages) == []


def test_lost_links_are_found(tmp_path: Path) -> None:
    texts = {
        "a.html": '<a href="b.html#x"></a><a href="b.html#y"></a><a href="c.html"></a>',
        "b.html": '<p id="x"></p>',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    pages = {tmp_path / name: _Page(text) for name, text in texts.items()}
    assert lost_links(tmp_path, pages) == ["a.html -> b.html#y", "a.html -> c.html"]


def test_no_page_loads_anything_from_elsewhere(pages: dict[Path, _Page]) -> None:
    loads = {(path.name, load) for path, page in pages.items() for load in page.loads if urlsplit(load).netloc}
    assert loads == set()


def test_the_lab_is_in_the_site_as_it_is_served(site: Path) -> None:
    assert (site / "lab.html").read_text(encoding="utf-8") == render_lab()


def test_every_page_of_docs_is_in_the_site_and_the_navigation(site: Path, pages: dict[Path, _Page]) -> None:
    start = site / "index.html"
    reached = {(start.parent / unquote(urlsplit(link).path)).resolve() for link in pages[start].links}
    for page in (TOP / "docs").rglob("*.md"):
        made = site / page.relative_to(TOP / "docs").with_suffix(".html")
        assert made.is_file(), made
        assert made.resolve() in reached, f"{page.name} is not in the navigation"


def test_reference_and_verbs_are_made_from_the_code(site: Path, pages: dict[Path, _Page]) -> None:
    assert set(VERBS) <= pages[site / "verbs.html"].anchors
    train = pages[site / "api" / "train.html"].anchors
    assert {"samerun.train.recorder.Recorder.record", "samerun.train.sampler.ElasticSampler.commit"} <= train


def test_directives_for_the_tests_do_not_show(site: Path) -> None:
    assert [path.name for path in site.rglob("*.html") if "block:" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: str(page.relative_to(TOP)))
def test_pages_outside_of_the_site_have_no_lost_links(page: Path) -> None:
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_pages_and_pictures_that_are_made_are_up_to_date() -> None:
    script = TOP / "scripts" / "make_docs.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
