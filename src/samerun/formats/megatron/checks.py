"""Findings of a torch_dist directory that need no values: objects, encodings, and what was read from a description."""

from __future__ import annotations

from samerun.errors import Problem
from samerun.formats.mcore.checks import unknown_classes, unverified
from samerun.formats.mcore.destination import check_encoding
from samerun.formats.megatron.objects import check_objects
from samerun.formats.megatron.optimizer import OptimizerState
from samerun.formats.megatron.source import Source


def check_source(source: Source, optimizer: OptimizerState) -> list[Problem]:
    """Returns the findings about the directory itself."""
    return [
        *check_objects(source),
        *check_encoding(optimizer.encodings, source.run, source.root),
        *unknown_classes(source.root, source.unknown),
        *(
            [unverified(source.root, "fsdp_dtensor, the encoding of Megatron-FSDP")]
            if "fsdp_dtensor" in optimizer.encodings
            else []
        ),
    ]
