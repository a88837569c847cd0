"""`Recorder.samples` over real ranks: one loss for all, also where a rank knows none or has an empty pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from samerun.trace import check_trace, read_trace
from samerun.train import Recorder
from support.gloo import run_ranks

pytestmark = pytest.mark.multiprocess

# By rank, then pass: (loss, ids).
PASSES = {0: [(1.0, [4, 2]), (4.0, [7])], 1: [(None, [14, 12]), (None, [17])], 2: [(2.0, [0, 1, 3]), (9.0, [])]}


def _record(rank: int, world_size: int, folder: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(folder)
    recorder.attach(model, optimizer)
    recorder.loaded(update=2)
    for loss, ids in PASSES[rank]:
        model(torch.randn(1, 3)).sum().backward()
        recorder.samples(ids, loss=loss)
    optimizer.step()
    recorder.close()


def test_ranks_agree_on_the_loss(tmp_path: Path) -> None:
    run_ranks(3, _record, str(tmp_path))
    trace = read_trace(tmp_path)
    assert check_trace(trace) == []
    lines = [rank.updates[0] for rank in trace.ranks]
    assert [line.loss for line in lines] == [(2 * 1.0 + 1 * 4.0 + 3 * 2.0) / 6] * 3
    assert [line.sample_ids for line in lines] == [(4, 2, 7), (14, 12, 17), (0, 1, 3)]
    assert [line.update for line in lines] == [3] * 3
    assert lines[0].grad_norm == lines[1].grad_norm == lines[2].grad_norm
