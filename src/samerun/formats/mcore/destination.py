"""At which layouts Megatron itself would load a checkpoint (seen with 0.13.0, 0.16.1 and 0.19.0)."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from samerun.core.mesh import Layout
from samerun.errors import Problem, Severity
from samerun.formats.mcore.flat import default_bucket_size
from samerun.formats.mcore.run import Run

_CONVERT = "`samerun convert --to megatron` writes the fully reshardable encoding"


def check_distributed(run: Run, encodings: Set[str], destination: Layout, root: Path) -> list[Problem]:
    """Returns why Megatron would refuse a distributed checkpoint at another layout; nothing if it would not."""
    reasons: list[str] = []
    moved = _changed(run, destination)
    if "fully_sharded_model_space" in encodings:
        reasons.append("releases from 0.16 on do not load fully_sharded_model_space, at any layout")
    if encodings & {"dp_reshardable", "dp_zero_gather_scatter"}:
        named = next(iter(sorted(encodings & {"dp_reshardable", "dp_zero_gather_scatter"})))
        odd = [axis for axis in ("tp", "pp", "ep") if axis in moved]
        if odd:
            reasons.append(f"{named} optimizer state cannot change {' or '.join(odd).upper()}; only DP")
        elif "dp" in moved and _buckets_change(run, destination):
            reasons.append("the default bucket size changes with that DP degree, and flat buckets with it")
    if run.ep > 1 and destination.ep == 1:
        reasons.append("from expert parallelism to none it stops with KeyError: 'optimizer'")
    elif run.ep > 1 and "dp" in moved:
        reasons.append("with experts, 0.16 looks for a random state per data-parallel rank that is not there")
    return [*_refused(root, run, destination, reasons), *check_even(run, destination, root)]


def check_legacy(run: Run, *, sharded: bool, destination: Layout, root: Path) -> list[Problem]:
    """Returns why Megatron would refuse one file per rank at another layout; nothing if it would not."""
    moved = _changed(run, destination)
    odd = [axis for axis in ("tp", "pp", "ep") if axis in moved]
    reasons = [f"{' and '.join(odd).upper()} cannot change; it prints so and ends with exit status 0"] if odd else []
    if not odd and sharded and "dp" in moved:
        reasons.append("the distributed optimizer's file fits another DP degree only if buckets stay the same")
    return [*_refused(root, run, destination, reasons), *check_even(run, destination, root)]


def _changed(run: Run, destination: Layout) -> set[str]:
    pairs = {
        "tp": (run.tp, destination.tp),
        "pp": (run.pp, destination.pp),
        "ep": (run.ep, destination.ep),
        "dp": (run.dp, destination.batch_replicas),
    }
    return {axis for axis, (held, wanted) in pairs.items() if held is not None and held != wanted}


def _buckets_change(run: Run, destination: Layout) -> bool:
    if not run.flag("overlap_grad_reduce") or run.count("ddp_bucket_size") or run.dp is None:
        return False
    return default_bucket_size(run.dp * run.cp) != default_bucket_size(destination.batch_replicas * destination.cp)


def check_even(run: Run, destination: Layout, root: Path) -> list[Problem]:
    """Checks that what tensor, pipeline and expert parallelism divide comes out even, which Megatron insists on."""
    even: list[tuple[str, int | None, str, int]] = [
        ("attention heads", run.count("num_attention_heads"), "tp", destination.tp),
        (
            "query groups",
            run.count("num_query_groups") if run.flag("group_query_attention") else None,
            "tp",
            destination.tp,
        ),
        ("columns of the MLP", run.count("ffn_hidden_size"), "tp", destination.tp),
        ("experts", run.count("num_experts"), "ep", destination.ep),
    ]
    uneven_stages = run.count("decoder_first_pipeline_num_layers") or run.count("decoder_last_pipeline_num_layers")
    if not uneven_stages and not run.args.get("pipeline_model_parallel_layout"):
        extra = run.flag("account_for_embedding_in_pipeline_split") + run.flag("account_for_loss_in_pipeline_split")
        layers = run.count("num_layers")
        even.append(("layers", layers + extra if layers else None, "pp", destination.pp))
    return [
        Problem(
            "SR-MEG-UNEVEN",
            f"{count} {what} do not divide over {axis}={degree}",
            severity=Severity.WARNING,
            where={"file": str(root), "key": axis},
            expected=f"a multiple of {degree}",
            found=count,
            hint="Megatron stops when it builds the model; choose a degree that divides"
            + (", or set --decoder-first-pipeline-num-layers" if axis == "pp" else ""),
        )
        for what, count, axis, degree in even
        if count is not None and count % degree
    ]


def _refused(root: Path, run: Run, destination: Layout, reasons: list[str]) -> list[Problem]:
    return [
        Problem(
            "SR-MEG-RIGID",
            f"Megatron does not load this at that layout: {reason}",
            severity=Severity.WARNING,
            where={"file": str(root)},
            expected=_text(run.dp, run.tp, run.pp, run.ep),
            found=_text(destination.batch_replicas, destination.tp, destination.pp, destination.ep),
            hint=_CONVERT,
        )
        for reason in reasons
    ]


def _text(dp: int | None, tp: int, pp: int, ep: int) -> str:
    return f"dp={dp or '?'},tp={tp},pp={pp},ep={ep}"


def check_encoding(encodings: Set[str], run: Run, root: Path) -> list[Problem]:
    """Says, on opening, what the encoding of the optimizer's state is bound to."""
    if "fully_sharded_model_space" in encodings:
        return [
            Problem(
                "SR-MEG-OLDENCODING",
                "the optimizer's state is fully_sharded_model_space, which releases from 0.16 on do not load",
                severity=Severity.WARNING,
                where={"file": str(root)},
                hint=f"0.13 to 0.15 load it (at another TP with NaN in padding rows). {_CONVERT}",
            )
        ]
    rigid = sorted(encodings & {"dp_reshardable", "dp_zero_gather_scatter", "legacy"})
    if not rigid:
        return []
    what = "this" if rigid == ["legacy"] else f"{rigid[0]} optimizer state"
    return [
        Problem(
            "SR-MEG-BOUND",
            f"Megatron loads {what} at tp={run.tp}, pp={run.pp}, ep={run.ep} only",
            severity=Severity.NOTE,
            where={"file": str(root)},
            hint=f"for another layout convert it first: {_CONVERT}",
        )
    ]
