"""Load proof, tensors: every key on both sides, its shape, type and values, its replicas, its ties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from samerun.core.mesh import Layout
from samerun.core.state import Role, TensorKey
from samerun.errors import Problem, Severity
from samerun.verify.load.kinds import SEARCH_BYTES, Budget, explain_values
from samerun.verify.load.reset import Resets, find_resets
from samerun.verify.state.match import Pair

if TYPE_CHECKING:
    from samerun.verify.load.loaded import Loaded

_PARTS = {
    Role.PARAM: "parameters",
    Role.BUFFER: "buffers",
    Role.OPTIM: "optimizer",
    Role.MASTER: "parameters",
    Role.EMA: "parameters",
}


def declared_part(key: str) -> str:
    """Returns the entry of the `declare` table under which a tensor falls."""
    return _PARTS[TensorKey.parse(key).role]


def check_tensors(loaded: Loaded) -> list[Problem]:
    """Returns differences in keys, shapes, types and values, and non-finite values."""
    resets, budget = find_resets(loaded), Budget(SEARCH_BYTES)
    problems = resets.problems(loaded)
    problems += _check_missing(loaded, resets)
    problems += _check_unexpected(loaded)
    for pair in loaded.match.pairs:
        problems += _check_pair(loaded, pair, resets)
    return [explain_values(loaded, problem, budget) for problem in problems]


def _check_missing(loaded: Loaded, resets: Resets) -> list[Problem]:
    hint = _renaming_hint(loaded)
    untold = _untold_average(loaded)
    return _unseen(loaded, untold) + [
        Problem(
            "SR-LOAD-MISSING",
            "the checkpoint has this tensor, the job does not",
            loaded.declared(declared_part(key)).severity,
            where={"tensor": key},
            hint=hint or "what is not loaded starts from its initial value: load it, or declare that it changes",
            expected=_describe(loaded.state.tensors[key].shape, loaded.state.tensors[key].dtype.name),
            found="absent",
        )
        for key in loaded.match.missing
        if not resets.covers(key) and not _master_of_loaded(loaded, key) and key not in untold
    ]


def _untold_average(loaded: Loaded) -> tuple[str, ...]:
    """Returns the keys of a saved average of the model, if the job told of none: it may have restored it."""
    if any(key.startswith("ema:") for key in loaded.found["tensors"]):
        return ()
    return tuple(key for key in loaded.match.missing if TensorKey.parse(key).role is Role.EMA)


def _unseen(loaded: Loaded, keys: tuple[str, ...]) -> list[Problem]:
    if not keys:
        return []
    return [
        Problem(
            "SR-LOAD-UNSEEN",
            f"the checkpoint holds an average of the model ({len(keys)} tensors), and the job did not say what it "
            "restored of it",
            loaded.declared(declared_part(keys[0])).severity,
            where={"tensor": keys[0]},
            hint="give it to recorder.attach as average=...: no loss and no norm shows an average that is not restored",
            expected=f"{len(keys)} tensors of an average",
            found="none told",
        )
    ]


def _master_of_loaded(loaded: Loaded, key: str) -> bool:
    """Whether a saved fp32 master is what the job holds as the parameter itself."""
    parsed = TensorKey.parse(key)
    if parsed.role is not Role.MASTER:
        return False
    job_key = f"param:{parsed.fqn}"
    fact = loaded.found["tensors"].get(job_key)
    return fact is not None and _equals_saved(loaded, key, job_key, fact)


def _equals_saved(loaded: Loaded, saved: str, key: str, fact: Mapping[str, Any]) -> bool:
    entry = loaded.state.tensors[saved]
    same_kind = list(entry.shape) == list(fact["shape"]) and entry.dtype.name == fact["dtype"]
    return same_kind and loaded.digest(saved, key) == fact["digest"]


def _check_unexpected(loaded: Loaded) -> list[Problem]:
    problems: list[Problem] = []
    hint = _renaming_hint(loaded)
    for key in loaded.match.unexpected:
        fact = loaded.found["tensors"][key]
        harmless = TensorKey.parse(key).role is Role.OPTIM and fact["nonzero"] == 0
        severity = loaded.declared(declared_part(key)).severity
        problems.append(
            Problem(
                "SR-LOAD-UNEXPECTED",
                "the job holds a state of zeros that the checkpoint does not have"
                if harmless
                else "the job has this tensor, the checkpoint does not",
                Severity.WARNING if harmless and severity is Severity.ERROR else severity,
                where={"tensor": key},
                hint="a step with empty gradients allocated it; harmless if the parameter never receives a gradient"
                if harmless
                else hint or "it keeps its initial value: the model or the optimizer is not the one that was saved",
                expected="absent",
                found=_describe(fact["shape"], fact["dtype"]),
            )
        )
    return problems


def _renaming_hint(loaded: Loaded) -> str:
    """Returns a hint if the keys on one side are those on the other with something put before every name."""
    missing = [TensorKey.parse(key) for key in loaded.match.missing]
    unexpected = [TensorKey.parse(key) for key in loaded.match.unexpected]
    if not missing or not unexpected:
        return ""
    for longer, shorter, side in ((unexpected, missing, "job"), (missing, unexpected, "checkpoint")):
        name = shorter[0].fqn
        for candidate in longer:
            prefix = candidate.fqn.removesuffix(name)
            if not prefix or prefix == candidate.fqn:
                continue
            renamed = {(key.role, key.slot, prefix + key.fqn) for key in shorter}
            if renamed <= {(key.role, key.slot, key.fqn) for key in longer}:
                return f"the {side}'s names have {prefix!r} before them: load into the inner module, or rename the keys"
    return ""


def _describe(shape: Any, dtype: str) -> str:
    return f"{dtype}{list(shape)}"


def _check_pair(loaded: Loaded, pair: Pair, resets: Resets) -> list[Problem]:
    entry, fact = loaded.state.tensors[pair.saved], loaded.found["tensors"][pair.key]
    problems = _check_finite(loaded, pair, fact)
    if list(entry.shape) != list(fact["shape"]):
        problems.append(
            Problem(
                "SR-LOAD-SHAPE",
                "the tensor has another shape than in the checkpoint",
                where={"tensor": pair.key},
                hint="the model was built with other sizes, or padded for another layout",
                expected=list(entry.shape),
                found=list(fact["shape"]),
            )
        )
    elif entry.dtype.name != fact["dtype"]:
        problems += _check_cast(loaded, pair, fact)
    elif not resets.covers(pair.key):
        problems += _check_values(loaded, pair, fact)
    return problems


def _check_finite(loaded: Loaded, pair: Pair, fact: Mapping[str, Any]) -> list[Problem]:
    if not fact["nonfinite"]:
        return []
    as_saved = _equals_saved(loaded, pair.saved, pair.key, fact)
    # A mask of infinities is an ordinary saved buffer; nothing else may hold one.
    harmless = as_saved and pair.key.startswith("buffer:")
    return [
        Problem(
            "SR-LOAD-NONFINITE",
            f"{fact['nonfinite']} elements are not finite" + (", as in the checkpoint" if as_saved else ""),
            Severity.NOTE if harmless else Severity.ERROR,
            where={"tensor": pair.key},
            hint="the run was already broken when it was saved: go back to an earlier checkpoint"
            if as_saved
            else "something wrote into the tensor after it was loaded, or loaded it from elsewhere",
            expected=0,
            found=fact["nonfinite"],
        )
    ]


def _check_values(loaded: Loaded, pair: Pair, fact: Mapping[str, Any]) -> list[Problem]:
    expected = loaded.digest(pair.saved, pair.key)
    if expected == fact["digest"] and not fact.get("odd"):
        return []
    problems = _check_replicas(loaded, pair.key, fact, expected)
    if expected != fact["digest"]:
        optimizer = TensorKey.parse(pair.key).role is Role.OPTIM
        problems.append(
            Problem(
                "SR-LOAD-OPT" if optimizer else "SR-LOAD-PARAM",
                "the values are not those of the checkpoint" + ("" if fact["nonzero"] else ": all are zero"),
                loaded.declared(declared_part(pair.key)).severity,
                where={"tensor": pair.key},
                hint=_value_hint(loaded, pair),
                expected=expected,
                found=fact["digest"],
            )
        )
    return problems


def _value_hint(loaded: Loaded, pair: Pair) -> str:
    if loaded.declared(declared_part(pair.key)).bound is not None:
        return "a bound can excuse a cast to another type; digests of the same type say only equal or not"
    return "`samerun diff` between this checkpoint and one saved right after loading shows by how much"


def _check_replicas(loaded: Loaded, key: str, fact: Mapping[str, Any], expected: str | None) -> list[Problem]:
    """Returns a finding per replica that differs: from the checkpoint if another is equal to it, else from the rest."""
    replicas = list(fact.get("odd", ()))
    if not replicas:
        return []
    if expected is not None and any(replica["digest"] == expected for replica in replicas):
        lead = min(set(range(loaded.found["world_size"])) - {replica["rank"] for replica in replicas}, default=0)
        replicas = [
            {"rank": lead, "digest": fact["digest"]},
            *(replica for replica in replicas if replica["digest"] != expected),
        ]
    return [
        Problem(
            "SR-LOAD-REPLICA",
            f"the replica that begins at rank {replica['rank']}{_coordinate(loaded, replica['rank'])} "
            "does not hold what the others hold",
            where={"tensor": key, "rank": replica["rank"]},
            hint="the replicas would train different models behind a normal loss: broadcast after loading",
            expected=expected or fact["digest"],
            found=replica["digest"],
        )
        for replica in replicas
    ]


def _coordinate(loaded: Loaded, rank: int) -> str:
    axes = loaded.found.get("layout")
    if not axes:
        return ""
    layout = Layout.from_dict(axes)
    if layout.world_size <= rank:
        return ""
    place = layout.coordinate(rank)
    return " (" + ", ".join(f"{axis} {place[axis]}" for axis in place if layout.to_dict()[axis] > 1) + ")"


def _check_cast(loaded: Loaded, pair: Pair, fact: Mapping[str, Any]) -> list[Problem]:
    """A differing type is explained if the job holds exactly the cast of what is saved; otherwise values differ too."""
    saved_dtype = loaded.state.tensors[pair.saved].dtype.name
    cast = loaded.digest(pair.saved, pair.key, fact["dtype"])
    explained = cast == fact["digest"]
    problems = _check_replicas(loaded, pair.key, fact, cast)
    master = f"master:{TensorKey.parse(pair.saved).fqn}"
    if master in loaded.state.tensors and _equals_saved(loaded, master, pair.key, fact):
        return problems
    if not explained:
        problems.append(
            Problem(
                "SR-LOAD-OPT" if pair.key.startswith("optim") else "SR-LOAD-PARAM",
                f"the values are not those of the checkpoint, nor their cast to {fact['dtype']}",
                loaded.declared(declared_part(pair.key)).severity,
                where={"tensor": pair.key},
                hint="the type differs and does not explain the difference",
                expected=cast,
                found=fact["digest"],
            )
        )
    severity, detail = _grade_cast(loaded, pair, fact["dtype"])
    problems.append(
        Problem(
            "SR-LOAD-DTYPE",
            f"the tensor has another type than in the checkpoint{detail if explained else ''}",
            severity,
            where={"tensor": pair.key},
            hint="" if severity is Severity.NOTE else "build the model in the saved type, or declare `dtype`",
            expected=saved_dtype,
            found=fact["dtype"],
        )
    )
    return problems


def _grade_cast(loaded: Loaded, pair: Pair, dtype: str) -> tuple[Severity, str]:
    from samerun.core.dtype import parse_dtype
    from samerun.verify.state.digest import cast_error

    declared = loaded.declared("dtype")
    if declared.bound is None:
        return declared.severity, "; it holds exactly their cast"
    error = cast_error(loaded.checkpoint, pair.saved, parse_dtype(dtype))
    within = error <= declared.bound
    detail = f"; it holds exactly their cast, which changes values by up to {error:.2e} of the largest"
    return (Severity.NOTE if within else Severity.ERROR), detail


def check_ties(loaded: Loaded) -> list[Problem]:
    """Returns ties that the checkpoint or the model's config says exist and the job does not have, and conflicts."""
    severity = loaded.declared("parameters").severity
    problems = [
        Problem(
            "SR-LOAD-TIE",
            f"{' and '.join(keys)} are one tensor in the checkpoint and separate ones in the job",
            severity,
            where={"tensor": keys[0]},
            hint="they start equal and drift apart with the first update; tie them again after parallelising the model",
            expected="one tensor",
            found=f"{len(keys)} tensors",
        )
        for saved, keys in loaded.match.untied.items()
        if not saved.startswith("optim.")
    ]
    told = {name for keys in loaded.match.untied.values() for name in keys}
    for names in loaded.found.get("broken_ties", ()):
        if not {f"param:{name}" for name in names} <= told:
            problems.append(
                Problem(
                    "SR-LOAD-TIE",
                    f"the model's configuration ties its head, and {' and '.join(names)} are separate tensors",
                    severity,
                    where={"tensor": f"param:{names[0]}"},
                    hint="parallelising a module replaces its parameters: tie them again afterwards",
                    expected="one tensor",
                    found=f"{len(names)} tensors",
                )
            )
    return problems + [problem for pair in loaded.match.pairs for problem in _check_copies(loaded, pair, severity)]


