"""Writes small checkpoints with the real megatron.core on CPU, and the full state of the live run beside each.

    pip install torch==2.13.0 && pip install megatron-core==0.16.1 numpy safetensors psutil pyyaml six regex pydantic
    python tests/golden/megatron/make.py OUT [CASE...]            # cases.py says which there are
    python tests/golden/megatron/make.py OUT --pack CASE...       # and puts them, packed, beside this file

A case that names a release (`release`) is for that one: 0.13.0, or 0.19.2, which wants a newer Python by its metadata
only (`pip install --no-deps --ignore-requires-python`). Ranks are forked from one process and talk over gloo. Gradients
are random numbers that depend on a parameter's name and place, the same on every data-parallel rank; the optimizer,
buffers, buckets, sharding and saving are megatron.core's own. `truth.npz` is put together from what every rank holds in
memory, never from the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import shutil
import sys
import zlib
from pathlib import Path

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
import numpy as np
import torch
import torch.distributed as dist
from cases import CASES, full_case
from fused import use_fused_adam
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.packed import pack

HERE = Path(__file__).parent
SETTINGS = ("lr", "betas", "eps", "weight_decay", "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


class OnCpu(TorchFunctionMode):
    """Puts on the CPU whatever asks for a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device", "")) or isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def stub_cuda() -> None:
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.get_rng_state = lambda *a, **k: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.synchronize = lambda *a, **k: None
    torch.cuda.set_device = lambda *a, **k: None
    torch.cuda.manual_seed = lambda *a, **k: None
    np.product = np.prod  # what 0.13 calls it


