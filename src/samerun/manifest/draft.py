"""A manifest drafted from a checkpoint: what it tells is filled in, what it cannot tell is asked.

Nothing is guessed that would change the run. A value that could be concluded but not known becomes a question that
names the conclusion, or, where being wrong is found out before anything runs, a value with a comment that says how it
is known.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from samerun.core.config import find_setting
from samerun.core.dtype import parse_dtype
from samerun.core.mesh import Layout
from samerun.core.schedule import position_of
from samerun.core.state import LogicalState, Role, Topology
from samerun.core.tolerance import precision_floor, terms_per_update
from samerun.errors import Problem, Severity
from samerun.manifest.models import PLACEHOLDERS, Declare
from samerun.manifest.tolerances import METRICS

FACTOR = 10
"""Bands that a draft proposes are this many times what two controls differ by."""

_FRAMEWORKS = {
    "dcp": "pytorch",
    "fsdp1": "pytorch",
    "torch": "pytorch",
    "ranklocal": "pytorch",
    "zero": "deepspeed",
    "universal": "deepspeed",
    "megatron": "megatron",
    "megatron-legacy": "megatron",
    "huggingface": "huggingface",
    "accelerate": "accelerate",
    "lightning": "lightning",
}
_CONFIG_NAMES = {
    "global_batch": ("global_batch", "global_batch_size", "train_batch_size"),
    "microbatch": ("microbatch", "max_microbatch", "micro_batch", "micro_batch_size", "per_device_train_batch_size"),
    "accumulation": ("accumulation", "gradient_accumulation_steps", "accumulation_steps"),
    "precision": ("precision", "compute_dtype", "dtype"),
    "commit": ("commit", "git_commit", "model_commit"),
    "log_every": ("log_every", "log_interval", "logging_steps"),
    "eval_every": ("eval_every", "eval_interval", "eval_steps"),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """An open question in place of a value."""

    question: str


@dataclass(slots=True)
class _Draft:
    lines: list[str] = field(default_factory=list[str])

    def section(self, name: str) -> None:
        self.lines += ["", f"{name}:"]

    def note(self, text: str, indent: int = 2) -> None:
        self.lines += [f"{' ' * indent}# {line}" for line in text.splitlines()]

    def put(self, key: str, value: Any, comment: str = "", indent: int = 2) -> None:
        line = f"{' ' * indent}{key}: {yaml_value(value)}"
        self.lines.append(f"{line}  # {comment}" if comment else line)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a draft draws on."""

    state: LogicalState
    source: Layout | None
    destination: Layout

    def config(self, wanted: str) -> Any:
        """Returns what the checkpoint's own configuration says under one of the usual names, or None."""
        return find_setting(self.state.objects, _CONFIG_NAMES[wanted])

    def count(self, wanted: str) -> int | None:
        """Returns a configured whole number of at least 1, or None."""
        value = self.config(wanted)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def draft_manifest(
    state: LogicalState,
    destination: Layout,
    *,
    checkpoint: str,
    name: str,
    source: Layout | None = None,
    refused: Sequence[Problem] = (),
    schema: str | None = None,
) -> str:
    """Returns the text of a manifest for moving `state` to `destination`, with every open question in it.

    Args:
        state: what the checkpoint holds.
        destination: where the run goes.
        checkpoint: the checkpoint's path as the manifest is to have it, relative to the manifest.
        name: a name for the migration.
        source: the layout that wrote the checkpoint, if the user says so; else the checkpoint's own record counts, and
            what was only concluded from its files becomes part of the question.
        refused: why the format's own framework would not load the checkpoint on the destination as it is.
        schema: path of the JSON schema beside the manifest, for editors; None leaves the line out.
    """
    facts = _Facts(state, source or (state.topology.layout if _is_recorded(state.topology) else None), destination)
    draft = _Draft()
    if schema is not None:
        draft.lines.append(f"# yaml-language-server: $schema={schema}")
    draft.lines += [
        "# A migration manifest, drafted from the checkpoint. Values that say ASK are open questions: the checkpoint",
        "# cannot tell, every answer is another run, and `samerun plan` goes no further until all are answered.",
        "samerun: 1",
    ]
    _put_run(draft, facts, checkpoint, name)
    _put_sides(draft, facts, told=source is not None)
    _put_progress(draft, facts)
    _put_batch(draft, facts)
    _put_declare(draft, facts)
    _put_transition(draft)
    _put_control(draft, facts)
    _put_tolerances(draft, facts)
    _put_window(draft, facts)
    _put_launch(draft)
    _put_convert(draft, refused)
    draft.lines += ["", "watch: []  # further paths that a disposable job may not change"]
    return "\n".join(draft.lines) + "\n"


