"""The memory estimate against tensors that real ranks hold, and against arithmetic by hand."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.dtype import DTYPES
from samerun.core.mesh import Layout
from samerun.core.state import LogicalState, ParamGroup, Role
from samerun.plan.memory import ROOT_UNIT, MemoryEstimate, estimate_memory, trainable_fqns, unit_of
from support.gloo import run_ranks
from support.states import SHAPES, adam_state, tensor, without

VOCAB, WIDTH, INNER, BLOCKS = 257, 48, 130, 2


def by_hand(entries: list[Any], **changes: Any) -> LogicalState:
    return LogicalState(format="dcp", tensors={str(entry.key): entry for entry in entries}, **changes)


def build_model(dtype: str) -> Any:
    """A toy with what breaks shapes: odd vocabulary, a 2-row gate, a tied head, a frozen tensor, a buffer."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, INNER)
            self.down = nn.Linear(INNER, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(self.norm(x)).relu())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.gate = nn.Linear(WIDTH, 2)
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
            self.head.weight = self.embed.weight
            self.shift = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
            self.register_buffer("scale", torch.ones(7))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids) + self.shift
            for layer in self.layers:
                x = layer(x)
            return self.head(x).logsumexp(-1).mean() + self.gate(x).sum()

    return Model().to(getattr(torch, dtype))


def state_of(model: Any, optimizer: Any) -> LogicalState:
    """The logical state of a live model and optimizer, by names and global shapes."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    kind = {name: str(parameter.dtype).removeprefix("torch.") for name, parameter in model.named_parameters()}
    entries = [
        tensor(f"param:{name}", tuple(parameter.shape), kind[name], aliases=["head.weight"] if "embed" in name else [])
        for name, parameter in model.named_parameters()
    ]
    for name, item in model.named_buffers():
        entries.append(tensor(f"buffer:{name}", tuple(item.shape), str(item.dtype).removeprefix("torch.")))
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            dtype = str(value.dtype).removeprefix("torch.")
            entries.append(tensor(f"optim.{slot}:{names[parameter]}", tuple(value.shape), dtype))
    return by_hand(entries)


def held_by_rank(rank: int, world_size: int, layout_text: str, dtype: str) -> tuple[dict[str, int], Any]:
    """Trains one step under FSDP2 and returns the bytes of the storages that this rank really holds, and the shapes."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layout = Layout.parse(layout_text)
    torch.manual_seed(0)
    model = build_model(dtype)
    names = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
    mesh = init_device_mesh("cpu", tuple(getattr(layout, name) for name in names), mesh_dim_names=names)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
        unit.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model(torch.arange(12).reshape(2, 6) % VOCAB).backward()
    optimizer.step()
    params = list(model.parameters())
    gradients = [parameter.grad for parameter in params if parameter.grad is not None]
    slots = [value for state in optimizer.state.values() for value in state.values()]
    held = {
        "parameters": storage_bytes(params),
        "gradients": storage_bytes(gradients),
        "optimizer": storage_bytes(slots),
        "buffers": storage_bytes(list(model.buffers())),
    }
    shapes = [(str(key), entry.shape, entry.dtype.name) for key, entry in state_of(model, optimizer).tensors.items()]
    return held, shapes


def storage_bytes(tensors: list[Any]) -> int:
    """Bytes of the distinct storages under the local parts of `tensors`."""
    local = [item.to_local() if hasattr(item, "to_local") else item for item in tensors]
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in local}
    return sum(storages.values())


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("dp_shard=3", "float32"), ("dp_shard=4", "bfloat16"), ("dp_replicate=2,dp_shard=2", "float32")],
)
def test_real_ranks_hold_what_was_estimated_within_ten_percent(layout: str, dtype: str) -> None:

    for module in ("torch.distributed.fsdp", "torch._dynamo"):  # once here, inherited by every rank
        importlib.import_module(module)
    results = run_ranks(Layout.parse(layout).world_size, held_by_rank, layout, dtype)
    shapes = results[0][1]
    entries = [
        tensor(key, shape, kind, aliases=["head.weight"] if key == "param:embed.weight" else [])
        for key, shape, kind in shapes
    ]
    estimate = estimate_memory(by_hand(entries), Layout.parse(layout))
    for (held, _), rank in zip(results, estimate.per_rank, strict=True):
        for part, found in held.items():
            assert getattr(rank, f"{part}_bytes") == pytest.approx(found, rel=0.10), (rank.rank, part)


def test_one_rank_holds_everything_once_and_gathers_nothing() -> None:
    state = adam_state(frozen=("gate.weight",))
    (rank,) = estimate_memory(state, Layout()).per_rank
    params = [entry for entry in state.tensors.values() if entry.key.role is Role.PARAM]
    slots = [entry for entry in state.tensors.values() if entry.key.role is Role.OPTIM]
    assert rank.parameters_bytes == sum(entry.num_bytes for entry in params)
    assert rank.gradients_bytes == rank.parameters_bytes - 3 * 30 * 4
    assert rank.optimizer_bytes == sum(entry.num_bytes for entry in slots)
    assert (rank.buffers_bytes, rank.gather_bytes, rank.gather_unit) == (28, 0, "")


