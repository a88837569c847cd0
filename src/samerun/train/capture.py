"""What a job really holds after loading: every tensor's digest, the optimizer's settings, counters, objects.

`capture_state` is collective and gathers no tensor values. Each rank digests the elements that it holds at their global
indices, and one int64 all-reduce adds the digests up, separately for every replica of every tensor, so that one flipped
bit on one replica shows and is named. Ranks that do not hold a key (pipeline stages) simply contribute nothing to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from samerun.core.mesh import Layout
from samerun.train.agree import Variant, distinct, world
from samerun.train.facts import CapturedState, TensorFact
from samerun.train.measure import (
    Described,
    agree_that_all_could,
    counter_fact,
    is_tensor,
    measure,
    read_local,
    tensor_fact,
)
from samerun.train.objects import generator_digests_by_rank, object_state, rank_records
from samerun.train.settings import learning_rates, optimizer_semantics, parameter_groups, read_config

if TYPE_CHECKING:
    from torch import nn

    from samerun.train.rank_rng import RankRandomness


def capture_state(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    objects: Mapping[str, Any] | None = None,
    config: Any = None,
    layout: Layout | None = None,
    rank_rng: RankRandomness | None = None,
    average: nn.Module | Mapping[str, Any] | None = None,
) -> CapturedState:
    """Captures what the job holds. Collective: every rank of the default group calls it, outside a forward pass.

    Changes nothing but the sharding state of FSDP2 modules, which are resharded if a forward pass left them gathered.

    Args:
        model: the module, or this rank's pipeline stages.
        optimizer: one or several torch optimizers, or None.
        scheduler: one or several learning-rate schedulers.
        objects: further things to compare after loading, by the name under which they are saved: anything with a
            `state_dict`, or plain data.
        config: architecture settings (dataclass, mapping, or an object with attributes); the model's own `config` by
            default.
        layout: the layout that the job believes it runs on.
        rank_rng: what `apply_rank_rng` did on this rank, if it was called.
        average: an average of the model (EMA, SWA): a module, or tensors by the averaged parameter's name.

    Raises:
        VerificationError: on every rank alike, if any rank holds something that cannot be digested.
    """
    local = read_local(model, optimizer, average)
    agree_that_all_could(local)
    disagreements: list[dict[str, Any]] = []
    described = distinct(local.describe())
    catalogue = _merge_tensors(described, disagreements)
    measured = measure(local, catalogue)
    tensors = {key: tensor_fact(key, rows, catalogue[key]) for key, rows in measured.items() if is_tensor(key)}
    counters = {key: counter_fact(rows, catalogue[key]) for key, rows in measured.items() if not is_tensor(key)}
    settings = distinct(
        {
            "groups": parameter_groups(model, optimizer),
            "optimizers": optimizer_semantics(optimizer),
            "learning_rates": learning_rates(optimizer),
        }
    )
    shared = _shared_objects(scheduler, objects, config if config is not None else read_config(model), disagreements)
    return CapturedState(
        layout=layout,
        world_size=world()[1],
        tensors=tensors,
        counters=counters,
        groups=_merge_groups(settings, disagreements),
        optimizers=_unique([body for variant in settings for body in variant.value["optimizers"]]),
        learning_rates=settings[0].value["learning_rates"],
        scheduler=shared["scheduler"],
        objects=shared["objects"],
        config=shared["config"],
        generators=generator_digests_by_rank(),
        rank_rng=rank_records(rank_rng),
        broken_ties=_broken_ties(shared["config"], tensors),
        disagreements=disagreements,
    )


def _merge_tensors(variants: list[Variant], disagreements: list[dict[str, Any]]) -> dict[str, Described]:
    merged: dict[str, Described] = {}
    for variant in variants:
        for key, shape, dtype, trainable, aliases, cuts in variant.value:
            described = Described(tuple(shape), dtype, trainable, tuple(aliases), cuts)
            known = merged.setdefault(key, described)
            if known.cuts is None and cuts is not None:
                known = merged[key] = replace(known, cuts=cuts)
            if known != described:
                disagreements.append(
                    {
                        "what": key,
                        "rank": variant.ranks[0],
                        "expected": f"{known.dtype}{list(known.shape)} trainable={known.trainable}",
                        "found": f"{dtype}{shape} trainable={trainable}",
                    }
                )
    return merged


def _merge_groups(variants: list[Variant], disagreements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins the groups of several stages; a parameter whose settings differ between ranks is a disagreement."""
    settings_of: dict[str, Any] = {}
    merged: list[dict[str, Any]] = []
    for variant in variants:
        for number, group in enumerate(variant.value["groups"]):
            new: list[str] = []
            for name in group["params"]:
                known = settings_of.setdefault(name, group["hyperparameters"])
                if known is group["hyperparameters"]:
                    new.append(name)
                elif known != group["hyperparameters"]:
                    disagreements.append(
                        {
                            "what": f"hyperparameters of {name}",
                            "rank": variant.ranks[0],
                            "expected": known,
                            "found": group["hyperparameters"],
                        }
                    )
            if new or not group["params"]:
                _append_group(merged, number, {**group, "params": new})
    return [{name: value for name, value in group.items() if name != "number"} for group in merged]


