"""Which layers each pipeline rank and model chunk holds (megatron.core 0.16, `get_transformer_layer_offset`)."""

from __future__ import annotations

from collections.abc import Mapping

from samerun.formats.mcore.run import Run

Stage = tuple[int, int]


def plan_stages(run: Run, num_layers: int) -> dict[Stage, range] | None:
    """Returns the global layers of every (pipeline rank, model chunk); None for a division that is not understood.

    Layers run through the chunks in order, and within a chunk through the pipeline ranks.
    """
    if run.args.get("pipeline_model_parallel_layout"):
        return None
    counts = {(pp, chunk): _num_layers(run, num_layers, pp, chunk) for pp in range(run.pp) for chunk in range(run.vpp)}
    known = {stage: count for stage, count in counts.items() if count is not None and count >= 0}
    if len(known) < len(counts) or sum(known.values()) != num_layers:
        return None
    return spread_layers(known)


def spread_layers(counts: Mapping[Stage, int]) -> dict[Stage, range]:
    """Returns the layers of every stage from how many each holds.

    >>> spread_layers({(0, 0): 1, (1, 0): 1, (0, 1): 1, (1, 1): 1})[1, 0]
    range(1, 2)
    """
    stages: dict[Stage, range] = {}
    first = 0
    for stage in sorted(counts, key=lambda stage: (stage[1], stage[0])):
        stages[stage] = range(first, first + counts[stage])
        first += counts[stage]
    return stages


def _num_layers(run: Run, num_layers: int, pp: int, chunk: int) -> int | None:
    first, last = run.count("decoder_first_pipeline_num_layers"), run.count("decoder_last_pipeline_num_layers")
    embedding = run.flag("account_for_embedding_in_pipeline_split")
    loss = run.flag("account_for_loss_in_pipeline_split")
    if first is not None or last is not None:
        count = _uneven(run.pp, num_layers, first, last, pp)
    else:
        padded = num_layers + embedding + loss
        count = padded // run.pp if padded % run.pp == 0 else None
    if count is None or count % run.vpp:
        return None
    count //= run.vpp
    count -= embedding and pp == 0 and chunk == 0
    return count - (loss and pp == run.pp - 1 and chunk == run.vpp - 1)


def _uneven(num_stages: int, num_layers: int, first: int | None, last: int | None, pp: int) -> int | None:
    if pp == 0 and first is not None:
        return first
    if pp == num_stages - 1 and last is not None:
        return last
    middle = num_stages - (first is not None) - (last is not None)
    count, rest = divmod(num_layers - (first or 0) - (last or 0), middle)
    return None if rest else count
