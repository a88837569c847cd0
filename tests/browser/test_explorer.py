"""The explorer in a real browser: keyboard only, both widths, both themes, no errors, nothing asked of anybody else."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from samerun.formats.detect import open_checkpoint
from samerun.web.explorer.server import ExplorerServer
from support.browser import SCRIPTS, THEMES, WIDTHS, Opener, View
from support.corpus import corpus, needs_corpus
from support.explorer import HOSTILE, WHOLE, serving, write_gap, write_many, write_safetensors
from support.runs import unpack_run

pytestmark = pytest.mark.browser

Open = Callable[..., View]
VIEWS = {
    "start": "",
    "checkpoint": "#/checkpoint?place=0",
    "broken": "#/checkpoint?place=1/gap",
    "tensor": "#/tensor?place=1/gap&key=param:0.weight",
    "diff": "#/diff?place=0&other=1/changed",
    "run": "#/run?place=2",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExplorerServer]:
    torch = pytest.importorskip("torch")
    top = tmp_path_factory.mktemp("explorer")
    folder = top / "named"
    folder.mkdir()
    write_gap(folder / "gap")
    changed = shutil.copytree(WHOLE, folder / "changed")
    data = bytearray((changed / "__1_0.distcp").read_bytes())
    data[open_checkpoint(WHOLE).locate("param:0.weight", 1).offset_bytes + 3] ^= 0x40
    (changed / "__1_0.distcp").write_bytes(bytes(data))
    write_safetensors(folder / "hostile.safetensors", {f"param:{HOSTILE}.w": torch.ones(3), "param:b": torch.ones(2)})
    write_many(top / "many.safetensors", 10_000)
    named = [WHOLE, folder, unpack_run("reject", top), top / "many.safetensors"]
    with serving(named) as server:
        yield server


@pytest.fixture
def open_view(open_url: Opener, server: ExplorerServer) -> Open:
    def open_one(view: str, width: int = 1280, theme: str = "light", **options: Any) -> View:
        found = open_url(server.address + VIEWS.get(view, view), width, theme, **options)
        expect(found.page.locator("h1")).to_be_visible()
        return found

    return open_one


def settled(view: str, page: Any) -> None:
    """Waits until a view has everything that it asks for, and asks for what is on demand."""
    if view == "start":
        expect(page.get_by_text("…", exact=True)).to_have_count(0)
    elif view == "tensor":
        page.locator("#read").click()
        expect(page.locator("svg.bars")).to_be_visible()
    elif view == "diff":
        expect(page.locator("#result")).to_be_visible()
    elif view in ("checkpoint", "broken"):
        expect(page.locator(".tensors tbody tr").first).to_be_visible()


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", VIEWS)
def test_it_opens_without_errors_foreign_requests_or_overflow(
    open_view: Open, server: ExplorerServer, view: str, width: int, theme: str
) -> None:
    found = open_view(view, width, theme)
    settled(view, found.page)
    assert found.complaints == []
    assert [url for url in found.requests if not url.startswith((server.address, "data:"))] == []
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width
    dark = found.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0] < 100")
    assert dark == (theme == "dark")
    if width == max(WIDTHS):
        assert found.page.evaluate(SCRIPTS["contrast"]) == []
    controls = found.page.locator("button, input, select, a, progress").all()
    name = "(e) => [...(e.labels ?? [])].map((l) => l.textContent).join('') || e.ariaLabel || e.textContent"
    assert all(control.evaluate(name).strip() for control in controls)


def test_a_checkpoint_by_keyboard_only(open_view: Open) -> None:
    """From the list to a tensor's gap and its values, and back, with Tab, arrows and Enter."""
    page = open_view("start").page
    settled("start", page)
    press = page.keyboard.press

    def tab_to(selector: str) -> None:
        for _ in range(300):
            press("Tab")
            if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
                outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                label = page.evaluate("!!document.activeElement.querySelector('.label')")
                assert outline != "none" or label, selector
                return
        raise AssertionError(f"no way to {selector} with the Tab key")

    press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    tab_to("a[href*='1%2Fgap']")
    press("Enter")
    expect(page.locator(".word")).to_have_text("CANNOT RESUME")
    assert page.evaluate("document.activeElement.tagName") == "H1"
    expect(page.locator(".finding h3").first).to_have_text("Part of a tensor is in no piece")
    tab_to("#find")
    page.keyboard.type("0.weight")
    expect(page.locator(".tensors tbody tr")).to_have_count(4)
    press("Control+A")
    press("Delete")
    expect(page.locator(".tensors tbody tr")).to_have_count(20)
    expect(page.locator("[role=treeitem]")).not_to_have_count(1)  # the tree follows the table
    tab_to("[role=treeitem]")
    press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.prefix") == "1"
    press("ArrowRight")
    expect(page.locator("[role=treeitem][aria-level='2']")).to_have_count(2)
    press("ArrowRight")
    press("Enter")
    expect(page.locator(".tensors tbody tr")).to_have_count(4)
    assert "under=1." in page.url
    press("ArrowLeft")
    press("Home")
    press("Enter")
    expect(page.locator(".tensors tbody tr th").first).to_contain_text("param:0.weight")
    tab_to(".tensors tbody a")
    press("Enter")
    expect(page.locator("h1")).to_have_text("param:0.weight")
    tab_to("svg.parts")
    press("End")
    expect(page.locator(".held .readout")).to_have_text("in no piece: dim 0 26 to 51, dim 1 0 to 5")
    assert "in no piece" in page.locator("svg.parts").get_attribute("aria-label")
    tab_to("#read")
    press("Enter")
    expect(page.locator("svg.bars")).to_be_visible()
    expect(page.get_by_text("450 of 606 values could be read")).to_be_visible()
    tab_to("svg.bars")
    press("Home")
    expect(page.locator("svg.bars")).to_have_attribute("aria-valuetext", re.compile(r"to .* · \d+ value"))
    page.go_back()
    expect(page.locator(".word")).to_have_text("CANNOT RESUME")
    assert "under=0.weight" in page.url  # the table is as it was left
    expect(page.locator(".tensors tbody tr")).to_have_count(4)


