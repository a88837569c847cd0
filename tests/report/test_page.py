"""The page: what it says of real runs, finished and unfinished, and what it never does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from samerun.errors import UsageError
from samerun.report.html import MAX_ROWS, embed, evidence_link, page_data, render_html
from samerun.report.model import ReportModel, read_run
from samerun.report.page import plan_page
from samerun.report.state import role_of, view_state
from samerun.verify.evidence.stage import stages_of
from support.runs import enlarge

LARGEST_BYTES = 3_000_000


class Page(HTMLParser):
    """Elements, links and text of a page, as a browser would find them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(1 for name, _ in self.elements if name == tag)

    def values(self, name: str) -> list[str]:
        return [value for _, attrs in self.elements if (value := attrs.get(name)) is not None]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def data_of(html: str) -> dict[str, Any]:
    return json.loads(html.split('id="data">')[1].split("</script>")[0])


@pytest.fixture(scope="module")
def promoted(promote_model: ReportModel) -> str:
    return render_html(promote_model)


@pytest.fixture(scope="module")
def rejected(reject_model: ReportModel) -> str:
    return render_html(reject_model)


def test_a_promotion_says_so_and_why(promoted: str) -> None:
    page = Page(promoted)
    assert "PROMOTE" in page.words
    assert "Validated for dp_shard=3 with 32 samples per update, and for nothing else." in page.words
    assert "Each of 640 samples was consumed once" in page.words
    assert page.words.index("PROMOTE") < page.words.index("The declared transition")
    for section in ("verdict", "transition", "state", "batch", "samples", "numbers", "memory", "findings", "evidence"):
        assert f'id="{section}"' in promoted
    assert 'id="missing"' not in promoted
    assert re.search(r'<article class="option chosen">\s*<header><h3>ragged</h3>', promoted)


def test_a_rejection_names_its_reasons_first(rejected: str, reject_model: ReportModel) -> None:
    page = Page(rejected)
    verdict = reject_model.verdict
    assert verdict is not None
    assert verdict.decision == "reject"
    assert any(problem.code.startswith("SR-SAMPLE-") for problem in verdict.reasons)
    for problem in verdict.reasons:
        assert problem.code in page.words
        assert page.words.index(problem.message.split("\n")[0]) < page.words.index("The declared transition")
    assert "The candidate's samples differ from update 13 on" in page.words
    assert "replayed" in page.words or "not the control's" in page.words


def test_findings_are_explained_and_grouped(rejected: str, reject_model: ReportModel) -> None:
    page = plan_page(reject_model)
    told = [(group.code, group.severity, group.stage.name if group.stage else "") for group in page.reasons]
    assert len(set(told)) == len(told)
    assert all(group.entry is not None for group in (*page.reasons, *page.findings))
    assert page.reasons[0].entry is not None
    assert page.reasons[0].entry.title in Page(rejected).words
    first = {id(item.problem) for group in page.reasons for item in group.instances}
    assert not first & {id(item.problem) for group in page.findings for item in group.instances}


@pytest.mark.parametrize("name", ["promoted", "rejected"])
def test_the_page_fetches_nothing_and_links_only_to_evidence(name: str, request: pytest.FixtureRequest) -> None:
    html: str = request.getfixturevalue(name)
    root: Path = request.getfixturevalue("promote" if name == "promoted" else "reject")
    page = Page(html)
    assert len(html.encode()) < LARGEST_BYTES / 5
    assert page.values("src") == []
    assert {tag for tag, _ in page.elements} & {
        "img",
        "iframe",
        "object",
        "embed",
        "audio",
        "video",
        "base",
        "form",
    } == set()
    assert [attrs["href"] for tag, attrs in page.elements if tag == "link"] == ["data:,"]
    assert "@import" not in html
    assert "url(" not in html
    links = [attrs["href"] or "" for tag, attrs in page.elements if tag == "a"]
    files = [link for link in links if not link.startswith("#")]
    assert len(files) > 20
    assert all((root / link).exists() for link in files)
    anchors = {link[1:] for link in links if link.startswith("#")}
    assert anchors <= set(page.values("id"))


def test_pictures_have_text_alternatives_and_ids_are_unique(promoted: str) -> None:
    page = Page(promoted)
    for tag, attrs in page.elements:
        if tag == "svg":
            assert attrs.get("aria-hidden") == "true" or attrs.get("aria-label"), attrs
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert page.elements[0][1].get("lang") == "en" or ("html", {"lang": "en"}) in page.elements


