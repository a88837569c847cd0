"""The manifest as data: one frozen model per section, nothing optional that would change the run.

A manifest file is YAML (`samerun.manifest.read`); its specification is `docs/manifest.md`, its JSON schema is generated
from these models. Defaults exist only where leaving the line out and writing it mean the same run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, field_validator

from samerun.core.dtype import parse_dtype
from samerun.core.mesh import Layout
from samerun.core.size import parse_size
from samerun.core.tolerance import terms_per_update
from samerun.manifest.section import Count, Number, Positive, Section, Text
from samerun.manifest.tolerances import AnalysisTolerance, ControlTolerance, Tolerances, UserTolerance

Framework = Literal["pytorch", "torchtitan", "deepspeed", "megatron", "huggingface", "accelerate", "lightning"]
Format = Literal[
    "dcp",
    "fsdp1",
    "torch",
    "ranklocal",
    "zero",
    "universal",
    "megatron",
    "megatron-legacy",
    "huggingface",
    "accelerate",
    "lightning",
    "safetensors",
]
Destined = Literal["dcp", "torch", "safetensors", "universal", "zero", "megatron", "huggingface"]
Precision = Literal["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
Invariant = Literal["samples-per-update", "valid-tokens-per-update", "schedule-position"]
OptionKind = Literal["uniform", "ragged", "fewer-replicas", "changed-batch"]
Label = Literal["continuation", "approximate-continuation", "intentional-change", "warm-start"]
ControlKind = Literal["original-layout", "continuation", "trace"]
Policy = Literal["keep", "linear", "square-root", "value"]

PLACEHOLDERS = (
    *("python", "checkpoint", "world_size", "layout", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"),
    *("global_batch", "max_microbatch", "passes", "replicas", "updates"),
)


class Run(Section):
    """Which run, and which checkpoint of it."""

    name: Text = Field(description="A name for this migration, for people.")
    framework: Framework = Field(description="What trains the run.")
    checkpoint: Text = Field(description="Path of the checkpoint, relative to the manifest.")
    format: Format = Field(description="The checkpoint's format, as `samerun inspect` names it.")
    model_commit: Text = Field(description="Commit of the model and training code that wrote the checkpoint, quoted.")
    precision: Precision = Field(description="Element type in which the forward and backward passes compute.")
    optimizer: Text = Field(description="Class name of the optimizer, such as AdamW.")


class Axes(Section):
    """Ranks along each axis of a layout; axes left out are 1."""

    pp: Positive = Field(1, description="Pipeline stages.")
    dp_replicate: Positive = Field(1, description="Data-parallel replicas that hold whole copies (DDP, HSDP).")
    dp_shard: Positive = Field(1, description="Data-parallel ranks that shard one copy (FSDP, ZeRO).")
    cp: Positive = Field(1, description="Context-parallel ranks, which share a batch.")
    tp: Positive = Field(1, description="Tensor-parallel ranks, which share a batch.")
    ep: Positive = Field(1, description="Expert-parallel degree; divides dp_shard x cp x tp.")

    def to_layout(self) -> Layout:
        """Returns the layout. Raises ValueError if `ep` does not divide what it must."""
        return Layout.from_dict(self.model_dump())


class Side(Section):
    """Where a run runs: its layout and, written out again so that a slip shows, its number of ranks."""

    layout: Axes = Field(description="Ranks along each axis, such as {tp: 2, dp_shard: 4}: four batches, eight ranks.")
    world_size: Positive = Field(description="Number of ranks: the product of the layout's axes except ep.")


class Source(Side):
    """Where the checkpoint was written."""

    microbatch: Positive | None = Field(None, description="Samples per replica and pass in the source, if uniform.")
    accumulation: Positive | None = Field(None, description="Passes per update in the source, if uniform.")


class Destination(Side):
    """Where the run goes."""

    device_memory: str | None = Field(
        None, description="Memory of one device, such as 80GiB; null leaves the comparison out."
    )

    stage: Annotated[int, Field(ge=0, le=3)] | None = Field(
        None, description="Stage of ZeRO in the destination's job; null takes the one that the checkpoint records."
    )

    @field_validator("device_memory")
    @classmethod
    def _amount(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value

    @property
    def device_memory_bytes(self) -> int | None:
        """The device's memory in bytes, or None."""
        return None if self.device_memory is None else parse_size(self.device_memory)


