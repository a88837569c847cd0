"""Faults of the script that launches the job."""

from __future__ import annotations

from samerun.demo.faults.catalog import Kind, in_launcher

in_launcher(
    "world-size",
    Kind.BATCH,
    "SR-JOB-WORLD",
    story="the launcher starts another number of processes than the plan says",
    replace=(("world_size=$2 layout=$3", "world_size=2 layout=dp_shard=2"),),
)
in_launcher(
    "other-layout",
    Kind.BATCH,
    "SR-JOB-LAYOUT",
    story="as many processes as planned, but replicated instead of sharded",
    replace=(("world_size=$2 layout=$3", 'world_size=$2 layout="dp_replicate=$2"'),),
)
in_launcher(
    "batch-drift",
    Kind.BATCH,
    "SR-JOB-BATCH",
    story="microbatch and accumulation are kept, so the global batch shrinks with the number of ranks",
    replace=(('--global-batch "$global_batch"', '--global-batch "$((global_batch * world_size / 4))"'),),
)
in_launcher(
    "accumulation",
    Kind.BATCH,
    "SR-JOB-BATCH",
    story="another microbatch than planned, and with it another number of accumulation passes",
    replace=(('--max-microbatch "$max_microbatch"', "--max-microbatch 1"),),
)
