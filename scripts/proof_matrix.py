"""Which converted checkpoints a real framework loaded, and how much of them was equal: docs/proofs.md, blanks included.

    SAMERUN_CORPUS=... python scripts/proof_matrix.py dcp torch safetensors         # where torch is
    SAMERUN_CORPUS=... python scripts/proof_matrix.py deepspeed into-deepspeed      # where DeepSpeed is
    SAMERUN_CORPUS=... python scripts/proof_matrix.py megatron mapped-megatron      # where megatron-core is
    SAMERUN_CORPUS=... python scripts/proof_matrix.py torchtitan                    # where torchtitan is
    python scripts/proof_matrix.py huggingface more-huggingface                     # where transformers is
    SAMERUN_CORPUS=... python scripts/proof_matrix.py llama from-megatron           # where all of them are
    python scripts/proof_matrix.py page

`--missing` leaves out sources of which something is known already; `--only=TEXT` takes what has TEXT in its source, in
`into-deepspeed` in "source destination stage".

Each part converts checkpoints of the collection, has the framework load them at other degrees, and writes what it
found into docs/proofs.json; rows of other parts stay. The page is made from that file alone: nothing is filled in by
hand.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TOP / "src"), str(TOP / "tests"), str(TOP / "scripts")]

import proof_experts  # noqa: E402
import proof_llama  # noqa: E402
import proof_more  # noqa: E402
import proof_titan  # noqa: E402

from samerun.errors import SamerunError, UndecidedError  # noqa: E402
from samerun.formats.detect import FORMATS, open_checkpoint  # noqa: E402

DATA, PAGE = TOP / "docs" / "proofs.json", TOP / "docs" / "proofs.md"
CORPUS = Path(os.environ.get("SAMERUN_CORPUS", "")) if os.environ.get("SAMERUN_CORPUS") else None
DESTINATIONS = ("dcp", "torch", "universal", "zero", "megatron", "huggingface", "safetensors")

# One or two of every source format whose optimizer is held by name; layouts are the issue's, by number of ranks.
SOURCES = (
    "torch/dcp_fsdp2_ws3", "torch/torchsave_ddp_ws2/checkpoint_5.pt", "torch/fsdp1_ws2_orig/local",
    "torch/fsdp1_ws2_orig/sharded_dcp", "torch/ranklocal_fsdp2_ws3", "torch/hf_trainer_ws2/checkpoint-5",
    "torch/accel_fsdp2_sharded_ws2", "torch/lightning_ddp_ws2/step5.ckpt", "torch/titan_fsdp_dp2",
    "deepspeed/z2_fp32_untied_ws3", "deepspeed/z3_fp32_tied_ws2", "deepspeed/z2_bf16_tied_ws2",
    "deepspeed-universal/z1_fp32_untied_ws3", "deepspeed-universal/z3_fp32_untied_ws2",
    "deepspeed-special/pp2_ws2", "deepspeed-special/moe2_ws2", "deepspeed-special/tp2_ws2",
    "megatron/td016_dpr_tp1pp1dp2", "megatron/td016_fr_tp2pp2dp1", "megatron/td016_moe_fr_ep2",
    "megatron/td013_fsms_tp2pp2dp1", "megatron/lg016_dist_tp1pp1dp2", "megatron/lg016_moe_dist_ep2",
)  # fmt: skip
EXPORTED = ("torch/dcp_fsdp2_ws3", "deepspeed/z2_fp32_untied_ws3")
SCRATCH = tempfile.TemporaryDirectory()
LAYOUTS = (
    "dp_shard=1", "dp_shard=2", "dp_shard=3", "dp_shard=4", "dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2",
    "dp_shard=8", "dp_replicate=2,dp_shard=2,tp=2",
)  # fmt: skip


def find_sources() -> Iterator[tuple[str, Path]]:
    """Yields the names and places of the sources that are here, and of some that are converted first."""
    for name in SOURCES if CORPUS is not None else ():
        if (CORPUS or Path()).joinpath(name).exists():
            yield name, (CORPUS or Path()) / name
    for name in EXPORTED if CORPUS is not None else ():
        if not (dest := Path(SCRATCH.name) / name).exists():
            dest.parent.mkdir(parents=True, exist_ok=True)
            convert_all_allowed((CORPUS or Path()) / name, dest, "safetensors", masters=None)
        yield f"{name}, as safetensors", dest


def convert_all_allowed(
    source: Path,
    dest: Path,
    to: str,
    *,
    masters: str | None = "params",
    names: str | Sequence[str] | None = None,
    **options: Any,
) -> tuple[str, list[str]]:
    """Converts as a user would who allows whatever blocks; returns the source's format and the decisions' codes."""
    from samerun.convert.convert import carry_out
    from samerun.convert.prepare import prepare
    from samerun.formats.mapfile import read_name_map
    from samerun.formats.mapped import MappedCheckpoint

    allowed: set[str] = set()
    checkpoint = open_checkpoint(source)
    mapped: Any = checkpoint
    for name in (names,) if isinstance(names, str) else names or ():
        mapped = MappedCheckpoint(mapped, read_name_map(name, mapped.state))
    try:
        while True:
            try:
                prepared = prepare(mapped, dest, to=to, allow=allowed, original=checkpoint, **options)
            except UndecidedError as error:
                codes = {problem.code for problem in error.problems if problem.severity == "error"}
                if codes <= allowed:
                    raise
                allowed |= codes
                if "SR-WRITE-MASTERS" in codes and masters is not None:
                    options["masters"] = masters
                continue
            carry_out(prepared)
            return checkpoint.state.format, sorted(allowed)
    finally:
        checkpoint.close()


# --- torch ----------------------------------------------------------------------------------------------------------


def as_torch_has_it(checkpoint: Any) -> Any:
    """Returns the checkpoint with its masters as parameters, as they were converted."""
    from samerun.convert.masters import settle_masters

    masters = any(entry.key.role == "master" for entry in checkpoint.state.tensors.values())
    return settle_masters(checkpoint, "params", "torch")[0] if masters else checkpoint


def _load_dcp(rank: int, world_size: int, source: str, folder: str, text: str) -> tuple[int, list[str]]:
    import load_matrix

    load_matrix.open_checkpoint = lambda path: as_torch_has_it(open_checkpoint(path))
    return load_matrix.load(rank, world_size, source, folder, text)


def _load_torch(rank: int, world_size: int, source: str, file: str) -> tuple[int, list[str]]:
    import torch

    from support.skeleton import build_model, build_optimizer, check_loaded

    warnings.simplefilter("ignore")
    checkpoint = as_torch_has_it(open_checkpoint(Path(source)))
    model = build_model(checkpoint.state)
    optimizer = build_optimizer(model, checkpoint.state)
    saved = torch.load(file, weights_only=True, map_location="cpu")
    model.load_state_dict(saved["model"], strict=True)
    optimizer.load_state_dict(next(saved[name] for name in ("optim", "optimizer") if name in saved))
    return len(checkpoint.state.tensors), check_loaded(model, optimizer, checkpoint)


def prove_with_torch(to: str) -> Iterator[dict[str, Any]]:
    """Yields a row for every source and layout: torch loads what was written as DCP, or as one file."""
    import torch

    from samerun.core.mesh import Layout
    from support.gloo import run_ranks

    for name, path in find_sources():
        if name == proof_titan.SOURCE or not proof_more.wanted(name):  # torchtitan: only its own model fits
            continue
        with tempfile.TemporaryDirectory() as scratch:
            dest = Path(scratch) / "moved"
            known = {row.get("layout") for row in read_rows() if (row["to"], row["source"]) == (to, name)}
            if "--missing" in sys.argv and known:
                continue
            row: dict[str, Any] = {"to": to, "source": name, "loaded_by": f"torch {torch.__version__}"}
            try:
                row["from"], row["decisions"] = convert_all_allowed(path, dest, to)
            except SamerunError as error:
                yield {**row, "from": _format_of(path), "refused": sorted({p.code for p in error.problems})}
                continue
            for text in LAYOUTS if to == "dcp" else ("dp_shard=1",):
                ranks = Layout.parse(text).world_size
                load, more = (_load_dcp, (text,)) if to == "dcp" else (_load_torch, ())
                try:
                    found = run_ranks(ranks, load, str(path), str(dest), *more, timeout=400)
                    wrong = sorted({key for _, keys in found for key in keys})
                    yield {**row, "layout": text, "tensors": found[0][0], "different": wrong}
                except RuntimeError as error:
                    last = str(error).strip().splitlines()[-1]
                    yield {**row, "layout": text, "failed": last[:160]}


def _format_of(path: Path) -> str:
    try:
        checkpoint = open_checkpoint(path)
    except SamerunError:
        return ""
    checkpoint.close()
    return checkpoint.state.format


# --- DeepSpeed ------------------------------------------------------------------------------------------------------


def prove_with_deepspeed() -> Iterator[dict[str, Any]]:
    """Yields a row for every kind of run, destination and stage: DeepSpeed's engine loads it and takes five updates."""
    import deepspeed

    from samerun.core.mesh import Layout
    from support import dsjob, plainjob
    from support.dsjob import RESTORE_MODEL, RESTORE_STAGE3, Job

    def trained(folder: Path) -> Iterator[tuple[str, Path, dict[str, Any], tuple[int, ...]]]:
        if proof_more.wanted(name := "torch, FSDP2, 3 ranks"):
            truth = plainjob.make_source(Job(3), 3, folder / "fsdp2")
            for saved in ("dcp", "run.pt"):
                yield name, folder / "fsdp2" / saved, truth, (1, 2, 3)
        one, three, offload = (folder / name for name in ("one", "three", "offload"))
        if proof_more.wanted(name := "DeepSpeed, stage 3, 3 ranks"):
            yield name, three, dsjob.make_source(Job(3), 3, three), (1, 3)
        if proof_more.wanted(name := "DeepSpeed, stage 1, 1 rank") and "--missing" not in sys.argv:
            yield name, one, dsjob.make_source(Job(1), 1, one), (1, 2)
        if proof_more.wanted(name := "DeepSpeed, stage 2, CPUAdam, 3 ranks"):
            from deepspeed.ops.op_builder import CPUAdamBuilder

            CPUAdamBuilder().load(verbose=False)  # compiled once, before ranks are forked that would all do it
            yield name, offload, dsjob.make_source(Job(2, offload=True), 3, offload), (2,)

    with tempfile.TemporaryDirectory() as scratch:
        for source, path, truth, stages in trained(Path(scratch)):
            for to in ("zero", "universal"):
                for stage in stages:
                    dest = Path(scratch) / "moved" / f"{path.parent.name}-{path.name}-{to}-{stage}"
                    dest.parent.mkdir(exist_ok=True)
                    options: dict[str, Any] = {"layout": Layout(dp_shard=2)}
                    if to == "zero":
                        options["writer"] = _zero_writer(stage)
                    row: dict[str, Any] = {
                        "to": to,
                        "source": source,
                        "loaded_by": f"DeepSpeed {deepspeed.__version__}",
                    }
                    row["from"], row["decisions"] = convert_all_allowed(path, dest, to, **options)
                    universal = to == "universal"
                    remedy = RESTORE_MODEL + (RESTORE_STAGE3 if stage == 3 else "") if universal else ""
                    row["layout"] = f"stage {stage} at 2 ranks from {path.name}"
                    cpu_adam = "CPUAdam" in source
                    try:
                        found = dsjob.resume(Job(stage, offload=cpu_adam), 2, dest, universal=universal, remedy=remedy)
                    except RuntimeError as error:
                        yield {**row, "failed": str(error).strip().splitlines()[-1][:160]}
                        continue
                    wrong = dsjob.differing(found["held"], truth["held"])
                    off = max(abs(a - b) for a, b in zip(found["losses"], truth["later"], strict=True))
                    yield {**row, "tensors": len(truth["held"]), "different": wrong, "loss_off": off}