class Progress(Section):
    """How far the run was when the checkpoint was written, after a complete update."""

    update: Count = Field(description="Completed optimizer steps.")
    samples: Count = Field(description="Samples committed since the run began, over all epochs and all replicas.")
    tokens: Count | None = Field(description="Valid tokens committed since the run began; null if nobody counts them.")
    epoch: Count | None = Field(description="Index of the epoch in progress, from 0; null if the run has none.")
    scheduler: dict[str, JsonValue] | None = Field(
        description="Where the learning-rate schedule stands, such as {last_epoch: 12}; null for a constant rate."
    )


class LearningRate(Section):
    """What becomes of the learning rate when the global batch is changed on purpose."""

    policy: Policy = Field(description="keep it, scale it with the batch or its square root, or set a value.")
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="The base rate, with policy value only."
    )
    schedule: Literal["updates", "samples"] = Field(
        "updates", description="What the schedule's position follows from now on: committed updates, or samples."
    )


class ChangedBatch(Section):
    """A deliberate change of the global batch."""

    global_batch: Positive = Field(description="Samples per update from now on.")
    learning_rate: LearningRate = Field(description="What becomes of the learning rate.")
    reason: Text = Field(description="Why.")


class Batch(Section):
    """How many samples make an update, what is held fixed, and how they are dealt."""

    invariant: Invariant = Field(description="What stays the same across the move.")
    global_batch: Positive = Field(description="Samples per update in the run so far.")
    max_microbatch: Positive = Field(description="Most samples that one destination replica takes in one pass.")
    option: OptionKind | None = Field(
        None, description="How the global batch is dealt on the destination; `samerun batch` compares the options."
    )
    changed: ChangedBatch | None = Field(None, description="The new batch, with option changed-batch only.")


class Bounded(Section):
    """A declaration that something may differ by at most this much."""

    bounded: Number = Field(description="Largest permitted deviation.")


def _declaration_form(value: Any) -> str:
    return "bound" if isinstance(value, dict | Bounded) else "word"


Declaration = Annotated[
    Annotated[Literal["exact", "expected-to-change"], Tag("word")] | Annotated[Bounded, Tag("bound")],
    Discriminator(_declaration_form),
]


class Declare(Section):
    """What is claimed of each part of the state: exact, bounded, or expected to change."""

    parameters: Declaration = Field(description="Values of the model's parameters after loading. Bound: relative L2.")
    buffers: Declaration = Field(description="Values of persistent buffers. Bound: relative L2.")
    optimizer: Declaration = Field(description="Optimizer state and hyperparameters. Bound: relative L2.")
    order: Declaration = Field(description="Which samples come when. Bound: samples replayed or omitted.")
    batch: Declaration = Field(description="Samples per update. Bound: samples more or fewer.")
    schedule: Declaration = Field(description="Learning rate per update. Bound: relative.")
    rng: Declaration = Field(description="Random number streams of each rank.")
    dtype: Declaration = Field(description="Element types of parameters and optimizer state.")
    objects: Declaration = Field(description="Everything else that was saved: scaler, loader, configuration.")


class Transition(Section):
    """What the resumed run may call itself."""

    label: Label = Field(description="What the resumed run is with respect to the source run.")
    replay_bound: Count | None = Field(None, description="Samples that may be seen again; approximate only.")
    omission_bound: Count | None = Field(None, description="Samples that may never be seen; approximate only.")
    reason: str | None = Field(None, description="Why the run is not an exact continuation, where it is not.")


class Rehearsal(Section):
    """A stand-in for machines that are gone: both layouts, on CPU processes, with a smaller model and less data."""

    of: Text = Field(description="The run that this stands for: its checkpoint, or where it is described.")
    reduced: Annotated[dict[str, Text], Field(min_length=1)] = Field(
        description="What is smaller, and to what: {layers: '48 to 2', data: '1 shard of 512'}."
    )
    kept: Annotated[tuple[Text, ...], Field(min_length=1)] = Field(
        description="What is the real run's own: code, layouts, optimizer, schedule."
    )


class Control(Section):
    """What the candidate is compared with."""

    kind: ControlKind = Field(description="The checkpoint resumed on its own layout, or a record made elsewhere.")
    trace: str | None = Field(None, description="The record, for kinds continuation and trace; relative path.")
    repeats: Positive = Field(2, description="How often the control is run, to see how much it varies by itself.")
    vary_microbatch: Positive | None = Field(
        None, description="max_microbatch of the second control, to vary the order of additions; null repeats as is."
    )
    oracle: str | None = Field(
        None,
        description="Command that resumes on one process in float64 and makes one update, to compare both with; small "
        "models only.",
    )
    rehearsal: Rehearsal | None = Field(
        None, description="The job is a reduced copy of the real one, on CPU processes; null runs the real one."
    )


