"""Writes the golden DeepSpeed checkpoints beside this file, with the values that the running job held.

    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
    torchrun --nproc-per-node 3 generate.py z2_align_rr OUT      # 2 to 4 ranks, see CASES
    python -m deepspeed.checkpoint.ds_to_universal --input_folder OUT/z3_bf16/global_step5 \\
        --output_folder OUT/universal_z3_bf16/uc
    python generate.py pack OUT z3_still z3_pair universal_z2_rr      # beside this file; these are kept packed

Needs DeepSpeed, which nothing else here does: see PROVENANCE.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.packed import pack

BATCH, LENGTH = 2, 6
WHOLE = {"stage3_param_persistence_threshold": 0}

# name: ranks, stage, keys of `zero_optimization`, other keys of the configuration. All run three updates but one.
CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "z0_bf16": (3, 0, {}, {"bf16": {"enabled": True}}),
    "z1_bf16opt": (3, 1, {}, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    "z2_align_rr": (
        3,
        2,
        {"parameter_alignment": True, "round_robin_gradients": True},
        {"bf16": {"enabled": True}},
    ),
    "z3_sub_bf16": (3, 3, {"sub_group_size": 100, **WHOLE}, {"bf16": {"enabled": True}}),
    "z3_bf16": (3, 3, WHOLE, {"bf16": {"enabled": True}}),
    "z2_rr": (3, 2, {"round_robin_gradients": True}, {"bf16": {"enabled": True}}),
    "z3_still": (3, 3, WHOLE, {"bf16": {"enabled": True}}),
    "z3_pair": (2, 3, WHOLE, {"bf16": {"enabled": True}}),
    "pp2dp2bf16": (4, 1, {}, {"bf16": {"enabled": True}}),
    "moe4": (4, 2, {}, {"bf16": {"enabled": True}}),
    "tp2dp2": (4, 1, {}, {"bf16": {"enabled": True}}),
}
UPDATES = dict.fromkeys(CASES, 3) | {"z3_bf16": 5}


class Plain(nn.Module):
    """Everything that breaks resumes: uneven sizes, a scalar, frozen and unused parameters, buffers, a gated MLP."""

    def __init__(self, *, still: bool = False) -> None:
        super().__init__()
        self.still = still  # every rank keeps the same buffers
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.emb = nn.Embedding(11, 5)
        self.up, self.gate, self.down = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.head = nn.Linear(5, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(ids)
        if self.training and not self.still:
            self.mean.mul_(0.9).add_(hidden.detach().float().mean((0, 1)) * 0.1)
            self.calls += 1
        hidden = hidden + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return self.head(self.norm(hidden) * self.scale + self.frozen)


class Block(nn.Module):
    """One pipeline layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.fc, self.out = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.out(functional.relu(self.fc(self.ln(hidden))))


class Expert(nn.Module):
    """One expert."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.relu(self.fc1(hidden)))


class Sparse(nn.Module):
    """Two layers of four experts."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.tok = nn.Embedding(11, 5)
        self.moe = nn.ModuleList([MoE(5, Expert(), num_experts=4, ep_size=2, k=1, min_capacity=8) for _ in range(2)])
        self.out = nn.Linear(5, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, balance = self.tok(ids), torch.zeros(())
        for layer in self.moe:
            change, loss, _ = layer(hidden)
            hidden, balance = hidden + change, balance + loss
        return self.out(hidden), balance


class Attention(nn.Module):
    """Fused query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv_proj(hidden).chunk(3, -1)
        return self.o_proj(torch.sigmoid(query) * key + value)


class Gated(nn.Module):
    """Fused gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)


class Layer(nn.Module):
    """One layer of the tensor-parallel model."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.self_attn, self.mlp = nn.LayerNorm(8), Attention(), Gated()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.ln(hidden))
        return hidden + self.mlp(hidden)


class Wide(nn.Module):
    """A model whose projections AutoTP cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(8, 12, bias=False)
        self.register_buffer("stat", torch.arange(6.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.lm_head(hidden)


def base_config(case: str, ranks: int) -> dict[str, Any]:
    _, stage, zero, more = CASES[case]
    return {
        "train_batch_size": ranks * BATCH,
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096, **zero},
        **more,
    }


def two_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    named = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in named if p.ndim > 1], "lr": 1e-2, "weight_decay": decay, "name": "decay"},
        {"params": [p for p in named if p.ndim < 2], "lr": 5e-3, "weight_decay": 0.0, "name": "no_decay"},
    ]


