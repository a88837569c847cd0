"""A Llama's state under Megatron's names and back, by NumPy and not by samerun's maps."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from samerun.formats.detect import open_checkpoint
from support import llamajob
from support.megatron import GOLDEN

Tensors = dict[str, np.ndarray]

_PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}


def to_megatron(found: Tensors, shape: Mapping[str, int]) -> Tensors:
    """Returns one kind of tensor (weights, or a slot) under Megatron's stacked names, from Llama's."""
    layers, groups, head = shape["num_hidden_layers"], shape["num_key_value_heads"], shape["head_dim"]
    made = {theirs: found[ours] for theirs, ours in _PLAIN.items()}
    for theirs, ours in _LAYER.items():
        made[f"decoder.layers.{theirs}"] = np.stack([found[f"model.layers.{i}.{ours}"] for i in range(layers)])
    fused, gated = [], []
    for i in range(layers):
        q, k, v = (found[f"model.layers.{i}.self_attn.{name}_proj.weight"] for name in "qkv")
        per_group = q.shape[0] // groups
        rows = [
            part
            for g in range(groups)
            for part in (
                q[g * per_group : (g + 1) * per_group],
                k[g * head : (g + 1) * head],
                v[g * head : (g + 1) * head],
            )
        ]
        fused.append(np.concatenate(rows))
        gated.append(np.concatenate([found[f"model.layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up")]))
    made["decoder.layers.self_attention.linear_qkv.weight"] = np.stack(fused)
    made["decoder.layers.mlp.linear_fc1.weight"] = np.stack(gated)
    return made


def to_llama(found: Tensors, shape: Mapping[str, int]) -> Tensors:
    """Returns one kind of tensor under Llama's names, from Megatron's stacked ones."""
    groups, head = shape["num_key_value_heads"], shape["head_dim"]
    heads = shape["num_attention_heads"] // groups
    made = {ours: found[theirs][: shape["vocab_size"]] for theirs, ours in _PLAIN.items()}
    for i in range(shape["num_hidden_layers"]):
        at = f"model.layers.{i}"
        made |= {f"{at}.{ours}": found[f"decoder.layers.{theirs}"][i] for theirs, ours in _LAYER.items()}
        fused = found["decoder.layers.self_attention.linear_qkv.weight"][i]
        parts = fused.reshape(groups, heads + 2, head, -1)
        for name, part in (("q", parts[:, :heads]), ("k", parts[:, heads]), ("v", parts[:, heads + 1])):
            made[f"{at}.self_attn.{name}_proj.weight"] = np.ascontiguousarray(part).reshape(-1, fused.shape[1])
        gate, up = np.split(found["decoder.layers.mlp.linear_fc1.weight"][i], 2)
        made |= {f"{at}.mlp.gate_proj.weight": gate, f"{at}.mlp.up_proj.weight": up}
    return made


def load_megatron(moved: Path, truth: Path, layouts: tuple[str, ...]) -> dict[str, Any]:
    """Returns what `tests/golden/megatron/load.py` found, by layout."""
    with socket.socket() as free:  # several of these may run at the same time
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "load.py", str(moved), str(truth), *layouts, "--port", port]
    done = subprocess.run(command, cwd=GOLDEN, capture_output=True, text=True, timeout=900)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"layout"')]
    error = {"error": (done.stderr.strip().splitlines() or ["nothing was said"])[-1]}
    return {text: next((line for line in lines if line["layout"] == text), error) for text in layouts}


def settings_differ(found: Mapping[str, Any], truth: Any) -> list[str]:
    """Returns which settings of Megatron's live groups are not the truth's, the groups told apart by their decay.

    `load.py` has made one update with them.
    """
    wrong: list[str] = []
    by_decay = {bool(group["weight_decay"]): group for group in truth["groups"]}
    for group in found["settings"]:
        for name in ("lr", "betas", "eps", "weight_decay"):
            known = by_decay[bool(group["wd_mult"])][name]
            if (list(known) if isinstance(known, tuple) else known) != group[name]:
                wrong.append(f"{name} of the group with wd_mult {group['wd_mult']}")
    (step,) = {float(value) for key, value in truth["tensors"].items() if key.startswith("optim.step:")}
    return wrong if found["step"] == [step + 1] else [*wrong, f"step {found['step']}"]


def write_truth(truth: Any, folder: Path) -> int:
    """Writes a Llama's state as `load.py` reads a truth; returns the number of tensors in it."""
    shape = {
        "num_hidden_layers": llamajob.LAYERS, "num_key_value_heads": llamajob.GROUPS, "head_dim": llamajob.HEAD,
    }  # fmt: skip
    arrays: Tensors = {}
    slots = {slot: f"optim.{slot}" for slot in ("exp_avg", "exp_avg_sq")} | {"fp32_param": "param"}
    for prefix, kind in {"": "param", **{f"optimizer.state.{slot}.": kind for slot, kind in slots.items()}}.items():
        held = {key.partition(":")[2]: value for key, value in truth["tensors"].items() if key.startswith(f"{kind}:")}
        arrays |= {prefix + name: value for name, value in to_megatron(held, shape).items()}
    case: dict[str, Any] = {
        "layers": llamajob.LAYERS, "hidden": llamajob.HIDDEN, "heads": llamajob.HEADS, "groups": llamajob.GROUPS,
        "kv": llamajob.HEAD, "ffn": llamajob.INNER, "vocab": llamajob.VOCAB, "divisor": 1, "experts": 0, "bias": False,
        "norm": "RMSNorm", "tied": False, "first": None, "bucket": None, "singleton": False, "fp32": True, "tp": 1,
        "pp": 1, "ep": 1, "etp": None, "vpp": None, "world": 1, "expert_bias": False, "streams": False,
        "encoding": "fully_reshardable",
    }  # fmt: skip
    folder.mkdir()
    np.savez(folder / "truth.npz", **arrays)
    (folder / "truth.json").write_text(json.dumps({"case": case}))
    return len(arrays)


