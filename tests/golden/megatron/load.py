"""Loads checkpoints with the real megatron.core on CPU, at any layout, and compares the live run with a truth.

    python tests/golden/megatron/load.py CHECKPOINT TRUTH LAYOUT [LAYOUT...]

`CHECKPOINT` is what `--load` names, `TRUTH` a folder that `make.py` wrote, `LAYOUT` looks like `tp=2,pp=1,dp=3,ep=1`;
`native` loads what lies in `TRUTH` itself, at the layout it has (a control). Every weight, master and moment that the
ranks hold after loading is put together by megatron.core's own boxes and compared bit by bit; padding of the vocabulary
must be zero. Then one update is made with gradients that depend on the global element alone, and its result must be the
same at all layouts. Prints a line of JSON per layout. With MEGATRON_TORCH_ADAM=1 in the environment the optimizer is
torch's AdamW, which megatron.core 0.16.1 falls back to where neither Apex nor Transformer Engine is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import make
import numpy as np
import torch
import torch.distributed as dist
from cases import DEFAULTS
from fused import use_fused_adam


def case_at(facts: dict, layout: dict[str, int]) -> dict:
    """Returns the case of a run at another layout, always with the distributed optimizer."""
    tp, pp, dp = (layout.get(axis, 1) for axis in ("tp", "pp", "dp"))
    same = all(layout.get(axis, 1) == (facts[axis] or 1) for axis in ("tp", "pp"))
    new = {
        "tp": tp,
        "pp": pp,
        "ep": layout.get("ep", 1),
        "etp": layout.get("etp"),
        "vpp": layout.get("vpp"),
        "world": tp * pp * dp,
    }
    first = layout.get("first", facts["first"] if same else None)
    return {**facts, **new, "first": first, "sharded": True, "bucket": None, "legacy": False}


def gradient(sharded, shape: tuple[int, ...], number: int) -> np.ndarray:
    """Returns a rank's part of a gradient that is the same number for a global element at every layout."""
    values = np.zeros(sharded.local_shape, np.float32)
    grid = [
        np.arange(offset, offset + size, dtype=np.float64).reshape([-1 if i == axis else 1 for i in range(len(shape))])
        for axis, (offset, size) in enumerate(zip(sharded.global_offset, shape, strict=True))
    ]
    phase = sum((grid[axis] * (0.37 + 0.61 * axis) for axis in range(len(shape))), np.zeros(shape))
    values[...] = np.sin(phase + number + make.seed_of(sharded.key) % 97).reshape(sharded.local_shape)
    return values


def set_gradients(param, sharded, target: torch.Tensor, number: int) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(sharded, ShardedTensorFactory):
        built = sharded.build_fn(sharded.key, target.view(sharded.data.shape), sharded.replica_id, None)
        for part in make.flatten(built):
            set_gradients(param, part, part.data, number)
        return
    lead = len(sharded.global_shape) - len(sharded.local_shape)
    shape = (*(1,) * lead, *sharded.local_shape)
    target.copy_(torch.from_numpy(gradient(sharded, shape, number)).view(target.shape))


def load(folder: Path, mpu, chunks, optimizer, case: dict, *, streams: bool):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    common = dist_checkpointing.load_common_state_dict(str(folder))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    names = [f"model{i}" if case["vpp"] else "model" for i in range(len(chunks))]
    model_state = {n: make.bare(c).sharded_state_dict(metadata=metadata) for n, c in zip(names, chunks, strict=True)}
    keep = {n: make.bare(c).sharded_state_dict(metadata=metadata) for n, c in zip(names, chunks, strict=True)}
    state = dict(model_state)
    state["optimizer"] = optimizer.sharded_state_dict(dict(keep), is_loading=True, metadata=metadata)
    if streams:
        shape = (case["pp"], case["tp"])
        at = (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank())
        dp = mpu.get_data_parallel_rank(with_context_parallel=True)
        if case["ep"] > 1:
            shape, at, dp = (*shape, mpu.get_data_parallel_world_size()), (*at, mpu.get_data_parallel_rank()), 0
        state["rng_state"] = ShardedObject("rng_state", [], shape, at, replica_id=dp)
    loaded = dist_checkpointing.load(state, str(folder))
    for name, chunk in zip(names, chunks, strict=True):
        make.bare(chunk).load_state_dict(loaded[name], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])
    return loaded, keep