_PLAIN = re.compile(r"(?:\.{0,2}/|[A-Za-z_])[A-Za-z0-9_./@+-]*\Z", re.ASCII)
_RESERVED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def yaml_value(value: Any) -> str:
    """Returns a value as YAML in one line; text is quoted whenever it could be read as something else.

    >>> yaml_value({"tp": 2, "note": "a: b"}), yaml_value("no"), yaml_value(1e-06)
    ('{tp: 2, note: "a: b"}', '"no"', '1.0e-06')
    """
    if isinstance(value, Ask):
        return json.dumps(f"ASK: {value.question}", ensure_ascii=False)
    if isinstance(value, str):
        plain = _PLAIN.match(value) and value.lower() not in _RESERVED
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return "{" + ", ".join(f"{yaml_value(str(key))}: {yaml_value(item)}" for key, item in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(yaml_value(item) for item in cast(Iterable[Any], value)) + "]"
    if isinstance(value, float) and math.isfinite(value):
        digits, exponent, power = repr(value).partition("e")
        return f"{digits if '.' in digits or not exponent else digits + '.0'}{exponent}{power}"
    return json.dumps(value)


def _put_run(draft: _Draft, facts: _Facts, checkpoint: str, name: str) -> None:
    state = facts.state
    draft.section("run")
    draft.put("name", name)
    framework = "torchtitan" if "torchtitan" in state.written_by else _FRAMEWORKS.get(state.format)
    draft.put("framework", framework or Ask("what trains this run?"))
    draft.put("checkpoint", checkpoint)
    draft.put("format", state.format)
    commit = facts.config("commit")
    draft.put("model_commit", str(commit) if commit else Ask("which commit of the model and training code wrote it?"))
    draft.put("precision", *_precision(facts))
    draft.put("optimizer", *_optimizer(state))


def _stored_dtypes(state: LogicalState) -> list[str]:
    entries = [entry for entry in state.tensors.values() if entry.key.role is Role.PARAM]
    return sorted({entry.dtype.name for entry in entries if entry.dtype.kind == "float"})


def _precision(facts: _Facts) -> tuple[Any, str]:
    stored = _stored_dtypes(facts.state)
    configured = facts.config("precision")
    if isinstance(configured, str):
        try:
            return parse_dtype(configured).name, "from the checkpoint's configuration"
        except ValueError:
            pass
    if stored and set(stored) <= {"bfloat16", "float16"} and len(stored) == 1:
        return stored[0], "the stored type of the parameters"
    hint = f", the configuration says {configured}" if configured else ""
    kinds = " and ".join(stored) or "unknown types"
    return Ask(f"in which type does the forward pass compute? Parameters are stored in {kinds}{hint}"), ""


def _optimizer(state: LogicalState) -> tuple[Any, str]:
    """Concludes the class where slots and hyperparameters leave only one."""
    slots = frozenset(entry.key.slot for entry in state.tensors.values() if entry.key.slot)
    known = {name for group in state.groups for name in group.hyperparameters}
    decoupled = {group.hyperparameters.get("decoupled_weight_decay") for group in state.groups}
    why = f"the only one with slots {', '.join(sorted(slots))} and these hyperparameters"
    if {"exp_avg", "exp_avg_sq"} <= slots and decoupled in ({True}, {False}) and "momentum_decay" not in known:
        return ("AdamW" if True in decoupled else "Adam"), f"decoupled_weight_decay is {str(True in decoupled).lower()}"
    if "ns_steps" in known:
        return "Muon", why
    if {"dampening", "nesterov"} <= known:
        return "SGD", why
    if {"square_avg", "acc_delta"} <= slots:
        return "Adadelta", why
    seen = f"slots {', '.join(sorted(slots))}" if slots else "no optimizer state in the checkpoint"
    return Ask(f"which class is the optimizer? There are {seen}" if slots else f"which optimizer? There is {seen}"), ""


def _is_recorded(topology: Topology) -> bool:
    """Whether the layout was written down by the format or by the run, and not concluded from how tensors are cut.

    A conclusion cannot tell context-parallel ranks from data-parallel ones, and so not count the batch replicas.
    """
    return topology.inferred is None or "saved object" in topology.inferred or topology.world_size == 1


def _put_sides(draft: _Draft, facts: _Facts, *, told: bool) -> None:
    topology, source, likely = facts.state.topology, facts.source, facts.state.topology.layout
    draft.section("source")
    why = "" if told or not topology.inferred else f"concluded from the checkpoint: {topology.inferred}"
    if source is not None:
        draft.put("layout", source.to_dict(short=True), why)
        draft.put("world_size", source.world_size, _replicas(source))
    else:
        looks = "For example {dp_shard: 4}"
        if likely is not None:
            looks = f"They look like {yaml_value(likely.to_dict(short=True))}, but cp ranks look like dp_shard ranks"
        draft.put("layout", Ask(f"how were the source's ranks arranged? {looks}"))
        size = topology.world_size
        draft.put("world_size", size or Ask("on how many ranks?"), why if size else "")
    if (micro := facts.count("microbatch")) and (passes := facts.count("accumulation")):
        draft.put("microbatch", micro, "from the checkpoint's configuration")
        draft.put("accumulation", passes, "from the checkpoint's configuration")
    draft.section("destination")
    draft.put("layout", facts.destination.to_dict(short=True))
    draft.put("world_size", facts.destination.world_size, _replicas(facts.destination))
    draft.put("device_memory", None, "such as 80GiB, to compare the estimate with")


def _replicas(layout: Layout) -> str:
    return f"of which {layout.batch_replicas} are batch replicas; TP, CP and PP ranks share a batch"


def _put_progress(draft: _Draft, facts: _Facts) -> None:
    progress = facts.state.progress
    after = f" by the end of update {progress.update}" if progress.update is not None else ""
    draft.section("progress")
    draft.put("update", _told(progress.update, "how many optimizer steps were complete?"))
    draft.put("samples", _told(progress.samples, f"how many samples were committed over all replicas{after}?"))
    tokens = f"how many valid tokens were committed{after}? null if nobody counts them"
    draft.put("tokens", _told(progress.tokens, tokens))
    draft.put("epoch", _told(progress.epoch, "index of the epoch in progress, from 0? null if the run has none"))
    draft.put("scheduler", *_scheduler(facts.state))


def _told(value: Any, question: str) -> Any:
    return Ask(question) if value is None else value


def _scheduler(state: LogicalState) -> tuple[Any, str]:
    if state.scheduler is None:
        question = (
            "the checkpoint holds no scheduler: where does it stand, such as {last_epoch: 12}? null for a constant"
        )
        return Ask(question), ""
    position = position_of(state.scheduler)
    if position is not None:
        return {"last_epoch": position}, ""
    return Ask("the saved scheduler has no last_epoch: what says where it stands? null if nothing does"), ""


def _put_batch(draft: _Draft, facts: _Facts) -> None:
    configured = facts.count("global_batch")
    draft.section("batch")
    draft.put(
        "invariant", Ask("what must stay the same: samples-per-update, valid-tokens-per-update, schedule-position?")
    )
    if configured:
        draft.put("global_batch", configured, "from the checkpoint's configuration")
    else:
        draft.put("global_batch", Ask(f"how many samples make an update, over all replicas?{_arithmetic(facts)}"))
    micro = facts.count("microbatch")
    used = f" The source used {micro}" if micro else ""
    draft.put("max_microbatch", Ask(f"how many samples can one destination replica take in one pass?{used}".rstrip()))
    replicas = facts.destination.batch_replicas
    draft.put("option", Ask(f"how is the batch dealt to {replicas} replicas? `samerun plan` compares the options"))
    draft.put("changed", None, "{global_batch, learning_rate: {policy: keep|linear|square-root|value}, reason}")


def _arithmetic(facts: _Facts) -> str:
    progress = facts.state.progress
    if progress.samples and progress.update and progress.samples % progress.update == 0:
        per_update = progress.samples // progress.update
        return f" {progress.samples} samples in {progress.update} updates are {per_update} each on average"
    return ""


def _put_declare(draft: _Draft, facts: _Facts) -> None:
    draft.section("declare")
    draft.note(
        "exact | expected-to-change | {bounded: number}. exact is the strictest claim, and every claim is checked."
    )
    for part in Declare.model_fields:
        draft.put(part, *(_rng_claim(facts) if part == "rng" else ("exact", "")))


def _rng_claim(facts: _Facts) -> tuple[str, str]:
    """Random streams belong to ranks: nothing but expected-to-change can hold when those change or were not saved."""
    if not facts.state.rng:
        return "expected-to-change", "the checkpoint holds no random number state; matters for dropout and augmentation"
    before = facts.source or facts.state.topology.layout
    if before == facts.destination:
        return "exact", ""
    return "expected-to-change", "streams belong to ranks, and those change; matters for dropout and augmentation"


def _put_transition(draft: _Draft) -> None:
    draft.section("transition")
    labels = "continuation, approximate-continuation, intentional-change, warm-start"
    draft.put("label", Ask(f"what may the resumed run call itself: {labels}?"))
    draft.put("replay_bound", None, "samples that may be seen again; approximate-continuation only")
    draft.put("omission_bound", None, "samples that may never be seen; approximate-continuation only")
    draft.put("reason", None, "for every label but continuation")


def _put_control(draft: _Draft, facts: _Facts) -> None:
    draft.section("control")
    kinds = "original-layout (samerun resumes it there), continuation or trace (a record made elsewhere)"
    draft.put("kind", Ask(f"what is the candidate compared with: {kinds}?"))
    draft.put("trace", None, "the record's directory, with kinds continuation and trace")
    draft.put("repeats", 2, "runs of the control, to see how much it varies by itself")
    micro = facts.count("microbatch")
    varied = micro // 2 if micro and micro > 1 else None
    question = "which smaller microbatch shall the second control use, such as 1? null repeats the first as it is"
    comment = "max_microbatch of the second one: the same batch, added up in another order"
    draft.put("vary_microbatch", varied or Ask(question), comment)
    draft.put("oracle", None, "small models: a command that makes one update on one process in float64")
    draft.put("rehearsal", None, "{of, reduced, kept}, where a reduced copy stands for machines that are gone")


def _put_tolerances(draft: _Draft, facts: _Facts) -> None:
    precision = _precision(facts)[0]
    kind = parse_dtype(precision if isinstance(precision, str) else next(iter(_stored_dtypes(facts.state)), "float32"))
    progress = facts.state.progress
    terms = terms_per_update(progress.tokens, progress.update)
    draft.section("tolerances")
    floors = f"in {kind.name} over {terms} terms" if isinstance(precision, str) else "in run.precision, where null"
    draft.note(
        "Relative bands: factor x what the controls differ by, never below floor. The floors are what another order\n"
        f"of additions does {floors}; lower precision needs wider ones (docs/manifest.md).\n"
        "{from: user, limit: ..., reason: ...} states a band instead, {from: analysis} computes a bound."
    )
    # torch's Muon orthogonalises every gradient in bfloat16, whatever the precision of the run (2.13, `_muon.py`).
    step = parse_dtype("bfloat16") if _optimizer(facts.state)[0] == "Muon" and kind.num_bytes > 2 else kind
    if step is not kind:
        draft.note("Muon computes its steps in bfloat16: what they lead to has the floors of that.")
    for metric in METRICS:
        of = kind if metric.startswith("eval_") else step
        known = isinstance(precision, str) or of is not kind
        floor = float(f"{precision_floor(metric, of, terms):.1e}") if known else None
        draft.put(metric, {"from": "control", "factor": FACTOR, "floor": floor})


def _put_window(draft: _Draft, facts: _Facts) -> None:
    draft.section("window")
    draft.put("updates", 20)
    draft.put("at_least", None, "such as 10: judge a metric up to where the controls get too noisy for it")
    for name, does in (("log_every", "log"), ("eval_every", "evaluate")):
        configured = facts.count(name)
        comment = "from the checkpoint's configuration" if configured else ""
        question = f"every how many updates does the job {does}? null if it never does"
        draft.put(name, configured or Ask(question), comment)


def _put_launch(draft: _Draft) -> None:
    example = "{python} -m torch.distributed.run --nproc-per-node {world_size} train.py --resume {checkpoint}"
    draft.section("launch")
    draft.note("Placeholders: " + " ".join(f"{{{name}}}" for name in PLACEHOLDERS))
    example += " --layout {layout} --global-batch {global_batch} --max-microbatch {max_microbatch}"
    draft.put("command", Ask(f"how is the job started? For example: {example}"))
    draft.put("source_command", None, "only if the source layout needs another command")
    draft.put("directory", ".", "where it runs, relative to this file")
    draft.put("environment", {})
    draft.put("timeout_seconds", 3600)


def _put_convert(draft: _Draft, refused: Sequence[Problem]) -> None:
    blocking = [problem for problem in refused if problem.severity is not Severity.NOTE]
    draft.lines.append("")
    if not blocking:
        draft.put("convert", None, "{to: dcp}, say, rewrites the checkpoint first; null loads it as it is", indent=0)
        return
    why = "; ".join(dict.fromkeys(problem.message for problem in blocking))
    question = (
        f"its own framework does not load it there ({why}). Into which format first? For example {{to: universal}}"
    )
    draft.put("convert", Ask(question), indent=0)