def _zero_writer(stage: int) -> Any:
    from functools import partial

    from samerun.formats.zero.write import lay_out

    return partial(lay_out, stage=stage)


# --- Megatron and Hugging Face ----------------------------------------------------------------------------------------

MEGATRON = {  # layouts, by place of the source: in the collection, or among the golden checkpoints
    "golden/fr_tp2pp2": ("tp=1,dp=3",),
    "golden/lg_dist_tied_pp2_dp2": ("tp=2",),
    "golden/lg_moe_tp2ep2": ("tp=1,ep=1", "dp=2,ep=2"),
    "megatron/td016_dpr_tp1pp1dp2": ("tp=2,pp=2",),
    "megatron/td013_fsms_tp2pp2dp1": ("dp=2",),
    "megatron/td019_dpr_tp1pp1dp2": ("tp=2",),
    "megatron/lg016_dist_tp1pp1dp2": ("pp=2",),
    "megatron/td016_moe_dpr_ep2": ("ep=1",),
}


def prove_with_megatron() -> Iterator[dict[str, Any]]:
    """Yields a row for every source and layout: megatron.core loads it and takes an update, as `load.py` says."""
    from importlib.metadata import version

    from samerun.core.mesh import Layout

    golden = TOP / "tests" / "golden" / "megatron"
    for name, layouts in MEGATRON.items():
        path = golden / name.partition("/")[2] if name.startswith("golden/") else (CORPUS or Path()) / name
        for text in layouts if path.exists() else ():
            row: dict[str, Any] = {"to": "megatron", "source": name, "loaded_by": f"mcore {version('megatron-core')}"}
            with tempfile.TemporaryDirectory() as scratch:
                dest = Path(scratch) / "moved"
                layout = Layout.parse(text.replace("dp=", "dp_shard="))
                row["from"], row["decisions"] = convert_all_allowed(path, dest, "megatron", layout=layout)
                command = [sys.executable, "load.py", str(dest), str(path), text]
                done = subprocess.run(command, cwd=golden, capture_output=True, text=True, timeout=600)
            said = [line for line in done.stdout.splitlines() if line.startswith('{"layout"')]
            found = json.loads(said[-1]) if said else {"error": done.stderr.strip().splitlines()[-1][:160]}
            if "error" in found:
                yield {**row, "layout": text, "failed": found["error"]}
            else:
                yield {**row, "layout": text, "tensors": found["tensors"], "different": found["differences"]}


