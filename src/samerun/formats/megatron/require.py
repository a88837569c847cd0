"""What stands against writing a state as a Megatron checkpoint, from names, shapes and arguments alone."""

from __future__ import annotations

import re

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role, TensorEntry, TensorKey
from samerun.errors import Problem, Severity
from samerun.formats.mcore.flat import align
from samerun.formats.mcore.run import Run
from samerun.formats.mcore.vocab import PADDED

_OURS = ("megatron", "megatron-legacy")
_NAMED = re.compile(
    r"(?:embedding\.\w+|decoder\.(?:layers|final_layernorm|final_norm)|output_layer|mtp|position_embeddings)\b.*"
)
_GROUPED = re.compile(r"\.experts\.linear_fc[12]\.(?:weight|bias)\d+$")


def check_writable(state: LogicalState, run: Run, wanted: Layout) -> list[Problem]:
    """Returns every finding; errors are decisions of the user."""
    names = {entry.key.fqn for entry in state.tensors.values()}
    return [
        *_check_names(state, names),
        *_check_args(state, run),
        *_check_kind(run, names),
        *_check_slots(state),
        *_check_optimizer(state),
        *_check_vocabulary(state, run, wanted),
        *([_no_iteration()] if state.progress.update is None else []),
    ]


def _check_names(state: LogicalState, names: set[str]) -> list[Problem]:
    odd = sorted(name for name in names if not _NAMED.fullmatch(name)) if state.format not in _OURS else []
    odd += sorted(name for name in names if _GROUPED.search(name))
    if not odd:
        return []
    return [
        Problem(
            "SR-MGW-NAMES",
            f"{len(odd)} tensors have no name that a Megatron job asks for, the first is {odd[0]}",
            where={"tensor": odd[0]},
            expected="names such as decoder.layers.mlp.linear_fc2.weight",
            found=odd[0],
            hint="a source of another framework needs a name map that gives Megatron's stacked names: "
            "--map inverse:megatron-to-llama,heads=H,groups=G (docs/maps.md; a prefix of the script's own is taken "
            'off by a --map before it, as in "net.*": "*"); grouped experts are read from torch_dist checkpoints only',
        )
    ]


def _check_args(state: LogicalState, run: Run) -> list[Problem]:
    if run.args:
        return []
    ours = state.format in _OURS
    return [
        Problem(
            "SR-MGW-ARGS",
            "the source holds no args, from which Megatron-LM takes consumed samples and compares the model",
            severity=Severity.WARNING if ours else Severity.ERROR,
            where={"key": "args"},
            hint="training loops of their own over megatron.core do without. Megatron-LM's own loader stops without "
            "args; with --allow SR-MGW-ARGS they are left out",
        )
    ]


def _check_kind(run: Run, names: set[str]) -> list[Problem]:
    kinds = {
        "Mamba layers": any(".mixer." in name for name in names),
        "latent attention": run.flag("multi_latent_attention") or any("linear_kv_down_proj" in name for name in names),
        "a pipeline layout of its own (pipeline_model_parallel_layout)": bool(
            run.args.get("pipeline_model_parallel_layout")
        ),
    }
    return [
        Problem(
            "SR-MGW-UNVERIFIED",
            f"the model has {kind}, which was never written and loaded by the real Megatron",
            where={"key": kind},
            hint="every tensor goes under its stored name in its stored shape, so it may well load: allow it "
            "(--allow SR-MGW-UNVERIFIED) and compare the first losses",
        )
        for kind, found in kinds.items()
        if found
    ]


def _check_slots(state: LogicalState) -> list[Problem]:
    problems: list[Problem] = []
    for text, entry in state.tensors.items():
        if entry.key.role not in (Role.OPTIM, Role.MASTER) or entry.key.slot == "step":
            continue
        weight = state.tensors.get(str(TensorKey(Role.PARAM, entry.key.fqn)))
        if weight is None or weight.shape != entry.shape:
            problems.append(
                Problem(
                    "SR-MGW-SLOT",
                    "an optimizer tensor has not its parameter's shape, which fully_reshardable asks for",
                    where={"tensor": text},
                    expected=list(weight.shape) if weight else "a parameter of that name",
                    found=list(entry.shape),
                    hint="Megatron would refuse it or read it into another place; leave it out with a map",
                )
            )
    return problems


def _check_optimizer(state: LogicalState) -> list[Problem]:
    if any(entry.key.role is Role.OPTIM for entry in state.tensors.values()):
        return []
    return [
        Problem(
            "SR-MGW-NOOPTIM",
            "the source holds no optimizer state: only weights are written",
            severity=Severity.WARNING,
            hint="load them with --no-load-optim, or --finetune",
        )
    ]


def _check_vocabulary(state: LogicalState, run: Run, wanted: Layout) -> list[Problem]:
    size = run.count("vocab_size")
    found = [entry for entry in state.tensors.values() if entry.key.fqn in PADDED and entry.key.slot is None]
    if not found or size is None:
        return []
    multiple = run.count("make_vocab_size_divisible_by")
    padded = align(size, multiple * wanted.tp) if multiple else found[0].shape[0]
    if padded < found[0].shape[0]:
        return [_cut_off(found[0], padded)]
    if found[0].shape[0] != size:
        return []
    return [
        Problem(
            "SR-MGW-VOCAB",
            f"the vocabulary's tensors are written with their {size} rows and no padding",
            severity=Severity.NOTE,
            where={"tensor": str(found[0].key)},
            hint="Megatron pads them as it loads, to a multiple that depends on TP: rows beyond are zero, in weights "
            "and moments, where the source's were as initialised. Those of the output layer take part in the softmax",
        )
    ]


def _cut_off(entry: TensorEntry, rows: int) -> Problem:
    return Problem(
        "SR-MGW-ROWS",
        f"a job at that TP holds {rows} rows of the vocabulary and would drop what is beyond",
        where={"tensor": str(entry.key)},
        expected=f"{rows} rows at the destination",
        found=f"{entry.shape[0]} rows",
        severity=Severity.WARNING,
        hint="those rows were trained (SR-MEG-VOCABUSED). Where the tokenizer uses them, raise "
        "--make-vocab-size-divisible-by so that they stay",
    )


def _no_iteration() -> Problem:
    return Problem(
        "SR-MGW-ITERATION",
        "the source does not say how many updates it is of: it is written as a release, which starts at iteration 0",
        severity=Severity.WARNING,
        where={"key": "iteration"},
        hint="the schedule and the position in the data start anew, unless the job sets them",
    )
