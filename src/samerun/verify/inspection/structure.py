"""Inspects an opened checkpoint: is every value there, do the parts agree, can the run resume from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, Role
from samerun.errors import FormatError, Problem, Severity
from samerun.formats.base import Checkpoint, Inspectable, PayloadCheck, Rigid
from samerun.stores.remote import original_name
from samerun.verify.inspection.consequence import explain_consequences
from samerun.verify.inspection.declared import check_declared
from samerun.verify.inspection.destination import Destination, check_destination, plan_destination
from samerun.verify.inspection.resume import Resumable, check_resume, judge_resumable
from samerun.verify.state.against import Against, compare_previous
from samerun.verify.state.averages import check_averages, check_copied
from samerun.verify.state.checksums import Checksums, combine_checksums
from samerun.verify.state.coverage import check_coverage
from samerun.verify.state.generators import saved_generators
from samerun.verify.state.proof import check_proof, read_proof
from samerun.verify.state.sidecar import SidecarCheck, check_sidecar, read_sidecar
from samerun.verify.state.values import check_values

_ITEMS_CHECKED = 4_096
_COUNTERS_READ = 4_096
_INCOMPLETE = (
    "SR-COV-", "SR-FILE-", "SR-META-", "SR-PKL-", "SR-KEY-", "SR-MEG-COMMON", "SR-MEG-LAYOUT", "SR-MEG-SPLIT",
    "SR-MEG-EXPERTS", "SR-MEG-LAYERS", "SR-MEG-OBJECT", "SR-PATH-PART",
)  # fmt: skip
_NOT_INCOMPLETE = frozenset({"SR-FILE-CRC", "SR-FILE-GENERATION", "SR-COV-REPLICA"})


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport:
    """What inspecting found. `intact` is None unless payloads were compared with recorded evidence.

    `evidence` names the digests beside the checkpoint that decided it, if any did.
    """

    path: str
    state: LogicalState
    problems: tuple[Problem, ...]
    complete: bool
    intact: bool | None
    resumable: Resumable
    num_files: int
    destination: Destination | None = None
    digests: Mapping[str, str] | None = None
    against: Against | None = None
    checksums: Checksums | None = None
    evidence: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the body of the `samerun/inspect/1` document."""
        state = self.state
        body: dict[str, Any] = {
            "path": self.path,
            "format": state.format,
            "written_by": dict(state.written_by),
            "topology": topology_json(state),
            "complete": self.complete,
            "intact": self.intact,
            "resumable": {
                "verdict": self.resumable.verdict,
                "have": list(self.resumable.have),
                "lack": list(self.resumable.lack),
            },
            "counts": {
                "tensors": len(state.tensors),
                "elements": sum(entry.num_elements for entry in state.tensors.values()),
                "bytes": sum(entry.num_bytes for entry in state.tensors.values()),
                "files": self.num_files,
            },
            "tensors": [self._tensor_json(key) for key in state.tensors],
            "groups": [
                {"params": list(group.params), "hyperparameters": dict(group.hyperparameters)} for group in state.groups
            ],
            "progress": {
                "update": state.progress.update,
                "samples": state.progress.samples,
                "tokens": state.progress.tokens,
                "epoch": state.progress.epoch,
            },
            "rng": saved_generators(state),
            "problems": [problem.to_json() for problem in self.problems],
        }
        if self.checksums is not None:
            body["checksums"] = self.checksums.to_json()
        if self.destination is not None:
            body["destination"] = self.destination.to_json()
        if self.against is not None:
            body["against"] = self.against.to_json()
        return body

    def _tensor_json(self, key: str) -> dict[str, Any]:
        entry = self.state.tensors[key]
        body: dict[str, Any] = {
            "key": key,
            "shape": list(entry.shape),
            "dtype": entry.dtype.name,
            "pieces": len(entry.tiling),
            "digest": self.digests.get(key) if self.digests else None,
            "crc32": self.checksums.tensors.get(key) if self.checksums else None,
            "original": entry.original,
        }
        if entry.aliases:
            body["aliases"] = list(entry.aliases)
        if entry.role_inferred:
            body["role_inferred"] = True
        if entry.name_inferred:
            body["name_inferred"] = True
        return body


def topology_json(state: LogicalState) -> dict[str, Any] | None:
    """Returns the topology's JSON form, None where nothing is known of it."""
    topology = state.topology
    if topology.world_size is None:
        return None
    return {
        "world_size": topology.world_size,
        "layout": topology.layout.to_dict(short=True) if topology.layout else None,
        "inferred": topology.inferred,
    }


