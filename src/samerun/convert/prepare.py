"""What is decided before a conversion writes anything: what is refused, what is planned, and for which source."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from samerun.convert.dtypes import RecastCheckpoint, plan_dtypes
from samerun.convert.masters import settle_masters
from samerun.convert.objects import settle_objects
from samerun.convert.order import settle_order
from samerun.convert.sources import combined_fingerprint, fingerprint_source
from samerun.convert.view import StateView
from samerun.convert.weights import check_read, keep_weights
from samerun.core.dtype import DType
from samerun.core.mesh import Layout
from samerun.core.written import DestinationPlan
from samerun.errors import PlanError, Problem, Severity, StalePlan, UndecidedError, UsageError
from samerun.execute.check import check_plan
from samerun.execute.engine import Settings
from samerun.execute.partial import require_places
from samerun.execute.plan import ConversionPlan
from samerun.execute.planner import plan_conversion
from samerun.formats.base import Array, Checkpoint, Inspectable, WriteSource
from samerun.stores.destination import StoredPlace
from samerun.stores.local import TreeFingerprint, compare_trees
from samerun.stores.remote import is_url, original_name
from samerun.verify.inspection.structure import inspect_checkpoint

WRITERS = ("dcp", "torch", "safetensors", "universal", "zero", "megatron", "huggingface")
_OF_A_RUN = ("SR-OPT-MISSING",)  # no matter where the weights alone are wanted
_SHAPELESS = ("SR-FSDP1-SHAPES", "SR-FSDP1-BOUNDARIES")
_SCALAR_BYTES = 64 << 10

Writer = Callable[[WriteSource, Layout | None], DestinationPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A conversion that may be carried out: everything that blocked was decided. Nothing was written yet.

    `source` is the checkpoint as opened, `view` as it is written (objects settled, types changed). `trees` are the
    fingerprints of everything that is read. `decisions` are the blocking findings that were allowed, by code.
    """

    source: Checkpoint
    view: Checkpoint
    plan: ConversionPlan
    place: Path | StoredPlace
    to: str
    layout: Layout | None
    trees: tuple[TreeFingerprint, ...]
    problems: tuple[Problem, ...]
    decisions: tuple[Problem, ...]
    dtypes: Mapping[str, DType] = field(default_factory=dict[str, DType])


def prepare(
    source: Checkpoint,
    dest: str | os.PathLike[str],
    *,
    to: str,
    layout: Layout | None = None,
    allow: Collection[str] = (),
    dtype: Mapping[str, DType] | None = None,
    settings: Settings | None = None,
    given: Path | None = None,
    original: Checkpoint | None = None,
    writer: Writer | None = None,
    payloads: bool = True,
    masters: str | None = None,
    weights_only: bool = False,
) -> Prepared:
    """Plans a conversion and refuses whatever stands against it. Writes nothing.

    Args:
        source: the opened checkpoint, or anything that looks like one (under other names, say).
        dest: the path of the destination, or its URL in a store; nothing may be there.
        to: the format to write.
        layout: the layout to write for, where the format is written for one.
        allow: codes of blocking findings that the user accepts.
        dtype: element types by role, where they are to change.
        settings: memory and threads.
        given: the path that the user named, where the checkpoint lies below it.
        original: the checkpoint as its reader opened it, where `source` is a view of one: what is checked of a source.
        writer: lays out the destination; that of the format `to` by default.
        payloads: whether to compare stored bytes with the checksums recorded beside them; one of several processes
            does it for all.
        masters: where fp32 masters go that the format has no place for: see `samerun.convert.masters`.
        weights_only: leave out everything but parameters and buffers, and compare no more than these with recorded
            checksums: see `samerun.convert.weights`.

    Raises:
        UsageError: for a destination or a format that cannot be.
        UndecidedError: if findings block that were not allowed; every one is listed.
        PlanError: if the plan is not right: a defect of the writer, or values that the source lacks.
    """
    place = _require_place(dest, given or source.path, source.path)
    lay_out: Callable[..., DestinationPlan] = writer or load_writer(to)
    original, source = original or source, adapt_source(source, to)
    source, said = settle_order(source, to)
    if masters is not None:
        source, settled = settle_masters(source, masters, to)
        said = (*said, *settled)
        allow = {*allow, "SR-WRITE-MASTERS"}
    left_out: dict[str, str] = {}
    if weights_only:
        source, left_out, note = keep_weights(source, to)
        said = (*said, note)
        lay_out = partial(lay_out, bare=True) if to == "torch" else lay_out
    dtypes = plan_dtypes(source.state, dtype) if dtype else {}
    trees = fingerprint_source(source.path, ())
    found = [p for p in inspect_checkpoint(original).problems if not (weights_only and p.code in _OF_A_RUN)]
    checked = None
    if payloads and isinstance(original, Inspectable):
        checked = (check_read(source) if weights_only else None) or original.check_payloads()
    found += checked.problems if checked is not None else ()
    # A process that leaves the check to another one plans as if it had passed; otherwise that one's findings block.
    trusted = isinstance(original, Inspectable) and (checked is None or checked.intact is not False)
    decisions = require_decided([*found, *_check_shapes(found)], allow)
    state, kept = settle_objects(source.state)
    view = RecastCheckpoint(StateView(source, state), dtypes) if dtypes else StateView(source, state)
    embedded: set[str] = set()
    destination = lay_out(WriteSource(view.state, _scalar_reader(view, embedded)), layout)
    destination = replace(destination, dropped={**left_out, **destination.dropped})
    decisions += require_decided(destination.problems, allow)
    settings = settings or Settings()
    plan = plan_conversion(
        destination,
        view,
        combined_fingerprint(trees),
        embedded=embedded,
        budget_bytes=settings.budget_bytes,
        trust_checksums=trusted,
    )
    if wrong := check_plan(plan, view.state):
        raise PlanError(wrong)
    before, trees = trees, fingerprint_source(source.path, plan.sources)
    if changed := compare_trees(before[0], trees[0]):
        raise StalePlan(changed)
    plan = replace(plan, source_fingerprint=combined_fingerprint(trees))
    if isinstance(place, StoredPlace):
        place.single_file = destination.single_file
    else:
        decisions += require_decided(_check_space(place, plan.bytes_written), allow)
    notes = [problem for problem in found if problem.severity is Severity.WARNING]
    notes = [problem for problem in (*said, *kept, *destination.problems, *notes) if problem not in decisions]
    return Prepared(
        source=source,
        view=view,
        plan=plan,
        place=place,
        to=to,
        layout=layout,
        trees=trees,
        problems=tuple(notes),
        decisions=tuple(decisions),
        dtypes=dtypes,
    )


