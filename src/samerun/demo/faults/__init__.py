"""The faults that `samerun demo --break` injects, and the findings that must name them.

A fault is put where it happens in real life: into the checkpoint's files (`files`), into the script that launches the
job (`launcher`), or into the libraries that the running job calls (`loading`, `beside`, `schedule`, `data`, `updates`,
`model`, through `samerun.demo.sabotage`). It is put there after the tolerances were sealed, and never into a trace.
"""

from __future__ import annotations

from importlib import import_module

from samerun.demo.faults.catalog import FAULTS, Fault, Kind, Where, damage_launcher

for _room in (
    "files",
    "launcher",
    "loading",
    "beside",
    "schedule",
    "model",
    "data",
    "updates",
):  # the order of the list
    import_module(f"{__name__}.{_room}")

__all__ = ["FAULTS", "Fault", "Kind", "Where", "damage_launcher"]
