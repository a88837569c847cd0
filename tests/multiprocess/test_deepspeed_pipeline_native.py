"""A DeepSpeed pipeline written natively: its engine takes it by plain `load_checkpoint` at other numbers of ranks.

Runs where DeepSpeed is installed. About a minute.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("deepspeed")

from samerun.convert.convert import carry_out
from samerun.convert.prepare import prepare
from samerun.core.mesh import Layout
from samerun.formats.detect import open_checkpoint
from samerun.formats.zero.write import lay_out
from support import dspipe

pytestmark = [pytest.mark.framework, pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore")]

_ROUNDING = 5e-7  # of losses near 7 in fp32: one unit in the last place


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[float]]:
    """Two stages without replicas."""
    folder = tmp_path_factory.mktemp("pipeline") / "source"
    return folder, *dspipe.make_source(2, 2, folder)


def move(source: Path, dest: Path, pp: int, ranks: int, parts: tuple[int, ...] | None = None) -> Path:
    checkpoint = open_checkpoint(source)
    layout = Layout(pp=pp, dp_shard=ranks // pp)
    carry_out(prepare(checkpoint, dest, to="zero", layout=layout, writer=partial(lay_out, parts=parts)))
    checkpoint.close()
    return dest


@pytest.mark.parametrize(("pp", "ranks", "parts"), [(2, 4, None), (1, 2, None), (2, 2, (0, 3))])
def test_the_engine_loads_it_natively_and_goes_on(
    pp: int, ranks: int, parts: tuple[int, ...] | None, trained: Any, tmp_path: Path
) -> None:
    source, truth, later = trained
    held, found = dspipe.resume(pp, ranks, move(source, tmp_path / "moved", pp, ranks, parts), universal=False)
    assert held.keys() == truth.keys()
    assert [name for name in truth if not np.array_equal(held[name], truth[name])] == []
    for rank in found:
        assert rank["groups"] == [(0.01, 0.1), (0.005, 0.0)]
        assert rank["steps"] == {3.0}
        assert max(abs(a - b) for a, b in zip(rank["later"], later, strict=True)) <= _ROUNDING


def test_a_wrong_moment_shows(trained: Any, tmp_path: Path) -> None:
    source, truth, _ = trained
    moved = move(source, tmp_path / "moved", 1, 1)
    (file,) = moved.glob("*/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    content = bytearray(file.read_bytes())
    at = content.index(truth["exp_avg/tied_modules.embed.weight"].tobytes())
    content[at + 2] ^= 1
    file.write_bytes(bytes(content))
    held, _ = dspipe.resume(1, 1, moved, universal=False)
    assert [n for n in truth if not np.array_equal(held[n], truth[n])] == ["exp_avg/tied_modules.embed.weight"]
