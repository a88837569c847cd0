from __future__ import annotations
from samerun.errors import Problem


def check_source(source, names, cutter, flat, sections) -> list[Problem]:
    return []