def _check_copies(loaded: Loaded, pair: Pair, severity: Severity) -> list[Problem]:
    """A tied tensor saved under several names must be the same under each, or one of them was lost."""
    fact = loaded.found["tensors"][pair.key]
    return [
        Problem(
            "SR-LOAD-TIE",
            f"the job ties {pair.saved} and {copy}, and the checkpoint holds different values for them",
            severity,
            where={"tensor": pair.key},
            hint="one of the two was thrown away in loading; the saved run did not tie them",
            expected=f"equal values under {pair.saved} and {copy}",
            found="different values",
        )
        for copy in pair.copies
        if not pair.key.startswith("optim.") and _differ(loaded, pair, copy, fact)
    ]


def _differ(loaded: Loaded, pair: Pair, copy: str, fact: Mapping[str, Any]) -> bool:
    mine, other = loaded.state.tensors[pair.saved], loaded.state.tensors[copy]
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return True
    return loaded.digest(pair.saved, pair.key) != loaded.digest(copy, pair.key)


def check_ranks(loaded: Loaded) -> list[Problem]:
    """Returns what ranks disagree about, and tensors that the ranks together do not hold whole."""
    problems = [
        Problem(
            "SR-LOAD-RANKS",
            f"ranks disagree about {body['what']}",
            where={"rank": body["rank"]},
            hint="every rank must load the same state; look for something that only some ranks did",
            expected=body["expected"],
            found=body["found"],
        )
        for body in loaded.found.get("disagreements", ())
    ]
    for key, fact in loaded.found["tensors"].items():
        if fact.get("missing_elements"):
            problems.append(
                Problem(
                    "SR-LOAD-SHAPE",
                    f"the ranks together lack {fact['missing_elements']} elements of the tensor",
                    where={"tensor": key},
                    hint="a rank of the tensor's mesh does not hold its shard",
                    expected=0,
                    found=fact["missing_elements"],
                )
            )
    return problems