def prove_with_huggingface() -> Iterator[dict[str, Any]]:
    """Yields a row for Trainer and Accelerate at 1, 2 and 3 ranks, from DCP directories of their own runs."""
    from importlib.metadata import version

    from support import hfjob
    from support.gloo import run_ranks

    for job, package in ((hfjob.train, "transformers"), (hfjob.accelerate, "accelerate")):
        rest = (0.1,) if package == "transformers" else ()
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            control = run_ranks(2, job, folder / "run", None, *rest, timeout=300)[0]["saved"]
            saved = folder / "run" / (f"checkpoint-{hfjob.SAVED}" if rest else "")
            convert_all_allowed(saved, folder / "dcp", "dcp")
            row: dict[str, Any] = {"to": "huggingface", "source": f"{package}, 2 ranks, as dcp"}
            row["loaded_by"] = f"{package} {version(package)}"
            row["from"], row["decisions"] = convert_all_allowed(folder / "dcp", folder / "moved", "huggingface")
            for ranks in (1, 2, 3):
                found = run_ranks(ranks, job, None, folder / "moved", *rest, timeout=300)[0]["saved"]
                wrong = [key for key in control if found[key].tobytes() != control[key].tobytes()]
                yield {**row, "layout": f"{ranks} ranks", "tensors": len(control), "different": wrong}