def _append_group(merged: list[dict[str, Any]], number: int, group: dict[str, Any]) -> None:
    for known in merged:
        if known["number"] == number and known["hyperparameters"] == group["hyperparameters"]:
            known["params"] += group["params"]
            known["unknown_params"] = known.get("unknown_params", 0) + group.get("unknown_params", 0)
            return
    merged.append({"number": number, **group})


def _unique(bodies: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for body in bodies:
        if body not in kept:
            kept.append(body)
    return kept


def _shared_objects(
    scheduler: Any, objects: Mapping[str, Any] | None, config: Any, disagreements: list[dict[str, Any]]
) -> dict[str, Any]:
    mine = {
        "scheduler": object_state(scheduler, "scheduler"),
        "config": object_state(config, "config"),
        "objects": {name: object_state(value, name) for name, value in (objects or {}).items()},
    }
    variants = distinct(mine)
    for name in sorted({name for variant in variants for name in variant.value["objects"]}):
        _note_difference(
            f"object {name}", [(v.value["objects"].get(name), v.ranks[0]) for v in variants], disagreements
        )
    for name in ("scheduler", "config"):
        _note_difference(name, [(v.value[name], v.ranks[0]) for v in variants], disagreements)
    return variants[0].value


def _note_difference(what: str, values: list[tuple[Any, int]], disagreements: list[dict[str, Any]]) -> None:
    first, _ = values[0]
    for value, rank in values[1:]:
        if value != first:
            disagreements.append({"what": what, "rank": rank, "expected": first, "found": value})


def _broken_ties(config: Any, tensors: Mapping[str, TensorFact]) -> list[list[str]]:
    """Returns names that the config says share one tensor and that do not.

    A config says it with a true setting such as `tie_word_embeddings` or `tied_head`. It does not say which names; if
    no parameter has an alias, matrices of the largest equal shape (embedding and head) are the ones meant.
    """
    if not isinstance(config, Mapping) or not _says_tied(cast("Mapping[str, Any]", config)):
        return []
    parameters = [fact for key, fact in tensors.items() if key.startswith("param:")]
    if any(fact.aliases for fact in parameters):
        return []
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for fact in parameters:
        if len(fact.shape) == 2 and _looks_like_vocabulary(fact.key):
            by_shape.setdefault(fact.shape, []).append(fact.key.partition(":")[2])
    return [names for names in by_shape.values() if len(names) > 1]


def _says_tied(config: Mapping[str, Any]) -> bool:
    words = ("tie", "tied")
    return any(value is True and set(str(name).lower().split("_")) & set(words) for name, value in config.items())


def _looks_like_vocabulary(key: str) -> bool:
    name = key.lower()
    return any(word in name for word in ("emb", "wte", "head", "output", "vocab", "tok", "decoder.weight"))
