"""Tells a file that is one part of a checkpoint: opened alone it looks like a smaller one, and is none."""

from __future__ import annotations

import os
import re
from pathlib import Path

from samerun.errors import Problem
from samerun.formats.statedict.rankfiles import find_rank_files, match_rank

_DCP = re.compile(r".+\.distcp")
_ZERO = re.compile(
    r"(?:bf16_)?(?:zero_pp_rank|mp_rank|layer|expp_rank)_\d+\w*?_(?:model|optim)_states\.pt|layer_\d+.*\.pt"
)
_MEGATRON = re.compile(r"mp_rank_\d\d(?:_\d{3}){0,2}")
_RANK_SHARD = re.compile(r"shard-\d{5}-.*\.safetensors")  # of HuggingFaceStorageWriter
_SHARD = re.compile(r"(?P<stem>.*?)-?(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_NUMBER = re.compile(r"\d+\.\w+")  # as likely an update as a rank


def check_part(file: Path) -> Problem | None:
    """Returns a finding if a file was written as one of several that make up a checkpoint, None otherwise."""
    folder = file.parent
    try:
        names = os.listdir(folder)
    except OSError:  # a folder that may be entered and not listed
        names = [file.name]
    if _DCP.fullmatch(file.name):
        return _part(file, folder, "a data file of a torch.distributed.checkpoint directory")
    if _ZERO.fullmatch(file.name):
        count = sum(_ZERO.fullmatch(name) is not None for name in names)
        return _part(file, folder, f"one of {count} files of a DeepSpeed checkpoint") if count > 1 else None
    if _MEGATRON.fullmatch(folder.name):
        return _part(file, folder.parent, "a file of one rank of a Megatron-LM checkpoint")
    if _RANK_SHARD.fullmatch(file.name):
        count = sum(_RANK_SHARD.fullmatch(name) is not None for name in names)
        return _part(file, folder, f"the shard of one of {count} ranks") if count > 1 else None
    if (shard := _SHARD.fullmatch(file.name)) is not None:
        count = int(shard["count"])
        return _part(file, folder, f"one of {count} shards of a model") if count > 1 else None
    return _check_rank(file, folder, names)


def _check_rank(file: Path, folder: Path, names: list[str]) -> Problem | None:
    matched = match_rank(file.name)
    if matched is None or _NUMBER.fullmatch(file.name):
        return None
    ranks = next((found for found in find_rank_files(folder, names) if found.pattern == matched[0]), None)
    if ranks is None or len(ranks.files) < 2:
        return None
    return _part(file, folder, f"one of {len(ranks.files)} files {ranks.pattern}, one per rank")


def _part(file: Path, folder: Path, what: str) -> Problem:
    return Problem(
        "SR-PATH-PART",
        f"this is {what}: what other files hold is not here",
        where={"file": str(file)},
        hint=f"give the path of the whole: {folder}",
    )
