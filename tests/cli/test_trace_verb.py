"""`samerun trace`: the table, the JSON document, and the exit codes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from samerun.cli.trace import command
from samerun.errors import UsageError
from samerun.trace import TraceWriter
from support.traces import empty_state


def write(directory: Path, num_updates: int, *, last_loss: float = 1.0) -> Path:
    with TraceWriter(directory, 0) as writer:
        writer.write(
            "header",
            {
                "schema": "samerun/trace/1",
                "stage": "control",
                "rank": 0,
                "world_size": 1,
                "coordinate": {},
                "layout": {"dp_shard": 1},
                "batch": {"global_batch": 2, "max_microbatch": 2, "passes": 1, "replicas": 1, "microbatches": [[2]]},
                "versions": {},
                "environment": {},
            },
        )
        writer.write("state", empty_state(0, state="00ff00ff00ff00ff"))
        unchanged = {"state_unchanged": True, "rng_unchanged": True, "changed": []}
        writer.write("eval", {"update": 0, "num_examples": 2, "losses": [1.0, 2.0], "logits": None, **unchanged})
        for index in range(1, num_updates + 1):
            loss = last_loss if index == num_updates else 1.0
            writer.write(
                "update",
                {"update": index, "loss": loss, "grad_norm": None, "lr": [0.5], "samples": 2, "tokens": 9}
                | {"sample_ids": [2 * index, 2 * index + 1], "finite": math.isfinite(loss)},
            )
        writer.write("boundary", {"what": "log", "update": num_updates})
        writer.write("end", {"reason": "finished", "updates": num_updates})
    return directory


def test_the_table(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(write(tmp_path, 3))])
    assert done.exit_code == 0, done.output
    assert "control, 1 ranks, dp_shard=1" in done.output
    assert "global batch 2 in 1 passes on 1 replicas" in done.output
    assert "00ff00ff00ff00ff" in done.output
    assert "mean loss 1.5, changed nothing" in done.output
    assert "boundaries: log 3" in done.output
    assert done.output.count(" 0.5 ") == 3


def test_a_long_trace_is_shortened_unless_asked_for(tmp_path: Path) -> None:
    write(tmp_path, 60)
    short = CliRunner().invoke(command, [str(tmp_path)]).output.splitlines()
    full = CliRunner().invoke(command, [str(tmp_path), "--all"]).output.splitlines()
    assert len(full) - len(short) == 60 - 21
    assert any(line.strip() == "..." for line in short)


def test_json(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(write(tmp_path, 3)), "--json"])
    body = json.loads(done.output)
    assert (done.exit_code, body["schema"], body["problems"], body["ended"]) == (0, "samerun/trace/1", [], True)
    assert [line["update"] for line in body["updates"]] == [1, 2, 3]
    assert (body["updates"][0]["samples"], body["updates"][0]["tokens"]) == (2, 9)
    assert body["states"] == [{"when": "loaded", "update": 0, "digest": "00ff00ff00ff00ff"}]


def test_findings_decide_the_exit_code(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(write(tmp_path, 3, last_loss=math.nan))])
    assert done.exit_code == 1
    assert "SR-TRACE-NONFINITE" in done.output
    assert "NOT FINITE" in done.output


def test_no_trace_is_a_usage_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(tmp_path)])
    assert isinstance(done.exception, UsageError)
    with pytest.raises(UsageError, match="SR-TRACE-NONE"):
        raise done.exception
