"""Proves the shipped name maps with the libraries themselves, and writes the checkpoints of this directory.

One model is built in megatron-core and in transformers, and their logits on the same tokens must agree after samerun
has renamed the weights, in both directions. The two libraries may live in different environments, so there are stages:

    python tests/golden/maps/make.py megatron    # with megatron-core 0.16.1
    python tests/golden/maps/make.py transformers    # with transformers 5.24 and samerun
    python tests/golden/maps/make.py back    # with megatron-core again

See PROVENANCE.md for versions and what was measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
VOCAB, WIDTH, INNER, LAYERS, POSITIONS, HEADS = 37, 24, 40, 2, 16, 4
CASES = {
    "llama-gqa": {"map": "megatron-to-llama", "groups": 2, "tied": False},
    "llama-mha": {"map": "megatron-to-llama", "groups": 4, "tied": True},
    "gpt2": {"map": "megatron-to-gpt2", "groups": 4, "tied": True},
}
# fp32 (2^-24), sums over at most 40 products in each of two layers, values of order one: some 5e-6. The libraries sum
# in different orders, so equality is not to be had; a wrong order of heads or halves moves logits by more than 0.1.
LIMIT = 2e-5


def tokens() -> np.ndarray:
    """Returns [3, 11] token numbers."""
    return np.random.default_rng(4).integers(0, VOCAB, (3, 11))


def scramble(model: torch.nn.Module, seed: int) -> None:
    """Gives every parameter values large enough that each of them shows in the logits, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator) * 0.2
            is_norm = ("norm" in name and name.endswith("weight")) or "ln_" in name
            parameter.copy_(value + 1 if is_norm else value)


# ---- megatron-core ----


def megatron_model(case: str) -> Any:
    """Builds a GPTModel of megatron-core's own layers, without Transformer Engine, on the CPU."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not torch.distributed.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        torch.cuda.current_device = lambda: "cpu"  # pyright: ignore  (rotary positions ask for it on any device)
        tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext  # there is no dropout
    llama = case != "gpt2"
    norm = "RMSNorm" if llama else "LayerNorm"
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, ffn_hidden_size=INNER, num_attention_heads=HEADS,
        num_query_groups=CASES[case]["groups"], normalization=norm, layernorm_epsilon=1e-5,
        gated_linear_unit=llama, add_bias_linear=not llama, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        activation_func=torch.nn.functional.silu if llama else gelu(os.environ.get("GELU", "tanh")),
        attention_softmax_in_fp32=True, gradient_accumulation_fusion=False,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization=norm), vocab_size=VOCAB, max_sequence_length=POSITIONS,
        position_embedding_type="rope" if llama else "learned_absolute", rotary_base=10000,
        share_embeddings_and_output_weights=bool(CASES[case]["tied"]),
    ).eval()  # fmt: skip


def gelu(approximate: str) -> Any:
    """Returns the activation that the job chooses: GPT-2 was trained with the tanh form."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate=approximate)

    return function


def megatron_logits(model: Any) -> np.ndarray:
    given = torch.from_numpy(tokens())
    places = torch.arange(given.shape[1]).expand_as(given)
    mask = torch.ones(1, 1, given.shape[1], given.shape[1]).triu(1).bool()
    with torch.no_grad():
        return model(given, places, mask).float().numpy()


