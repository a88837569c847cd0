"""Whether a source is still the one that a conversion was planned for: its files, before and after."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from samerun.errors import Problem
from samerun.stores.local import TreeFingerprint, compare_trees, fingerprint_tree


def fingerprint_source(path: Path, sources: Iterable[str]) -> tuple[TreeFingerprint, ...]:
    """Fingerprints the checkpoint, and files that are read although they lie elsewhere."""
    root = path.resolve()
    elsewhere = sorted(
        {file for file in sources if root != (real := Path(file).resolve()) and root not in real.parents}
    )
    return (fingerprint_tree(path), *(fingerprint_tree(file) for file in elsewhere))


def combined_fingerprint(trees: Iterable[TreeFingerprint]) -> str:
    """Returns one digest over contents and modification times: for telling whether a source is still the same one."""
    body = hashlib.sha256()
    for tree in trees:
        body.update(f"{tree.root}\n{tree.digest}\n".encode("utf-8", "surrogateescape"))
        body.update(json.dumps([tree.files[name].modified_ns for name in sorted(tree.files)]).encode())
    return f"sha256:{body.hexdigest()}"


def changes_since(trees: Iterable[TreeFingerprint], path: Path, sources: Iterable[str]) -> list[Problem]:
    """Returns what changed of a source since it was fingerprinted; nothing if nothing did."""
    try:
        after = fingerprint_source(path, sources)
    except OSError as error:
        return [
            Problem(
                "SR-FILE-CHANGED",
                f"the source cannot be read any more: {error.strerror}",
                where={"file": str(path)},
                hint="something removed or replaced it while it was converted",
            )
        ]
    return [problem for a, b in zip(trees, after, strict=False) for problem in compare_trees(a, b)]
