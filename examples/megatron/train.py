"""Trains a small GPT of megatron-core on Python's own sources, and resumes on other tensor, pipeline and data ranks.

    torchrun --standalone --nproc-per-node 4 train.py --tensor-model-parallel-size 2 --train-iters 8 --save saved
    torchrun --standalone --nproc-per-node 3 train.py --micro-batch-size 2 --train-iters 40 --load saved

Model, parallelism, schedule, distributed optimizer and checkpoint are megatron-core's; flags go by the names that they
have in Megatron-LM. The lines that samerun adds are marked `# samerun`. Without a GPU `on_cpu.py` stands in for one.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    from on_cpu import use_cpu

    on_cpu = use_cpu()

from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from parts import AttentionOverParts, gather_parts, own_part
from torch import Tensor
from torch.utils.data import DataLoader

from samerun.integrations.megatron import RecordedModel, RecordedOptimizer, parallel_layout  # samerun
from samerun.train import ElasticSampler, Recorder  # samerun

sys.path.insert(0, str(Path(__file__).parents[1] / "pytorch"))
from data import IGNORE, Batch, load_text
from model import NUM_TOKENS


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--expert-model-parallel-size", type=int, default=1)
    parser.add_argument("--decoder-first-pipeline-num-layers", type=int, help="if stages are not equal")
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=22)
    parser.add_argument("--ffn-hidden-size", type=int, default=34)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--num-query-groups", type=int, default=2)
    parser.add_argument("--kv-channels", type=int, default=6)
    parser.add_argument("--num-experts", type=int, help="a mixture of experts in every layer")
    parser.add_argument("--moe-router-topk", type=int, default=2)
    parser.add_argument("--moe-router-enable-expert-bias", action="store_true", help="balance without a loss")
    parser.add_argument("--seq-length", type=int, default=24)
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=4)
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16, with float32 masters")
    parser.add_argument("--fp16", action="store_true", help="train in float16, with float32 masters and a loss scale")
    parser.add_argument("--initial-loss-scale", type=float, default=2.0**11)
    parser.add_argument("--loss-scale-window", type=int, default=6, help="updates after which the scale grows")
    parser.add_argument("--micro-batch-size", type=int, default=3)
    parser.add_argument("--global-batch-size", type=int, default=12)
    parser.add_argument("--train-iters", type=int, default=40, help="train up to this update")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--lr-warmup-samples", type=int, default=60)
    parser.add_argument("--lr-decay-samples", type=int, default=2400)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--optimizer-encoding", default="fully_reshardable", help="or dp_reshardable")
    args = parser.parse_args(words)
    args.vocab_size = NUM_TOKENS
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    args.add_bias_linear = not args.num_experts  # megatron.core 0.16.1 fails with a bias in experts that are not spread
    # Experts beside tensor parallelism need it.
    args.sequence_parallel = bool(args.num_experts) and args.tensor_model_parallel_size > 1
    return args


def make_model(args: argparse.Namespace) -> list[DistributedDataParallel]:
    """Returns this rank's chunks of the model, of which there is one."""
    stages = args.pipeline_model_parallel_size
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        gated_linear_unit=True,
        add_bias_linear=args.add_bias_linear,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=args.params_dtype,
        pipeline_dtype=args.params_dtype,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=stages,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        num_moe_experts=args.num_experts,
        moe_router_topk=args.moe_router_topk,
        # A loss that balances experts is taken over the tokens of one rank and pass: another one at another layout.
        moe_router_load_balancing_type="none",
        moe_router_enable_expert_bias=args.moe_router_enable_expert_bias,
        moe_router_dtype="fp32",
        moe_router_score_function="sigmoid" if args.moe_router_enable_expert_bias else "softmax",
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers if stages > 1 else None,
        # One denominator for the whole batch: else the gradient depends on how the batch is dealt.
        calculate_per_token_loss=True,
        # Weights that do not depend on the layout, and no kernels that need a GPU's.
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=args.num_experts, normalization="RMSNorm")
    if args.context_parallel_size > 1:
        spec.submodules.self_attention.submodules.core_attention = AttentionOverParts
    model = GPTModel(
        config,
        spec,
        args.padded_vocab_size,
        args.seq_length,
        mpu.is_pipeline_first_stage(),
        mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        parallel_output=True,
    )
    model = Float16Module(config, model) if args.bf16 or args.fp16 else model
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    return [model]


