"""Proves the map `torchtitan-to-llama` with torchtitan's own model and adapter; writes `titan/`.

    python tests/golden/maps/make_titan.py      # with torchtitan 0.3.0

The model is torchtitan's Llama with fused projections, as its configurations have it, trained for two updates by AdamW;
attention is its SDPA, since its other kinds compile for a GPU. What is written: `step.pt` (the model as torchtitan
saves it, weights apart; the optimizer under the names that it trains, fused), `logits.npy`, and `hf.safetensors`: the
weights as torchtitan's `Llama3StateDictAdapter.to_hf` gives them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

HERE = Path(__file__).parent / "titan"
VOCAB, WIDTH, INNER, LAYERS, POSITIONS, HEADS, GROUPS = 37, 24, 40, 2, 16, 4, 2


def build() -> tuple[Llama3Model, Llama3Model.Config]:
    init = {"weight": torch.nn.init.normal_, "bias": torch.nn.init.zeros_}
    norm = RMSNorm.Config(normalized_shape=WIDTH, param_init={"weight": torch.nn.init.uniform_})
    rope = ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=POSITIONS)
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=norm,
            ffn_norm=norm,
            attention=make_gqa_config(
                dim=WIDTH,
                n_heads=HEADS,
                n_kv_heads=GROUPS,
                fuse_qkv=True,
                rope=rope,
                inner_attention=ScaledDotProductAttention.Config(),
                wqkv_param_init=init,
                wo_param_init=init,
            ),
            feed_forward=make_ffn_config(dim=WIDTH, hidden_dim=INNER, w1_param_init=init, w2w3_param_init=init),
        )
        for _ in range(LAYERS)
    ]
    config = Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=WIDTH, param_init=init),
        norm=norm,
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCAB, param_init=init),
        layers=layers,
    )
    return config.build(), config


def tokens() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(4).integers(0, VOCAB, (3, 11)))


def main() -> None:
    torch.manual_seed(3)
    ScaledDotProductAttention.sdpa_backends = [torch.nn.attention.SDPBackend.MATH]
    model, config = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.ndim > 1 else 0.1) + (parameter.ndim == 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(tokens())
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).backward()
        optimizer.step()
    with torch.no_grad():
        logits = model(tokens()).numpy()
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]  # what torchtitan's optimizer states are saved under
    saved = optimizer.state_dict()
    moments = {
        "state": {names[number]: slots for number, slots in saved["state"].items()},
        "param_groups": [{**group, "params": [names[n] for n in group["params"]]} for group in saved["param_groups"]],
    }
    assert any("wqkv" in name for name in names)
    assert any(".wq." in name for name in weights)
    HERE.mkdir(exist_ok=True)
    torch.save({"model": weights, "optimizer": moments}, HERE / "step.pt")
    np.save(HERE / "logits.npy", logits)
    adapted = Llama3StateDictAdapter(config, None).to_hf(weights)
    save_file({name: value.contiguous() for name, value in adapted.items()}, HERE / "hf.safetensors")


if __name__ == "__main__":
    main()
