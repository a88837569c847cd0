"""Which kind of failure a finding of a resume points to, in the words in which the field reports them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

KINDS: Mapping[str, str] = {
    "SR-FILE-": "files",
    "SR-PKL-": "files",
    "SR-PATH-": "files",
    "SR-META-": "files",
    "SR-SIDECAR-": "files",
    "SR-COV-": "fused and strided layouts",
    "SR-JOB-WORLD": "global batch",
    "SR-JOB-LAYOUT": "global batch",
    "SR-JOB-BATCH": "global batch",
    "SR-JOB-": "the job itself",
    "SR-LOAD-OPT": "optimizer state",
    "SR-LOAD-GROUP": "parameter groups",
    "SR-LOAD-CLASS": "parameter groups",
    "SR-LOAD-STEP": "counters",
    "SR-LOAD-SCHED": "scheduler",
    "SR-LOAD-LR": "scheduler",
    "SR-LOAD-OBJECT": "data",
    "SR-LOAD-DTYPE": "dtype and masters",
    "SR-LOAD-NONFINITE": "dtype and masters",
    "SR-LOAD-TIE": "tied, frozen, never stepped",
    "SR-LOAD-REPLICA": "after load",
    "SR-LOAD-RANKS": "after load",
    "SR-LOAD-CONFIG": "settings that shapes do not show",
    "SR-LOAD-MISSING": "names",
    "SR-LOAD-UNEXPECTED": "names",
    "SR-LOAD-SHAPE": "fused and strided layouts",
    "SR-LOAD-PARAM": "fused and strided layouts",
    "SR-EVAL-CHANGED": "random numbers",
    "SR-EVAL-": "settings that shapes do not show",
    "SR-RNG-": "random numbers",
    "SR-SAMPLE-": "data",
    "SR-TRACE-DISAGREE": "loss normalisation",
    "SR-TRACE-SAMPLES": "data",
    "SR-SCHEDULE-": "scheduler",
    "SR-UPD-TOKENS": "data",
    "SR-UPD-SAMPLES": "global batch",
    "SR-UPD-INDEX": "counters",
    "SR-UPD-MISSING": "counters",
    "SR-UPD-LR": "scheduler",
    "SR-UPD-SCALE": "fp16 scaler",
    "SR-UPD-SKIPPED": "fp16 scaler",
    "SR-UPD-LOSS": "loss normalisation",
    "SR-UPD-GRADNORM": "loss normalisation",
    "SR-UPD-GRADIENT": "loss normalisation",
    "SR-UPD-CLIP": "loss normalisation",
    "SR-UPD-UPDATENORM": "optimizer state",
    "SR-UPD-DELTA": "optimizer state",
    "SR-UPD-DIRECTION": "optimizer state",
    "SR-UPD-STILL": "tied, frozen, never stepped",
    "SR-UPD-FROZEN-MOVED": "tied, frozen, never stepped",
    "SR-UPD-NONFINITE": "dtype and masters",
    "SR-UPD-REPLICA": "after load",
    "SR-UPD-SETTING": "parameter groups",
    "SR-UPD-COUNTER": "counters",
    "SR-UPD-TENSOR": "tied, frozen, never stepped",
    "SR-UPD-BUFFER": "after load",
    "SR-UPD-AVERAGE": "averages of the model",
    "SR-UPD-LAG": "averages of the model",
    "SR-LOAD-UNSEEN": "averages of the model",
}
"""Beginnings of codes; the longest that fits counts."""


def kind_of(code: str) -> str | None:
    """Returns the kind of failure that a finding with this code points to, or None where it points to none.

    A finding whose evidence tells more says so itself (`Problem.kind`).
    """
    fitting = [start for start in KINDS if code.startswith(start)]
    return KINDS[max(fitting, key=len)] if fitting else None