def test_shards_gaps_and_values_show_under_the_pointer(open_view: Open) -> None:
    page = open_view("tensor").page
    expect(page.locator("rect.part")).to_have_count(4)
    gap, third = page.locator("rect.gap"), page.locator("rect.part").nth(1)
    top, below = gap.bounding_box(), third.bounding_box()
    assert top["y"] + top["height"] == pytest.approx(below["y"], abs=2)
    third.hover()
    expect(page.locator(".held .readout")).to_contain_text(
        "rank 2: dim 0 52 to 77, dim 1 0 to 5 · __2_0.distcp at byte"
    )
    settled("tensor", page)
    page.locator("svg.bars").hover(position={"x": 5, "y": 20})
    expect(page.locator(".histogram .readout")).to_contain_text("value")
    page.locator("input[value=decades]").check()
    expect(page.locator("svg.bars")).to_be_visible()
    expect(page.locator("rect.count")).to_have_count(64)


def test_sizes_lead_into_the_tree_and_the_table_sorts(open_view: Open) -> None:
    page = open_view("checkpoint").page
    tiles = page.locator(".tile")
    expect(tiles.first).to_be_visible()
    areas = [box["width"] * box["height"] for box in (tile.bounding_box() for tile in tiles.all())]
    assert areas == sorted(areas, reverse=True)
    tiles.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator(".tensors tbody tr")).to_have_count(8)
    assert page.evaluate("document.activeElement.className").startswith("tile")
    expect(page.locator("[aria-selected=true]")).to_have_attribute("data-prefix", "1")
    page.get_by_role("button", name="show all").click()
    expect(page.locator(".tensors tbody tr")).to_have_count(20)
    page.locator("[data-sort=bytes]").click()
    expect(page.locator("th[aria-sort=descending] button")).to_have_text("size")
    expect(page.locator(".tensors tbody tr th").first).to_contain_text("0.weight")
    page.locator("#part").select_option("optim.step")
    expect(page.locator(".tensors tbody tr")).to_have_count(5)


def test_what_deviates_most_comes_first(open_view: Open) -> None:
    page = open_view("diff").page
    settled("diff", page)
    expect(page.locator("#result .word")).to_have_text("DIFFERENT")
    expect(page.locator(".deviations tbody tr")).to_have_count(1)
    page.locator("#two").select_option("0")
    page.locator("#compare").click()
    expect(page.locator("#result .word")).to_have_text("EQUAL")
    page.locator("#two").select_option("1/gap")
    page.locator("#compare").click()
    expect(page.locator(".finding h3").first).to_have_text("Part of a tensor is in no piece")


def test_every_byte_is_read_on_demand(open_view: Open) -> None:
    page = open_view("checkpoint").page
    page.get_by_role("button", name="Read every byte").click()
    expect(page.get_by_text("the files hold no evidence that decides")).to_be_visible()


def test_ten_thousand_tensors_stay_fluid(open_view: Open) -> None:
    found = open_view("#/checkpoint?place=3")
    page = found.page
    expect(page.locator(".tensors tbody tr")).to_have_count(100)
    assert page.evaluate("document.querySelectorAll('*').length") < 4_000
    page.locator("#find").fill("layers.17. exp_avg_sq")
    expect(page.locator(".tensors tbody tr")).to_have_count(8)
    page.locator("#find").fill("")
    page.get_by_role("button", name="next").focus()
    for rows in ("rows 101 to 200", "rows 201 to 300"):
        page.keyboard.press("Enter")  # the focus stays where it is
        expect(page.get_by_text(f"{rows} of 10,000")).to_be_visible()
    page.locator("[role=treeitem] .label").first.click()
    expect(page.locator("[role=treeitem][aria-level='2']")).to_have_count(313)
    assert page.locator(".tile").count() <= 61
    assert found.complaints == []


