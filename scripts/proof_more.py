"""More parts of the proof matrix: exports, other frameworks into DeepSpeed, Megatron by way of a name map."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from samerun.formats.detect import open_checkpoint

TOP = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
Convert = Callable[..., tuple[str, list[str]]]

# --- exports ----------------------------------------------------------------------------------------------------------


def prove_exports(sources: Iterator[tuple[str, Path]], convert: Convert) -> Iterator[Row]:
    """Yields a row per source: the stock safetensors library reads every tensor of the export, without samerun."""
    for name, path in sources:
        row: Row = {"to": "safetensors", "source": name, "loaded_by": f"safetensors {version('safetensors')}"}
        with tempfile.TemporaryDirectory() as scratch:
            dest = Path(scratch) / "export"
            row["from"], row["decisions"] = convert(path, dest, "safetensors", masters=None)
            read = [sys.executable, "-I", str(TOP / "scripts" / "read_export.py"), str(dest)]
            found = json.loads(subprocess.run(read, capture_output=True, text=True, check=True, timeout=300).stdout)
        checkpoint = open_checkpoint(path)
        wrong = [key for key in checkpoint.state.tensors if found["tensors"].pop(key, None) != _digest(checkpoint, key)]
        wrong += [*found["tensors"], *(["samerun was imported"] if found["samerun"] else [])]
        groups = [list(group.params) for group in checkpoint.state.groups]
        wrong += [] if [group["params"] for group in found["groups"]] == groups else ["groups"]
        checkpoint.close()
        yield {**row, "layout": "one process", "tensors": len(checkpoint.state.tensors), "different": wrong}


def _digest(checkpoint: Any, key: str) -> list[Any]:
    import hashlib

    import numpy as np

    values = np.ascontiguousarray(checkpoint.read(key))
    shape = list(checkpoint.state.tensors[key].shape)
    return [shape, hashlib.sha256(values.tobytes()).hexdigest()]


# --- DeepSpeed --------------------------------------------------------------------------------------------------------

INTO_DEEPSPEED = (
    "torch/fsdp1_ws2_orig/local", "torch/ranklocal_fsdp2_ws3", "torch/hf_trainer_ws2/checkpoint-5",
    "torch/accel_fsdp2_sharded_ws2", "torch/lightning_ddp_ws2/step5.ckpt", "deepspeed-universal/z1_fp32_untied_ws3",
    "deepspeed-universal/z3_fp32_untied_ws2", "deepspeed-special/tp2_ws2", "torch/dcp_fsdp2_ws3, as safetensors",
)  # fmt: skip


def prove_into_deepspeed(sources: Iterator[tuple[str, Path]], convert: Convert) -> Iterator[Row]:
    """Yields a row per source, destination and stage: a DeepSpeed engine over a model of its names loads it."""
    import deepspeed

    from samerun.core.mesh import Layout
    from support.gloo import run_ranks

    known = dict(sources)
    if wanted("pipeline"):
        yield from _prove_pipeline(convert)
    for name in (name for name in INTO_DEEPSPEED if name in known):
        for to in ("zero", "universal"):
            for stage in (1, 3) if to == "zero" else (2, 3):
                if not wanted(f"{name} {to} {stage}"):
                    continue
                row: Row = {"to": to, "source": name, "loaded_by": f"DeepSpeed {deepspeed.__version__}"}
                row["layout"] = f"stage {stage} at 2 ranks"
                options: Row = {"layout": Layout(dp_shard=2), "masters": None}
                options |= {"writer": _at_stage(stage)} if to == "zero" else {}
                with tempfile.TemporaryDirectory() as scratch:
                    dest = Path(scratch) / "moved"
                    row["from"], row["decisions"] = convert(known[name], dest, to, **options)
                    try:
                        found = run_ranks(2, _held_by_engine, str(known[name]), str(dest), stage, to, timeout=300)
                        yield {
                            **row,
                            "tensors": found[0][0],
                            "different": sorted({k for _, keys in found for k in keys}),
                        }
                    except RuntimeError as error:
                        yield {**row, "failed": str(error).strip().splitlines()[-1][:160]}


def wanted(text: str) -> bool:
    """Whether `--only=...` on the command line leaves this in."""
    return all(argument[7:] in text for argument in sys.argv if argument.startswith("--only="))


def _prove_pipeline(convert: Convert) -> Iterator[Row]:
    """Yields rows for a real pipeline of two stages, loaded by its engine at two stages with replicas, and at one."""
    import deepspeed
    import numpy as np

    from samerun.core.mesh import Layout
    from support import dspipe

    row: Row = {
        "to": "universal",
        "source": "DeepSpeed pipeline, 2 stages",
        "loaded_by": f"DeepSpeed {deepspeed.__version__}",
    }
    with tempfile.TemporaryDirectory() as scratch:
        there, moved = Path(scratch) / "there", Path(scratch) / "moved"
        truth, later = dspipe.make_source(2, 2, there)
        row["from"], row["decisions"] = convert(
            there, moved, "universal", layout=Layout(pp=2, dp_shard=2), masters=None
        )
        for pp, ranks in ((2, 4), (1, 2)):
            held, found = dspipe.resume(pp, ranks, moved)
            wrong = [name for name in truth if name not in held or not np.array_equal(held[name], truth[name])]
            off = max(abs(a - b) for a, b in zip(found[0]["later"], later, strict=True))
            layout = f"{pp} stages at {ranks} ranks"
            yield {**row, "layout": layout, "tensors": len(truth), "different": wrong, "loss_off": off}


def _at_stage(stage: int) -> Any:
    from functools import partial

    from samerun.formats.zero.write import lay_out

    return partial(lay_out, stage=stage)


def _held_by_engine(rank: int, ranks: int, source: str, folder: str, stage: int, to: str) -> tuple[int, list[str]]:
    """Loads into an engine whose tensors are all NaN before; returns how many were compared, and which differ."""
    import deepspeed
    import torch

    from support import dsjob
    from support.skeleton import build_model

    warnings.simplefilter("ignore")
    dsjob._quiet()
    checkpoint = open_checkpoint(Path(source))
    state = checkpoint.state
    model = build_model(state)
    model.forward = lambda: None
    named = dict(model.named_parameters(remove_duplicate=False))
    sixteen = any(parameter.dtype == torch.bfloat16 for parameter in named.values())
    job = dsjob.Job(stage, bf16=sixteen)
    groups = [
        {"params": [p for fqn in group.params if (p := named[fqn]).requires_grad], "lr": 77.0, "weight_decay": 0.5}
        for group in state.groups
    ]
    optimizer = torch.optim.AdamW(groups)
    config = job.config(ranks, universal=to == "universal")
    config.pop("scheduler")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    path, client = engine.load_checkpoint(folder, load_lr_scheduler_states=False)
    if to == "universal":
        exec(dsjob.RESTORE_MODEL, {"engine": engine, "path": path, "client": client})
        if stage == 3:
            exec(dsjob.RESTORE_STAGE3, {"engine": engine, "path": path, "client": client})
    held = dsjob.full_state(engine, job)
    wrong: list[str] = []
    compared = 0
    for key, entry in state.tensors.items():
        if entry.key.slot == "step" or entry.key.role == "ema":
            continue
        kind = {"param": "module", "buffer": "buffer", "master": "fp32"}.get(entry.key.role.value, entry.key.slot)
        names = (entry.key.fqn, *entry.aliases)
        found = next((held[f"{kind}/{fqn}"] for fqn in names if f"{kind}/{fqn}" in held), None)
        expected = checkpoint.read(key)
        compared += 1
        if found is None or found.reshape(expected.shape).astype(expected.dtype).tobytes() != expected.tobytes():
            wrong.append(key)
    wrong += _settings(engine, state, checkpoint)
    checkpoint.close()
    return compared, wrong


def _settings(engine: Any, state: Any, checkpoint: Any) -> Iterator[str]:
    inner = engine.optimizer.optimizer
    filled = [group for group in state.groups if group.params]
    for number, (mine, saved) in enumerate(zip(inner.param_groups, filled, strict=True)):
        for name in ("lr", "weight_decay", "betas", "eps"):
            if name in saved.hyperparameters and _plain(mine[name]) != _plain(saved.hyperparameters[name]):
                yield f"{name} of group {number}"
    steps = {float(checkpoint.read(key)) for key, e in state.tensors.items() if e.key.slot == "step"}
    found = {float(slots["step"]) for slots in inner.state.values() if "step" in slots}
    if steps and found != steps:
        yield f"steps {sorted(found)} for {sorted(steps)}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


# --- Megatron by way of a map -----------------------------------------------------------------------------------------

MAPPED = {"dcp": "tp=1,dp=3", "safetensors": "tp=2,pp=2", "huggingface": "pp=2"}


def prove_mapped_megatron(convert: Convert) -> Iterator[Row]:
    """Yields a row per format in between: Megatron's run under Llama's names, and back into Megatron by the map."""
    from samerun.core.mesh import Layout

    golden = TOP / "tests" / "golden" / "megatron"
    for to, text in MAPPED.items():
        row: Row = {"to": "megatron", "source": f"golden/fr_tp2pp2, as {to} under Llama's names"}
        row |= {"loaded_by": f"mcore {version('megatron-core')}", "layout": text}
        with tempfile.TemporaryDirectory() as scratch:
            there, back = Path(scratch) / "there", Path(scratch) / "back"
            masters = None if to == "safetensors" else "slots"
            convert(golden / "fr_tp2pp2", there, to, names="megatron-to-llama", masters=masters)
            layout = Layout.parse(text.replace("dp=", "dp_shard="))
            inverse = "inverse:megatron-to-llama,heads=4,groups=2"
            row["from"], row["decisions"] = convert(there, back, "megatron", names=inverse, layout=layout, masters=None)
            command = [sys.executable, "load.py", str(back), "fr_tp2pp2", text]
            done = subprocess.run(command, cwd=golden, capture_output=True, text=True, timeout=600)
        said = [line for line in done.stdout.splitlines() if line.startswith('{"layout"')]
        found = json.loads(said[-1]) if said else {"error": done.stderr.strip().splitlines()[-1][:160]}
        if "error" in found:
            yield {**row, "failed": found["error"]}
        else:
            yield {**row, "tensors": found["tensors"], "different": found["differences"]}


# --- Hugging Face -----------------------------------------------------------------------------------------------------

BETWEEN = ("torch", "safetensors", "zero", "universal", "huggingface")


def prove_more_huggingface(convert: Convert) -> Iterator[Row]:
    """Yields rows for Trainer and Accelerate at 1 and 3 ranks, from their own run by way of other formats."""
    from samerun.core.mesh import Layout
    from support import hfjob
    from support.gloo import run_ranks

    for job, package in ((hfjob.train, "transformers"), (hfjob.accelerate, "accelerate")):
        rest = (0.1,) if package == "transformers" else ()
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            control = run_ranks(2, job, folder / "run", None, *rest, timeout=300)[0]["saved"]
            saved = folder / "run" / (f"checkpoint-{hfjob.SAVED}" if rest else "")
            for between in (one for one in BETWEEN if any(wanted(f"{package} {one} {ranks}") for ranks in (1, 3))):
                there, moved = folder / between, folder / f"{between}-moved"
                layout = {"layout": Layout(dp_shard=2)} if between in ("zero", "universal") else {}
                row: Row = {"to": "huggingface", "source": f"{package}, 2 ranks, as {between}"}
                row["loaded_by"] = f"{package} {version(package)}"
                try:
                    convert(saved, there, between, masters=None, **layout)
                    row["from"], row["decisions"] = convert(there, moved, "huggingface", masters=None)
                except Exception as error:
                    yield {**row, "from": between, "layout": "", "failed": str(error).splitlines()[0][:160]}
                    continue
                for ranks in (ranks for ranks in (1, 3) if wanted(f"{package} {between} {ranks}")):
                    try:
                        found = run_ranks(ranks, job, None, moved, *rest, timeout=300)[0]["saved"]
                    except RuntimeError as error:
                        yield {**row, "layout": f"{ranks} ranks", "failed": str(error).strip().splitlines()[-1][:160]}
                        continue
                    wrong = [key for key in control if found[key].tobytes() != control[key].tobytes()]
                    yield {**row, "layout": f"{ranks} ranks", "tensors": len(control), "different": wrong}