def rank_main(case: dict, folder: Path, out: Path, rank: int, port: int, same_tp_pp: bool) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(case["world"]), LOCAL_RANK="0"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=case["world"])
    with make.OnCpu():
        mpu, _, chunks, optimizer, _ = make.build(case, rank)
        make.step(chunks, optimizer, 99, None)  # what is loaded must replace something
        loaded, shards = load(folder, mpu, chunks, optimizer, case, streams=same_tp_pp)
        torch.save(make.live_state(case, chunks, optimizer, shards, rank), out / f"loaded{rank}.pt")
        for name, chunk in zip(shards, chunks, strict=True):
            chunk.zero_grad_buffer()
            for key, param in make.bare(chunk).named_parameters():
                set_gradients(param, shards[name][key], param.main_grad, 3)
        optimizer.step()
        torch.save(make.live_state(case, chunks, optimizer, shards, rank), out / f"stepped{rank}.pt")
    if rank == 0:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        facts = {
            "iteration": loaded.get("iteration"),
            "args": loaded.get("args") is not None,
            "samples": getattr(loaded.get("args"), "consumed_train_samples", None),
            "schedule": loaded.get("opt_param_scheduler"),
            "rng": loaded.get("rng_state"),
            "groups": groups,
            "step": sorted({group.get("step", -1) for group in groups}),
        }
        torch.save(facts, out / "facts.pt")
    dist.barrier()


def gather(out: Path, what: str, world: int) -> dict[str, np.ndarray]:
    full: dict[str, np.ndarray] = {}
    for rank in range(world):
        for key, shape, offset, values in torch.load(out / f"{what}{rank}.pt", weights_only=False):
            array = full.setdefault(key, np.full(shape, np.nan, np.float32))
            box = array[tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))]
            known, new = ~np.isnan(box), ~np.isnan(values)
            assert (box[known & new] == values[known & new]).all(), f"ranks disagree about {key}"
            box[new] = values[new]
    return full


def compare(found: dict[str, np.ndarray], truth: dict[str, np.ndarray], rows: int) -> list[str]:
    """Returns what differs. Of vocabulary tensors the first `rows` must agree."""
    wrong = [f"{key} is only on one side" for key in sorted(set(found) ^ set(truth))]
    for key in sorted(set(found) & set(truth)):
        a, b = found[key], truth[key]
        if "word_embeddings" in key or "output_layer" in key:
            a, b = a[:rows], b[:rows]
        if a.shape != b.shape or not np.array_equal(a, b):
            wrong.append(
                f"{key} differs" + (f" in {(a != b).sum()} of {a.size}" if a.shape == b.shape else " in shape")
            )
    return wrong


def run(folder: Path, case: dict, port: int, same_tp_pp: bool) -> tuple[dict, dict, dict]:
    """Loads at one layout in forked ranks. Returns the loaded values, those after an update, and facts."""
    with tempfile.TemporaryDirectory() as scratch:
        out, children = Path(scratch), []
        for rank in range(case["world"]):
            pid = os.fork()
            if pid == 0:
                try:
                    rank_main(case, folder, out, rank, port, same_tp_pp)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        facts = torch.load(out / "facts.pt", weights_only=False)
        return gather(out, "loaded", case["world"]), gather(out, "stepped", case["world"]), facts


def warm() -> None:
    """Imports what every rank needs before ranks are forked."""
    import megatron.core.dist_checkpointing.serialization
    import megatron.core.dist_checkpointing.strategies.fully_parallel
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    if not os.environ.get("MEGATRON_TORCH_ADAM"):
        use_fused_adam()


