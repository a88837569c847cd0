"""`samerun plan`: a manifest becomes a plan, or the list of decisions that are still open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samerun.cli.output import emit_json, exit_code, print_problems, stdout_console
from samerun.errors import PlanError, Problem, Severity, UsageError

if TYPE_CHECKING:
    from samerun.core.batch import BatchOption
    from samerun.core.state import LogicalState
    from samerun.manifest.read import Document
    from samerun.plan.memory import MemoryEstimate
    from samerun.plan.migration import Decision, MigrationPlan
    from samerun.plan.schedule import PlannedRates


@click.command(name="plan")
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the plan to this JSON file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(manifest: Path, output: Path | None, as_json: bool) -> int:
    """Turn MANIFEST into a plan: batch, memory, decisions; or list what is open.

    Reads the checkpoint's metadata only. Exits 1 while a question is open or a
    finding blocks.

    \b
    samerun plan move.yaml
    samerun plan move.yaml -o plan.json
    """
    from samerun.manifest.read import question_problem, read_document

    document = read_document(manifest)
    asked = [question_problem(document, question) for question in document.questions]
    if document.problems:
        return _refuse(document, [*document.problems, *asked], as_json)
    state = _open(document)
    if document.manifest is None:
        return _show_open(document, state, [*_unreadable(state), *asked], as_json)
    return _plan(document, state, output, as_json)


def _refuse(document: Document, problems: list[Problem], as_json: bool) -> int:
    if not as_json:
        raise UsageError(problems)
    emit_json("plan", _open_body(document, problems, (), None))
    return UsageError.exit_code


def _open(document: Document) -> LogicalState | None:
    """Reads the manifest's checkpoint; None while the manifest does not say which one that is."""
    from samerun.formats.detect import open_checkpoint

    path = document.value("run.checkpoint")
    if not path or any(question.key in ("run", "run.checkpoint") for question in document.questions):
        return None
    return open_checkpoint(Path(document.name).parent / path).state


def _unreadable(state: LogicalState | None) -> list[Problem]:
    """Returns what reading the checkpoint's metadata found that blocks; `samerun inspect` looks further."""
    return [problem for problem in (state.problems if state else ()) if problem.severity is Severity.ERROR]


def _plan(document: Document, state: LogicalState | None, output: Path | None, as_json: bool) -> int:
    from samerun.manifest.read import place_problems, require_manifest
    from samerun.plan.migration import plan_migration

    if state is None:
        raise UsageError(Problem("SR-USAGE-OPTION", "the manifest names no checkpoint"))
    unreadable = _unreadable(state)
    try:
        plan = plan_migration(require_manifest(document), state)
    except PlanError as error:
        return _show_open(document, state, place_problems(document, [*unreadable, *error.problems]), as_json)
    if unreadable:
        return _show_open(document, state, unreadable, as_json)
    if output is not None:
        import json

        from samerun.stores.local import write_atomic

        write_atomic(output, json.dumps(plan.to_json(), indent=1) + "\n")
    problems = place_problems(document, plan.problems)
    if as_json:
        body = {**plan.to_json(), "decided": True, "questions": []}
        emit_json("plan", body | {"problems": [problem.to_json() for problem in problems]})
    else:
        _print_plan(document, plan)
        if plan.next_rates is not None:
            _print_rates(plan.next_rates)
        print_problems(problems)
        click.echo(f"\nnext: samerun run {document.name}")
    return 0


def _show_open(document: Document, state: LogicalState | None, problems: list[Problem], as_json: bool) -> int:
    """Shows what can be said already, then what keeps the plan from being made."""
    options, memory = _preview(document, state)
    if as_json:
        emit_json("plan", _open_body(document, problems, options, memory))
        return exit_code(problems)
    if options:
        _heading("Batch options")
        _print_batch(document, options, None)
    if memory is not None:
        _heading(f"Memory per rank at {memory.layout}, before activations")
        _print_memory(memory)
    asked = sum(problem.code == "SR-PLAN-ASK" for problem in problems)
    _heading(f"{asked} open questions" if asked else "No plan: these findings block")
    print_problems(problems)
    return exit_code(problems)


def _open_body(
    document: Document, problems: list[Problem], options: tuple[BatchOption, ...], memory: MemoryEstimate | None
) -> dict[str, Any]:
    return {
        "decided": False,
        "questions": [question.to_json() for question in document.questions],
        "options": [option.to_json() for option in options],
        "memory": memory.to_json() if memory is not None else None,
        "problems": [problem.to_json() for problem in problems],
    }


