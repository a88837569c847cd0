"""A toy model and what its live tensors hold: bytes of distinct storages, and the logical state by shapes."""

from __future__ import annotations

from typing import Any

from samerun.core.state import LogicalState
from support.states import tensor

VOCAB, WIDTH, INNER, BLOCKS = 257, 48, 130, 2


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
    return LogicalState(format="dcp", tensors={str(entry.key): entry for entry in entries})


def storage_bytes(tensors: list[Any]) -> int:
    """Bytes of the distinct storages under the local parts of `tensors`."""
    local = [item.to_local() if hasattr(item, "to_local") else item for item in tensors]
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in local}
    return sum(storages.values())


def held_by(model: Any, optimizer: Any) -> dict[str, int]:
    """Bytes of the storages that this process holds, by what they are."""
    params = list(model.parameters())
    return {
        "parameters": storage_bytes(params),
        "gradients": storage_bytes([parameter.grad for parameter in params if parameter.grad is not None]),
        "optimizer": storage_bytes([value for state in optimizer.state.values() for value in state.values()]),
        "buffers": storage_bytes(list(model.buffers())),
    }
