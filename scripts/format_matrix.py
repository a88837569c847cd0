"""Writes docs/formats/index.md: which real checkpoints were read, and whether their values were those of the live run.

    SAMERUN_CORPUS=... python scripts/format_matrix.py

Reads the golden checkpoints of the tests and, where `SAMERUN_CORPUS` names one, a collection of real checkpoints with
truth. Rows of checkpoints that are not here keep what an earlier run found. Nothing is filled in by hand.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

TOP = Path(__file__).parents[1]
sys.path[:0] = [str(TOP / "src"), str(TOP / "tests")]

import numpy as np  # noqa: E402

from samerun.core.state import LogicalState, Role  # noqa: E402
from samerun.errors import FormatError, Severity, UsageError  # noqa: E402
from samerun.formats.base import Checkpoint  # noqa: E402
from samerun.formats.detect import FORMATS, open_checkpoint  # noqa: E402
from samerun.verify.inspection.structure import InspectReport, inspect_checkpoint  # noqa: E402
from support.corpus import read_truth  # noqa: E402
from support.megatron import key_of, read_tensors, unstack  # noqa: E402
from support.packed import packed_in, unpack  # noqa: E402

PAGE = TOP / "docs" / "formats" / "index.md"
_EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")
FAMILIES = ("torch", "deepspeed", "deepspeed-special", "deepspeed-universal", "megatron")
GOLDEN = ("statedict", "deepspeed", "wrapped", "dcp", "megatron")
VERSIONS = {
    "torch": "torch 2.13.0", "deepspeed": "DeepSpeed 0.19.8", "deepspeed-special": "DeepSpeed 0.19.8",
    "deepspeed-universal": "DeepSpeed 0.19.8", "statedict": "torch 2.13.0",
    "wrapped": "DeepSpeed 0.19.8 in Accelerate 1.15.0 or transformers 5.24.0", "dcp": "torch 2.13.0",
}  # fmt: skip
RELEASES = {"td013": "0.13.0", "td016": "0.16.1", "lg016": "0.16.1", "td019": "0.19.0"}  # of the collection's Megatron
# What cannot be written on a CPU with the releases at hand: read from the source's description, or not at all.
UNVERIFIED = (
    ("zero", "fp16 optimizers (FP16_Optimizer, FusedAdam)", "SR-ZERO-UNVERIFIED"),
    ("zero", "DeepSpeed releases before 0.19", ""),
    ("universal", "fp16 sources", "SR-ZERO-UNVERIFIED"),
    ("dcp", "releases of torch before 2.13", ""),
    (
        "megatron",
        "`fsdp_dtensor`, Transformer Engine's names, grouped experts, context parallelism",
        "SR-MEG-UNVERIFIED",
    ),
    ("torch", "tensors of subclasses other than DTensor and ShardedTensor", "SR-PKL-UNKNOWN"),
    ("lightning", "FSDP and DeepSpeed strategies (they refuse a CPU)", ""),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint. Text as it is printed; empty where there is nothing."""

    format: str
    checkpoint: str
    written_by: str
    ranks: str
    layout: str
    parameters: str
    optimizer: str
    groups: str
    scheduler: str
    rng: str
    progress: str
    complete: str
    equal_to_truth: str


def main() -> int:
    """Writes the page and returns the exit code: 1 if a value differs from its truth."""
    rows = {row.checkpoint: row for row in old_rows()}
    with tempfile.TemporaryDirectory() as scratch:
        for name, path, truth in find_checkpoints(Path(scratch)):
            rows[name] = read_row(name, path, truth)
            print(f"{name}: {rows[name].equal_to_truth or rows[name].complete}", file=sys.stderr, flush=True)
    PAGE.write_text(page(sorted(rows.values(), key=lambda row: (row.format, row.checkpoint))), encoding="utf-8")
    return int(any("unexplained" in row.equal_to_truth for row in rows.values()))