def bare(chunk):
    """Takes the wrappers off a model chunk."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def seed_of(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def build(case: dict, rank: int):
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    mpu.initialize_model_parallel(
        case["tp"],
        case["pp"],
        case["vpp"],
        expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case["etp"],
        create_gloo_process_groups=True,
    )
    dtype = torch.float32 if case["fp32"] else torch.bfloat16
    config = TransformerConfig(
        num_layers=case["layers"],
        hidden_size=case["hidden"],
        num_attention_heads=case["heads"],
        num_query_groups=case["groups"],
        kv_channels=case["kv"],
        ffn_hidden_size=case["ffn"],
        gated_linear_unit=case["gated"],
        activation_func=torch.nn.functional.silu if case["gated"] else torch.nn.functional.gelu,
        add_bias_linear=case["bias"],
        normalization=case["norm"],
        use_cpu_initialization=True,
        bf16=not case["fp32"],
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=case["tp"],
        pipeline_model_parallel_size=case["pp"],
        virtual_pipeline_model_parallel_size=case["vpp"],
        expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case["etp"] or case["tp"],
        num_moe_experts=case["experts"] or None,
        moe_layer_freq=case["freq"] or 1,
        moe_ffn_hidden_size=case["ffn"] if case["experts"] else None,
        moe_shared_expert_intermediate_size=case["shared"],
        qk_layernorm=case["qk_norm"],
        moe_router_enable_expert_bias=case["expert_bias"],
        moe_router_score_function="sigmoid" if case["expert_bias"] else "softmax",
        num_layers_in_first_pipeline_stage=case["first"],
        num_layers_in_last_pipeline_stage=case["last"],
        sequence_parallel=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=case["experts"] or None, qk_layernorm=case["qk_norm"], normalization=case["norm"]
    )
    if case["freq"]:  # layers that are not alike
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=case["norm"])
    multiple = case["divisor"] * case["tp"]
    padded = -(-case["vocab"] // multiple) * multiple
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=case["sharded"],
        overlap_grad_reduce=case["bucket"] is not None,
        bucket_size=case["bucket"],
        grad_reduce_in_fp32=True,
    )
    chunks = []
    for chunk in range(case["vpp"] or 1):
        first = (
            mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
            if case["vpp"]
            else mpu.is_pipeline_first_stage()
        )
        last = (
            mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
            if case["vpp"]
            else mpu.is_pipeline_last_stage()
        )
        model = GPTModel(
            config,
            spec,
            padded,
            16,
            first,
            last,
            share_embeddings_and_output_weights=case["tied"],
            position_embedding_type=case["positions"],
            parallel_output=True,
            vp_stage=chunk if case["vpp"] else None,
        )
        fill(model)
        model = model if case["fp32"] else Float16Module(config, model)
        chunks.append(DistributedDataParallel(config, ddp, model, disable_bucketing=chunk > 0))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            weight_decay=0.1,
            bf16=not case["fp32"],
            params_dtype=dtype,
            clip_grad=0.0,
            use_distributed_optimizer=case["sharded"],
        ),
        chunks,
    )
    return mpu, config, chunks, optimizer, padded


def fill(model) -> None:
    for name, param in model.named_parameters():
        param.data.copy_(random(name, param, "weight") * 0.1 + (1.0 if param.dim() == 1 and "weight" in name else 0.0))
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.arange(buffer.numel(), dtype=buffer.dtype) * 0.25)


def random(name: str, param, what: str):
    """Random numbers that are equal where ranks hold the same parameter, and different everywhere else."""
    from megatron.core import parallel_state as mpu

    place = [mpu.get_tensor_model_parallel_rank()] if getattr(param, "tensor_model_parallel", False) else []
    if "local_experts" in name:
        place += [mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_model_parallel_rank()]
    shared = "word_embeddings" in name or (name == "output_layer.weight" and getattr(param, "shared_embedding", False))
    where = [] if shared else [mpu.get_pipeline_model_parallel_rank()]
    generator = torch.Generator().manual_seed(
        seed_of("word" if shared else name, place, where, what, tuple(param.shape))
    )
    return torch.randn(param.shape, generator=generator)


def step(chunks, optimizer, number: int, vocab: int | None) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
        for name, param in bare(chunk).named_parameters():
            param.main_grad.copy_(random(name, param, f"grad{number}"))
            if name == "embedding.word_embeddings.weight" and vocab:  # no token looks padding rows up
                from megatron.core import parallel_state as mpu

                first = mpu.get_tensor_model_parallel_rank() * param.shape[0]
                param.main_grad[max(0, vocab - first) :] = 0
    optimizer.step()


def place(pieces: list, sharded, tensor, prefix: str) -> None:
    """Files a rank's values of one parameter by the boxes that megatron.core itself gives it."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(sharded, ShardedTensorFactory):
        built = sharded.build_fn(
            sharded.key, tensor.view(sharded.data.shape), sharded.replica_id, sharded.flattened_range
        )
        for part in flatten(built):
            place(pieces, part, part.data, prefix)
        return
    assert isinstance(sharded, ShardedTensor)
    values = tensor.detach().float().reshape(sharded.local_shape)
    while values.dim() < len(sharded.global_shape):
        values = values.unsqueeze(0)
    pieces.append(
        (prefix + sharded.key, tuple(sharded.global_shape), tuple(sharded.global_offset), values.numpy().copy())
    )


