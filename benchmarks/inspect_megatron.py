"""Times opening Megatron checkpoints of many flat chunks: metadata of real shape, with data files full of zeros.

    python benchmarks/inspect_megatron.py [CHUNKS...]

The optimizer is `dp_reshardable` on one model-parallel rank of 64 data-parallel ranks: a chunk for every parameter on
every rank that holds a part of it, three slots. Prints chunks, CPU seconds to open, and microseconds per chunk.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from inspect_dcp import Chunks, write_metadata

from samerun.formats.detect import open_checkpoint
from samerun.formats.torchfile.nodes import Instance, Named
from samerun.formats.torchfile.write import Pieces, add_archive

_DP = 64
_WIDTH = 16
_ITEM = 8192  # bytes of an item
_NAME = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0."


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Returns the model's tensors, layers stacked."""
    width = _WIDTH
    return {
        "embedding.word_embeddings.weight": (64, width),
        "decoder.layers.self_attention.linear_proj.weight": (layers, width, width),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (layers, width),
        "decoder.layers.self_attention.linear_qkv.weight": (layers, 3 * width, width),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (layers, width),
        "decoder.layers.mlp.linear_fc1.weight": (layers, 4 * width, width),
        "decoder.layers.mlp.linear_fc2.weight": (layers, width, 4 * width),
        "decoder.final_layernorm.weight": (width,),
        "output_layer.weight": (64, width),
    }


def flat_chunks(layers: int) -> tuple[int, list[tuple[int, int]]]:
    """Returns the bucket's length, and start and size of every chunk, in Megatron's own order."""
    from samerun.formats.mcore.flat import align

    single = shapes(layers)
    order = [single["output_layer.weight"], single["decoder.final_layernorm.weight"]]
    for _ in range(layers):
        # of the local specification, last registered first: fc2, fc1, pre-MLP norm, qkv, proj, input norm
        order += [single[f"decoder.layers.{name}"][1:] for name in (
            "mlp.linear_fc2.weight", "mlp.linear_fc1.weight", "mlp.linear_fc1.layer_norm_weight",
            "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight",
            "self_attention.linear_qkv.layer_norm_weight",
        )]  # fmt: skip
    order.append(single["embedding.word_embeddings.weight"])
    starts: list[tuple[int, int]] = []
    position = 0
    for shape in order:
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        start = align(position)
        starts.append((start, start + size))
        position = start + size
    share = -(-position // _DP)
    cuts = [
        (max(a, low), min(b, low + share) - max(a, low))
        for a, b in starts
        for low in range(a // share * share, b, share)
        if min(b, low + share) > max(a, low)
    ]
    return position, cuts


def write(root: Path, layers: int) -> int:
    """Writes a checkpoint. Returns its number of chunks."""
    root.mkdir()
    at, count = 0, 0

    def place(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> Chunks:
        nonlocal at, count
        placed = [(offsets, sizes, "__0_0.distcp", at + _ITEM * n) for n, (offsets, sizes) in enumerate(boxes)]
        at += _ITEM * len(placed)
        count += len(placed)
        return placed

    def tensors() -> Iterator[tuple[str, tuple[int, ...], str, Chunks]]:
        for name, shape in shapes(layers).items():
            if ".layers." in name:
                rest = (0,) * (len(shape) - 1)
                boxes = [((layer, *rest), (1, *shape[1:])) for layer in range(layers)]
            else:
                boxes = [((0,) * len(shape), shape)]
            yield name, shape, "bfloat16", place(boxes)
        length, cuts = flat_chunks(layers)
        for slot in ("param", "exp_avg", "exp_avg_sq"):
            yield _NAME + slot, (length,), "float32", place(((start,), (size,)) for start, size in cuts)

    write_metadata(root, tensors(), _ITEM)
    with open(root / "__0_0.distcp", "wb") as file:
        file.truncate(at)
    args = {"world_size": _DP, "num_layers": layers, "vocab_size": 64, "transformer_impl": "local"}
    args |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "use_distributed_optimizer": True}
    common = Pieces()
    add_archive(common, {"args": Instance(Named("argparse", "Namespace"), args), "iteration": 1}, "common")
    file = common.file("common.pt")
    (root / "common.pt").write_bytes(b"".join(literal.content for literal in file.literals))
    (root / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return count


def main(sizes: list[int]) -> None:
    """Measures each size once, after one that warms up."""
    print("chunks  seconds  us/chunk")
    for number, wanted in enumerate([1_000, *sizes]):
        with tempfile.TemporaryDirectory() as folder:
            count = write(Path(folder) / "iter_0000001", max(1, wanted // 24))
            start = time.process_time()
            checkpoint = open_checkpoint(Path(folder) / "iter_0000001")
            seconds = time.process_time() - start
            placed = sum(key.startswith(("master:", "optim.")) for key in checkpoint.state.tensors)
            if not placed:
                raise SystemExit("flat buffers were not placed")
            checkpoint.close()
            if number:
                print(f"{count:6}  {seconds:7.2f}  {1e6 * seconds / count:8.1f}")


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [12_000, 50_000, 100_000])
