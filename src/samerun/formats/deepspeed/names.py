"""The names of DeepSpeed's checkpoint files, and what each says about the file (DeepSpeed 0.19, runtime/engine.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a file of a checkpoint's directory holds."""

    MODEL = "model states"
    OPTIM = "optimizer states"
    LAYER = "pipeline layer"
    EXPERT = "expert"
    EXPERT_OPTIM = "expert optimizer states"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """A parsed name. `dp` is None where one file serves all data-parallel ranks; `mp` counts tensor x pipeline ranks.

    `layer` is the pipeline layer, or the number of the MoE layer for experts; `tp` is the tensor-parallel rank in the
    name of a pipeline layer. `precision` is the prefix of optimizer files (`bf16`, `fp16` or empty).
    """

    name: str
    kind: Kind
    dp: int | None = None
    mp: int = 0
    layer: int | None = None
    expert: int | None = None
    tp: int = 0
    precision: str = ""


_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:(bf16|fp16)_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-(?:model|tensor)_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(-?\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MOST_DIGITS = 7


def parse_name(name: str) -> FileName | None:
    """Returns what a file name says, None if it is no state file of DeepSpeed's.

    >>> parse_name("bf16_zero_pp_rank_3_mp_rank_01_optim_states.pt").dp
    3
    """
    if re.search(rf"\d{{{_MOST_DIGITS + 1},}}", name):
        return None
    if match := _MODEL.fullmatch(name):
        dp = None if match[1] is None else int(match[1])
        return FileName(name=name, kind=Kind.MODEL, dp=dp, mp=int(match[2]))
    if match := _OPTIM.fullmatch(name):
        return FileName(name=name, kind=Kind.OPTIM, dp=int(match[2]), mp=int(match[3]), precision=match[1] or "")
    if match := _LAYER.fullmatch(name):
        return FileName(name=name, kind=Kind.LAYER, layer=int(match[1]), tp=int(match[2] or 0))
    if match := _EXPERT.fullmatch(name):
        layer = 0 if match[1] is None else int(match[1])
        return FileName(name=name, kind=Kind.EXPERT, layer=layer, expert=int(match[2]), mp=int(match[3]))
    if match := _EXPERT_OPTIM.fullmatch(name):
        return FileName(name=name, kind=Kind.EXPERT_OPTIM, expert=int(match[1]), mp=int(match[2]))
    return None


def model_name(mp: int, dp: int | None) -> str:
    """Returns the name of a model file; `dp` is None for stages that keep the parameters whole."""
    return f"{'' if dp is None else f'zero_pp_rank_{dp}_'}mp_rank_{mp:02d}_model_states.pt"


def optim_name(mp: int, dp: int, precision: str) -> str:
    """Returns the name of an optimizer file."""
    return f"{f'{precision}_' if precision else ''}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"


def expert_name(layer: int, expert: int) -> str:
    """Returns the name of an expert's file; both numbers are global."""
    return f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"


def layer_name(layer: int) -> str:
    """Returns the name of a pipeline layer's file."""
    return f"layer_{layer:02d}-model_states.pt"