def flatten(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [item for part in value for item in flatten(part)] if isinstance(value, list) else [value]


def live_state(case: dict, chunks, optimizer, model_state: dict, rank: int) -> list:
    """Returns this rank's part of the model and optimizer, from memory."""
    pieces: list = []
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    for number, chunk in enumerate(chunks):
        sharded = model_state[f"model{number}" if case["vpp"] else "model"]
        for name, buffer in bare(chunk).named_buffers():
            found = sharded.get(name)
            if found is not None and hasattr(found, "global_shape"):
                place(pieces, found, buffer, "")
        for name, param in bare(chunk).named_parameters():
            found = sharded[name]
            place(pieces, found, param, "")
            for slot, values, start in optimizer_values(optimizers, param):
                full = torch.full((param.numel(),), float("nan"))
                full[start : start + values.numel()] = values.detach().float().reshape(-1)
                place(pieces, found, full.reshape(param.shape), f"optimizer.state.{slot}.")
    return pieces


def optimizer_values(optimizers, param):
    for one in optimizers:
        if hasattr(one, "model_param_gbuf_map"):
            if param in one.model_param_gbuf_map:
                start = one._get_model_param_range_map(param)["param"].start
                for slot, values in one._get_main_param_and_optimizer_states(param).items():
                    if slot != "step":
                        yield {"param": "fp32_param"}.get(slot, slot), values, start
            continue
        for model_group, main_group in zip(
            getattr(one, "float16_groups", []), getattr(one, "fp32_from_float16_groups", []), strict=True
        ):
            for model_param, main in zip(model_group, main_group, strict=True):
                if model_param is param:
                    yield "fp32_param", main, 0
                    for slot, values in one.optimizer.state[main].items():
                        if slot != "step":
                            yield slot, values, 0


def arguments(case: dict, padded: int, rank: int) -> argparse.Namespace:
    world = case["world"]
    return argparse.Namespace(
        world_size=world,
        tensor_model_parallel_size=case["tp"],
        pipeline_model_parallel_size=case["pp"],
        virtual_pipeline_model_parallel_size=case["vpp"],
        context_parallel_size=1,
        moe_layer_freq=case["freq"] or 1,
        expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case["etp"] or case["tp"],
        data_parallel_size=world // (case["tp"] * case["pp"]),
        num_layers=case["layers"],
        hidden_size=case["hidden"],
        num_attention_heads=case["heads"],
        num_query_groups=case["groups"],
        group_query_attention=True,
        kv_channels=case["kv"],
        ffn_hidden_size=case["ffn"],
        swiglu=case["gated"],
        position_embedding_type=case["positions"],
        add_position_embedding=case["positions"] == "learned_absolute",
        qk_layernorm=case["qk_norm"],
        moe_shared_expert_intermediate_size=case["shared"],
        add_bias_linear=case["bias"],
        normalization=case["norm"],
        num_experts=case["experts"] or None,
        moe_router_enable_expert_bias=case["expert_bias"],
        decoder_first_pipeline_num_layers=case["first"],
        decoder_last_pipeline_num_layers=case["last"],
        pipeline_model_parallel_layout=None,
        untie_embeddings_and_output_weights=not case["tied"],
        vocab_size=case["vocab"],
        padded_vocab_size=padded,
        make_vocab_size_divisible_by=case["divisor"],
        transformer_impl="local",
        bf16=not case["fp32"],
        fp16=False,
        params_dtype=torch.float32 if case["fp32"] else torch.bfloat16,
        use_distributed_optimizer=case["sharded"],
        overlap_grad_reduce=case["bucket"] is not None,
        ddp_bucket_size=case["bucket"],
        tokenizer_type="HuggingFaceTokenizer",
        global_batch_size=12,
        micro_batch_size=1,
        seq_length=16,
        consumed_train_samples=36,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        iteration=3,
        rank=rank,
        ckpt_format="torch" if case["legacy"] else "torch_dist",
    )


def save(case: dict, folder: Path, mpu, chunks, optimizer, model_state: dict, padded: int, rank: int) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    state = {
        "args": arguments(case, padded, rank),
        "checkpoint_version": 3.0,
        "iteration": 3,
        "opt_param_scheduler": {"max_lr": 0.01, "num_steps": 36, "lr_decay_style": "constant", "lr_decay_steps": 1200},
        "num_floating_point_operations_so_far": 1.5,
    }
    tp, pp = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
    dp = mpu.get_data_parallel_rank(with_context_parallel=True)
    rng = [{"random_rng_state": [tp, pp], "torch_rng_state": torch.full((8,), tp + 10 * pp, dtype=torch.uint8)}]
    if case["legacy"]:
        save_legacy(case, folder, mpu, chunks, optimizer, {**state, "rng_state": rng})
        return
    metadata = {
        "distrib_optim_sharding_type": case["encoding"],
        "singleton_local_shards": case["singleton"],
        "chained_optim_avoid_prefix": True,
    }
    if case["encoding"] is None:
        del metadata["distrib_optim_sharding_type"]
    shape, at = (case["pp"], case["tp"]), (pp, tp)
    if case["ep"] > 1:
        shape, at, dp = (*shape, mpu.get_data_parallel_world_size()), (*at, mpu.get_data_parallel_rank()), 0
    state |= model_state
    state["rng_state"] = ShardedObject("rng_state", rng, shape, at, replica_id=dp)
    sharded = {key: model_state[key] for key in model_state}
    state["optimizer"] = optimizer.sharded_state_dict(sharded, metadata=metadata)
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist"), mpu.get_data_parallel_group(with_context_parallel=True)
    )
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), strategy, content_metadata=metadata)


