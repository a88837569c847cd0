"""A DeepSpeed pipeline's universal checkpoint, by samerun: its engine loads it at other numbers of stages and replicas.

Runs where DeepSpeed is installed. About half a minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("deepspeed")

from samerun.convert.convert import convert
from samerun.core.mesh import Layout
from samerun.formats.detect import open_checkpoint
from support import dspipe

pytestmark = [pytest.mark.framework, pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore")]

_ROUNDING = 2e-7  # of losses near 7 in fp32: one unit in the last place is 0.7e-7 of them


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[float]]:
    """Two stages without replicas, converted for two stages with two."""
    folder = tmp_path_factory.mktemp("pipeline")
    held, later = dspipe.make_source(2, 2, folder / "source")
    checkpoint = open_checkpoint(folder / "source")
    convert(checkpoint, folder / "universal", to="universal", layout=Layout(pp=2, dp_shard=2))
    checkpoint.close()
    return folder / "universal", held, later


@pytest.mark.parametrize(("pp", "ranks"), [(2, 4), (1, 2)])
def test_the_engine_goes_on_at_another_degree(pp: int, ranks: int, moved: Any) -> None:
    folder, truth, later = moved
    held, found = dspipe.resume(pp, ranks, folder)
    assert held.keys() == truth.keys()
    assert [name for name in truth if not np.array_equal(held[name], truth[name])] == []
    for rank in found:
        assert rank["groups"] == [(0.01, 0.1), (0.005, 0.0)]
        assert rank["steps"] == {3.0}
        assert rank["later"] == pytest.approx(later, rel=_ROUNDING)


def test_a_wrong_moment_shows(moved: Any) -> None:
    folder, truth, _ = moved
    (file,) = folder.glob("*/zero/tied_modules.embed.weight/exp_avg.pt")
    content = bytearray(file.read_bytes())
    at = content.index(truth["exp_avg/tied_modules.embed.weight"].tobytes())
    content[at + 2] ^= 1
    file.write_bytes(bytes(content))
    held, _ = dspipe.resume(1, 1, folder)
    wrong = [name for name in truth if not np.array_equal(held[name], truth[name])]
    assert wrong == ["exp_avg/tied_modules.embed.weight"]
