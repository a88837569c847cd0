"""Writes docs/coverage-of-failures.md: how resumes fail, the finding that shows each, and the tests that name it.

The left half is written here; tests are found by searching for the code. `--check` fails when the page is out of date.
A code that is not catalogued, or that no test names, stops the script.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TOP = Path(__file__).parents[1]
sys.path.insert(0, str(TOP / "src"))

from samerun.catalog import load_catalog  # noqa: E402

PAGE = TOP / "docs" / "coverage-of-failures.md"
# (what happens, codes without `SR-`). I: from names, sizes and metadata; D: bytes are read. No code: not seen.
FAILURES: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Files", "I", (
        ("a rank's shard is missing, or in a temporary sibling directory", "FILE-MISSING"),
        ("a shard is truncated by a byte", "FILE-TRUNCATED FILE-HEADER PKL-ZIP"),
        ("a file is empty: the save failed before its first byte", "FILE-EMPTY"),
        ("data files without metadata", "META-MISSING"),
        ("metadata that cannot be used, or claims another format", "META-BROKEN MEG-COMMON MEG-JSON MEG-BACKEND"),
        ("metadata that contradicts itself or points outside", "META-ENTRY FILE-OVERLAP FILE-ESCAPE FILE-NOPLACE"),
        ("ranks without collectives overwrote a save of more ranks", "META-CONFLICT COV-OVERLAP COV-GAP"),
        ("`latest` names a directory that never finished", "PATH-TRACKER ZERO-LATEST"),
        ("no tracker, or one that names another: the framework starts elsewhere", "MEG-NOTRACKER MEG-TRACKED"),
        ("nodes without a shared file system hold only their own shards", "FILE-MISSING COV-GAP"),
        ("an index names a file that is absent, or tensors that a file lacks", "FILE-MISSING FILE-INDEX"),
        ("stale files of a save with more ranks", "FILE-STALE RANK-STALE ZERO-STALE UNI-STALE"),
    )),
    ("Files", "D", (
        ("bit flip, zeroed payload", "FILE-CRC PKL-CRC PROOF-VALUE SIDECAR-VALUE"),
        ("an asynchronous save wrote layers of two steps", "CNT-STEPS ZERO-MASTER AGAINST-PARTLY SIDECAR-VALUE"),
        ("every save after the first wrote the first save's tensors", "AGAINST-STUCK CNT-DIRECTORY"),
        ("crash while a directory was overwritten: one file of an older step", "FILE-GENERATION SIDECAR-FILE"),
        ("the same, without evidence in the files", "FILE-GENERATION-OPEN ZERO-RANKOPEN UNI-OPEN"),
    )),
    ("Rigid formats", "I", (
        ("the recorded world size cannot be changed by this format", "ZERO-RIGID RANK-RIGID UNI-RIGID UNI-STAGE"),
        ("this encoding cannot change tensor or pipeline parallelism", "MEG-BOUND MEG-RIGID MEG-UNEVEN"),
    )),
    ("Uneven and padded shards", "I", (
        ("fewer rows than ranks: empty shards", "TO-EMPTY TO-UNEVEN TO-TP"),
        ("shards that carry no geometry", "RANK-GEOMETRY RANK-CHUNKS COV-PLACEMENT"),
        ("vocabulary padded for one degree; rows of padding, or trained", "MEG-VOCAB MEG-VOCABUSED MEG-VOCABOPEN"),
        ("flat buffers that do not fit their parameters", "ZERO-LAYOUT MEG-LAYOUT"),
        ("flattened parameters without boundaries or shapes", "FSDP1-BOUNDARIES FSDP1-SHAPES"),
    )),
    ("Fused and strided layouts", "I", (
        ("pipeline layers owned twice or by nobody", "MEG-LAYERS"),
        ("halves of a gated weight saved apart do not fit", "MEG-SPLIT"),
    )),
    ("Fused and strided layouts", "D", (
        ("the order of a flat buffer is not the one that its arithmetic gives", "MEG-ORDER MEG-MASTER"),
    )),
    ("Experts", "I", (
        ("only some ranks' experts saved; expert files missing", "FILE-MISSING COV-GAP MEG-EXPERTS"),
        ("router weights or their counters absent", "MEG-ROUTER"),
    )),
    ("Optimizer state", "I", (
        ("nothing was saved, or only the first of several parts", "OPT-MISSING COV-GAP"),
        ("moments of some parameters are absent", "OPT-NOSTATE OPT-SLOT UNI-LOST"),
        ("slots that a converter does not know", "UNI-DROPPED ZERO-SLOTS COV-SLOT"),
        ("two slots are one stored tensor", "OPT-SHARED"),
        ("a slot has another shape than its parameter: full against flat", "OPT-SHAPE"),
        ("kept by position in a format whose loader asks by name: nothing is restored", "OPT-POSITIONAL"),
    )),
    ("Optimizer state", "D", (
        ("moments are zero after updates", "VAL-ZERO"),
        ("second moments negative, values not finite", "VAL-NEGATIVE VAL-NONFINITE"),
        ("universal conversion scrambled or rounded values", "UNI-ROUNDROBIN UNI-VALUES UNI-ROUNDED"),
    )),
    ("Parameter groups", "I", (
        ("ids mapped by position while the order may differ", "OPT-ORDER OPT-OPEN OPT-ASSUMED OPT-UNMATCHED"),
        ("groups or their hyperparameters lost", "GROUP-LOST GROUP-EMPTY GROUP-HYPER GROUP-NONE UNI-GROUPS"),
        ("stages or ranks disagree about groups and settings", "MEG-GROUPS MEG-SETTINGS ZERO-GROUPS"),
        ("a parameter in two groups", "GROUP-TWICE"),
        ("conversion would give all groups the first one's", "ZERO-GROUPZERO UNI-GROUPZERO"),
        ("hyperparameters changed between two saves", "AGAINST-GROUPS"),
    )),
    ("Counters", "I", (
        ("directory, trainer state, scheduler and optimizer disagree", "CNT-DISAGREE CNT-DIRECTORY CNT-OPTIMIZER"),
        ("steps differ between parameters", "CNT-STEPS UNI-STEP RANK-STEP"),
        ("a step kept in bf16 or fp16", "CNT-DTYPE"),
        ("a counter went backwards since the previous save", "AGAINST-BACKWARDS"),
        ("one step tensor shared by sub-groups", "UNI-SHAREDSTEP"),
    )),
    ("Scheduler", "I", (
        ("not saved", "SCHED-MISSING"),
        ("stepped once per process, or once too often", "SCHED-POSITION"),
        ("the rates are not those of the groups (a stale group object)", "SCHED-LR"),
        ("counted in samples, and at another number than were consumed", "MEG-SCHEDULE"),
        ("the schedule is a function that is not saved", "SCHED-LAMBDA"),
        ("a schedule that is a function, with another horizon", "SCHED-HORIZON AGAINST-SCHEDULE"),
    )),
    ("Data", "I", (
        ("cursor absent", "DATA-MISSING"),
        ("one rank's cursor is used by all, or bound to the world size", "ACC-CURSOR HF-CURSOR DATA-PERRANK"),
        ("saved in the middle of an epoch without the loader", "PL-EPOCH"),
        ("saved within an update: the passes since the last one are lost", "ORDER-PHASE"),
    )),
    ("RNG", "I", (
        ("not saved; files for N ranks, others wanted", "RNG-MISSING RNG-RANKS TO-RNG"),
        ("rank 0's stream for all", "RNG-SHARED"),
        ("one rank's file lost, the last one included where anything shows it", "RNG-LOST"),
    )),
    ("dtype and masters", "D", (
        ("weights are not what masters round to", "ZERO-MASTER MEG-MASTER"),
        ("masters rebuilt from 16 bits", "ZERO-ROUNDED UNI-ROUNDED MEG-ROUNDED"),
        ("moments kept in fewer bits than their parameters", "OPT-DTYPE"),
    )),
    ("Tied, frozen, never stepped", "I", (
        ("tied tensors saved with different values", "TIE-DIFFERS"),
        ("a parameter neither trained nor recorded as frozen", "ZERO-UNOWNED"),
        ("the optimizer knows parameters that the model lacks", "OPT-ORPHAN"),
        ("the format's own loader would not restore buffers and frozen parameters", "UNI-MODELSTATE"),
    )),
    ("Names", "I", (
        ("wrapper prefixes", "NAME-WRAPPED"),
        ("one tensor under two names", "KEY-TWICE"),
        ("adapters only", "HF-ADAPTER"),
        ("an index that does not list what its files hold", "ST-UNLISTED ST-TOTAL"),
    )),
    ("Versions", "I", (
        ("items compressed by an extension", "FILE-TRANSFORM FILE-PACKED"),
        ("a pickled object in a safetensors file", "ST-OBJECT"),
        ("an optimizer encoding that newer releases refuse", "MEG-OLDENCODING"),
        ("element types that are not known", "FILE-DTYPE"),
        ("read by description only", "ZERO-UNVERIFIED MEG-UNVERIFIED"),
    )),
    ("Ranks", "I", (
        ("rank files swapped", "RANK-SWAPPED ZERO-SWAPPED MEG-SWAPPED"),
        ("replicas differ", "COV-REPLICA RANK-REPLICA ZERO-REPLICA MEG-REPLICA"),
        ("the last rank's file lost without a trace", "RANK-OPEN"),
        ("ranks disagree in shape or metadata", "RANK-SHAPE META-CONFLICT MEG-RANKS"),
    )),
    ("Conversions", "I", (
        ("stale working folder of a conversion", "UNI-TMP"),
        ("round-robin gradients", "ZERO-ROUNDROBIN UNI-ROUNDROBIN"),
    )),
    ("Conversions", "D", (
        ("bytes or files changed since samerun converted it", "PROOF-VALUE PROOF-MISSING"),
        ("the proof or the job's digests are damaged, or of another save",
         "PROOF-FOREIGN PROOF-BROKEN SIDECAR-STALE SIDECAR-BROKEN"),
        ("the job held other counters or tensors than were saved", "SIDECAR-COUNTER SIDECAR-MISSING"),
    )),
    ("Scaler and EMA", "I", (
        ("fp16 scaler absent", "SCALER-MISSING"),
        ("EMA absent although the run had one", "EMA-MISSING"),
        ("EMA of another shape or other names", "EMA-SHAPE EMA-NAMES"),
        ("EMA saved as a list, which may not fit", "EMA-UNMATCHED EMA-ORDER"),
        ("state_dict is the average", "PL-AVERAGE EMA-SWAPPED"),
    )),
    ("Scaler and EMA", "D", (("EMA saved as the model, or the model as the EMA", "EMA-SAME"),)),
)  # fmt: skip


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    text, wrong = page()
    for line in wrong:
        print(line, file=sys.stderr)
    if "--check" in sys.argv:
        return int(bool(wrong) or not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return int(bool(wrong))


def page() -> tuple[str, list[str]]:
    """Returns the page, and what is wrong: codes that are not catalogued, or not named by a test."""
    tests = {path: path.read_text(encoding="utf-8") for path in sorted((TOP / "tests").rglob("test_*.py"))}
    known, wrong = load_catalog(), list[str]()
    lines = [
        "# How resumes fail, and what shows it",
        "",
        "Written by `python scripts/make_docs.py`. Distilled from public reports and from reproductions. *I*: seen by",
        "`samerun inspect` from names, sizes and metadata; *D*: with `--deep`, which reads bytes, or beside a previous",
        "checkpoint. A row without a finding is not seen. The tests named provoke a finding; `test_silence` holds down",
        "what is said of whole checkpoints of every framework: a finding not listed there is silent on all of them.",
        "",
        "| kind | | what happens | finding | tests |",
        "|---|---|---|---|---|",
    ]
    for kind, place, rows in FAILURES:
        for what, names in rows:
            codes = [f"SR-{name}" for name in names.split()]
            wrong += [f"{code} is not catalogued" for code in codes if code not in known]
            found: dict[str, None] = {}
            for code in codes:
                naming = [path for path, text in tests.items() if re.search(rf"{code}(?![A-Z-])", text)]
                wrong += [] if naming else [f"{code} is named by no test"]
                found |= dict.fromkeys(path.stem for path in naming[:3])
            lines.append(f"| {kind} | {place} | {what} | {' '.join(codes)} | {' '.join(found)} |")
    return "\n".join(lines) + "\n", wrong


if __name__ == "__main__":
    sys.exit(main())