def save_legacy(case: dict, folder: Path, mpu, chunks, optimizer, state: dict) -> None:
    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    name += f"_{mpu.get_pipeline_model_parallel_rank():03d}" if case["pp"] > 1 else ""
    name += f"_{mpu.get_expert_model_parallel_rank():03d}" if case["ep"] > 1 else ""
    here = folder / name
    for number, chunk in enumerate(chunks):
        state[f"model{number}" if case["vpp"] else "model"] = chunk.state_dict_for_save_checkpoint()
    state["optimizer"] = optimizer.state_dict()
    here.mkdir(parents=True, exist_ok=True)
    if case["sharded"]:
        optimizer.save_parameter_state(str(here / "distrib_optim.pt"))
    if mpu.get_expert_data_parallel_rank() == 0 if case["ep"] > 1 else mpu.get_data_parallel_rank() == 0:
        torch.save(state, here / "model_optim_rng.pt")


def main(name: str, case: dict, out: Path, rank: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(case["world"]), LOCAL_RANK="0"
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=case["world"])
    if case["fused"]:
        use_fused_adam()
    with OnCpu():
        mpu, _, chunks, optimizer, padded = build(case, rank)
        for number in range(3):
            step(chunks, optimizer, number, None if case["tied"] else case["vocab"])
        options = {"singleton_local_shards": case["singleton"]}
        model_state = {
            f"model{i}" if case["vpp"] else "model": bare(chunk).sharded_state_dict(metadata=options)
            for i, chunk in enumerate(chunks)
        }
        pieces = live_state(case, chunks, optimizer, model_state, rank)
        (out / f"live{rank}.pkl").write_bytes(pickle.dumps(pieces))
        save(case, out / "iter_0000003", mpu, chunks, optimizer, model_state, padded, rank)
    dist.barrier()
    if rank == 0:
        (out / "latest_checkpointed_iteration.txt").write_text("3")
        import megatron.core

        groups = [{k: v for k, v in group.items() if k in SETTINGS} for group in optimizer.param_groups]
        facts = {"case": case, "padded_vocab": padded, "written_by": megatron.core.__version__, "groups": groups}
        (out / "truth.json").write_text(json.dumps(facts, indent=1))


def merge(case: dict, out: Path) -> None:
    full: dict[str, np.ndarray] = {}
    for rank in range(case["world"]):
        path = out / f"live{rank}.pkl"
        for key, shape, offset, values in pickle.loads(path.read_bytes()):
            array = full.setdefault(key, np.full(shape, np.nan, np.float32))
            box = array[tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))]
            known, new = ~np.isnan(box), ~np.isnan(values)
            assert (box[known & new] == values[known & new]).all(), f"ranks disagree about {key}"
            box[new] = values[new]
        path.unlink()
    assert not any(np.isnan(array).any() for array in full.values()), [k for k, a in full.items() if np.isnan(a).any()]
    np.savez_compressed(out / "truth.npz", **full)


def run(name: str, out: Path, port: int) -> None:
    case = full_case(name)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    children = []
    for rank in range(case["world"]):
        pid = os.fork()
        if pid == 0:
            try:
                main(name, case, out, rank, port)
                for writer in multiprocessing.active_children():  # megatron.core's, which would outlive the rank
                    writer.terminate()
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert not any(codes), f"{name}: ranks ended with {codes}"
    merge(case, out)


def pack_case(folder: Path) -> None:
    """Packs what a case wrote. The truth is not compressed by itself: most of its bytes are the checkpoint's."""
    with np.load(folder / "truth.npz") as arrays:
        truth = dict(arrays)
    np.savez(folder / "truth.npz", **truth)
    pack(folder, HERE / f"{folder.name}.tar.xz")


if __name__ == "__main__":
    stub_cuda()
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # before ranks are forked, which takes seconds for each otherwise

    release = megatron.core.__version__
    words = [word for word in sys.argv[1:] if word != "--pack"]
    out, names = Path(words[0]), words[1:] or [n for n in CASES if CASES[n].get("release", "0.16") in release]
    for number, name in enumerate(names):
        assert CASES[name].get("release", release) in release, f"{name} is not for {release}"
        try:
            run(name, out / name, 29_600 + os.getpid() % 1000 + number)
        except AssertionError as error:
            print(name, "FAILED", error, flush=True)
            continue
        if "--pack" in sys.argv:
            pack_case(out / name)
        print(name, "written", flush=True)