def test_the_data_that_can_be_hovered_over_is_what_was_recorded(promoted: str, promote_model: ReportModel) -> None:
    data = data_of(promoted)
    loss = data["charts"]["loss"]
    assert loss["names"] == {"from": 13, "count": 20}
    control, candidate = (series["values"] for series in loss["panels"][0]["series"])
    assert promote_model.control is not None
    assert promote_model.followed is not None
    assert control == [float(f"{item.loss:.9g}") for item in promote_model.control.observed.updates]
    assert candidate == [float(f"{item.loss:.9g}") for item in promote_model.followed.observed.updates]
    deviation, own, limit = loss["panels"][1]["series"]
    assert (deviation["style"], own["style"], limit["style"]) == ("deviation", "noise", "limit")
    assert all(value < most for value, most in zip(deviation["values"], limit["values"], strict=True))
    assert data["tensors"]["total"] == len(data["tensors"]["name"])


def test_state_coverage_counts_every_tensor(promote_model: ReportModel) -> None:
    view = view_state(promote_model)
    assert view is not None
    assert view.compared
    assert sum(row.tensors for row in view.coverage) == promote_model.inspected["counts"]["tensors"]
    assert all(row.equal == row.tensors and not row.differing and not row.missing for row in view.coverage)
    by_name = {item.name: item.agreement for item in view.settings}
    assert by_name["parameter groups"] == by_name["scheduler"] == by_name["sampler"] == "equal"
    assert view.digests[0][1] == view.digests[1][1]


def test_a_difference_in_the_state_shows(promote_model: ReportModel) -> None:
    load = promote_model.candidates["03-load"]
    state = load.observed.states[0]
    tensors = dict(state.body["tensors"])
    lost = next(key for key in tensors if key.startswith("optim.exp_avg:"))
    changed = next(key for key in tensors if key.startswith("param:"))
    del tensors[lost]
    tensors[changed] = {**tensors[changed], "digest": "0" * 16}
    tensors["param:extra"] = tensors[changed]
    states = (replace(state, body={**state.body, "tensors": tensors}),)
    job = replace(load, observed=replace(load.observed, states=states))
    damaged = replace(promote_model, candidates={**promote_model.candidates, "03-load": job})
    view = view_state(damaged)
    assert view is not None
    by_role = {row.role: row for row in view.coverage}
    assert by_role[role_of(lost)].missing == 1
    assert by_role["parameters"].differing == 1
    assert by_role["parameters"].unexpected == 1
    rows = {row.name: row for row in view.rows}
    assert rows[changed.partition(":")[2]].agreement == "differs"
    assert rows[lost.partition(":")[2]].slots["exp_avg"] == "missing"
    assert "1 differs, 1 unexpected" in Page(render_html(damaged)).words


def remove(*names: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        for name in names:
            target = root / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()

    return damage


def after(stage: int) -> tuple[str, ...]:
    return tuple(f"stages/{name}" for name in stages_of(converts=False)[stage:])


def failed_at_inspect(root: Path) -> None:
    remove(*after(1), "sealed.json", "plan.json", "verdict.json")(root)
    path = root / "stages/01-inspect/result.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    lost = {
        "code": "SR-FILE-MISSING",
        "severity": "error",
        "where": {"file": "__3_0.distcp"},
        "message": "a file that the metadata names is not there",
        "hint": "copy it",
    }
    path.write_text(json.dumps({**body, "status": "fail", "problems": [lost]}), encoding="utf-8")


def garble(name: str, content: str) -> Callable[[Path], None]:
    return lambda root: (root / name).write_text(content, encoding="utf-8") and None


