"""Finding files that ranks wrote each for itself, by their names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
_RANK = re.compile(
    r"(?P<before>.*?(?:^|[._-])(?:rank|rk|shard|part|proc|process|worker|gpu|device)[._-]?)(?P<rank>\d+)(?P<after>.*)",
    re.IGNORECASE,
)
_DEEPSPEED = re.compile(r"(?:bf16_)?(?:zero_pp_rank|mp_rank|layer|expp_rank)_\d+")
_ONLY_NUMBER = re.compile(r"(?P<before>)(?P<rank>\d+)(?P<after>\.\w+)")
_OF = re.compile(r"_?of_?(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Files whose names differ in the rank only. `pattern` has `*` for it; `world_size` where names say it."""

    pattern: str
    files: dict[int, Path]
    world_size: int | None = None


def find_rank_files(folder: Path, names: Iterable[str] | None = None) -> tuple[RankFiles, ...]:
    """Returns the sets of rank files in a folder, the largest first."""
    sets: dict[str, dict[int, Path]] = {}
    for name in sorted(os.listdir(folder) if names is None else names):
        found = match_rank(name)
        if found is not None:
            sets.setdefault(found[0], {}).setdefault(found[1], folder / name)
    made = [RankFiles(pattern, dict(sorted(files.items())), _world_size(pattern)) for pattern, files in sets.items()]
    return tuple(sorted(made, key=lambda item: (-len(item.files), item.pattern)))


def match_rank(name: str) -> tuple[str, int] | None:
    """Returns a file name's pattern and rank, None if the name carries no rank.

    >>> match_rank("model_rank3.pt")
    ('model_rank*.pt', 3)
    >>> match_rank("checkpoint_5.pt") is None
    True
    """
    if not name.endswith(SUFFIXES) or _DEEPSPEED.match(name):
        return None
    match = _RANK.fullmatch(name) or _ONLY_NUMBER.fullmatch(name)
    if match is None or len(match["rank"]) > 9:
        return None
    return f"{match['before']}*{match['after']}", int(match["rank"])


def _world_size(pattern: str) -> int | None:
    match = _OF.search(pattern.partition("*")[2])
    return int(match.group(1)) if match and len(match.group(1)) < 10 else None