def truth_of_megatron(source: Path, shape: Mapping[str, int], *, masters_are_params: bool) -> Any:
    """Returns what a run of the collection held, as a Llama's state: tensors from the ranks' memory.

    The settings of groups are those that samerun reads from the source; their members are dealt by transformers' names.
    """
    held = _from_memory(source)
    kinds = {"optim.exp_avg": "exp_avg", "optim.exp_avg_sq": "exp_avg_sq"}
    kinds |= {"param": "fp32_param"} if masters_are_params else {"master": "fp32_param"}
    tensors: Tensors = {}
    for kind, slot in kinds.items():
        prefix = f"optimizer.state.{slot}."
        mine = {key.removeprefix(prefix): value for key, value in held.items() if key.startswith(prefix)}
        tensors |= {f"{kind}:{fqn}": value.astype(np.float32) for fqn, value in to_llama(mine, shape).items()}
    if not masters_are_params:
        weights = {key: value for key, value in held.items() if not key.startswith("optimizer.")}
        tensors |= {f"param:{fqn}": value.astype(np.float32) for fqn, value in to_llama(weights, shape).items()}
    checkpoint = open_checkpoint(source)
    groups, state = list(checkpoint.state.groups), checkpoint.state
    step = float(checkpoint.read(next(key for key in state.tensors if key.startswith("optim.step:"))))
    checkpoint.close()
    fqns = [key.partition(":")[2] for key in tensors if key.startswith("param:")]
    tensors |= {f"optim.step:{fqn}": np.float32(step) for fqn in fqns}
    ordered = [names["names"] for names in llamajob.named_groups(llamajob.build(**shape))]
    by_decay = {bool(group.hyperparameters["wd_mult"]): group.hyperparameters for group in groups}
    made = [llamajob.settings_of(by_decay[decays], ordered[number]) for number, decays in enumerate((True, False))]
    return {"tensors": tensors, "groups": made, "position": state.progress.update}


def _from_memory(source: Path) -> Tensors:
    """Returns what the ranks of a run held: of the golden ones, or of those of the collection."""
    from safetensors.torch import load_file

    if (source / "truth.npz").exists():
        return dict(np.load(source / "truth.npz"))
    return {name: value.float().numpy() for name, value in load_file(source / "TRUTH.safetensors").items()}
