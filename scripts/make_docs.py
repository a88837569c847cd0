"""Writes the pages of docs/ that are made from the code. `--check` fails when one is out of date instead."""

from __future__ import annotations

import sys
from pathlib import Path

TOP = Path(__file__).parents[1]
sys.path.insert(0, str(TOP / "src"))

from pictures import PICTURES  # noqa: E402

from samerun.catalog import load_catalog  # noqa: E402
from samerun.manifest.schema import schema_text  # noqa: E402

sys.path.insert(0, str(TOP / "scripts"))

import failure_coverage  # noqa: E402


def findings_page() -> str:
    """Returns docs/findings.md: every finding, grouped by family."""
    lines = [
        "# Findings",
        "",
        "Everything that samerun notices has a code. This page is made from the same text that `samerun explain CODE`",
        "prints (`python scripts/make_docs.py`). The severity is the usual one; a finding may be milder in context.",
        "",
    ]
    family = ""
    for entry in load_catalog().values():
        head = entry.code.split("-")[1]
        if head != family:
            family = head
            lines += [f"## SR-{family}", ""]
        lines += [f"### {entry.code}", "", f"**{entry.title}** ({entry.severity})", ""]
        for text in (entry.meaning, f"*How to see it.* {entry.see}", f"*What to do.* {entry.do}"):
            lines += [text, ""]
    return "\n".join(lines).rstrip() + "\n"


PAGES = {
    TOP / "docs" / "findings.md": findings_page,
    failure_coverage.PAGE: lambda: failure_coverage.page()[0],
    TOP / "docs" / "schema" / "manifest-1.json": schema_text,
    **{TOP / "docs" / "pictures" / name: draw for name, draw in PICTURES.items()},
}


def main() -> int:
    """Writes or checks every page; returns the exit code."""
    stale = 0
    for path, make in PAGES.items():
        text = make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if "--check" in sys.argv:
            print(f"{path.relative_to(TOP)} is out of date: run python scripts/make_docs.py", file=sys.stderr)
            stale = 1
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(TOP)}", file=sys.stderr)
    return stale


if __name__ == "__main__":
    sys.exit(main())
