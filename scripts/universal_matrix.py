"""Moves real DeepSpeed runs to another number of ranks three ways and compares each with the uninterrupted run.

    DS_ACCELERATOR=cpu PYTHONPATH=src:tests python scripts/universal_matrix.py OUT.json [SITUATION...]
    python scripts/universal_matrix.py OUT.json --table

Each situation trains five updates, saves, and trains five more: the truth. Then stock DeepSpeed loads, at another
number of ranks, (1) what its own ds_to_universal makes of the save, (2) what samerun's universal writer makes of it,
before and after the documented lines, and (3) what samerun's native writer makes of it. Needs DeepSpeed 0.19.8, which
nothing else here does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

SITUATIONS: dict[str, tuple[dict[str, Any], int, int, int]] = {  # job, ranks, ranks after, stage after
    "stage 3, sub-groups": ({"stage": 3, "unused": True, "sub_group_size": 1500}, 3, 2, 3),
    "stage 2, round_robin_gradients (off after `--to universal`)": (
        {"stage": 2, "unused": True, "round_robin": True},
        3,
        2,
        2,
    ),
    "stage 1 to stage 3": ({"stage": 1}, 3, 2, 3),
    "stage 3 to stage 1": ({"stage": 3, "tied": True}, 2, 3, 1),
    "stage 1, bf16, gradients in fp32": ({"stage": 1, "bf16": True, "grads_in_fp32": True}, 3, 2, 1),
    "stage 3, bf16": ({"stage": 3, "bf16": True, "tied": True}, 3, 4, 3),
    "stage 2, SGD with momentum": ({"stage": 2, "optimizer": "sgd"}, 3, 2, 2),
    "stage 2, bf16, parameter_alignment": ({"stage": 2, "bf16": True, "aligned": True}, 3, 2, 2),
    "stage 3, to one rank": ({"stage": 3}, 3, 1, 3),
    "stage 1": ({"stage": 1}, 3, 2, 1),
    "stage 2, from one rank": ({"stage": 2}, 1, 4, 2),
    "stage 2, CPUAdam offload": ({"stage": 2, "offload": True}, 2, 3, 2),
}


def convert_with_deepspeed(source: str, target: str) -> None:
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=source,
            output_folder=target,
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def _guarded(connection: Any, source: str, target: str) -> None:
    try:
        convert_with_deepspeed(source, target)
        connection.send(None)
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}".splitlines()[0][:120])


def theirs(source: Path, target: Path) -> str | None:
    """Converts with DeepSpeed's own tool, in a process of its own; returns the error, if any."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_guarded, args=(sending, str(source), str(target)))
    process.start()
    answer = receiving.recv() if receiving.poll(240) else "no answer in 240 s"
    process.join(5)
    return answer


def measure(job: Any, ranks: int, folder: Path, truth: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Loads with stock DeepSpeed and says what differs from the truth."""
    from support.dsjob import resume

    try:
        found = resume(job, ranks, folder, **more)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return {"error": (lines or [type(error).__name__])[-1][:140]}
    result = compare(found, truth, "")
    if more.get("remedy"):
        result["before"] = compare(found, truth, "_before")
    off = [abs(a - b) for a, b in zip(found["losses"], truth["later"], strict=True)]
    return result | {"loss_off": max(off), "first_loss_off": off[0]}


def compare(found: dict[str, Any], truth: dict[str, Any], when: str) -> dict[str, Any]:
    """Compares full tensors, groups, steps and counters, after loading or (`_before`) before the documented lines."""
    from support.dsjob import differing

    wrong = differing(found[f"held{when}"], truth["held"])
    known, expected = found[f"facts{when}"], truth["facts"]
    return {
        "arrays": len(truth["held"]),
        "wrong": len(wrong),
        "examples": wrong[:3],
        "groups": known["groups"] == expected["groups"],
        "steps": set(known["steps"]) == set(expected["steps"]),
        "counters": all(known[key] == expected[key] for key in ("global_steps", "global_samples", "scheduler")),
    }


def run_situation(name: str, work: Path) -> dict[str, Any]:
    from samerun.core.mesh import Layout
    from samerun.formats.detect import open_checkpoint
    from samerun.formats.universal.write import lay_out as lay_out_universal
    from samerun.formats.zero.write import lay_out as lay_out_zero
    from support.dsjob import RESTORE_MODEL, RESTORE_STAGE3, Job, make_source
    from support.written import carry_out, source_of

    settings, ranks, after, stage = SITUATIONS[name]
    job = Job(**settings)
    then = replace(job, stage=stage)
    truth = make_source(job, ranks, work / "source")
    result: dict[str, Any] = {"ranks": ranks, "ranks_after": after, "updates_before": truth["losses"]}
    error = theirs(work / "source" / "global_step5", work / "theirs" / "uc")
    result["theirs"] = (
        {"error": error} if error else measure(then, after, work / "theirs", truth, tag="uc", universal=True)
    )
    checkpoint = open_checkpoint(work / "source")
    layout = Layout(dp_shard=after)
    carry_out(lay_out_universal(source_of(checkpoint), layout), checkpoint, work / "universal")
    carry_out(lay_out_zero(source_of(checkpoint), layout, stage=stage), checkpoint, work / "zero")
    plain = replace(then, round_robin=False)  # load_universal fills shuffled buffers in the unshuffled order
    lines = RESTORE_MODEL + (RESTORE_STAGE3 if stage == 3 else "")
    result["zero"] = measure(then, after, work / "zero", truth)
    result["universal"] = measure(plain, after, work / "universal", truth, universal=True, remedy=lines)
    return result


def describe(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"`{found['error']}`"
    lost = [name for name in ("groups", "steps", "counters") if not found[name]]
    wrong = f"{found['wrong']} of {found['arrays']} wrong" if found["wrong"] else "all equal"
    loss = f"; loss {found['loss_off']:.1e}" if "loss_off" in found else ""
    return f"{wrong}{'; ' + ', '.join(lost) + ' lost' if lost else ''}{loss}"


def table(results: dict[str, Any]) -> str:
    rows = [
        "| situation | ranks | ds_to_universal | `--to universal`, stock load only | `--to universal`, with the lines "
        "| "
        "`--to zero` |",
        "|---|---|---|---|---|---|",
    ]
    for name in SITUATIONS:
        if name in results and "error" not in results[name]:
            found = results[name]
            shown = [
                found["theirs"],
                found["universal"].get("before", found["universal"]),
                found["universal"],
                found["zero"],
            ]
            cells = " | ".join(describe(one) for one in shown)
            rows.append(f"| {name} | {found['ranks']} to {found['ranks_after']} | {cells} |")
    return "\n".join(rows)


def main() -> None:
    path, chosen = Path(sys.argv[1]), sys.argv[2:]
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if chosen != ["--table"]:
        import deepspeed  # noqa: F401 - once, before any fork

        for name in chosen or SITUATIONS:
            work = Path(tempfile.mkdtemp(prefix="matrix-"))
            try:
                results[name] = run_situation(name, work)
            except Exception:
                results[name] = {"error": traceback.format_exc()[-1500:]}
            finally:
                shutil.rmtree(work, ignore_errors=True)
            path.write_text(json.dumps(results, indent=1))
            print(
                name,
                {way: describe(found) for way, found in results[name].items() if isinstance(found, dict)},
                flush=True,
            )
    print(table(results))


if __name__ == "__main__":
    main()
