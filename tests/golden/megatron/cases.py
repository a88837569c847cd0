"""The small runs that `make.py` knows. `world` ranks; what is not named is as in `DEFAULTS`."""

from __future__ import annotations

from typing import Any

SMALL = dict(layers=2, hidden=12, heads=4, groups=2, kv=3, ffn=10, vocab=29, divisor=4, experts=0)
TINY = dict(hidden=8, ffn=6, vocab=13)
OLD = dict(TINY, gated=False, positions="learned_absolute")
DEFAULTS = dict(
    SMALL,
    tp=1,
    pp=1,
    vpp=None,
    ep=1,
    etp=None,
    gated=True,
    bias=False,
    norm="RMSNorm",
    qk_norm=False,
    positions="rope",
    freq=None,
    tied=False,
    first=None,
    last=None,
    bucket=None,
    singleton=False,
    fp32=False,
    fused=False,
    expert_bias=False,
    shared=None,
)

# Kept here as directories, or packed: all except those of the last table.
KEPT: dict[str, dict[str, Any]] = {
    "fr_tp2pp2": dict(tp=2, pp=2, world=4, encoding="fully_reshardable", layers=4),
    "dpr_buckets_dp2": dict(world=2, encoding="dp_reshardable", bucket=700, layers=3),
    "lg_dist_tied_pp2_dp2": dict(pp=2, world=4, encoding="legacy", tied=True, layers=3, first=1, bias=True),
    "lg_moe_tp2ep2": dict(tp=2, ep=2, world=4, encoding="legacy", experts=4),
    "zgs_tp2dp3": dict(TINY, tp=2, world=6, encoding="dp_zero_gather_scatter", bias=True, norm="LayerNorm"),
    "fr_moe_tp2ep3": dict(TINY, tp=2, ep=3, world=6, encoding="fully_reshardable", experts=6),
    "dpr_moe_ep2dp4": dict(TINY, ep=2, world=4, encoding="dp_reshardable", experts=4, expert_bias=True),
    "dpr_vpp_pp2dp3": dict(TINY, pp=2, vpp=2, world=6, encoding="dp_reshardable", layers=4),
    "fr_vpp_pp2dp3": dict(TINY, fused=True, pp=2, vpp=2, world=6, encoding="fully_reshardable", layers=4),
    "fr_shifted_pp2dp3": dict(
        TINY, fused=True, pp=2, vpp=2, world=6, encoding="fully_reshardable", layers=4, tied=True
    ),
    "lg_vpp_pp2dp3": dict(TINY, pp=2, vpp=2, world=6, encoding="legacy", layers=4),
    "fsms13_tp2dp3": dict(TINY, release="0.13", fused=True, tp=2, world=6, encoding="fully_sharded_model_space"),
    "fsms13_pp2dp3": dict(
        TINY,
        release="0.13",
        fused=True,
        pp=2,
        world=6,
        encoding="fully_sharded_model_space",
        tied=True,
        layers=3,
        first=1,
    ),
    "lg13_tp2dp3": dict(TINY, release="0.13", fused=True, tp=2, world=6, encoding="legacy"),
    "dpr19_dp3": dict(TINY, release="0.19", world=3, encoding="dp_reshardable", bias=True, norm="LayerNorm"),
    "fr19_pp2tp2": dict(
        TINY, fused=True, release="0.19", tp=2, pp=2, world=4, encoding="fully_reshardable", layers=3, first=1
    ),
    "dpr19_moe_ep3": dict(TINY, release="0.19", ep=3, world=3, encoding="dp_reshardable", experts=3),
    "lg19_vpp_pp2dp3": dict(TINY, release="0.19", pp=2, vpp=2, world=6, encoding="legacy", layers=4),
}
OTHERS: dict[str, dict[str, Any]] = {
    "dpr_tp2pp2": dict(tp=2, pp=2, world=4, encoding="dp_reshardable", layers=4),
    "dpr_dp3": dict(world=3, encoding="dp_reshardable", bias=True, norm="LayerNorm"),
    "dpr_tied_pp2_dp2": dict(pp=2, world=4, encoding="dp_reshardable", tied=True, layers=3, first=1),
    "dpr_vpp_pp2": dict(pp=2, vpp=2, world=2, encoding="dp_reshardable", layers=4),
    "fr_moe_tp2ep2": dict(tp=2, ep=2, world=4, encoding="fully_reshardable", experts=4),
    "dpr_moe_tp2ep2": dict(tp=2, ep=2, world=4, encoding="dp_reshardable", experts=4),
    "dpr_moe_ep2_etp1": dict(tp=2, ep=2, etp=1, world=4, encoding="dp_reshardable", experts=6, expert_bias=True),
    "dpzero_tp2dp2": dict(tp=2, world=4, encoding="dp_zero_gather_scatter"),
    "plain_tp2pp2": dict(tp=2, pp=2, world=4, encoding=None, layers=4),
    "singleton_dpr_tp2": dict(tp=2, world=2, encoding="dp_reshardable", singleton=True),
    "fp32_fr_tp2": dict(tp=2, world=2, encoding="fully_reshardable", fp32=True),
    "lg_dist_tp2pp2": dict(tp=2, pp=2, world=4, encoding="legacy", layers=4),
    "lg_moe_tp2pp2ep2": dict(tp=2, pp=2, ep=2, world=8, encoding="legacy", experts=4, layers=4),
    "lg_plain_tp2pp2": dict(tp=2, pp=2, world=4, encoding="legacy-plain", layers=4),
    "lg_buckets_dp2": dict(world=2, encoding="legacy", bucket=700, layers=3),
    "fr19_tied_pp2dp3": dict(
        TINY, release="0.19", fused=True, pp=2, vpp=2, world=6, encoding="fully_reshardable", layers=4, tied=True
    ),
    "dpr_tp3_gelu": dict(
        OLD, tp=3, world=3, heads=6, groups=3, ffn=9, encoding="dp_reshardable", norm="LayerNorm", bias=True
    ),
    "dpr_pp3_uneven_tied": dict(
        TINY, pp=3, world=3, layers=5, first=1, last=1, tied=True, encoding="dp_reshardable", qk_norm=True
    ),
    "dpr_shared_tp2ep2": dict(TINY, tp=2, ep=2, world=4, experts=4, shared=6, encoding="dp_reshardable"),
    "lg_shared_ep2": dict(TINY, ep=2, world=2, experts=4, shared=6, encoding="legacy"),
    "fr_freq_ep2": dict(TINY, ep=2, world=4, layers=3, experts=4, freq=[0, 1, 1], encoding="fully_reshardable"),
    "lg_freq_pp2ep2": dict(TINY, pp=2, ep=2, world=4, layers=4, experts=4, freq=[0, 1, 0, 1], encoding="legacy"),
    "lg_vpp_tied_buckets": dict(
        OLD, pp=2, vpp=2, world=4, layers=4, tied=True, bucket=300, encoding="legacy", norm="LayerNorm", bias=True
    ),
    "dpr_vpp_buckets": dict(TINY, pp=2, vpp=2, world=4, layers=4, bucket=300, encoding="dp_reshardable"),
    "lg_qknorm_tp2": dict(TINY, tp=2, world=2, qk_norm=True, encoding="legacy-plain"),
}
CASES = KEPT | OTHERS


def full_case(name: str) -> dict[str, Any]:
    """Returns a case with everything that it leaves out."""
    case: dict[str, Any] = {**DEFAULTS, **CASES[name]}
    case["legacy"] = str(case["encoding"]).startswith("legacy")
    case["sharded"] = case["encoding"] not in (None, "legacy-plain")
    return case
