"""The report in a real browser: no errors, no requests, keyboard, zoom, both widths, both themes, paper."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from samerun.core.mesh import Layout
from samerun.plan.migration import PlannedSide
from samerun.report.html import render_html
from samerun.report.model import ReportModel, read_run
from support.browser import SCRIPTS, THEMES, WIDTHS, Opener, View
from support.runs import enlarge_run, unpack_run

pytestmark = pytest.mark.browser

Open = Callable[..., View]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("pages")
    written: dict[str, Path] = {}
    for name in ("promote", "reject"):
        root = unpack_run(name, top)
        model = read_run(root)
        written[name] = root / "report.html"
        written[name].write_text(render_html(model), encoding="utf-8")
        if name == "promote":
            large = enlarge_run(unpack_run(name, top / "large"), num_updates=5000, num_tensors=10_000)
            written["large"] = large / "report.html"
            written["large"].write_text(render_html(read_run(large)), encoding="utf-8")
            written["parallel"] = root / "parallel.html"
            written["parallel"].write_text(render_html(to_tensor_parallel(model)), encoding="utf-8")
    return written


def to_tensor_parallel(model: ReportModel) -> ReportModel:
    """Returns the plan of another destination, before any candidate ran: tensors are cut along both dimensions."""
    assert model.plan is not None
    plan = replace(model.plan, destination=PlannedSide(layout=Layout(tp=2, dp_shard=2)))
    return replace(model, plan=plan, candidates={}, verdict=None)


@pytest.fixture
def open_page(open_url: Opener, pages: dict[str, Path]) -> Open:
    def open_one(name: str, width: int = 1280, theme: str = "light", **options: Any) -> View:
        return open_url(pages[name].as_uri(), width, theme, **options)

    return open_one


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["promote", "reject"])
def test_it_opens_without_errors_requests_or_overflow(open_page: Open, name: str, width: int, theme: str) -> None:
    view = open_page(name, width, theme)
    assert view.complaints == []
    assert [url for url in view.requests if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in view.requests if url.startswith("file:")]) == 1
    assert view.page.evaluate("document.documentElement.scrollWidth") <= width
    dark = view.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0] < 100")
    assert dark == (theme == "dark")
    assert view.page.locator(".verdict .word").inner_text() == name.upper()
    for chart in view.page.locator(".chart .canvas").all():
        box = chart.bounding_box()
        assert box["width"] > 150
        assert box["height"] > 60


@pytest.mark.parametrize("theme", THEMES)
def test_text_has_enough_contrast(open_page: Open, theme: str) -> None:
    low = open_page("reject", theme=theme).page.evaluate(SCRIPTS["contrast"])
    assert low == []


def test_values_show_under_the_pointer_in_every_chart_of_updates(open_page: Open) -> None:
    page = open_page("promote").page
    plot = page.locator("#chart-loss .canvas").first
    plot.hover(position={"x": 5, "y": 20})
    expect(page.locator("#chart-loss .readout")).to_contain_text("update 13")
    for chart in ("loss", "grad_norm", "update_norm", "lr"):
        expect(page.locator(f"#chart-{chart} .readout")).to_contain_text("update 13")
        text = page.locator(f"#chart-{chart} .readout").inner_text()
        assert text.startswith("update 13")
        assert "candidate" in text
        assert page.locator(f"#chart-{chart} .hair").first.is_visible()
    assert "allowed" in page.locator("#chart-loss .readout").inner_text()
    assert page.locator("#chart-evaluation .readout").inner_text() == ""


def test_charts_work_from_the_keyboard(open_page: Open) -> None:
    page = open_page("promote").page
    plot = page.locator("#chart-loss .plot")
    plot.focus()
    for key, update in (("ArrowRight", 13), ("ArrowRight", 14), ("End", 32), ("ArrowLeft", 31), ("Home", 13)):
        page.keyboard.press(key)
        expect(plot).to_have_attribute("aria-valuetext", re.compile(f"^update {update} "))
    assert plot.get_attribute("role") == "slider"
    page.keyboard.press("Escape")
    expect(page.locator("#chart-loss .readout")).to_have_text("")


def test_everything_can_be_reached_with_the_tab_key(open_page: Open) -> None:
    page = open_page("promote").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(400):
        page.keyboard.press("Tab")
        found = page.evaluate("(({ id, classList, tagName }) => id || classList[0] || tagName)(document.activeElement)")
        if found == "BODY":
            break
        reached.add(found)
    assert {"shape", "tensor-find", "tensor-odd", "plot", "tensor-more"} <= reached


def test_numbers_are_listed_on_demand(open_page: Open) -> None:
    page = open_page("promote").page
    figure = page.locator("#chart-grad_norm")
    figure.locator("summary").click()
    expect(figure.locator("tbody tr")).to_have_count(20)
    assert figure.locator("thead th").all_inner_texts()[:3] == ["update", "control", "candidate"]


def test_zoom_by_buttons_keys_and_dragging(open_page: Open) -> None:
    page = open_page("large").page
    figure = page.locator("#chart-loss")
    labels = figure.locator(".xaxis span")
    assert labels.first.inner_text() == "13"
    assert labels.last.inner_text() == "5012"
    figure.get_by_role("button", name="zoom in").click()
    span = int(labels.last.inner_text()) - int(labels.first.inner_text())
    assert span < 2500
    other = page.locator("#chart-grad_norm .xaxis span")
    assert other.first.inner_text() == labels.first.inner_text()
    figure.locator(".plot").focus()
    page.keyboard.press("0")
    assert labels.first.inner_text() == "13"
    figure.scroll_into_view_if_needed()
    box = figure.locator(".canvas").first.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 20, steps=4)
    page.mouse.up()
    first, last = int(labels.first.inner_text()), int(labels.last.inner_text())
    assert 2400 < first < 2600
    assert 2800 < last < 3100
    assert "NaN" not in figure.inner_html()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["promote", "parallel"])
def test_who_owns_which_slice_is_drawn_within_its_frame(open_page: Open, name: str, width: int) -> None:
    page = open_page(name, width).page
    number = page.locator("#shape option").count()
    kinds = set()
    for index in range(number):
        page.locator("#shape").select_option(index=index)
        picture = page.locator("[data-owner]:visible .picture")
        frame = picture.bounding_box()
        kinds.add("both" in picture.get_attribute("class"))
        for part in picture.locator("svg").all():
            box = part.bounding_box()
            assert box["height"] == pytest.approx(frame["height"], abs=1)
            assert box["width"] > 15
            assert box["x"] + box["width"] <= width
    assert number > 4
    assert kinds == ({False} if name == "promote" else {True, False})


def test_a_tensor_is_chosen_and_found(open_page: Open) -> None:
    page = open_page("promote").page
    assert page.locator("[data-owner]:visible").count() == 1
    page.locator("#shape").select_option(index=1)
    assert page.locator("[data-owner]:visible").get_attribute("data-owner") == "1"
    page.locator("#tensor-find").fill("EMBED")
    expect(page.locator("#tensor-table tbody tr")).to_have_count(1)
    assert page.locator("#tensor-table tbody th").inner_text() == "embedding.weight"
    page.locator("#tensor-find").fill("")
    page.locator("#tensor-odd").check()
    expect(page.locator("#tensor-table tbody tr")).to_have_count(0)


def test_samples_show_who_consumed_them(open_page: Open) -> None:
    page = open_page("reject").page
    strip = page.locator("[data-strip] svg").first
    strip.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#strip-readout")).to_contain_text("sample ")
    text = page.locator("#strip-readout").inner_text()
    assert text.startswith("sample ")
    assert "update 13, place 1 of 32" in text
    assert "in the control on replica" in text


def test_ten_thousand_tensors_and_five_thousand_updates_stay_fluid(open_page: Open, pages: dict[str, Path]) -> None:
    """A run directory of that size, from the records of a real one, read from disk."""
    assert pages["large"].stat().st_size < 3_000_000
    view = open_page("large")
    page = view.page
    ready = page.evaluate("performance.getEntriesByType('navigation')[0].domComplete")
    assert ready < 8000  # milliseconds, on a loaded two-core machine
    assert page.evaluate("document.querySelectorAll('*').length") < 12_000
    assert page.evaluate(SCRIPTS["frames"]) < 500
    page.locator("#tensor-table thead button").last.click()
    expect(page.locator("#tensor-table tbody tr")).to_have_count(10)
    page.locator("#tensor-more").click()
    expect(page.locator("#tensor-table tbody tr")).to_have_count(210)
    assert view.complaints == []


def test_without_its_script_the_page_still_tells(open_page: Open) -> None:
    page = open_page("promote", java_script_enabled=False).page
    assert page.locator(".verdict .word").inner_text() == "PROMOTE"
    assert page.locator("#chart-loss svg").count() == 2
    assert page.locator("[data-owner]:visible").count() == 1
    assert page.locator("#shape").is_hidden()
    assert page.locator(".zoom").first.is_hidden()
    assert "needs the page's script" in page.locator("#state").inner_text()


def test_it_prints(open_page: Open) -> None:
    page = open_page("promote", theme="dark").page
    page.emulate_media(media="print")
    assert page.locator("nav.contents").is_hidden()
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(28, 33, 39)"
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert page.pdf()[:5] == b"%PDF-"