def _require_place(dest: str | os.PathLike[str], *sources: Path) -> Path | StoredPlace:
    """Returns where the destination is to lie. Raises UsageError if it cannot be there."""
    if is_url(dest):
        from samerun.convert.stored import require_stored

        return require_stored(str(dest), original_name(sources[-1].resolve()))
    places = [require_places(source, Path(dest)) for source in sources]
    return places[0]


def load_writer(to: str, *, stage: int | None = None) -> Writer:
    """Returns the function that lays out a format; `stage` is that of ZeRO, for `zero` only.

    Raises:
        UsageError: if there is no such format, or nothing writes it.
    """
    if to in WRITERS:
        try:
            lay_out = importlib.import_module(f"samerun.formats.{to}.write").lay_out
            return lay_out if stage is None else partial(lay_out, stage=stage)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("samerun.formats"):
                raise
    raise UsageError(
        Problem("SR-CONVERT-FORMAT", f"no format called {to!r} can be written", hint=f"formats: {', '.join(WRITERS)}")
    )


def adapt_source(source: Checkpoint, to: str) -> Checkpoint:
    """Returns a checkpoint under the names that a format gives it without being asked; mostly the checkpoint itself.

    Raises:
        UsageError: if its tensors do not fit together under those names.
    """
    adapt = getattr(importlib.import_module(f"samerun.formats.{to}.write"), "adapt", None) if to == "megatron" else None
    return adapt(source) if adapt is not None else source


def _check_shapes(found: Iterable[Problem]) -> list[Problem]:
    """Refuses a source whose reader knows parameters as rows of values only: no model loads what becomes of them."""
    lost = next((problem for problem in found if problem.code in _SHAPELESS), None)
    if lost is None:
        return []
    return [
        Problem(
            "SR-CONVERT-SHAPES",
            f"the source does not say what shape its parameters have ({lost.code}), and rows of "
            "values would be written",
            where=lost.where,
            expected="parameters with shapes",
            found="rows of values",
            hint="load it once in the job that saved it, and save a full or sharded state dict, or the optimizer by "
            "name beside the local one (FSDP.optim_state_dict), which tells shapes. For rows of values all the same: "
            "--allow SR-CONVERT-SHAPES",
        )
    ]


def require_decided(problems: Iterable[Problem], allow: Collection[str]) -> list[Problem]:
    """Returns the blocking findings that were allowed.

    Raises:
        UndecidedError: if one was not; every one is listed.
    """
    blocking = [problem for problem in problems if problem.severity is Severity.ERROR]
    if undecided := [problem for problem in blocking if problem.code not in allow]:
        raise UndecidedError(undecided)
    return blocking


def _scalar_reader(view: Checkpoint, embedded: set[str]) -> Callable[[str], Array]:
    def scalar(key: str) -> Array:
        entry = view.state.tensors[key]
        if entry.num_bytes > _SCALAR_BYTES:
            raise ValueError(f"{key} has {entry.num_bytes} bytes: too many for a pickle")
        embedded.add(key)
        return view.read(key)

    return scalar


def _check_space(place: Path, num_bytes: int) -> list[Problem]:
    found = os.statvfs(place.parent)
    free = found.f_bavail * found.f_frsize
    if free >= num_bytes:
        return []
    return [
        Problem(
            "SR-CONVERT-SPACE",
            "the file system has less space than the destination needs",
            where={"file": str(place.parent)},
            expected=f"{num_bytes} bytes",
            found=f"{free} bytes",
            hint="choose another place; --allow SR-CONVERT-SPACE tries it all the same (what an earlier attempt wrote "
            "counts as used)",
        )
    ]