def _preview(document: Document, state: LogicalState | None) -> tuple[tuple[BatchOption, ...], MemoryEstimate | None]:
    """Returns the options and the memory as far as the manifest's answers reach."""
    from samerun.core.batch import plan_batch
    from samerun.core.dtype import DTYPES
    from samerun.manifest.models import Destination, Source
    from samerun.plan.batch import source_equation
    from samerun.plan.memory import estimate_memory
    from samerun.plan.sharding import destination_stage

    destination = document.sections.get("destination")
    if not isinstance(destination, Destination):
        return (), None
    layout = destination.layout.to_layout()
    batch, micro = document.value("batch.global_batch"), document.value("batch.max_microbatch")
    options: tuple[BatchOption, ...] = ()
    if isinstance(batch, int) and isinstance(micro, int):
        source = document.sections.get("source")
        equation = source_equation(source) if isinstance(source, Source) else None
        options = plan_batch(batch, layout.batch_replicas, micro, source=equation)
    if state is None:
        return options, None
    computed = DTYPES.get(str(document.value("run.precision")))
    framework, converted = document.value("run.framework"), document.value("convert.to")
    stage = destination_stage(
        state,
        framework=str(framework) if framework else None,
        written=str(converted or document.value("run.format") or state.format),
        declared=destination.stage,
    )
    device = destination.device_memory_bytes
    return options, estimate_memory(state, layout, stage=stage, compute_dtype=computed, device_memory_bytes=device)


def _print_plan(document: Document, plan: MigrationPlan) -> None:
    from samerun.cli.batch import print_costs

    checkpoint = plan.checkpoint
    click.echo(f"{document.value('run.name')}: {plan.label}")
    click.echo(f"  checkpoint   {checkpoint.path} ({checkpoint.format}), update {plan.first_update - 1}")
    for name, side in (("source", plan.source), ("destination", plan.destination)):
        idle = f", {side.idle_ranks} idle" if side.idle_ranks else ""
        ranks = f"{side.world_size} ranks, {side.batch_replicas} batch replicas{idle}"
        click.echo(f"  {name:<12} {side.layout}  ({ranks})")
    click.echo(f"  window       updates {plan.first_update} to {plan.last_update}")
    _heading("Batch options")
    listed = plan.options if plan.batch in plan.options else (*plan.options, plan.batch)
    _print_batch(document, listed, plan.batch)
    if plan.costs:
        print_costs(plan.options, plan.costs[: len(plan.options)])
    _heading("Memory per rank, before activations")
    _print_memory(plan.memory)
    _heading("Decisions")
    _print_decisions(plan.decisions)


def _print_rates(rates: PlannedRates) -> None:
    _heading(f"Learning rate at the next updates ({rates.kind})" if rates.kind else "Learning rate at the next updates")
    if rates.kind == "constant":
        click.echo("  no schedule was saved; these stay unless the script sets others")
    rows = [rates.rates[begin : begin + 5] for begin in range(0, len(rates.rates), 5)]
    for number, row in enumerate(rows):
        values = "  ".join(" ".join(f"{rate:.6g}" for rate in dict.fromkeys(group)) for group in row)
        click.echo(f"  {rates.first_update + 5 * number:>8}  {values}")
    if rates.why_not:
        click.echo(f"  not known: {rates.why_not}")


def _print_batch(document: Document, options: tuple[BatchOption, ...], chosen: BatchOption | None) -> None:
    from samerun.cli.batch import print_equation, print_options
    from samerun.manifest.models import Destination, Source
    from samerun.plan.batch import source_equation

    source, destination = document.sections.get("source"), document.sections.get("destination")
    if isinstance(destination, Destination):
        equation = source_equation(source) if isinstance(source, Source) else None
        replicas = destination.layout.to_layout().batch_replicas
        batch, micro = document.value("batch.global_batch"), document.value("batch.max_microbatch")
        print_equation(batch, replicas, micro, "samples", equation)
    print_options(options, "samples", chosen)


def _print_memory(memory: MemoryEstimate) -> None:
    from samerun.cli.memory import print_memory

    print_memory(memory)


def _print_decisions(decisions: tuple[Decision, ...]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for decision in decisions:
        table.add_row(decision.key, decision.chosen, decision.consequence)
    stdout_console().print(table)


def _heading(text: str) -> None:
    click.echo(f"\n{text}")
