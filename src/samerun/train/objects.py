"""Objects beside the tensors: what they would be saved as, and the state of each rank's random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from samerun.core.digest import to_hex
from samerun.core.plain import plain
from samerun.train.agree import distinct, gather_number

if TYPE_CHECKING:
    from samerun.train.rank_rng import RankRandomness


def object_state(value: Any, name: str) -> Any:
    """Returns what `value` would be saved as (its `state_dict`, if it has one) as plain, comparable data."""
    if isinstance(value, list | tuple) and any(hasattr(item, "state_dict") for item in cast("Sequence[Any]", value)):
        return [object_state(item, f"{name}.{number}") for number, item in enumerate(cast("Sequence[Any]", value))]
    save: Any = getattr(value, "state_dict", None)
    return plain(save() if callable(save) else value, name, _array_of)


def _array_of(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return None
    tensor: Any = value.detach()
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).cpu().contiguous()
    if local.dtype == torch.bfloat16 or str(local.dtype).startswith("torch.float8"):
        import ml_dtypes

        width = torch.int16 if local.element_size() == 2 else torch.uint8
        return local.view(width).numpy().view(getattr(ml_dtypes, str(local.dtype).removeprefix("torch.")))
    return local.numpy()


def generator_digests_by_rank() -> dict[str, dict[str, str]]:
    """Returns the digest of every rank's state by generator, then rank; a rank without that generator is left out.

    Generators are named as in `samerun.train.generators.generator_states`. Collective.
    """
    from samerun.train.generators import generator_digests

    mine = generator_digests()
    variants = distinct(sorted(mine))
    found: dict[str, dict[str, str]] = {}
    for name in sorted({name for variant in variants for name in variant.value}):
        having = {rank for variant in variants if name in variant.value for rank in variant.ranks}
        words = _gather_words(int(mine.get(name, "0"), 16))
        found[name] = {str(rank): to_hex(words[rank]) for rank in sorted(having)}
    return found


def rank_records(record: RankRandomness | None) -> dict[str, Any]:
    """Returns what each rank did to its generators, by rank; None for a rank that told nothing. Collective.

    Empty where no rank told anything.
    """
    mine = None if record is None else record.to_json()
    variants = distinct(mine and {name: mine[name] for name in mine if name not in ("stream", "seed")})
    if all(variant.value is None for variant in variants):
        return {}
    streams, seeds = _gather_words(mine["stream"] if mine else 0), _gather_words(mine["seed"] if mine else 0)
    records = {rank: variant.value for variant in variants for rank in variant.ranks}
    return {
        str(rank): records[rank] and {**records[rank], "stream": streams[rank], "seed": seeds[rank]}
        for rank in sorted(records)
    }


def _gather_words(word: int) -> list[int]:
    """Returns every rank's 64-bit word, by rank. Collective."""
    low, high = gather_number(word & 0xFFFF_FFFF), gather_number(word >> 32)
    return [top << 32 | bottom for bottom, top in zip(low, high, strict=True)]
