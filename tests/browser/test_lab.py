"""The optimization lab in a real browser: the exercise clicked through and read back, by mouse and by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import expect

from samerun.core.lab import CHECKPOINT_UPDATES, HIDDEN, LabState, Rule, advance, forget, trajectory
from samerun.web.lab.page import render_lab
from samerun.web.serve import PageServer
from support.browser import SCRIPTS, THEMES, WIDTHS, Opener, View

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def lab_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab") / "lab.html"
    path.write_text(render_lab(), encoding="utf-8")
    return path


@pytest.fixture
def view(open_url: Opener, lab_file: Path) -> View:
    return open_url(lab_file.as_uri())


@pytest.fixture
def page(view: View) -> Any:
    return view.page


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def press(page: Any, where: str, button: str, times: int = 1) -> None:
    found = page.locator(where).get_by_role("button", name=button, exact=True)
    found.click()
    if times > 1:  # one by one, but without waiting for the pointer to get there
        found.evaluate("(button, times) => { for (let i = 1; i < times; i++) button.click(); }", times)


def prepare(page: Any, run: str, eta: str, x2: str, x3: str) -> None:
    """The exercise up to its steps."""
    press(page, f"[data-bench={run}]", "Reset")
    for field, value in (("eta", eta), ("x0", "2"), ("p2", x2), ("p3", x3)):
        page.fill(f"#{run}-{field}", value)


def rows(page: Any, table: str) -> list[list[str]]:
    return [line.locator("th, td").all_inner_texts() for line in page.locator(f"{table} tbody tr").all()]


def shown(page: Any, run: str, what: str) -> str:
    return page.locator(f"[data-bench={run}] [data-now={what}]").inner_text()


def test_the_exercise(page: Any) -> None:
    """Reset, eta and x0, predict x2 and x3, Step three times, inspect both positions; then the other run."""
    prepare(page, "A", "0.5", "0.5", "0.25")
    assert page.locator("#A-m2").inner_text() == ""
    press(page, "[data-bench=A]", "Step", 3)
    assert (shown(page, "A", "k"), shown(page, "A", "x"), shown(page, "A", "gradient")) == ("3", "0.25", "0.25")
    assert page.locator("#A-m2").inner_text() == "✓ right"
    assert page.locator("#A-m3").inner_text() == "✓ right"
    assert rows(page, "[data-bench=A]") == [
        ["0", "", "2", "2", ""],
        ["1", "0.5", "1", "1", ""],
        ["2", "0.5", "0.5", "0.5", "0.5 ✓ right"],
        ["3", "0.5", "0.25", "0.25", "0.25 ✓ right"],
    ]
    prepare(page, "B", "1.5", "0.5", "-0.25")
    press(page, "[data-bench=B]", "Step", 3)
    assert [number(row[2]) for row in rows(page, "[data-bench=B]")] == [2, -1, 0.5, -0.25]
    assert page.locator("#B-m2").inner_text() == "✓ right"
    assert page.locator("#B-m3").inner_text() == "✓ right"
    assert [row[3] for row in rows(page, "#together")] == ["✓ equal", "✗ different", "✓ equal", "✗ different"]
    verdict = page.locator("#together-verdict").inner_text()
    assert verdict.startswith("At iteration 2 both runs are at 0.5. The next update takes A to 0.25 and B to −0.25")
    assert page.locator(".todo li.done").count() == 8
    assert "iteration 3 at −0.25" in page.locator("[data-bench=B] svg").get_attribute("aria-label")


def test_at_iteration_two_nothing_tells_the_runs_apart(page: Any) -> None:
    for run, eta in (("A", "0.5"), ("B", "1.5")):
        prepare(page, run, eta, "", "")
        press(page, f"[data-bench={run}]", "Step", 2)
    assert "Nothing in that number says which run" in page.locator("#together-verdict").inner_text()


def test_wrong_and_missing_predictions_are_marked_and_cannot_be_mended(page: Any) -> None:
    prepare(page, "B", "1.5", "", "0.25")
    press(page, "[data-bench=B]", "Step", 3)
    assert page.locator("#B-m2").inner_text() == "not predicted"
    assert page.locator("#B-m3").inner_text() == "✗ wrong"
    assert not page.locator("#B-p2").is_editable()
    assert not page.locator("#B-p3").is_editable()
    assert page.locator("[data-bench=B] [data-todo=predict].done").count() == 0
    press(page, "[data-bench=B]", "Reset")
    assert page.locator("#B-p3").is_editable()
    assert page.locator("#B-p3").input_value() == ""
    assert len(rows(page, "[data-bench=B]")) == 1


def test_a_control_changed_in_the_middle_does_not_rewrite_history(page: Any) -> None:
    press(page, "[data-bench=A]", "Step", 2)
    before = rows(page, "[data-bench=A]")
    page.fill("#A-eta", "0.1")
    page.fill("#A-x0", "7")
    assert rows(page, "[data-bench=A]") == before
    note = page.locator("#A-note").inner_text()
    assert "η = 0.1 applies from the next step on" in note
    assert "x₀ = 7 applies at Reset; this run began at 2" in note
    press(page, "[data-bench=A]", "Step")
    after = rows(page, "[data-bench=A]")
    assert after[:3] == before
    assert after[3][1] == "changed0.1"
    assert number(after[3][2]) == pytest.approx(0.45)
    press(page, "[data-bench=A]", "Reset")
    assert rows(page, "[data-bench=A]") == [["0", "", "7", "7", ""]]


def test_a_control_that_is_no_number_stops_the_steps(page: Any) -> None:
    page.fill("#A-eta", "")
    step = page.locator("[data-bench=A] [data-do=step]")
    assert step.is_disabled()
    assert page.locator("#A-eta").get_attribute("aria-invalid") == "true"
    assert page.locator("#A-note").inner_text() == "η must be a number."
    page.fill("#A-eta", "0.5")
    assert step.is_enabled()
    page.fill("#A-x0", "")
    assert step.is_disabled()
    page.fill("#A-x0", "4")
    step.click()
    assert shown(page, "A", "x") == "2"
    assert page.locator("[data-bench=A] [data-say]").inner_text() == "Iteration 1: position 2."
    page.fill("#A-x0", "")
    assert step.is_enabled()
    assert page.locator("[data-bench=A] [data-do=reset]").is_disabled()


def test_a_run_that_explodes_stays_readable(page: Any) -> None:
    page.fill("#A-eta", "1000")
    press(page, "[data-bench=A]", "Step", 110)
    assert shown(page, "A", "x") in ("∞", "−∞", "NaN")
    assert "NaN" not in page.locator("[data-bench=A] svg").inner_html()


@pytest.mark.parametrize("rule", [rule for rule in Rule if HIDDEN[rule]])
def test_a_resume_that_lost_what_x_does_not_show(page: Any, rule: Rule) -> None:
    where = f"#{rule.value}"
    eta = float(page.locator(f"{where}-eta").input_value())
    press(page, where, "Step", CHECKPOINT_UPDATES)
    assert "bit for bit, so every evaluation of f agrees" in page.locator(f"{where} [data-verdict]").inner_text()
    press(page, where, "Step")
    control = trajectory(rule, eta, LabState(2.0), CHECKPOINT_UPDATES + 1)
    candidate = advance(rule, eta, forget(control[CHECKPOINT_UPDATES], HIDDEN[rule]))
    saved, last = rows(page, where)[-2:]
    assert number(saved[2].split()[0]) == number(saved[3].split()[0])
    assert number(last[2].split()[0]) == pytest.approx(control[-1].x, rel=1e-4)
    assert number(last[3].split()[0]) == pytest.approx(candidate.x, rel=1e-4)
    assert (saved[4], last[4]) == ("✓ equal", "✗ different")
    assert "Different at update 4" in page.locator(f"{where} [data-verdict]").inner_text()
    assert page.locator(f"{where} .finding-of code").first.inner_text().startswith("SR-LOAD-")


@pytest.mark.parametrize("rule", [rule for rule in Rule if HIDDEN[rule]])
def test_a_resume_that_restored_everything_is_the_same_run(page: Any, rule: Rule) -> None:
    where = f"#{rule.value}"
    for part in page.locator(f"{where} [data-part]").all():
        part.check()
    press(page, where, "Step", CHECKPOINT_UPDATES + 3)
    assert {row[4] for row in rows(page, where)} == {"", "✓ equal"}
    assert (
        "everything that decides the next update was restored" in page.locator(f"{where} [data-verdict]").inner_text()
    )
    assert page.locator(f"{where} [data-part]").first.is_disabled()


def test_keyboard_only(page: Any) -> None:
    keyboard = page.keyboard

    def tab_to(id_or_action: str) -> None:
        for _ in range(200):
            keyboard.press("Tab")
            name = page.evaluate("(({ id, dataset }) => id || dataset.do || '')(document.activeElement)")
            if name == id_or_action:
                return
        raise AssertionError(f"no way to {id_or_action} with the Tab key")

    keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for run, predicted in (("A", "0.25"), ("B", "-0.25")):
        tab_to("reset")
        keyboard.press("Enter")
        for field, value in (("p2", "0.5"), ("p3", predicted)):
            tab_to(f"{run}-{field}")
            keyboard.type(value)
        keyboard.press("Shift+Tab")
        keyboard.press("Shift+Tab")
        for key in ("Enter", "Space", "Enter"):
            keyboard.press(key)
        assert shown(page, run, "k") == "3"
        assert page.locator(f"#{run}-m3").inner_text() == "✓ right"
        page.locator(f"#{run}-p3").focus()
    assert "both runs are at 0.5" in page.locator("#together-verdict").inner_text()
    page.locator("#momentum [data-part]").focus()
    keyboard.press("Space")
    assert page.locator("#momentum [data-part]").is_checked()


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_opens_without_errors_requests_or_overflow(open_url: Opener, lab_file: Path, width: int, theme: str) -> None:
    view = open_url(lab_file.as_uri(), width, theme, reduced_motion="reduce")
    page = view.page
    for run in ("A", "B"):
        prepare(page, run, "0.5", "0.5", "9")
        press(page, f"[data-bench={run}]", "Step", 3)
    press(page, "#adam", "Step", 4)
    assert view.complaints == []
    assert [url for url in view.requests if not url.startswith("data:")] == [lab_file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)[0] < 100")
    assert dark == (theme == "dark")
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    assert page.evaluate(SCRIPTS["contrast"]) == []


def test_every_control_and_picture_has_a_name(page: Any) -> None:
    for control in page.locator("input, button").all():
        name = control.evaluate("(e) => [...(e.labels ?? [])].map((l) => l.textContent).join('') || e.textContent")
        assert name.strip()
    assert all(picture.get_attribute("aria-label") for picture in page.locator("svg").all())


def test_the_page_checks_itself_against_pythons_numbers(open_url: Opener, lab_file: Path, tmp_path: Path) -> None:
    states = int(open_url(lab_file.as_uri()).page.locator("#selfcheck").inner_text().split(". ")[1].split()[0])
    assert states > 400
    bent = tmp_path / "bent.html"
    bent.write_text(lab_file.read_text(encoding="utf-8").replace('"momentum":0.9', '"momentum":0.9000000000000001'))
    page = open_url(bent.as_uri()).page
    expect(page.locator("#broken")).to_be_visible()
    assert page.locator("[data-bench=A] [data-do=step]").is_disabled()


def test_without_its_script_the_page_says_so(open_url: Opener, lab_file: Path) -> None:
    page = open_url(lab_file.as_uri(), java_script_enabled=False).page
    assert "switched off" in page.locator("noscript").inner_text()
    assert "no topology here, no sharding and no distributed optimizer" in page.locator("#supports").inner_text()


@pytest.fixture
def served() -> Iterator[str]:
    server = PageServer(render_lab())
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server.address
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_works_as_served(open_url: Opener, served: str) -> None:
    view = open_url(served)
    press(view.page, "[data-bench=A]", "Step")
    assert shown(view.page, "A", "x") == "1"
    assert [url for url in view.requests if not url.startswith("data:")] == [served]
    assert view.complaints == []