def make_optimizer(args: argparse.Namespace, model: list[DistributedDataParallel]) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.lr / 10,
        weight_decay=0.05,
        bf16=args.bf16,
        fp16=args.fp16,
        initial_loss_scale=args.initial_loss_scale,
        loss_scale_window=args.loss_scale_window,
        hysteresis=2,
        params_dtype=args.params_dtype,
        clip_grad=args.clip_grad,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, model)
    get_model_config(model[0]).grad_scale_func = optimizer.scale_loss
    return optimizer


def make_scheduler(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """The schedule counts samples, so that it does not depend on the number of ranks."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.lr / 10,
        lr_warmup_steps=args.lr_warmup_samples,
        lr_decay_steps=args.lr_decay_samples,
        lr_decay_style="cosine",
        start_wd=0.05,
        end_wd=0.05,
        wd_incr_steps=args.lr_decay_samples,
        wd_incr_style="constant",
    )


def token_losses(args: argparse.Namespace, targets: Tensor, logits: Tensor) -> Tensor:
    """Returns the loss of each token, 0 where nothing follows; `logits` are this rank's part of the vocabulary.

    Rows that pad the vocabulary are no tokens. Another TP has another number of them, and would be another model if
    the softmax counted them.
    """
    first = mpu.get_tensor_model_parallel_rank() * logits.shape[-1]
    padding = torch.arange(first, first + logits.shape[-1], device=logits.device) >= args.vocab_size
    known = targets != IGNORE
    logits = logits.float().masked_fill(padding, float("-inf"))
    return tensor_parallel.vocab_parallel_cross_entropy(logits, targets.where(known, 0)) * known


def forward_step(args: argparse.Namespace, batches: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    positions = torch.arange(args.seq_length).expand_as(batch.inputs)
    inputs, targets, positions = (own_part(tensor) for tensor in (batch.inputs, batch.targets, positions))
    output = model(inputs, positions, None)

    def loss_sum(logits: Tensor, non_loss_data: bool = False) -> Any:
        losses = token_losses(args, targets, logits)
        if non_loss_data:
            whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
            losses, whole = gather_parts(losses), gather_parts(whole[..., : args.vocab_size].float())
            return losses.sum(1) / (batch.targets != IGNORE).sum(1), whole
        total = losses.sum()
        return total, (targets != IGNORE).sum().int(), total.detach()

    return output, loss_sum


def own_tokens(batch: Batch) -> int:
    return int((own_part(batch.targets) != IGNORE).sum())


def evaluate(args: argparse.Namespace, model: Any, batch: Batch) -> dict[str, Tensor]:
    """Runs fixed examples through the stages; every rank returns what the last one found."""
    found = get_forward_backward_func()(
        forward_step_func=partial(forward_step, args),
        data_iterator=iter([batch]),
        model=model,
        num_microbatches=1,
        seq_length=args.seq_length,
        micro_batch_size=len(batch.ids),
        forward_only=True,
        collect_non_loss_data=True,
    )
    losses, logits = found[0] if found else (torch.empty(len(batch.ids)), torch.empty(*batch.inputs.shape, NUM_TOKENS))
    logits = logits.contiguous()
    for tensor in (losses, logits):
        dist.broadcast(tensor, mpu.get_pipeline_model_parallel_last_rank(), mpu.get_pipeline_model_parallel_group())
    return {"losses": losses, "logits": logits}


def random_state() -> dict[str, Any]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def sharded_random_state(value: list[Any]) -> ShardedObject:
    """One state for each place along PP and TP, as in Megatron-LM."""
    shape = (mpu.get_pipeline_model_parallel_world_size(), mpu.get_tensor_model_parallel_world_size())
    place = (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank())
    replica = mpu.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", value, shape, place, replica_id=replica)


def sharded_weights(model: list[DistributedDataParallel], metadata: Any) -> dict[str, Any]:
    """Returns the state of each chunk under the name that Megatron-LM has for it."""
    names = ["model"] if len(model) == 1 else [f"model{chunk}" for chunk in range(len(model))]
    return {name: chunk.module.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, model, strict=True)}


def save(args: argparse.Namespace, model: Any, optimizer: Any, scheduler: Any, sampler: Any) -> None:
    metadata = {"distrib_optim_sharding_type": args.optimizer_encoding, "chained_optim_avoid_prefix": True}
    done = sampler.committed
    recorded = vars(args) | {
        "swiglu": True,
        "normalization": "RMSNorm",
        "transformer_impl": "local",
        "use_distributed_optimizer": True,
        "world_size": dist.get_world_size(),
        "iteration": done.update,
        "consumed_train_samples": done.samples,
        "load": None,
        "save": None,
    }
    weights = sharded_weights(model, metadata)
    state = {
        "args": argparse.Namespace(**recorded),
        "checkpoint_version": 3.0,
        "iteration": done.update,
        **weights,
        "optimizer": optimizer.sharded_state_dict(weights, metadata=metadata),
        "opt_param_scheduler": scheduler.state_dict(),
        "rng_state": sharded_random_state([random_state()]),
        "sampler": sampler.state_dict(),  # samerun
    }
    folder = args.save / f"iter_{done.update:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist", 1), mpu.get_data_parallel_group(with_context_parallel=True)
    )
    dist_checkpointing.save(state, str(folder), strategy, content_metadata=metadata)
    if dist.get_rank() == 0:
        (args.save / "latest_checkpointed_iteration.txt").write_text(str(done.update))


def load(args: argparse.Namespace, model: Any, optimizer: Any, scheduler: Any, sampler: Any) -> None:
    tracker = args.load / "latest_checkpointed_iteration.txt"
    folder = args.load / f"iter_{int(tracker.read_text()):07d}" if tracker.exists() else args.load
    common = dist_checkpointing.load_common_state_dict(str(folder))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    saved = common["args"]
    weights = sharded_weights(model, metadata)
    state = weights | {
        "optimizer": optimizer.sharded_state_dict(sharded_weights(model, metadata), is_loading=True, metadata=metadata)
    }
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    keeps_streams = all(getattr(saved, degree) == getattr(args, degree) for degree in degrees)
    if keeps_streams:  # other degrees start new ones, as in Megatron-LM
        state["rng_state"] = sharded_random_state([])
    state = dist_checkpointing.load(state, str(folder))
    for name, chunk in zip(weights, model, strict=True):
        chunk.module.load_state_dict(state[name])
    with torch.no_grad():  # in fp32 the flat state lies in the parameters themselves
        optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["opt_param_scheduler"])
    sampler.load_state_dict(state["sampler"])  # samerun
    if keeps_streams:
        set_random_state(state["rng_state"][0])


def main() -> None:
    args = parse_args()
    recorder = Recorder.from_env()  # samerun
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        create_gloo_process_groups=True,
    )
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    model = make_model(args)
    optimizer = make_optimizer(args, model)
    scheduler = make_scheduler(args, optimizer)
    logical = RecordedModel(model, vocab_size=args.vocab_size)  # samerun
    optimizer = RecordedOptimizer(optimizer, logical)  # samerun
    text, fixed = load_text(args.seq_length, "tiny")
    sampler = ElasticSampler(  # samerun: ranks of one tensor or pipeline group work on the same samples
        len(text),
        global_batch=args.global_batch_size,
        replicas=mpu.get_data_parallel_world_size(),
        replica=mpu.get_data_parallel_rank(),
        max_microbatch=args.micro_batch_size,
        seed=args.seed,
        last_batch="drop",
    )
    loader = DataLoader(text, batch_sampler=sampler, collate_fn=text.collate, generator=torch.Generator())
    recorder.attach(  # samerun
        logical, optimizer, scheduler, optimizer.scaler, sampler=sampler, layout=parallel_layout()
    )
    if args.load:
        load(args, model, optimizer, scheduler, sampler)
    recorder.loaded(update=sampler.committed.update)  # samerun
    recorder.evaluate(lambda: evaluate(args, model, fixed))  # samerun

    forward_backward = get_forward_backward_func()
    for update in sampler.updates(loader, until=args.train_iters):  # samerun
        if recorder.finished:  # samerun
            break
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = [microbatch.batch for microbatch in update]
        tokens = sum(batch.valid_tokens for batch in batches)
        losses = forward_backward(
            forward_step_func=partial(forward_step, args),
            data_iterator=iter(batches),
            model=model,
            num_microbatches=update.passes,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        weight = sum(own_tokens(batch) for batch in batches)  # of this rank's part of the sequences
        loss = sum(losses) / max(1, weight) if losses else None  # the last stage alone knows it
        ids = [sample for batch in batches for sample in batch.ids]  # samerun: what the loader really gave
        recorder.samples(ids, loss=loss, tokens=tokens, weight=weight)  # samerun
        made, grad_norm, _ = optimizer.step()
        if made:  # a loss scale skips updates with infinities
            scheduler.step(args.global_batch_size)
        done = sampler.commit().update  # samerun
        if done % 5 == 0:
            if loss is not None and dist.get_rank() == dist.get_world_size() - 1:
                print(f"update {done}: loss {loss:.5f}, gradient {grad_norm or 0:.5f}", flush=True)
            recorder.boundary("log", done)  # samerun
        if args.save and done == args.train_iters and recorder.may_save:  # samerun: may_save
            save(args, model, optimizer, scheduler, sampler)
    recorder.close()  # samerun
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