def batches(ranks: int, replica: int, vocab: int, seed: int) -> Any:
    """Yields this replica's part of one global sequence of batches."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, vocab, (ranks * BATCH, LENGTH), generator=generator)[replica * BATCH :][:BATCH]


def next_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float()[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def same_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def train_plain(case: str, ranks: int, rank: int) -> Any:
    model = Plain(still=case in ("z3_still", "z3_pair"))
    optimizer = torch.optim.AdamW(two_groups(model, 0.1), betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=base_config(case, ranks),
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda i: (i + 1) / 10),
    )
    for _, ids in zip(range(UPDATES[case]), batches(ranks, rank, 11, 3), strict=False):
        engine.backward(next_loss(engine(ids), ids))
        engine.step()
    return engine


def train_experts(case: str, ranks: int, rank: int) -> Any:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    model = Sparse()
    groups = split({"params": list(model.parameters()), "name": "all", "lr": 0.01})
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=base_config(case, ranks))
    for _, ids in zip(range(UPDATES[case]), batches(ranks, rank, 11, 1), strict=False):
        logits, balance = engine(ids)
        engine.backward(same_loss(logits, ids) + 0.01 * balance)
        engine.step()
    return engine


def train_pipeline(case: str, ranks: int, rank: int) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    def head(embedding: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ embedding.weight.t()

    specs = [
        TiedLayerSpec("emb", nn.Embedding, 11, 5),
        *(LayerSpec(Block) for _ in range(3)),
        LayerSpec(nn.LayerNorm, 5),
        TiedLayerSpec("emb", nn.Embedding, 11, 5, forward_fn=head),
    ]
    model = PipelineModule(specs, num_stages=2, loss_fn=same_loss, partition_method="uniform")
    config = base_config(case, ranks // 2) | {"gradient_accumulation_steps": 2}
    config["train_batch_size"] *= 2
    optimizer = torch.optim.AdamW(two_groups(model, 0.01))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = ((ids, ids) for ids in batches(1, 0, 11, 1))
    for _ in range(UPDATES[case]):
        engine.train_batch(data)
    return engine


def train_tensor_parallel(case: str, ranks: int, rank: int) -> Any:
    column = {"partition_type": "column", "partition_dim": 0}
    specs = [
        {"patterns": [r".*\.(o_proj|down_proj)\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.qkv_proj\.weight$"], "shape": [3, -1], **column},
        {"patterns": [r".*\.gate_up_proj\.weight$"], "shape": [2, -1], **column},
    ]
    config = base_config(case, ranks) | {
        "gradient_accumulation_steps": 1,
        "tensor_parallel": {
            "autotp_size": 2,
            "partition_config": {"use_default_specs": False, "layer_specs": specs},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    del config["train_batch_size"]
    engine, *_ = deepspeed.initialize(model=Wide(), config=config)
    for _, ids in zip(range(UPDATES[case]), batches(ranks, rank // 2, 12, 1), strict=False):
        engine.backward(same_loss(engine(ids), ids))
        engine.step()
    return engine


def held_values(engine: Any, stage: int) -> dict[str, np.ndarray]:
    """Returns what this rank holds logically, from the running job and never from a file. Every rank calls it."""
    optimizer = engine.optimizer
    if stage in (1, 2) and hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    held = {f"buffer/{name}": buffer.detach().numpy().copy() for name, buffer in engine.module.named_buffers()}
    held.pop("buffer/scratch", None)
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            weights = parameter.detach().float().clone().numpy()
        held[f"module/{name}"] = weights
        if parameter.requires_grad and stage:
            found = {"fp32": safe_get_full_fp32_param(parameter)}
            found |= {slot: safe_get_full_optimizer_state(parameter, slot) for slot in ("exp_avg", "exp_avg_sq")}
            held |= {f"{slot}/{name}": full.float().numpy().reshape(weights.shape) for slot, full in found.items()}
    if stage == 0:
        held |= whole_optimizer_values(engine)
    return held


def whole_optimizer_values(engine: Any) -> dict[str, np.ndarray]:
    """Returns masters and moments of stage 0 in 16 bits, by the identity of parameters."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    wrapper, held = engine.optimizer, {}
    for weights, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
        for parameter, master in zip(weights, masters, strict=True):
            name, state = names[id(parameter)], wrapper.optimizer.state[master]
            held[f"fp32/{name}"] = master.detach().numpy().copy()
            held |= {f"{slot}/{name}": state[slot].numpy().copy() for slot in ("exp_avg", "exp_avg_sq")}
    return held


def main(case: str, out: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7 if case.startswith("z") else 5)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    ranks, rank, stage = dist.get_world_size(), dist.get_rank(), CASES[case][1]
    assert ranks == CASES[case][0]
    special = {"pp": train_pipeline, "mo": train_experts, "tp": train_tensor_parallel}
    engine = special.get(case[:2], train_plain)(case, ranks, rank)
    folder = out / case
    client = {"epoch": 1, "consumed_samples": UPDATES[case] * BATCH * ranks, "rng": torch.get_rng_state()}
    engine.save_checkpoint(str(folder), client_state=client if case[:2] not in special else {})
    held = held_values(engine, stage)
    name = "truth.npz" if case[:2] not in special else f"truth_rank{rank}.npz"
    if rank == 0 or case[:2] in special:
        np.savez_compressed(folder / name, **held)
    dist.barrier()
    dist.destroy_process_group()


def pack_case(folder: Path) -> None:
    """Packs what a case wrote, without DeepSpeed's own script in it."""
    for script in folder.glob("*.py"):
        script.unlink()
    pack(folder, Path(__file__).parent / f"{folder.name}.tar.xz")


if __name__ == "__main__":
    if sys.argv[1] == "pack":
        for name in sys.argv[3:]:
            pack_case(Path(sys.argv[2]) / name)
    else:
        main(sys.argv[1], Path(sys.argv[2]))