class Window(Section):
    """How far the candidate is followed."""

    updates: Positive = Field(20, description="Updates that the candidate runs beside the control.")
    at_least: Positive | None = Field(
        None,
        description="Updates for which every metric must be judged; behind them one that the controls are too noisy "
        "for is left out. Null: all of the window.",
    )
    log_every: Positive | None = Field(
        description="The job logs at every multiple of this many updates; null if it never does while it trains."
    )
    eval_every: Positive | None = Field(
        description="The job evaluates at every multiple of this many updates; null if it never does while it trains."
    )


class Launch(Section):
    """How the user's own job is started."""

    command: Text = Field(description=f"The command line, with placeholders: {', '.join(PLACEHOLDERS)}.")
    source_command: str | None = Field(None, description="Another command for the source layout, if it needs one.")
    directory: Text = Field(".", description="Where the command runs, relative to the manifest.")
    environment: dict[str, str] = Field(default_factory=dict[str, str], description="Added to the environment.")
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        3600, description="A stage that runs longer is ended and fails."
    )


class Convert(Section):
    """How the checkpoint is rewritten before the destination loads it, where its own format cannot be loaded there."""

    to: Destined = Field(description="Format to write, as `samerun convert --to` takes it.")
    map: str | None = Field(
        None, description="Name map: a file, relative to the manifest, or the name of a shipped one."
    )
    dtype: dict[str, str] = Field(default_factory=dict[str, str], description="Element types by role, to be changed.")
    masters: Literal["params", "slots", "drop"] | None = Field(
        None, description="Where fp32 masters go that the format has no place for."
    )
    allow: tuple[str, ...] = Field((), description="Codes of blocking findings that are accepted, each a decision.")

    @field_validator("dtype")
    @classmethod
    def _known(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value.values():
            parse_dtype(name)
        return value


class Manifest(Section):
    """One migration, completely decided."""

    samerun: Literal[1] = Field(description="Version of this file format.")
    run: Run
    source: Source
    destination: Destination
    progress: Progress
    batch: Batch
    declare: Declare
    transition: Transition
    control: Control
    tolerances: Tolerances
    window: Window
    launch: Launch
    convert: Convert | None = Field(
        None, description="Rewrites the checkpoint for the destination first; null loads it as it is."
    )
    watch: tuple[str, ...] = Field((), description="Further paths that a disposable job may not change.")

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Returns the manifest with this content, given as plain JSON-like data.

        Raises:
            pydantic.ValidationError: with every violation.
        """
        return cls.model_validate_json(json.dumps(data))

    def to_data(self) -> dict[str, Any]:
        """Returns the content as plain data, every default written out. The inverse of `from_data`."""
        data = self.model_dump(mode="json", by_alias=True)
        later = (
            (data["tolerances"], "parameter_gradient"),
            (data["control"], "oracle"),
            (data["control"], "rehearsal"),
            (data["window"], "at_least"),
        )
        for section, name in ((data, "convert"), *later):
            if section[name] is None:  # came later: what was sealed before keeps its hash
                del section[name]
        return data

    def settled_tolerances(self) -> dict[str, ControlTolerance | AnalysisTolerance | UserTolerance]:
        """Returns the tolerances by metric, with floors that `null` leaves to the precision filled in."""
        terms = terms_per_update(self.progress.tokens, self.progress.update)
        return self.tolerances.settled(parse_dtype(self.run.precision), terms)

    def sha256(self) -> str:
        """Returns `sha256:...` of the content; comments, order and spelled-out defaults make no difference."""
        return content_sha256(self.to_data())


def canonical_json(data: Any) -> str:
    """Returns the one spelling of JSON-like `data`: sorted keys, no spaces, shortest floats, UTF-8.

    Raises:
        ValueError: for a non-finite number, which JSON does not have.
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_sha256(data: Any) -> str:
    """Returns `sha256:...` of the canonical JSON of `data`."""
    return "sha256:" + hashlib.sha256(canonical_json(data).encode()).hexdigest()


_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def find_placeholders(template: str) -> list[str]:
    """Returns the names between braces in a command line, in order; a lone brace gives that brace itself.

    Doubled braces are literal ones, as in `str.format`.

    >>> find_placeholders("run --resume {checkpoint} '{{}}' {")
    ['checkpoint', '{']
    """
    found = (match for match in _FIELD.finditer(template) if match[0] not in ("{{", "}}"))
    return [match[0] if match[1] is None else match[1] for match in found]


def fill_placeholders(template: str, values: Mapping[str, object]) -> str:
    """Returns the command line with every placeholder replaced by the text of its value.

    Raises:
        KeyError: for a placeholder without a value.
    """

    def replacement(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        return match[0] if match[1] is None else str(values[match[1]])

    return _FIELD.sub(replacement, template)