PARTIAL: dict[str, tuple[Callable[[Path], None], str]] = {
    "failed at inspect": (failed_at_inspect, "Stage 01-inspect failed"),
    "nothing but the manifest": (
        remove("stages", "sealed.json", "plan.json", "verdict.json", "state.json"),
        "No stage has",
    ),
    "control only": (remove(*after(2), "verdict.json"), "there is no candidate yet"),
    "no verdict": (remove("verdict.json"), "There is no verdict yet"),
    "no seal": (remove("sealed.json"), "Nothing was sealed"),
    "no traces of the controls": (
        remove("stages/02-control/trace", "stages/02-control/repeat-2"),
        "There is no control",
    ),
    "no trace of the window": (remove("stages/06-window/trace"), "the stage was run and left no trace"),
    "no manifest and no seal": (remove("manifest.yaml", "sealed.json"), "The declared transition is not known"),
    "a verdict that is none": (garble("verdict.json", "[1, 2]"), "a JSON object was expected"),
    "a verdict without criteria": (garble("verdict.json", '{"verdict": "promote"}'), "KeyError"),
    "a cut off seal": (garble("sealed.json", '{"schema": "samerun/se'), "sealed.json"),
    "a result that is none": (garble("stages/04-eval/result.json", '{"stage": "04-eval"}'), "04-eval/result.json"),
    "a trace without a header": (garble("stages/06-window/trace/rank-00000.jsonl", "x\n"), "PROMOTE"),
    "an open manifest": (garble("manifest.yaml", "samerun: 1\n"), "PROMOTE"),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_an_incomplete_run_directory_still_gives_a_page_that_says_so(name: str, promote: Path, tmp_path: Path) -> None:
    damage, said = PARTIAL[name]
    root = tmp_path / "run"
    shutil.copytree(promote, root)
    damage(root)
    page = Page(render_html(read_run(root)))
    assert said in page.words
    assert page.count("h1") == 1


def test_every_single_file_can_be_missing_or_empty(promote: Path, tmp_path: Path) -> None:
    names = [path.relative_to(promote) for path in sorted(promote.rglob("*")) if path.is_file()]
    kept = {"rank-00001.jsonl", "rank-00002.jsonl", "rank-00003.jsonl", "log.txt"}  # alike: rank 0 stands for them
    for number, name in enumerate(name for name in names if name.name not in kept):
        root = tmp_path / str(number)
        shutil.copytree(promote, root)
        (root / name).write_bytes(b"")
        assert "<h1>" in render_html(read_run(root))
        (root / name).unlink()
        assert "<h1>" in render_html(read_run(root))
        shutil.rmtree(root)


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError) as refused:
            read_run(place)
        assert [problem.code for problem in refused.value.problems] == ["SR-RUN-DIRECTORY"]


HOSTILE = "</script><img src=x onerror=alert(1)><b onmouseover='alert(2)'>\u2028&quot;{{7*7}}`$"


def test_names_and_log_lines_never_become_markup(promote: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(promote, root)
    victim = "blocks.0.mlp.gate.weight"
    for path in root.rglob("*.json*"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(victim, json.dumps(HOSTILE)[1:-1]), encoding="utf-8")
    path = root / "stages/06-window/result.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    finding = {
        "code": "SR-JOB-FAILED",
        "severity": "warning",
        "where": {"tensor": HOSTILE, "file": HOSTILE},
        "message": f"the job ended; its last lines:\n{HOSTILE}",
        "hint": HOSTILE,
        "expected": HOSTILE,
        "found": {HOSTILE: HOSTILE},
    }
    path.write_text(json.dumps({**body, "problems": [finding]}), encoding="utf-8")
    path = root / "verdict.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    body["criteria"][0] |= {"name": HOSTILE, "question": HOSTILE, "evidence": "javascript:alert(3)"}
    body["label"] = HOSTILE
    path.write_text(json.dumps(body), encoding="utf-8")

    html = render_html(read_run(root))
    page = Page(html)
    assert HOSTILE.split("\u2028")[0] in page.words
    assert html.count("<script") == html.count("</script>") == 2
    assert page.count("script") == 2
    assert page.count("img") == 0
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert not [link for link in page.values("href") if "javascript" in link]
    assert HOSTILE in data_of(html)["tensors"]["name"]
    assert "49" not in page.words.partition(HOSTILE[:20])[2][:200]


def test_embedded_data_cannot_leave_its_element() -> None:
    text = embed({"a": "</script><!--\u2029&"})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"a": "</script><!--\u2029&"}


def test_only_what_is_there_becomes_a_link(promote_model: ReportModel) -> None:
    assert evidence_link(promote_model, "", "verdict.json") == "verdict.json"
    assert evidence_link(promote_model, "../a b/", "stages/06-window/trace") == "../a%20b/stages/06-window/trace"
    for path in ("javascript:alert(1)", "../../etc/passwd", "/etc/passwd", "https://example.org", "stages/../x"):
        assert evidence_link(promote_model, "", path) is None


def test_a_large_run_stays_small_and_quick(promote_model: ReportModel) -> None:
    large = enlarge(promote_model, num_updates=5000, num_tensors=10_000)
    html = render_html(large)
    assert len(html.encode()) < LARGEST_BYTES
    data = data_of(html)
    assert data["charts"]["loss"]["names"] == {"from": 13, "count": 5000}
    assert len(data["tensors"]["name"]) == data["tensors"]["total"] >= 10_000
    longest = max(re.findall(r' d="([^"]*)"', html), key=len)
    assert len(longest) < 60_000


def test_of_very_many_tensors_those_that_stand_out_are_listed(promote_model: ReportModel) -> None:
    page = plan_page(enlarge(promote_model, num_updates=20, num_tensors=MAX_ROWS + 500))
    data = page_data(page)["tensors"]
    assert len(data["name"]) == MAX_ROWS
    assert data["total"] > MAX_ROWS
    known = [value for value in data["deviation"] if value is not None]
    assert known[0] == max(known)
