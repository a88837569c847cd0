"""What a native checkpoint can be loaded onto by DeepSpeed itself, and what its converters make of it (0.19.8)."""

from __future__ import annotations

from samerun.core.mesh import Layout
from samerun.errors import Problem, Severity
from samerun.formats.deepspeed.states import as_dict
from samerun.formats.zero.optimizer_tensors import Flat
from samerun.formats.zero.source import Source


def check_loadable(source: Source, flat: Flat) -> list[Problem]:
    """Says at which degrees DeepSpeed loads the checkpoint and what a conversion with its own tools would lose."""
    return [*_rigid(source), *check_conversion(source, flat)]


def _rigid(source: Source) -> list[Problem]:
    degrees = source.degrees
    if source.stage == 0:
        return []
    return [
        Problem(
            "SR-ZERO-RIGID",
            f"DeepSpeed loads this at dp={degrees.dp}, tp={degrees.tp}, pp={degrees.pp}"
            f"{f', ep={degrees.ep}' if degrees.ep > 1 else ''} only",
            severity=Severity.NOTE,
            where={"file": str(source.root)},
            hint=f"for another number of ranks convert it first: {conversion_hint(source)}",
        )
    ]


def conversion_hint(source: Source) -> str:
    """Returns which conversion takes the checkpoint to another number of ranks."""
    experts = bool(source.experts or source.expert_optims or source.degrees.ep > 1)
    if source.degrees.pp > 1 or (experts and (_fuses_experts(source) or source.degrees.tp > 1)):
        return "`samerun convert --to dcp` holds every tensor whole; pipelines and fused experts are not written back"
    own = f"`samerun convert --to zero --layout dp=N{',ep=M' if experts else ''}`"
    if native_conversion_fails(source):
        return f"{own}; DeepSpeed's own ds_to_universal cannot"
    extra = "" if source.stage == 3 or _has_info(source) else " with --inject_missing_state"
    return f"{own}, or DeepSpeed's ds_to_universal{extra}"


def _has_info(source: Source) -> bool:
    first = source.first
    return first is not None and bool(first.parallel_info)


def native_conversion_fails(source: Source) -> bool:
    """Whether DeepSpeed's own converter refuses the checkpoint: stage 0, elastic, or native experts."""
    elastic = any(optim.layout == "elastic" for optim in source.optims.values())
    native_experts = bool(source.experts) and not _fuses_experts(source)
    return source.stage == 0 or elastic or native_experts


def _fuses_experts(source: Source) -> bool:
    return bool(source.first and source.first.value.get("ds_autoep_layers"))


def check_conversion(source: Source, flat: Flat) -> list[Problem]:
    """Warns about what DeepSpeed's own conversion would get wrong without an error."""
    if native_conversion_fails(source):
        return []
    problems: list[Problem] = []
    zero = as_dict(source.config.get("zero_optimization"))
    if zero.get("round_robin_gradients") is True and source.stage in (1, 2) and source.degrees.dp > 1:
        problems.append(
            _warning(
                source,
                "SR-ZERO-ROUNDROBIN",
                "with round_robin_gradients, ds_to_universal mixes up parameters and moments without an error",
                "slice maps are in another order than buffers. samerun goes by the buffers; zero_to_fp32 is right too",
            )
        )
    slots = {slot for optim in source.optims.values() for shard in optim.shards for slot in shard.slots}
    unknown = sorted(slots - {"exp_avg", "exp_avg_sq"})
    if unknown or (slots and "exp_avg" not in slots):
        problems.append(
            _warning(
                source,
                "SR-ZERO-SLOTS",
                f"ds_to_universal knows Adam's moments only and would fail at, or drop, {', '.join(unknown)}",
                "it keeps exp_avg and exp_avg_sq; samerun keeps every slot",
            )
        )
    settings = [{key: value for key, value in group.items() if key != "name"} for _, group in flat.groups]
    if source.stage == 3 and any(group != settings[0] for group in settings[1:]):
        problems.append(
            _warning(
                source,
                "SR-ZERO-GROUPZERO",
                "through ds_to_universal, stage 3 gives group 0's hyperparameters to all groups",
                "learning rate, betas and decay of the other groups are lost at load; set them again after loading",
            )
        )
    return problems


def _warning(source: Source, code: str, message: str, hint: str) -> Problem:
    return Problem(code, message, severity=Severity.NOTE, where={"file": str(source.root)}, hint=hint)


def check_destination(source: Source, destination: Layout) -> list[Problem]:
    """Checks whether DeepSpeed itself would load the checkpoint at another layout."""
    degrees = source.degrees
    ep = max([degrees.ep, *((name.expert or 0) + 1 for name in source.expert_optims)])
    experts = ep if source.experts or source.expert_optims or ep > 1 else destination.ep
    wanted = (destination.batch_replicas * destination.cp, destination.tp, destination.pp, destination.ep)
    held = (degrees.dp, degrees.tp, degrees.pp, experts)
    same_model = wanted[1:] == held[1:]
    if wanted == held or (source.stage == 0 and same_model):
        return []
    how = "with an error that does not name the reason" if source.stage == 3 else "clearly"
    return [
        Problem(
            "SR-ZERO-RIGID",
            f"DeepSpeed refuses this checkpoint at that layout, {how}"
            if same_model or source.stage
            else "DeepSpeed cannot change tensor, pipeline or expert parallelism of this checkpoint",
            severity=Severity.WARNING,
            where={"file": str(source.root)},
            expected=_degrees(held),
            found=_degrees(wanted),
            hint=f"convert it first: {conversion_hint(source)}",
        )
    ]


def _degrees(found: tuple[int, int, int, int]) -> str:
    dp, tp, pp, ep = found
    return f"dp={dp},tp={tp},pp={pp}" + (f",ep={ep}" if ep > 1 else "")
