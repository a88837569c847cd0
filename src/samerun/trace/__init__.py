"""Traces: what a job really did, one JSON line per event, one file per rank.

A trace is a directory of `rank-NNNNN.jsonl`. The first line of each is a header; then come `state`, `eval`, `update`,
`boundary` and `end` lines in the order in which they happened (`docs/trace.md` describes every field). Reading needs
neither torch nor NumPy. A last line that a crash cut off is reported and ignored; everything before it counts.
"""

from samerun.trace.check import check_trace
from samerun.trace.model import (
    BoundaryLine,
    EndLine,
    EvalLine,
    Header,
    RankTrace,
    StateLine,
    Trace,
    UpdateLine,
)
from samerun.trace.read import read_trace
from samerun.trace.write import SCHEMA, TraceWriter, encode, file_name

__all__ = [
    "SCHEMA",
    "BoundaryLine",
    "EndLine",
    "EvalLine",
    "Header",
    "RankTrace",
    "StateLine",
    "Trace",
    "TraceWriter",
    "UpdateLine",
    "check_trace",
    "encode",
    "file_name",
    "read_trace",
]