def find_checkpoints(scratch: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yields (name, path, folder of the truth). What is kept packed is unpacked into `scratch`."""
    for family in GOLDEN:
        kept = TOP / "tests" / "golden" / family
        unpacked = [unpack(kept / f"{name}.tar.xz", scratch / family) for name in packed_in(kept)]
        for folder in sorted([*kept.iterdir(), *unpacked], key=lambda path: path.name):
            if folder.is_dir():
                yield from _inside(f"golden/{family}/{folder.name}", folder)
    corpus = os.environ.get("SAMERUN_CORPUS")
    for family in FAMILIES if corpus else ():
        root = Path(corpus or "") / family
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if folder.is_dir():
                twin = root.parent / "deepspeed" / folder.name  # a conversion has its source's truth
                for name, path, truth in _inside(f"{family}/{folder.name}", folder):
                    yield name, path, twin if family == "deepspeed-universal" and twin.is_dir() else truth


def _inside(name: str, folder: Path) -> Iterator[tuple[str, Path, Path]]:
    try:
        open_checkpoint(folder).close()
    except UsageError as error:
        if error.problems[0].code != "SR-PATH-SEVERAL":
            yield name, folder, folder
            return
        for part in sorted(folder.iterdir()):
            if part.is_dir() or part.suffix in (".pt", ".ckpt", ".pth"):
                yield f"{name}/{part.name}", part, folder
    except FormatError:
        yield name, folder, folder
    else:
        yield name, folder, folder


def read_row(name: str, path: Path, truth: Path) -> Row:
    """Opens one checkpoint and compares it with its truth."""
    family = name.removeprefix("golden/").partition("/")[0]
    try:
        checkpoint = open_checkpoint(path)
    except (FormatError, UsageError) as error:
        return Row("", name, written_by(family, truth), *[""] * 8, f"not read ({error.problems[0].code})", "")
    state, told = checkpoint.state, compare(checkpoint, truth)
    report = inspect_checkpoint(checkpoint, deep="differ" in told)
    slots = sorted({entry.key.slot or "" for entry in state.tensors.values() if entry.key.role is Role.OPTIM})
    params = [entry for entry in state.tensors.values() if entry.key.role in (Role.PARAM, Role.MASTER)]
    row = Row(
        state.format, name, written_by(family, truth),
        str(state.topology.world_size or "") + ("*" if state.topology.inferred else ""),
        str(state.topology.layout or ""), str(len({entry.key.fqn for entry in params})), " ".join(slots),
        str(len(state.groups) or ""), "yes" if state.scheduler else "", str(len(state.rng) or ""), _progress(state),
        "yes" if report.complete else "no", _with_reason(told, report),
    )  # fmt: skip
    checkpoint.close()
    return row


def written_by(family: str, folder: Path) -> str:
    """Returns what wrote a checkpoint, and its release."""
    if family == "megatron" and (folder / "truth.json").is_file():
        facts = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
        return f"Megatron {facts.get('written_by', '0.16.1')}"
    if family == "megatron":
        return f"Megatron {RELEASES[folder.name[:5]]}"
    return "torchtitan 0.3.0" if folder.name.startswith("titan") else VERSIONS[family]


def _with_reason(told: str, report: InspectReport) -> str:
    """Adds the finding that explains values which differ: conversions that are wrong on disk are in the collection."""
    if "differ" not in told:
        return told
    code = next((problem.code for problem in report.problems if problem.severity is Severity.ERROR), "unexplained")
    return f"{told} ({code})"


def _progress(state: LogicalState) -> str:
    parts = [
        f"{name} {value}" for name in ("update", "samples") if (value := getattr(state.progress, name)) is not None
    ]
    return ", ".join(parts)


def compare(checkpoint: Checkpoint, folder: Path) -> str:
    """Returns how many tensors of the truth are equal, bit for bit in the narrower of both types."""
    whole = [(names, value, 0) for names, value in read_full_truth(folder, checkpoint.path.name)]
    truth = whole or list(read_rank_truth(folder))
    if not truth:
        return ""
    equal, absent, differing, shapeless = 0, 0, 0, 0
    by_name = _by_name(checkpoint.state)
    for names, value, rank in truth:
        key = next((by_name[name] for name in names if name in by_name), None)
        if key is None:
            absent += 1
            continue
        try:
            found = checkpoint.read(key)
        except FormatError:
            absent += 1
            continue
        found = found if whole else _part(found, value.shape, names[0][1], rank)
        same = found.size == value.size
        value = value.astype(found.dtype) if found.dtype.itemsize == 2 else value
        same = same and np.array_equal(found.astype(value.dtype).reshape(value.shape), value, equal_nan=True)
        equal, differing = equal + same, differing + (not same)
        shapeless += same and found.shape != value.shape and found.size > 1
    told = f"{equal} of {len(truth)}" + ("" if whole else " held by ranks")
    told += f", {absent} not in it" if absent else ""
    told += f", {shapeless} of them without their shape" if shapeless else ""
    return f"{told}, {differing} differ" if differing else told


def _part(found: np.ndarray, shape: tuple[int, ...], name: str, rank: int) -> np.ndarray:
    """Returns what a rank holds of a tensor that is cut evenly over tensor-parallel ranks, which are the innermost.

    DeepSpeed's AutoTP cuts each part of a fused tensor by itself.
    """
    for axis, (whole, part) in enumerate(zip(found.shape, shape, strict=True)):
        if whole != part:
            fused = 3 if "qkv" in name else 2 if "gate_up" in name else 1
            ranks = -(-whole // part)
            pieces = [np.array_split(one, ranks, axis)[rank % ranks] for one in np.array_split(found, fused, axis)]
            found = np.concatenate(pieces, axis)
    return found


def _by_name(state: LogicalState) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for key, entry in state.tensors.items():
        role = f"optim.{entry.key.slot}" if entry.key.slot else str(entry.key.role)
        for fqn in (entry.key.fqn, *entry.aliases):
            found.setdefault((role, fqn), key)
    return found


def read_full_truth(folder: Path, inner: str) -> list[tuple[list[tuple[str, str]], np.ndarray]]:
    """Returns (names under which it may be filed, value) per tensor of the truth; nothing where it is kept by rank."""
    if "megatron" in folder.parts:
        return list(_megatron_truth(folder))
    if (folder / "truth.safetensors").is_file():
        return [(_torch_names(name), value) for name, value in read_truth(folder).items()]
    for name in ("truth_step5.npz", "truth.npz", f"truth{inner.removeprefix('step-')}.npz"):
        if (folder / name).is_file():
            with np.load(folder / name) as arrays:
                return [(_npz_names(key), arrays[key]) for key in arrays.files if _npz_names(key)]
    return []


def read_rank_truth(folder: Path) -> Iterator[tuple[list[tuple[str, str]], np.ndarray, int]]:
    """Yields (names under which it may be filed, value, rank) for what each rank held of a DeepSpeed job.

    Ranks of expert parallelism number their own experts from 0.
    """
    for file in sorted(folder.glob("truth_rank*.npz")):
        rank = int(file.stem.removeprefix("truth_rank"))
        with np.load(file) as arrays:
            experts = {int(match[2]) for name in arrays.files if (match := _EXPERT.fullmatch(name))}
            for name in arrays.files:
                match = _EXPERT.fullmatch(name)
                full = f"{match[1]}{rank * len(experts) + int(match[2])}{match[3]}" if match else name
                if names := _npz_names(full):
                    yield names, arrays[name], rank


def _megatron_truth(folder: Path) -> Iterator[tuple[list[tuple[str, str]], np.ndarray]]:
    """Yields the tensors of a Megatron run's truth, stacks of layers taken apart for files of single ranks."""
    golden = (folder / "truth.npz").is_file()
    facts = json.loads((folder / ("truth.json" if golden else "TRUTH.json")).read_text(encoding="utf-8"))
    arrays = dict(np.load(folder / "truth.npz")) if golden else read_tensors(folder / "TRUTH.safetensors")
    legacy = facts["case"]["legacy"] if golden else folder.name.startswith("lg")
    rows = facts["case"]["vocab"] if golden else facts["padded_vocab"]
    for name, value in arrays.items():
        for key, part in unstack(key_of(name), value).items() if legacy else [(key_of(name), value)]:
            padded = "word_embeddings" in key or "output_layer" in key
            role, _, fqn = key.partition(":")
            yield [(role, fqn), ("buffer", fqn)], part[:rows] if padded else part


def _torch_names(name: str) -> list[tuple[str, str]]:
    part, _, rest = name.partition(".")
    if part == "model":
        return [("param", rest), ("buffer", rest)]
    fqn, _, slot = rest.rpartition(".")
    return [(f"optim.{slot}", fqn)]


def _npz_names(key: str) -> list[tuple[str, str]]:
    if key.startswith(("model.", "optim.")):
        return _torch_names(key)
    if ":" in key:
        role, _, fqn = key.partition(":")
        return [(role, fqn), *([("buffer", fqn)] if role == "param" else [("param", fqn)] if role == "buffer" else [])]
    part, _, fqn = key.partition("/")
    roles = {"module": ("param", "buffer"), "fp32": ("master", "param"), "buffer": ("buffer",)}
    return [(role, fqn) for role in roles.get(part, (f"optim.{part}",) if part.startswith("exp") else ())]


def page(rows: list[Row]) -> str:
    """Returns the page."""
    heads = ["format", "checkpoint", "written by", "ranks", "layout", "parameters", "optimizer slots", "groups",
             "scheduler", "RNG states", "progress", "complete", "equal to the live run"]  # fmt: skip
    lines = [
        "# What was read",
        "",
        "Written by `python scripts/format_matrix.py`. Each row is a checkpoint that its framework wrote on a CPU",
        "with gloo, opened as a user would. *Equal to the live run* counts full tensors that were taken from the",
        "running job, never from the checkpoint, and are equal here; *not in it* are tensors that it does not hold",
        "(buffers that are not saved, mostly); *held by ranks* counts what each rank held, its part of a tensor",
        "included. Empty where there is no truth. `golden/` lies in `tests/golden`; the others are a collection that",
        "is not part of the repository. `*`: inferred. Empty: nothing there, or not known.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
    ]
    lines += [f"| {' | '.join(astuple(row))} |" for row in rows]
    lines += ["", "## Not verified", "", "Read from the description of their source, or not at all.", ""]
    lines += ["| format | what | says so |", "|---|---|---|"]
    lines += [f"| {name} | {what} | {code} |" for name, what, code in UNVERIFIED]
    missing = [name for name in FORMATS if not any(row.format == name for row in rows)]
    if missing:
        lines += ["", f"No checkpoint of these formats was opened: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def old_rows() -> Iterator[Row]:
    """Yields the rows of the page as it is."""
    for line in PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else ():
        cells = [cell.strip() for cell in line[1:-1].split("|")] if line.startswith("| ") else []
        if len(cells) == len(fields(Row)) and cells[0] != "format":
            yield Row(*cells)


if __name__ == "__main__":
    sys.exit(main())
