"""Part of the proof matrix: DeepSpeed's experts at other data- and expert-parallel degrees, in its own engine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# What trains, on how many ranks; and by destination format (stage, expert-parallel degree, ranks).
RUNS: dict[str, tuple[dict[str, Any], int, dict[str, tuple[tuple[int, int, int], ...]]]] = {
    "DeepSpeed experts, stage 2, ep 2, 4 ranks": (
        {"stage": 2, "ep": 2},
        4,
        {"zero": ((2, 2, 2), (1, 3, 3), (2, 1, 2)), "universal": ((2, 1, 3),)},
    ),
    "DeepSpeed experts, stage 1, ep 1, 2 ranks": ({"stage": 1, "ep": 1}, 2, {"zero": ((1, 2, 4), (2, 6, 6))}),
    "DeepSpeed experts, bf16, data before experts, ep 2, 4 ranks": (
        {"stage": 2, "ep": 2, "bf16": True, "data_first": True, "aligned": True, "round_robin": True},
        4,
        {"zero": ((2, 3, 3),)},
    ),
}


def prove_experts(convert: Callable[..., tuple[str, list[str]]], wanted: Callable[[str], bool]) -> Iterator[Row]:
    """Yields a row per run and destination: stock `load_checkpoint`, everything compared, five updates more."""
    import deepspeed

    from samerun.core.mesh import Layout
    from samerun.formats.zero.write import lay_out
    from support import dsmoe
    from support.dsjob import differing

    for source, (settings, ranks, moves) in RUNS.items():
        if not wanted(source):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            truth = dsmoe.make_source(dsmoe.Job(**settings), ranks, folder / "source")
            for to, (stage, ep, there) in ((to, move) for to, found in moves.items() for move in found):
                row: Row = {"to": to, "source": source, "loaded_by": f"DeepSpeed {deepspeed.__version__}"}
                row["layout"] = f"stage {stage}, ep {ep}, {there} ranks"
                dest = folder / f"{to}-{stage}-{ep}-{there}"
                options: Row = {"layout": Layout(dp_shard=there, ep=ep)}
                options |= {"writer": partial(lay_out, stage=stage)} if to == "zero" else {}
                row["from"], row["decisions"] = convert(folder / "source", dest, to, **options)
                job = dsmoe.Job(**{**settings, "stage": stage, "ep": ep, "universal": to == "universal"})
                held = truth["held"]
                if to == "universal":  # load_universal restores neither buffers nor frozen parameters
                    held = {name: values for name, values in held.items() if _is_trained(name, held)}
                try:
                    found = dsmoe.resume(job, there, dest)
                except RuntimeError as error:
                    yield {**row, "failed": str(error).strip().splitlines()[-1][:160]}
                    continue
                wrong = differing({name: found["held"][name] for name in held if name in found["held"]}, held)
                row |= {"tensors": len(held), "different": wrong}
                if to == "zero" and not settings.get("bf16"):
                    row["loss_off"] = max(abs(a - b) for a, b in zip(found["later"], truth["later"], strict=True))
                yield row


def _is_trained(name: str, held: dict[str, Any]) -> bool:
    return f"fp32/{name.partition('/')[2]}" in held
