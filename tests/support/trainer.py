"""A small training script's names, for the parts of one that the documentation shows: a real model, one gloo rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Dropping the last reference to a DDP model joins gloo's threads with the GIL held, and can hang (torch 2.13).
_kept_alive: list[Any] = []


@contextmanager
def trainer_names() -> Iterator[dict[str, Any]]:
    """Yields what a script has defined before the lines that a page shows; every block gets fresh ones."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    from samerun.core.mesh import Layout
    from samerun.train import ContributionMean, ElasticSampler, Recorder

    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        dataset = [(torch.randn(4), float(i % 3)) for i in range(96)]
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        _kept_alive.append(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sampler = ElasticSampler(len(dataset), global_batch=32, replicas=1, replica=0, max_microbatch=8, seed=0)
        loader: Any = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)  # pyright: ignore[reportArgumentType]

        def loss_sum(model: Any, batch: Any) -> Any:
            inputs, targets = batch
            return ((model(inputs).squeeze(-1) - targets.float()) ** 2).sum()

        def valid_tokens(batch: Any) -> int:
            return len(batch[0])

        yield {
            "torch": torch, "dcp": dcp, "DataLoader": torch.utils.data.DataLoader,
            "ContributionMean": ContributionMean, "ElasticSampler": ElasticSampler, "Recorder": Recorder,
            "mesh": mesh, "data_parallel_group": dist.group.WORLD, "layout": Layout(dp_shard=1),
            "dataset": dataset, "collate": torch.utils.data.default_collate, "sampler": sampler, "loader": loader,
            "r": 0, "rank": 0, "replica": 0, "replicas": 1, "total_updates": 2,
            "model": model, "optimizer": optimizer, "scaler": None,
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
            "loss_sum": loss_sum, "valid_tokens": valid_tokens, "count_valid": valid_tokens,
            "tokens": 32, "loss": 0.5, "grad_norm": 1.0, "ids": list(range(32)), "losses": [0.5], "logits": None,
            "progress": {"update": 0}, "config": {"dim": 4}, "path": "checkpoint",
            "state": {"model": model.module.state_dict()}, "folder": "step-12", "save": lambda *update: None,
            "update": 12, "last_update": 14,
        }  # fmt: skip
    finally:
        dist.destroy_process_group()