@settings(deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_optimizer_state_is_divided_and_never_lost(shards: int, sizes: list[int]) -> None:
    state = adam_state({f"layers.{index}.w": (rows, 3) for index, rows in enumerate(sizes)})
    ranks = estimate_memory(state, Layout(dp_shard=shards)).per_rank
    steps = 4 * len(sizes)
    assert sum(rank.optimizer_bytes - steps for rank in ranks) == sum(rows * 3 * 4 * 2 for rows in sizes)
    allocated = [rank.parameters_bytes for rank in ranks]
    assert len(set(allocated)) == 1
    assert sum(sizes) * 3 * 4 <= sum(allocated) < (sum(sizes) + shards * len(sizes)) * 3 * 4


def test_replicas_of_hsdp_hold_the_same() -> None:
    ranks = estimate_memory(adam_state(), Layout(dp_replicate=2, dp_shard=3)).per_rank
    assert [rank.total_bytes for rank in ranks[:3]] == [rank.total_bytes for rank in ranks[3:]]


def test_tensor_parallel_cuts_what_it_divides() -> None:
    state = by_hand(
        [tensor("param:a", (6, 5)), tensor("param:b", (5, 6)), tensor("param:c", (5, 5)), tensor("param:d", (6,))]
    )
    first, second = estimate_memory(state, Layout(tp=2)).per_rank
    assert first.parameters_bytes == second.parameters_bytes == 4 * (15 + 15 + 25 + 6)


def test_the_largest_unit_is_gathered_in_the_compute_type() -> None:
    state = by_hand(
        [tensor("param:layers.0.w", (4, 8)), tensor("param:layers.1.w", (5, 8)), tensor("param:head.w", (2, 8))]
    )
    rank = estimate_memory(state, Layout(dp_shard=2), compute_dtype=DTYPES["bfloat16"]).per_rank[0]
    assert (rank.gather_unit, rank.gather_bytes) == ("layers.1", 6 * 8 * 2)


def test_pipeline_stages_divide_blocks_and_both_ends_hold_a_tied_tensor() -> None:
    state = by_hand(
        [
            tensor("param:embed.w", (3, 10), aliases=["head.w"]),
            *(tensor(f"param:layers.{index}.w", (2, 10)) for index in range(4)),
            tensor("param:norm.w", (10,)),
        ]
    )
    first, last = estimate_memory(state, Layout(pp=2)).per_rank
    assert first.parameters_bytes == 4 * (30 + 40)
    assert last.parameters_bytes == 4 * (30 + 40 + 10)
    untied = replace(state.tensors["param:embed.w"], aliases=())
    first, last = estimate_memory(by_hand([untied, *[*state.tensors.values()][1:]]), Layout(pp=2)).per_rank
    assert last.parameters_bytes == 4 * (40 + 10)


def test_experts_are_dealt_over_ep() -> None:
    numbered = by_hand([tensor(f"param:layers.0.experts.{index}.w", (4, 3)) for index in range(4)])
    stacked = by_hand([tensor("param:layers.0.experts.w1", (4, 4, 3))])
    for state in (numbered, stacked):
        ranks = estimate_memory(state, Layout(dp_shard=4, ep=2)).per_rank
        assert [rank.parameters_bytes for rank in ranks] == [4 * 4 * 3 * 4 // 4] * 4


def test_masters_and_averages_are_sharded_like_their_parameters() -> None:
    state = by_hand([tensor("param:w", (6, 4), "bfloat16"), tensor("master:w", (6, 4)), tensor("ema:w", (6, 4))])
    rank = estimate_memory(state, Layout(dp_shard=3)).per_rank[0]
    assert (rank.parameters_bytes, rank.masters_bytes, rank.ema_bytes) == (2 * 4 * 2, 2 * 4 * 4, 2 * 4 * 4)


def test_a_slot_of_another_shape_is_counted_whole() -> None:
    state = by_hand([tensor("param:w", (6, 4)), tensor("optim.row_var:w", (6,)), tensor("optim.col_var:w", (4,))])
    rank = estimate_memory(state, Layout(dp_shard=3)).per_rank[0]
    assert rank.optimizer_bytes == 4 * (2 + 4)


def test_the_host_needs_all_to_consolidate_and_one_piece_per_rank_to_load() -> None:
    state = adam_state(shards=4)
    host = estimate_memory(state, Layout(dp_shard=3)).host
    assert host.consolidate_bytes == sum(entry.num_bytes for entry in state.tensors.values())
    assert host.direct_bytes == 3 * 26 * 30 * 4


def test_which_parameters_have_gradients() -> None:
    state = adam_state(frozen=("gate.weight",))
    assert trainable_fqns(state) == set(SHAPES) - {"gate.weight"}
    plain_sgd = replace(without(state, Role.OPTIM), groups=(ParamGroup(("norm.weight",), {"lr": 1.0}),))
    assert trainable_fqns(plain_sgd) == {"norm.weight"}
    assert trainable_fqns(replace(plain_sgd, groups=())) == set(SHAPES)
    assert not estimate_memory(plain_sgd, Layout()).optimizer_known


@pytest.mark.parametrize(
    ("fqn", "unit"),
    [
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("layers.2.moe.experts.5.w1", "layers.2"),
        ("0.weight", "0"),
        ("lm_head.weight", ROOT_UNIT),
    ],
)
def test_units_are_named_by_the_first_number(fqn: str, unit: str) -> None:
    assert unit_of(fqn) == unit


def test_the_estimate_goes_through_json() -> None:
    estimate = estimate_memory(adam_state(), Layout(dp_shard=3, tp=2), device_memory_bytes=10**6)
    assert MemoryEstimate.from_json(estimate.to_json()) == estimate
    assert estimate.fits
    assert not replace(estimate, device_memory_bytes=10).fits
    assert replace(estimate, device_memory_bytes=None).fits is None


def test_a_thousand_ranks_and_ten_thousand_tensors_take_a_moment() -> None:
    state = adam_state({f"layers.{index}.w": (1000, 7) for index in range(2500)})
    assert len(estimate_memory(state, Layout(dp_replicate=2, dp_shard=512)).per_rank) == 1024
