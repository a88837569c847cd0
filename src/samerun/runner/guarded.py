"""The checkpoint, and whatever else a disposable job may not touch, shown to be as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from samerun.errors import FormatError, Problem, Severity, UsageError
from samerun.stores.local import FileFingerprint, TreeFingerprint, compare_trees, fingerprint_tree, write_atomic


def fingerprint_watched(paths: Sequence[Path]) -> dict[str, TreeFingerprint]:
    """Fingerprints every watched path; one that does not exist yet counts as empty."""
    return {str(path): fingerprint_tree(path) if path.exists() else TreeFingerprint(str(path), {}) for path in paths}


def check_untouched(
    before: Mapping[str, TreeFingerprint], after: Mapping[str, TreeFingerprint], stage: str
) -> list[Problem]:
    """Returns one finding per file that changed while a job ran."""
    problems: list[Problem] = []
    for path, tree in before.items():
        for change in compare_trees(tree, after[path]):
            problems.append(
                Problem(
                    "SR-JOB-WROTE",
                    f"while the job ran, {change.message}",
                    where={"stage": stage, **change.where},
                    hint="a disposable job may not save, advance a tracker or log to the real run: ask "
                    "recorder.may_save before every write",
                )
            )
    return problems


def write_fingerprint(path: Path, tree: TreeFingerprint) -> None:
    """Keeps a fingerprint in the run directory."""
    files = {name: [item.size_bytes, item.modified_ns, item.content] for name, item in tree.files.items()}
    write_atomic(path, json.dumps({"root": tree.root, "digest": tree.digest, "files": files}, indent=1) + "\n")


def read_fingerprint(path: Path) -> TreeFingerprint:
    """Reads `write_fingerprint` back."""
    body = json.loads(path.read_text(encoding="utf-8"))
    return TreeFingerprint(body["root"], {name: FileFingerprint(*item) for name, item in body["files"].items()})


def check_source(checkpoint: Path, kept: TreeFingerprint, stage: str) -> list[Problem]:
    """Returns findings when the checkpoint is no longer the one that was inspected, and what is wrong with it now.

    A changed checkpoint is inspected again, to the last byte, so that the damage is named and not only noticed.
    """
    if not checkpoint.exists():
        return [_gone(checkpoint, stage)]
    changes = compare_trees(kept, fingerprint_tree(checkpoint))
    if not changes:
        return []
    problems = [
        Problem(
            "SR-FILE-CHANGED",
            f"since the checkpoint was inspected, {change.message}",
            where={"stage": stage, **change.where},
            hint="the tolerances were sealed for the files as they were; restore them, or begin a new run directory",
        )
        for change in changes
    ]
    return [*inspect_again(checkpoint), *problems]


def inspect_again(checkpoint: Path) -> list[Problem]:
    """Returns every error that a deep inspection finds."""
    from samerun.formats.detect import open_checkpoint
    from samerun.verify.inspection.structure import inspect_checkpoint

    try:
        opened = open_checkpoint(checkpoint)
    except (FormatError, UsageError) as error:
        return list(error.problems)
    try:
        report = inspect_checkpoint(opened, deep=True)
        return [problem for problem in report.problems if problem.severity is Severity.ERROR]
    finally:
        opened.close()


def _gone(checkpoint: Path, stage: str) -> Problem:
    return Problem(
        "SR-FILE-CHANGED",
        "the checkpoint is no longer there",
        where={"stage": stage, "file": str(checkpoint)},
        hint="restore it where it was, or begin a new run directory",
    )