def read_truth(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Returns the case of a run and its full state, as `make.py` or the corpus of real runs keeps them."""
    if (folder / "truth.json").exists():
        case = json.loads((folder / "truth.json").read_text())["case"]
        return {**DEFAULTS, **case}, dict(np.load(folder / "truth.npz"))
    from safetensors.torch import load_file

    layout = json.loads((folder / "TRUTH.json").read_text())["layout"]
    model = {"layers": 4, "hidden": 32, "heads": 4, "groups": 2, "kv": 8, "ffn": 48, "vocab": 100, "divisor": 8}
    degrees = {axis: layout.get(axis) or 1 for axis in ("tp", "pp", "ep")}
    case = {**DEFAULTS, **model, **degrees, "experts": 4 if "moe" in folder.name else 0}
    case |= {"vpp": layout.get("vpp"), "world": layout["world"], "encoding": "?"}
    return case, {name: value.numpy() for name, value in load_file(folder / "TRUTH.safetensors").items()}


def stored_rows(folder: Path) -> int:
    """Returns how many rows of the vocabulary a checkpoint holds; a job's padding comes beyond, or the end is cut."""
    from torch.distributed.checkpoint import FileSystemReader

    tensors = FileSystemReader(folder).read_metadata().state_dict_metadata
    return tensors["embedding.word_embeddings.weight"].size[0]


def main(arguments: argparse.Namespace) -> int:
    warm()
    made, truth = read_truth(arguments.truth)
    facts = {"case": made}
    first, wrong = None, 0
    for number, text in enumerate(arguments.layouts):
        native = text.startswith("native")
        root = arguments.truth if native else arguments.checkpoint
        folder = next(root.glob("iter_*"))
        given = {key: int(value) for key, value in (pair.split("=") for pair in text.split(",") if "=" in pair)}
        layout = given or {axis: facts["case"][axis] or 1 for axis in ("tp", "pp", "ep")}
        if native:
            layout = {axis: made[axis] for axis in ("tp", "pp", "ep", "etp", "vpp") if made[axis]}
            layout["dp"] = made["world"] // (made["tp"] * made["pp"])
        case = case_at(facts["case"], layout)
        if native:
            case["bucket"] = facts["case"]["bucket"]
        same = all((facts["case"][axis] or 1) == case[axis] for axis in ("tp", "pp"))
        same = same and facts["case"].get("streams", True)  # a run of another framework has none that Megatron asks for
        line: dict = {"layout": text}
        try:
            loaded, stepped, about = run(folder, case, arguments.port + number, same)
            rows = min(stored_rows(folder), loaded["embedding.word_embeddings.weight"].shape[0])
            line |= {"differences": compare(loaded, truth, rows), "tensors": len(loaded), "step": about["step"]}
            line |= {"iteration": about["iteration"], "samples": about["samples"], "schedule": about["schedule"]}
            line["rng"] = about["rng"] is not None
            line["groups"] = [[g["lr"], g["weight_decay"], g["is_expert_parallel"]] for g in about["groups"]]
            names = ("lr", "betas", "eps", "weight_decay", "wd_mult")
            line["settings"] = [{name: g.get(name) for name in names} for g in about["groups"]]
            beyond = [k for k, v in loaded.items() if v.shape[0] > rows and ("word_emb" in k or "output_l" in k)]
            line["padding"] = {"rows": rows, "zero": all(not loaded[k][rows:].any() for k in beyond)}
            if first is None:
                # the control, or the first layout, is what all others are compared with
                first = (stepped, rows)
            line["update"] = compare(stepped, first[0], min(rows, first[1]))
            wrong += bool(line["differences"] or line["update"] or not (native or line["padding"]["zero"]))
        except (RuntimeError, AssertionError) as error:
            line["error"] = str(error)
            wrong += 1
        print(json.dumps(line, default=repr), flush=True)
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("truth", type=Path)
    parser.add_argument("layouts", nargs="+")
    parser.add_argument("--port", type=int, default=29_700)
    make.stub_cuda()
    sys.exit(main(parser.parse_args()))
