"""Faults of loading: model and optimizer do not hold what was saved."""

from __future__ import annotations

import os
from typing import Any

from samerun.demo.faults.catalog import LOW, Kind, in_job
from samerun.demo.faults.wrap import after_load, flip_last_bit, local, second_half, trained


@in_job("optimizer-reset", Kind.OPTIMIZER, "SR-LOAD-OPT-RESET")
def reset_optimizer() -> None:
    """The weights are loaded, the optimizer starts from nothing."""
    after_load(lambda model, optimizer: optimizer.state.clear())


@in_job("moments-missing", Kind.OPTIMIZER, "SR-LOAD-MISSING", "SR-LOAD-OPT", "SR-LOAD-OPT-RESET")
def forget_one_parameter() -> None:
    """The optimizer has no state for one parameter."""
    after_load(lambda model, optimizer: optimizer.state.pop(model.blocks[0].mlp.up.weight))


@in_job("moments-half-read", Kind.OPTIMIZER, "SR-LOAD-OPT")
def read_half_of_the_shards() -> None:
    """Only the first half of the ranks read their part of the first moments."""

    def then(model: Any, optimizer: Any) -> None:
        if second_half():
            for state in optimizer.state.values():
                local(state["exp_avg"]).zero_()

    after_load(then)


@in_job("moments-swapped", Kind.OPTIMIZER, "SR-LOAD-OPT")
def swap_moments() -> None:
    """Moments are matched by position, and two parameters of the same shape changed places."""

    def then(model: Any, optimizer: Any) -> None:
        attention = model.blocks[0].attention
        states = [optimizer.state[p] for p in (attention.query.weight, attention.value.weight)]
        for slot in ("exp_avg", "exp_avg_sq"):
            states[0][slot], states[1][slot] = states[1][slot], states[0][slot]

    after_load(then)


@in_job("moments-quantised", Kind.DTYPE, "SR-LOAD-OPT")
def quantise_moments() -> None:
    """The second moments went through eight bits."""
    import torch

    def then(model: Any, optimizer: Any) -> None:
        for state in optimizer.state.values():
            values = local(state["exp_avg_sq"])
            values.copy_(values.to(torch.float8_e5m2).to(values.dtype))

    after_load(then)


@in_job("masters-rebuilt", Kind.DTYPE, "SR-LOAD-PARAM", precisions=LOW)
def round_weights() -> None:
    """The float32 weights were rebuilt from bfloat16."""
    import torch

    def then(model: Any, optimizer: Any) -> None:
        for parameter in trained(model):
            values = local(parameter)
            values.copy_(values.to(torch.bfloat16))

    after_load(then)


@in_job("step-ahead", Kind.COUNTERS, "SR-LOAD-STEP")
def count_a_dummy_step() -> None:
    """A dummy step, made to allocate the optimizer's state, was counted."""

    def then(model: Any, optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["step"].add_(1)

    after_load(then)


@in_job("step-reset", Kind.COUNTERS, "SR-LOAD-STEP")
def restart_the_steps() -> None:
    """The moments are loaded, Adam's step counters begin again."""

    def then(model: Any, optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["step"].fill_(1)

    after_load(then)


@in_job("decay-lost", Kind.GROUPS, "SR-LOAD-GROUP")
def lose_hyperparameters() -> None:
    """All groups but the first have the optimizer's defaults."""

    def then(model: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups[1:]:
            group["weight_decay"] = optimizer.defaults["weight_decay"]

    after_load(then)


@in_job("groups-swapped", Kind.GROUPS, "SR-LOAD-GROUP")
def swap_groups() -> None:
    """The two groups exchanged their hyperparameters."""

    def then(model: Any, optimizer: Any) -> None:
        first, second = optimizer.param_groups
        for name in ("weight_decay", "lr", "initial_lr"):
            first[name], second[name] = second[name], first[name]

    after_load(then)


@in_job("betas-changed", Kind.GROUPS, "SR-LOAD-GROUP")
def change_betas() -> None:
    """The second beta is the library's default again."""

    def then(model: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["betas"] = (group["betas"][0], 0.999)

    after_load(then)


@in_job("decay-coupled", Kind.GROUPS, "SR-LOAD-CLASS", "SR-LOAD-GROUP")
def couple_weight_decay() -> None:
    """Weight decay goes through the moments: Adam in place of AdamW, with the same state."""

    def then(model: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["decoupled_weight_decay"] = False

    after_load(then)


@in_job("parameter-not-loaded", Kind.NAMES, "SR-LOAD-PARAM")
def leave_one_at_its_start() -> None:
    """One weight's name matched nothing, so it kept its random start."""
    import torch

    def then(model: Any, optimizer: Any) -> None:
        values = local(model.blocks[-1].mlp.down.weight)
        values.copy_(torch.empty_like(values).normal_(std=0.06, generator=torch.Generator().manual_seed(1)))

    after_load(then)


@in_job("weights-swapped", Kind.LAYOUT, "SR-LOAD-PARAM")
def swap_weights() -> None:
    """Key and value, cut from one fused weight, changed places."""

    def then(model: Any, optimizer: Any) -> None:
        key, value = (local(p) for p in (model.blocks[0].attention.key.weight, model.blocks[0].attention.value.weight))
        kept = key.clone()
        key.copy_(value)
        value.copy_(kept)

    after_load(then)


@in_job("rows-out-of-order", Kind.LAYOUT, "SR-LOAD-PARAM")
def rotate_rows() -> None:
    """The rows of a gated half were joined in the wrong order; sum and norm are the same."""

    def then(model: Any, optimizer: Any) -> None:
        values = local(model.blocks[0].mlp.gate.weight)
        values.copy_(values.roll(1, 0))

    after_load(then)


@in_job("buffer-not-loaded", Kind.NAMES, "SR-LOAD-PARAM")
def spoil_a_buffer() -> None:
    """A persistent buffer is built again with another base and not restored."""
    after_load(lambda model, optimizer: model.rope.mul_(1.01))


@in_job("frozen-changed", Kind.TIED, "SR-LOAD-PARAM")
def spoil_the_frozen() -> None:
    """A frozen parameter was left out of the save and recomputed from other text."""

    def then(model: Any, optimizer: Any) -> None:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                local(parameter).mul_(1.01)

    after_load(then)


@in_job("replica-diverged", Kind.REPLICAS, "SR-LOAD-REPLICA", layout="dp_replicate=2,dp_shard=2")
def diverge_replica() -> None:
    """One replica continues from a slightly different weight; its loss looks normal."""

    def then(model: Any, optimizer: Any) -> None:
        if second_half():
            local(next(trained(model))).view(-1)[0] += 1e-2

    after_load(then)


@in_job("one-bit", Kind.FILES, "SR-LOAD-PARAM")
def change_the_last_bit() -> None:
    """One weight of one rank differs in its last bit: the smallest change there is."""

    def then(model: Any, optimizer: Any) -> None:
        if int(os.environ["RANK"]) == 0:
            flip_last_bit(local(next(trained(model))))

    after_load(then)


@in_job("weight-nan", Kind.DTYPE, "SR-LOAD-NONFINITE")
def make_weight_nan() -> None:
    """One weight is not a number after loading."""

    def then(model: Any, optimizer: Any) -> None:
        if int(os.environ["RANK"]) == 0:
            local(next(trained(model))).view(-1)[0] = float("nan")

    after_load(then)
