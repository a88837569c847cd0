"""What a Megatron run says about itself: the saved `args`, as numbers that a reader needs.

Names are those of Megatron-LM's command line (0.13 to 0.19). Where `args` were not saved (training loops of their own
over megatron.core), the degrees are taken from what else shows them, and said to be inferred.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samerun.core.mesh import Layout
from samerun.core.state import RecordedProgress, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Degrees of parallelism and the shape of the model. `vpp` is the number of model chunks per pipeline rank.

    `dp` counts the ranks that see different samples. `tp`, `pp` and `ep` are 1 where nothing says otherwise. `inferred`
    says from what the degrees are known when `args` are missing.
    """

    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    world_size: int | None = None
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    inferred: str | None = None

    @property
    def dp(self) -> int | None:
        """Number of batch replicas, None where the world size is unknown."""
        if self.world_size is None or self.world_size % (self.tp * self.pp * self.cp):
            return None
        return self.world_size // (self.tp * self.pp * self.cp)

    def count(self, name: str) -> int | None:
        """Returns an argument that is a number of things, None where it is absent or no such number."""
        return as_count(self.args.get(name))

    def flag(self, name: str) -> bool:
        """Whether an argument is set."""
        return self.args.get(name) is True

    @property
    def gated(self) -> bool:
        """Whether the first linear layer of an MLP holds a gate beside the projection."""
        return self.flag("swiglu") or self.flag("gated_linear_unit") or self.flag("quick_geglu")

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weight."""
        return self.args.get("untie_embeddings_and_output_weights") is False

    @property
    def local_spec(self) -> bool | None:
        """Whether layers are Megatron's own modules (True) or Transformer Engine's (False)."""
        name = self.args.get("transformer_impl")
        return None if name not in ("local", "transformer_engine") else name == "local"

    @property
    def shards_optimizer(self) -> bool:
        """Whether the optimizer state is divided over data-parallel ranks."""
        return self.flag("use_distributed_optimizer") or self.flag("use_megatron_fsdp")

    def topology(self) -> Topology:
        """Returns the layout of the ranks that wrote the checkpoint."""
        dp = self.dp
        if dp is None:
            return Topology(world_size=self.world_size, inferred=self.inferred)
        shard = self.shards_optimizer or (self.cp * self.tp) % self.ep > 0
        ep = self.ep if (dp * self.cp * self.tp) % self.ep == 0 else 1
        layout = Layout(
            pp=self.pp,
            dp_replicate=1 if shard else dp,
            dp_shard=dp if shard else 1,
            cp=self.cp,
            tp=self.tp,
            ep=ep,
        )
        return Topology(world_size=self.world_size, layout=layout, inferred=self.inferred)

    def progress(self, iteration: Any) -> RecordedProgress:
        """Returns the counters: Megatron's iteration, and its samples in one global order."""
        update = iteration if is_whole(iteration) else self.args.get("iteration")
        samples = self.args.get("consumed_train_samples")
        return RecordedProgress(
            update=update if is_whole(update) else None, samples=samples if is_whole(samples) else None
        )

    def data(self) -> dict[str, Any]:
        """Returns the position in the data, which Megatron keeps as one global number of samples."""
        names = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
        found = {name: self.args[name] for name in names if is_whole(self.args.get(name))}
        return {"megatron": found} if "consumed_train_samples" in found else {}


def parse_run(args: Any, degrees: Mapping[str, int] | None = None) -> Run:
    """Reads saved `args`. `degrees` (`tp`, `pp`, ...) count where `args` are missing."""
    if not isinstance(args, dict) or not args:
        known = degrees or {}
        return Run(
            world_size=known.get("world_size"),
            tp=known.get("tp", 1),
            pp=known.get("pp", 1),
            etp=known.get("tp", 1),
            inferred="from the shards of saved objects" if known else None,
        )
    named: dict[str, Any] = {str(name): value for name, value in args.items()}

    def degree(name: str) -> int:
        return as_count(named.get(name)) or 1

    pp, tp = degree("pipeline_model_parallel_size"), degree("tensor_model_parallel_size")
    ep = degree("expert_model_parallel_size")
    return Run(
        args=named,
        world_size=as_count(named.get("world_size")),
        tp=tp,
        pp=pp,
        vpp=degree("virtual_pipeline_model_parallel_size") if pp > 1 else 1,
        cp=degree("context_parallel_size"),
        ep=ep,
        etp=as_count(named.get("expert_tensor_parallel_size")) or tp,
    )


def as_count(value: Any) -> int | None:
    """Returns a whole number above zero, None for anything else."""
    return value if is_whole(value) and 0 < value < 1 << 40 else None


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number that is not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