def sharded_tensors(model: Any) -> list[Any]:
    """Returns what megatron-core would save under torch_dist: each with its key, global shape and place."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    described = model.sharded_state_dict()
    apply_factories(described)
    return [value for value in nested_values(described) if isinstance(value, ShardedTensor)]


def box(tensor: Any) -> tuple[Any, ...]:
    """Returns where a shard lies in its global tensor: leading axes that were added are indexed, not sliced."""
    added = tensor.prepend_axis_num
    starts = tensor.global_offset
    inner = tuple(slice(a, a + n) for a, n in zip(starts[added:], tensor.data.shape, strict=True))
    return (*starts[:added], *inner)


def megatron() -> None:
    for number, case in enumerate(CASES):
        folder = HERE / case
        folder.mkdir(exist_ok=True)
        model = megatron_model(case)
        scramble(model, number)
        stacked: dict[str, torch.Tensor] = {}
        for shard in sharded_tensors(model):
            whole = stacked.setdefault(shard.key, torch.full(tuple(shard.global_shape), float("nan")))
            whole[box(shard)] = shard.data
        plain = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        torch.save({"model": stacked}, folder / "stacked.pt")
        torch.save({"model": plain}, folder / "plain.pt")
        np.save(folder / "megatron-logits.npy", megatron_logits(model))
        print(case, sorted(stacked), [name for name in plain if ".1." in name or "layers" not in name], flush=True)


def back() -> None:
    """Loads what samerun made of the transformers model, under megatron-core's own keys, and compares logits."""
    proved = json.loads((HERE / "proved.json").read_text())
    for case in CASES:
        model = megatron_model(case)
        scramble(model, 99)
        saved = torch.load(HERE / case / "back.pt", weights_only=True)["model"]
        shards = sharded_tensors(model)
        if CASES[case][
            "tied"
        ]:  # the torch writer gives one tensor under both of its names, megatron-core has the first
            head = saved.pop("output_layer.weight", saved["embedding.word_embeddings.weight"])
            assert torch.equal(head, saved["embedding.word_embeddings.weight"])
        assert {shard.key for shard in shards} == saved.keys(), {shard.key for shard in shards} ^ saved.keys()
        for shard in shards:
            assert tuple(shard.global_shape) == tuple(saved[shard.key].shape), shard.key
            with torch.no_grad():
                shard.data.copy_(saved[shard.key][box(shard)])
        expected = np.load(HERE / case / "hf-logits.npy")
        proved[case]["back_max_abs"] = float(np.abs(megatron_logits(model) - expected).max())
        proved[case]["back_scale"] = float(np.abs(expected).max())
        (HERE / case / "back.pt").unlink()
        print(case, proved[case])
        assert proved[case]["back_max_abs"] <= LIMIT * max(1.0, proved[case]["back_scale"])
    (HERE / "proved.json").write_text(json.dumps(proved, indent=2) + "\n")


# ---- transformers ----


def hf_model(case: str) -> Any:
    """Builds the same model in transformers, from a configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    tied = bool(CASES[case]["tied"])
    if case == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB, n_positions=POSITIONS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=INNER,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config).eval()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=CASES[case]["groups"], rms_norm_eps=1e-5,
            max_position_embeddings=POSITIONS, tie_word_embeddings=tied,
        )
    ).eval()  # fmt: skip


def hf_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens())).logits.float().numpy()


def setting(case: str, inverse: bool = False) -> str:
    """Returns a map as `--map` takes it."""
    counts = "" if case == "gpt2" else f",groups={CASES[case]['groups']}"
    return f"{'inverse:' if inverse else ''}{CASES[case]['map']},heads={HEADS}{counts}"


def converted(source: Path, dest: Path, case: str, to: str, *, inverse: bool = False) -> str:
    """Converts under the case's map. Returns the digest of the state."""
    from samerun.convert.convert import carry_out
    from samerun.convert.prepare import prepare
    from samerun.formats.detect import open_checkpoint
    from samerun.formats.mapfile import read_name_map
    from samerun.formats.mapped import MappedCheckpoint

    checkpoint = open_checkpoint(source)
    view = MappedCheckpoint(checkpoint, read_name_map(setting(case, inverse), checkpoint.state))
    return carry_out(prepare(view, dest, to=to, original=checkpoint, allow=("SR-OPT-MISSING",))).state


def transformers() -> None:
    import tempfile

    proved: dict[str, dict[str, Any]] = {}
    for number, case in enumerate(CASES):
        folder = HERE / case
        expected = np.load(folder / "megatron-logits.npy")
        proved[case] = {"scale": float(np.abs(expected).max())}
        with tempfile.TemporaryDirectory() as scratch:
            for kind in ("stacked", "plain"):
                moved = Path(scratch) / kind
                proved[case][f"{kind}_state"] = converted(folder / f"{kind}.pt", moved, case, "huggingface")
                config = hf_model(case).config
                config.save_pretrained(moved)
                model, loading = type(hf_model(case)).from_pretrained(moved, output_loading_info=True)
                assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
                found = hf_logits(model.eval())
                proved[case][f"{kind}_max_abs"] = float(np.abs(found - expected).max())
                assert proved[case][f"{kind}_max_abs"] <= LIMIT * max(1.0, proved[case]["scale"]), proved
        model = hf_model(case)
        scramble(model, 50 + number)
        model.save_pretrained(folder / "hf")
        (folder / "hf" / "generation_config.json").unlink(missing_ok=True)
        np.save(folder / "hf-logits.npy", hf_logits(model))
        (folder / "back.pt").unlink(missing_ok=True)
        (folder / "back.pt.samerun-proof.json").unlink(missing_ok=True)
        proved[case]["back_state"] = converted(folder / "hf", folder / "back.pt", case, "torch", inverse=True)
        (folder / "back.pt.samerun-proof.json").unlink()
        print(case, proved[case], flush=True)
    (HERE / "proved.json").write_text(json.dumps(proved, indent=2) + "\n")


if __name__ == "__main__":
    {"megatron": megatron, "transformers": transformers, "back": back}[sys.argv[1]]()