# --- data and page --------------------------------------------------------------------------------------------------


def read_rows() -> list[dict[str, Any]]:
    """Returns what is known."""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else []


def merge(new: dict[str, Any]) -> None:
    """Puts a row in the place of the one with the same source, destination, framework and layout.

    Parts may run at the same time: each row is put into what the file holds then, under a lock.
    """
    keys = ("to", "source", "loaded_by", "layout")
    with open(DATA.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = [row for row in read_rows() if any(row.get(key) != new.get(key) for key in keys)]
        rows.append(new)
        rows.sort(key=lambda row: tuple(str(row.get(key, "")) for key in keys))
        DATA.write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")


def page(rows: list[dict[str, Any]]) -> str:
    """Returns docs/proofs.md."""
    lines = [
        "# What was proved by loading it",
        "",
        "Checkpoints that samerun converted, loaded by the real framework through its own loader at another degree,",
        "and compared with the source bit for bit: every tensor of model and optimizer, and the settings of the",
        "parameter groups. Made by `scripts/proof_matrix.py` from what was run; an empty cell was not. What the",
        "conversion itself proves (every destination is read back and compared with its source) is not counted here.",
        "Where the source has fp32 masters and the destination no place for them, `--masters params` was given. A",
        "source called `X, as Y` was converted from X to Y by samerun before. Exports (`safetensors`) are read by the",
        "safetensors library in a process without samerun. torchtitan's checkpoint is loaded by its own model,",
        "since its optimizer has other names than its weights. `Llama under X` is one small Llama that X",
        "trained on three ranks, compared with what the live run held; into and out of Megatron it goes by the map",
        "`megatron-to-llama`.",
        "",
        "## From which format into which",
        "",
        "| from | " + " | ".join(f"`{to}`" for to in DESTINATIONS) + " |",
        "|---|" + "---|" * len(DESTINATIONS),
    ]
    for source in FORMATS:
        lines.append(f"| `{source}` | " + " | ".join(_cell(rows, source, to) for to in DESTINATIONS) + " |")
    lines += ["", "## Each source", "", "| source | from | to | loaded by | degrees | tensors | equal | decisions |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["source"], row["from"], row["to"], row["loaded_by"]), []).append(row)
    for (source, kind, to, by), members in sorted(groups.items()):
        lines.append(f"| {source} | {kind} | {to} | {by} | {_degrees(members)} | {_counts(members)} |")
    return "\n".join(lines) + "\n"


def _cell(rows: list[dict[str, Any]], source: str, to: str) -> str:
    found = [row for row in rows if (row["from"], row["to"]) == (source, to)]
    good = [row for row in found if "tensors" in row and not row["different"]]
    bad = [row for row in found if row not in good and "refused" not in row]
    refused = sorted({code for row in found for code in row.get("refused", ())})
    parts = [f"{len(good)} loads equal"] if good else []
    parts += [f"{len(bad)} not" if good else f"{len(bad)} loads, none equal"] if bad else []
    parts += [f"refused: {', '.join(refused)}"] if refused and not good else []
    return "; ".join(parts)


def _degrees(rows: list[dict[str, Any]]) -> str:
    return "; ".join(row["layout"].replace(",", " ") for row in rows if "layout" in row)


def _counts(rows: list[dict[str, Any]]) -> str:
    if refused := [row for row in rows if "refused" in row]:
        return f" | | refused: {', '.join(refused[0]['refused'])}"
    total = max((row.get("tensors", 0) for row in rows), default=0)
    failed = sorted({row["failed"] for row in rows if "failed" in row})
    wrong = sorted({key for row in rows for key in row.get("different", ())})
    text = "all" if not wrong and not failed else ""
    text += f"not {', '.join(wrong[:3])}" + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "") if wrong else ""
    text += f" failed: {failed[0].replace('|', '/')}" if failed else ""
    losses = [row["loss_off"] for row in rows if row.get("loss_off") is not None]
    text += f"; next losses within {max(losses):.1e}" if losses else ""
    decisions = ", ".join(sorted({code for row in rows for code in row.get("decisions", ())}))
    return f"{total or ''} | {text} | {decisions}"


def _missing(text: str) -> bool:
    """Whether a source and its destination are wanted; with `--missing`, unless rows of it are equal already."""
    source, _, to = text.rpartition(" ")
    rows = [row for row in read_rows() if (row["source"], row["to"]) == (source, to)] if "--missing" in sys.argv else []
    return proof_more.wanted(text) and not (rows and all(row.get("different") == [] for row in rows))


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "safetensors": lambda: proof_more.prove_exports(find_sources(), convert_all_allowed),
    "into-deepspeed": lambda: proof_more.prove_into_deepspeed(find_sources(), convert_all_allowed),
    "experts": lambda: proof_experts.prove_experts(convert_all_allowed, proof_more.wanted),
    "mapped-megatron": lambda: proof_more.prove_mapped_megatron(convert_all_allowed),
    "llama": lambda: proof_llama.prove_llama(convert_all_allowed, _missing),
    "from-megatron": lambda: proof_llama.prove_from_megatron(CORPUS or Path(), convert_all_allowed, _missing),
    "torchtitan": lambda: proof_titan.prove_with_torchtitan(find_sources(), convert_all_allowed),
    "more-huggingface": lambda: proof_more.prove_more_huggingface(convert_all_allowed),
    "dcp": lambda: prove_with_torch("dcp"),
    "torch": lambda: prove_with_torch("torch"),
    "deepspeed": prove_with_deepspeed,
    "megatron": prove_with_megatron,
    "huggingface": prove_with_huggingface,
}


def main() -> int:
    """Runs the parts that are named, and writes the page; returns the exit code."""
    for part in [part for part in sys.argv[1:] if not part.startswith("--")]:
        for row in PARTS[part]() if part != "page" else ():
            merge(row)
            print({key: row[key] for key in row if key not in ("decisions",)}, file=sys.stderr, flush=True)
    PAGE.write_text(page(read_rows()), encoding="utf-8")
    DATA.with_suffix(".lock").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