def inspect_checkpoint(
    checkpoint: Checkpoint,
    *,
    deep: bool = False,
    destination: Layout | None = None,
    previous: Checkpoint | None = None,
    advance: Callable[[int], None] | None = None,
) -> InspectReport:
    """Inspects a checkpoint without a framework, a GPU or a process group.

    `deep` reads every byte: checksums, finiteness, moments, replicas. `destination` adds what that layout would do to
    the tensors; `previous`, an earlier checkpoint of the run, what did not move since. `advance` is told the bytes
    read. Nothing about a checkpoint raises: everything is a finding.
    """
    state = checkpoint.state
    problems = [*state.problems, *check_coverage(state)]
    intact: bool | None = None
    digests: dict[str, str] | None = None
    evidence: tuple[str, ...] = ()
    payloads: PayloadCheck | None = None
    num_files = 1
    if isinstance(checkpoint, Inspectable):
        num_files = checkpoint.num_files
        problems += _unreported(checkpoint.check_items(None if deep else _ITEMS_CHECKED), problems)
    steps, step_files = read_steps(checkpoint)
    resume = check_resume(state, checkpoint.path.name, steps)
    problems += check_generation(steps, step_files) or []
    problems += [*resume, *check_averages(state), *check_declared(state)]
    if deep:
        if isinstance(checkpoint, Inspectable):
            payloads = checkpoint.check_payloads(advance)
            intact = payloads.intact
            problems += payloads.problems
        problems += check_values(checkpoint)
        digests = _digests(checkpoint)
        problems += check_copied(checkpoint, digests)
        beside = (("the job's digests", _check_sidecar), ("the conversion's proof", _check_proof))
        for name, check in beside:
            recorded = check(checkpoint, digests)
            problems += recorded.problems
            evidence += (name,) if recorded.intact is not None else ()
            intact = recorded.intact if recorded.intact is not None and intact is not False else intact
    planned = plan_destination(state, destination) if destination is not None else None
    if planned is not None:
        problems += check_destination(state, planned)
        problems += checkpoint.check_destination(planned.layout) if isinstance(checkpoint, Rigid) else []
    if any(problem.code in ("SR-FILE-CRC", "SR-PKL-CRC", "SR-FILE-GENERATION") for problem in problems):
        intact = False
    if intact and any(problem.code == "SR-FILE-GENERATION-OPEN" for problem in problems):
        problems = [problem for problem in problems if problem.code != "SR-FILE-GENERATION-OPEN"]  # decided after all
    against = compare_previous(checkpoint, previous, digests=digests) if previous is not None else None
    problems = explain_consequences([*problems, *(against.problems if against else ())])
    return InspectReport(
        path=original_name(checkpoint.path),
        state=state,
        problems=tuple(problems),
        complete=not any(makes_incomplete(problem) for problem in problems),
        intact=intact,
        resumable=judge_resumable(state, problems),
        num_files=num_files,
        destination=planned,
        digests=digests,
        against=against,
        checksums=combine_checksums(checkpoint, payloads),
        evidence=evidence,
    )


def _check_sidecar(checkpoint: Checkpoint, digests: Mapping[str, str]) -> SidecarCheck:
    """Compares with the digests that the job wrote beside the checkpoint, if it did."""
    sidecar = read_sidecar(checkpoint.path)
    if sidecar is None:
        return SidecarCheck(None)
    return (
        SidecarCheck(None, (sidecar,)) if isinstance(sidecar, Problem) else check_sidecar(checkpoint, sidecar, digests)
    )


def _check_proof(checkpoint: Checkpoint, digests: Mapping[str, str]) -> SidecarCheck:
    """Compares with the digests in the proof of the conversion that wrote the checkpoint, if one did."""
    proof = read_proof(checkpoint.path)
    if proof is None:
        return SidecarCheck(None)
    return SidecarCheck(None, (proof,)) if isinstance(proof, Problem) else check_proof(checkpoint, proof, digests)


def _digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Digests every tensor that can be read; what cannot is named by other checks."""
    from samerun.verify.state.digest import digest_tensor

    digests: dict[str, str] = {}
    for key in checkpoint.state.tensors:
        with contextlib.suppress(FormatError):
            digests[key] = digest_tensor(checkpoint, key)
    return digests


def _unreported(found: list[Problem], known: list[Problem]) -> list[Problem]:
    """Drops findings that were already made about the same file and tensor."""
    seen = {(problem.code, str(problem.where)) for problem in known}
    return [problem for problem in found if (problem.code, str(problem.where)) not in seen]


def makes_incomplete(problem: Problem) -> bool:
    """Whether a finding means that some value cannot be read. Values that can be read but are wrong do not count."""
    return (
        problem.severity is Severity.ERROR
        and problem.code.startswith(_INCOMPLETE)
        and problem.code not in _NOT_INCOMPLETE
    )


def read_steps(checkpoint: Checkpoint) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the optimizer's step counters by FQN, and the file that each lies in. Unreadable ones are left out."""
    steps: dict[str, float] = {}
    files: dict[str, str] = {}
    keys = [key for key, entry in checkpoint.state.tensors.items() if _is_step(entry.key.role, entry.key.slot, entry)]
    stride = max(1, -(-len(keys) // _COUNTERS_READ))
    for key in keys[::stride]:
        entry = checkpoint.state.tensors[key]
        try:
            steps[entry.key.fqn] = float(checkpoint.read(key).astype("float64").reshape(-1)[0])
            files[entry.key.fqn] = str(checkpoint.locate(key, 0).file).partition("@")[0]  # unpacked items
        except FormatError:
            continue
    return steps, files


def _is_step(role: Role, slot: str | None, entry: Any) -> bool:
    return role is Role.OPTIM and slot == "step" and entry.num_elements == 1 and entry.dtype.kind in ("float", "int")


def check_generation(steps: Mapping[str, float], files: Mapping[str, str]) -> list[Problem]:
    """Counters that agree inside every file and differ between files: the files are from different saves."""
    by_file: dict[str, set[float]] = {}
    for fqn, file in files.items():
        by_file.setdefault(file, set()).add(steps[fqn])
    if len(by_file) < 2 or any(len(values) > 1 for values in by_file.values()):
        return []
    values = {next(iter(found)) for found in by_file.values()}
    if len(values) < 2:
        return []
    shown = ", ".join(f"{file.rpartition('/')[2]}: {next(iter(found)):g}" for file, found in sorted(by_file.items()))
    return [
        Problem(
            "SR-FILE-GENERATION",
            f"data files are from different saves: the optimizer's steps are {shown}",
            where={"file": min(by_file, key=lambda file: next(iter(by_file[file])))},
            hint="a save was interrupted while it overwrote an older one in place; every value is suspect. Use another "
            "checkpoint, and save each into a directory of its own",
        )
    ]