def test_hostile_names_are_shown_and_not_obeyed(open_view: Open) -> None:
    found = open_view("#/checkpoint?place=1/hostile.safetensors")
    page = found.page
    expect(page.locator(".tensors tbody tr")).to_have_count(2)
    assert (
        page.locator(".tensors tbody th").first.inner_text().startswith("param:</script><img src=x onerror=alert(1)>")
    )
    page.locator(".tensors tbody a").first.click()
    expect(page.locator("h1")).to_contain_text("<b onmouseover='alert(2)'>")
    assert page.locator("main img, main b[onmouseover]").count() == 0
    assert found.complaints == []


def test_a_running_migration_is_followed_live(open_url: Opener, tmp_path: Path) -> None:
    root = unpack_run("promote", tmp_path)
    for name in ("stages/06-window/result.json", "stages/07-judge/result.json", "verdict.json"):
        (root / name).unlink()
    state = json.loads((root / "state.json").read_text())
    (root / "state.json").write_text(json.dumps({**state, "job": {"stage": "06-window", "token": "x"}}))
    trace = root / "stages/06-window/trace/rank-00000.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    updates = [number for number, line in enumerate(lines) if '"kind": "update"' in line]
    trace.write_text("".join(lines[: updates[3]]))
    with (root / "lock").open("w") as lock, serving([root]) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        view = open_url(server.address)  # the only place there is: shown at once
        page = view.page
        expect(page.locator(".word")).to_have_text("RUNNING")
        expect(page.get_by_text("3 of 20 updates")).to_be_visible()
        assert page.locator(".now .line.candidate").get_attribute("d").startswith("M")
        trace.write_text("".join(lines[: updates[9]]))
        expect(page.get_by_text("9 of 20 updates")).to_be_visible()
        fcntl.flock(lock, fcntl.LOCK_UN)
        expect(page.locator(".stages .interrupted")).to_have_count(1)
        assert view.complaints == []


def test_the_report_of_a_run_opens_with_its_evidence(open_view: Open, server: ExplorerServer) -> None:
    view = open_view("run")
    with view.page.expect_popup() as opened:
        view.page.get_by_role("link", name="the report").click()
    report = opened.value
    problems: list[str] = []
    report.on("console", lambda message: problems.append(message.text))
    report.wait_for_load_state()
    report.reload()
    assert report.locator(".verdict .word").inner_text() == "REJECT"
    report.locator("#chart-loss .plot").focus()
    report.keyboard.press("Home")
    expect(report.locator("#chart-loss .readout")).to_contain_text("update 13")
    report.get_by_role("link", name="verdict.json").first.click()
    assert '"samerun/judge/1"' in report.inner_text("body")
    assert report.url.startswith(server.address)
    assert problems == []


def test_a_request_without_the_token_or_outside_the_paths_is_refused(
    open_url: Opener, open_view: Open, server: ExplorerServer
) -> None:
    bare = open_url(f"http://127.0.0.1:{server.port}/").page
    assert "open the address that `samerun ui` printed" in bare.inner_text("body")
    page = open_view("#/checkpoint?place=1/../..").page
    expect(page.locator("h1")).to_have_text("This cannot be shown")
    expect(page.locator(".finding code").first).to_have_text("SR-UI-OUTSIDE")


def test_an_explorer_that_has_ended_says_so(open_url: Opener) -> None:
    with serving([WHOLE]) as server:
        page = open_url(server.address + "#/?stay=1").page
        expect(page.locator("h1")).to_have_text("What is here")
    page.get_by_role("link", name="step-400").click()
    expect(page.locator("h1")).to_have_text("The explorer has ended")


@needs_corpus
@pytest.mark.parametrize(
    ("name", "word", "code"),
    [
        ("torch/dcp_fsdp2_ws4/ckpt", "CAN RESUME IN PART", None),
        ("torch-damaged/truncated_half_rank1", "CANNOT RESUME", "SR-FILE-TRUNCATED"),
        ("deepspeed-damaged/z2_missing_last_rank", "CANNOT RESUME", None),
    ],
)
def test_real_checkpoints_whole_and_broken(open_url: Opener, name: str, word: str, code: str | None) -> None:
    with serving([corpus(name)]) as server:
        view = open_url(server.address)
        page = view.page
        expect(page.locator(".word")).to_have_text(word)
        if code is not None:
            expect(page.locator(".finding.error code").first).to_have_text(code)
        page.locator(".tensors tbody a").first.click()
        expect(page.locator("svg.parts")).to_be_visible()
        page.locator("#read").click()
        expect(page.locator(".histogram, main p:has-text('no finite value')").first).to_be_visible()
        assert view.complaints == []
