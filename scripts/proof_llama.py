"""A part of the proof matrix: one Llama that every framework trained and saved, loaded by every other framework.

The truth is what the live run held when it saved (`support.llamajob`), of Megatron's runs what was taken
from the ranks' memory. Where names differ, the truth is renamed here by NumPy, not by samerun's maps.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Convert = Callable[..., tuple[str, list[str]]]

KINDS = (
    "torch", "ranklocal", "fsdp1", "lightning", "accelerate", "zero", "universal", "dcp", "huggingface",
)  # fmt: skip
RUNS = ("megatron/td016_fr_tp2pp2dp1", "megatron/lg016_dist_tp1pp1dp2")
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


# --- from every framework ---------------------------------------------------------------------------------------------


def prove_llama(convert: Convert, wanted: Callable[[str], bool]) -> Iterator[Row]:
    """Yields rows for each framework's save: into Trainer, Accelerate and Megatron at other degrees."""
    from support import llamajob

    for kind in KINDS:
        source = f"Llama under {kind}, {llamajob.RANKS} ranks"
        targets = [to for to in ("huggingface", "megatron") if wanted(f"{source} {to}")]
        if not targets:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            saved, truth = llamajob.save(kind, folder / "run")
            row: Row = {"source": source}
            strip = _strip(folder) if kind == "lightning" else ()
            if "huggingface" in targets:
                yield from _into_huggingface(convert, row, saved, truth, folder / "hf", strip)
            if "megatron" in targets:
                yield from _into_megatron(convert, row, saved, truth, folder, strip)


def _strip(folder: Path) -> tuple[str, ...]:
    (folder / "strip.yaml").write_text('"net.*": "*"\n')
    return (str(folder / "strip.yaml"),)


def _into_huggingface(
    convert: Convert, row: Row, source: Path, truth: Any, moved: Path, names: tuple[str, ...], **changed: int
) -> Iterator[Row]:
    from support import llamajob
    from support.gloo import run_ranks

    row = {**row, "to": "huggingface"}
    row["from"], row["decisions"] = convert(source, moved, "huggingface", names=names)
    build = partial(llamajob.build, **changed)
    jobs = (
        ("transformers", llamajob.resume_trainer, (2,)),
        ("accelerate", llamajob.resume_accelerate, (1,)),
    )
    for package, job, degrees in jobs:
        for ranks in degrees:
            one = {**row, "loaded_by": f"{package} {version(package)}", "layout": f"{ranks} ranks"}
            yield _loaded(one, truth, lambda ranks=ranks, job=job: run_ranks(ranks, job, moved, build, timeout=900)[0])


def _loaded(row: Row, truth: Any, load: Callable[[], Any]) -> Row:
    from support import llamajob

    try:
        found = load()
    except RuntimeError as error:
        return {**row, "failed": str(error).strip().splitlines()[-1][:160]}
    wrong = llamajob.differences(found, truth)
    if "position" in found and found["position"] != truth.get("position", llamajob.UPDATES):
        wrong.append(f"position {found['position']}")
    return {**row, "tensors": len(truth["tensors"]), "different": wrong}


def _into_megatron(
    convert: Convert, row: Row, source: Path, truth: Any, folder: Path, names: tuple[str, ...]
) -> Iterator[Row]:
    from support import llamajob
    from support.llamanames import load_megatron, settings_differ, write_truth

    written = write_truth(truth, folder / "truth")
    moved = folder / "megatron"
    row = {**row, "to": "megatron", "loaded_by": f"mcore {version('megatron-core')}"}
    names = (*names, f"inverse:megatron-to-llama,heads={llamajob.HEADS},groups={llamajob.GROUPS}")
    row["from"], row["decisions"] = convert(source, moved, "megatron", names=names, masters=None)
    for text, found in load_megatron(moved, folder / "truth", ("tp=2,pp=2",)).items():
        if "error" in found:
            yield {**row, "layout": text, "failed": found["error"][:160]}
        else:
            wrong = [*found["differences"], *settings_differ(found, truth)]
            yield {**row, "layout": text, "tensors": written, "different": wrong}


# --- from Megatron ----------------------------------------------------------------------------------------------------


def prove_from_megatron(corpus: Path, convert: Convert, wanted: Callable[[str], bool]) -> Iterator[Row]:
    """Yields rows for Megatron's runs as a Llama of transformers: under Trainer, Accelerate, and DeepSpeed's engine."""
    from samerun.core.mesh import Layout
    from support.llamanames import truth_of_megatron

    for name in RUNS:
        source = corpus / name
        shape = {**SHAPE, "vocab_size": json.loads((source / "TRUTH.json").read_text())["padded_vocab"]}
        for to in ("zero", "universal", "huggingface"):
            if not wanted(f"{name}, as a Llama {to}"):
                continue
            with tempfile.TemporaryDirectory() as scratch:
                row: Row = {"source": f"{name}, as a Llama", "to": to}
                names = ("megatron-to-llama",)
                truth = truth_of_megatron(source, shape, masters_are_params=to == "huggingface")
                if to == "huggingface":
                    yield from _into_huggingface(convert, row, source, truth, Path(scratch) / "hf", names, **shape)
                    continue
                for stage in (1, 3) if to == "zero" else (2, 3):
                    moved = Path(scratch) / f"stage{stage}"
                    options: Row = {"layout": Layout(dp_shard=3), "masters": None, "names": names}
                    options |= {"writer": _at_stage(stage)} if to == "zero" else {}
                    row["from"], row["decisions"] = convert(source, moved, to, **options)
                    yield _into_engine({**row, "layout": f"stage {stage} at 3 ranks"}, truth, moved, stage, shape)


def _into_engine(row: Row, truth: Any, moved: Path, stage: int, shape: dict[str, int]) -> Row:
    from support import llamajob
    from support.gloo import run_ranks

    row["loaded_by"] = f"DeepSpeed {version('deepspeed')}"
    rest = (moved, stage, row["to"] == "universal", True, shape)
    return _loaded(row, truth, lambda: run_ranks(3, llamajob.resume_engine, *rest, timeout=900)[0])


def _at_stage(stage: int) -> Any:
    from samerun.formats.zero.write import lay_out

    return partial(lay_out, stage=stage)
