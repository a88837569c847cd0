"""Pictures of tensors against counted cells, and spreads of values against NumPy."""

from __future__ import annotations

import doctest
import json
import math
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.core.dtype import DTYPES
from samerun.core.state import Role, TensorEntry, TensorKey, Tiling
from samerun.errors import CorruptCheckpoint
from samerun.formats.detect import open_checkpoint
from samerun.web.explorer import picture
from samerun.web.explorer.picture import draw_tensor
from samerun.web.explorer.spread import BINS, measure_spread
from support.explorer import WHOLE, write_gap, write_safetensors

# ------------------------------------------------------------------------------------------------ pictures


def entry_of(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> TensorEntry:
    offsets = np.array([box[0] for box in boxes], np.int64).reshape(len(boxes), len(shape))
    lengths = np.array([box[1] for box in boxes], np.int64).reshape(len(boxes), len(shape))
    return TensorEntry(TensorKey(Role.PARAM, "w"), shape, DTYPES["float32"], Tiling(offsets, lengths), "w")


def nowhere(piece: int) -> Any:
    from samerun.errors import Problem

    raise CorruptCheckpoint(Problem("SR-FILE-TRUNCATED", "cut off"))


def cells(spots: Any, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    found = np.zeros(shape, np.int64)
    for spot in spots:
        found[slice(*spot.rows), slice(*spot.columns)] += 1
    return found


@settings(deadline=None)
@given(st.data())
def test_gaps_and_overlaps_are_drawn_where_they_are(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    corner = st.tuples(*(st.integers(0, size - 1) for size in shape))
    boxes: list[Any] = []
    for first in data.draw(st.lists(corner, max_size=6)):
        boxes.append(
            (first, tuple(data.draw(st.integers(0, size - at)) for at, size in zip(first, shape, strict=True)))
        )
    drawn = draw_tensor(entry_of(shape, boxes), nowhere, None, None)
    count = np.zeros(shape, np.int64)
    for (row, column), (height, width) in set(boxes):
        count[row : row + height, column : column + width] += 1
    assert drawn.exact
    assert drawn.dims == (0, 1)
    assert (cells(drawn.gaps, shape) == (count == 0)).all()  # every missing cell in exactly one rectangle
    assert (cells(drawn.overlaps, shape) == (count > 1)).all()


def test_a_vector_is_drawn_across_and_a_scalar_as_one_value() -> None:
    vector = draw_tensor(entry_of((9,), [((0,), (3,)), ((5,), (4,))]), nowhere, 2, 0)
    assert vector.dims == (None, 0)
    assert [(spot.rows, spot.columns) for spot in vector.gaps] == [((0, 1), (3, 5))]
    scalar = draw_tensor(entry_of((), [((), ())]), nowhere, 0, 0)
    assert (scalar.dims, scalar.gaps, scalar.extent) == ((None, None), (), (1, 1))


def test_a_tensor_is_drawn_along_the_dimensions_that_are_cut() -> None:
    boxes = [((0, 0, first), (4, 5, 3)) for first in (0, 3)]
    drawn = draw_tensor(entry_of((4, 5, 6), boxes), nowhere, 0, 0)
    assert (drawn.dims, drawn.exact, drawn.gaps) == ((0, 2), True, ())
    cut = [((a, b, c), (2, 2, 2)) for a in (0, 2) for b in (0, 2) for c in (0, 2)]
    deep = draw_tensor(entry_of((4, 4, 4), cut[:-1]), nowhere, 8, 0)
    assert (deep.exact, deep.gaps) == (False, ())  # three cut dimensions: counted, not drawn


def test_holders_are_read_from_file_names_and_trouble_is_kept() -> None:
    assert doctest.testmod(picture).failed == 0
    assert picture.holder_of("zero_pp_rank_2_mp_rank_00_model_states.pt") == "dp 2, mp 0"
    assert picture.holder_of("model_rank1.pt") == "rank 1"
    drawn = draw_tensor(entry_of((2,), [((0,), (2,))]), nowhere, 0, 0)
    assert [piece.trouble for piece in drawn.pieces] == ["cut off"]


def test_every_rank_of_a_real_checkpoint_is_where_its_file_says() -> None:
    checkpoint = open_checkpoint(WHOLE)
    entry = checkpoint.state.tensors["param:1.bias"]  # 9 values on 4 ranks: 3, 3, 3 and none
    drawn = draw_tensor(entry, lambda piece: checkpoint.locate("param:1.bias", piece), 0, 0)
    held = {piece.holder: spot.columns for piece, spot in zip(drawn.pieces, drawn.spots, strict=True)}
    assert held == {"rank 0": (0, 3), "rank 1": (3, 6), "rank 2": (6, 9), "rank 3": (9, 9)}
    assert all(piece.file == f"__{number}_0.distcp" for number, piece in enumerate(drawn.pieces))


# ------------------------------------------------------------------------------------------------ spreads


def test_the_spread_is_numpys(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(997, 31, generator=generator, dtype=torch.float32) * 3 + 1
    found = spread_of(tmp_path, values)
    exact = values.numpy().astype(np.float64).reshape(-1)
    gap = exact - exact.mean()
    for name, wanted in {
        "min": exact.min(),
        "max": exact.max(),
        "mean": exact.mean(),
        "std": exact.std(),
        "rms": math.sqrt((exact**2).mean()),
        "norm": np.linalg.norm(exact),
        "skewness": (gap**3).mean() / exact.std() ** 3,
        "kurtosis": (gap**4).mean() / exact.std() ** 4,
        "smallest": np.abs(exact).min(),
    }.items():
        assert found[name] == pytest.approx(wanted, rel=1e-9), name
    assert found["linear"]["counts"] == np.histogram(exact, BINS)[0].tolist()
    assert sum(found["decades"]["counts"]) == exact.size
    assert (found["seen"], found["elements"], found["problems"]) == (exact.size, exact.size, [])


def spread_of(folder: Path, values: Any) -> dict[str, Any]:
    checkpoint = open_checkpoint(write_safetensors(folder / "m.safetensors", {"param:w": values}))
    return measure_spread(checkpoint, "param:w", lambda done, total: None)


def test_what_is_not_finite_is_counted_apart(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = torch.tensor([1.5, math.nan, math.inf, -math.inf, 0.0, -2.0], dtype=torch.bfloat16)
    found = spread_of(tmp_path, values)
    assert [found[name] for name in ("nan", "positive_infinite", "negative_infinite", "zeros", "negative")] == [1] * 5
    assert (found["finite"], found["min"], found["max"]) == (3, -2.0, 1.5)
    assert sum(found["linear"]["counts"]) == 3
    nothing = spread_of(tmp_path, torch.full((4,), math.nan))
    assert (nothing["finite"], nothing["mean"], nothing["linear"], nothing["decades"]) == (0, None, None, None)


@pytest.mark.parametrize("values", [[3.0, 3.0], [0.0], [1e308, -1e308], [True, False], [5, -7]])
def test_odd_values_have_a_spread_too(tmp_path: Path, values: list[Any]) -> None:
    torch = pytest.importorskip("torch")
    wide = torch.float64 if isinstance(values[0], float) else None
    found = spread_of(tmp_path, torch.tensor(values, dtype=wide))
    assert sum(found["linear"]["counts"]) == len(values)
    assert json.loads(json.dumps(found)) == found


def test_only_what_can_be_read_is_counted(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gap(tmp_path / "gap"))
    found = measure_spread(checkpoint, "param:0.weight", lambda done, total: None)
    assert (found["elements"], found["seen"]) == (606, 606 - 26 * 6)
    cut = shutil.copytree(WHOLE, tmp_path / "cut")
    with (cut / "__2_0.distcp").open("r+b") as file:
        file.truncate(100)
    found = measure_spread(open_checkpoint(cut), "param:0.weight", lambda done, total: None)
    assert found["seen"] == 606 - 26 * 6
    assert [item["code"] for item in found["problems"]] == ["SR-FILE-TRUNCATED"]


def test_memory_stays_bounded_and_reading_can_be_ended(tmp_path: Path) -> None:
    count = 24 << 20
    header = {"param:w": {"dtype": "BF16", "shape": [count // 64, 64], "data_offsets": [0, 2 * count]}}
    text = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * count)
    checkpoint = open_checkpoint(path)
    told: list[int] = []

    def advance(done: int, total: int) -> None:
        told.append(done)
        if len(told) == 6:
            raise KeyboardInterrupt

    tracemalloc.start()
    with pytest.raises(KeyboardInterrupt):
        measure_spread(checkpoint, "param:w", advance)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert told[-1] < 2 * 2 * count
    assert peak < count * 2  # a fourth of what the tensor is as float64 would not pass
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2
