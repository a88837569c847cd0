"""Two checkpoints compared: streaming, through ties and renames, with tolerances, and the verb on top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from samerun.cli.diff import command as diff
from samerun.cli.digest import command as digest
from samerun.core.digest import digest_array, state_digest
from samerun.core.mesh import Layout
from samerun.core.namemap import NameMap
from samerun.core.state import ParamGroup, RecordedProgress
from samerun.errors import CorruptCheckpoint, Problem, UsageError
from samerun.formats.mapfile import read_name_map
from samerun.formats.mapped import MappedCheckpoint
from samerun.verify.state import compare as verify_compare
from samerun.verify.state import digest as verify_digest
from samerun.verify.state.compare import compare_checkpoints
from support import toy
from support.memory import MemoryCheckpoint

RNG = np.random.default_rng(0)
BASE = {
    "param:w": RNG.normal(size=(12, 5)).astype(np.float32),
    "buffer:n": np.array(3, np.int64),
    "optim.exp_avg:w": RNG.normal(size=(12, 5)).astype(np.float32),
    "optim.step:w": np.array(4.0, np.float32),
}


def changed(key: str, array: np.ndarray | None, base: dict[str, np.ndarray] = BASE) -> dict[str, np.ndarray]:
    rest = {name: value for name, value in base.items() if name != key}
    return rest if array is None else {**rest, key: array}


def compare(a: Any, b: Any, **rest: Any) -> Any:
    return compare_checkpoints(MemoryCheckpoint(a), MemoryCheckpoint(b), **rest)


def test_the_same_state_cut_in_other_places_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_digest, "_BLOCK_BYTES", 64)
    a = MemoryCheckpoint(BASE, cuts={"param:w": [3, 3, 9]}, replicas=2)
    b = MemoryCheckpoint(BASE, cuts={"param:w": [5], "optim.exp_avg:w": [1]})
    result = compare_checkpoints(a, b)
    assert result.equal
    assert result.compared == 4


def test_every_kind_of_difference() -> None:
    other = changed("param:w", BASE["param:w"][:, :4]) | {"param:new": np.zeros(2, np.float32)}
    other["buffer:n"] = np.array(3, np.int32)
    del other["optim.exp_avg:w"]
    result = compare(BASE, other)
    assert result.only_in_a == ("optim.exp_avg:w",)
    assert result.only_in_b == ("param:new",)
    assert [(item.key, item.a, item.b) for item in result.shape] == [("param:w", [12, 5], [12, 4])]
    assert [(item.key, item.a, item.b) for item in result.dtype] == [("buffer:n", "int64", "int32")]
    assert result.values == ()
    assert not result.equal


def test_values_and_tolerances() -> None:
    nudged = BASE["param:w"].copy()
    nudged[7, 2] += 0.5
    result = compare(BASE, changed("param:w", nudged))
    (difference,) = result.values
    assert difference.key == "param:w"
    assert difference.changed == 1
    assert difference.max_abs == pytest.approx(0.5, rel=1e-6)
    assert difference.rel_l2 == pytest.approx(0.5 / np.linalg.norm(BASE["param:w"]), rel=1e-6)
    assert compare(BASE, changed("param:w", nudged), atol=0.6).equal
    assert not compare(BASE, changed("param:w", nudged), atol=0.4).equal
    assert compare(BASE, changed("param:w", nudged), rtol=abs(0.51 / BASE["param:w"][7, 2])).equal


def test_numbers_that_are_not_finite() -> None:
    holes = BASE["param:w"].copy()
    holes[0, 0], holes[0, 1] = np.nan, np.inf
    with_holes = changed("param:w", holes)
    assert compare(with_holes, with_holes).equal
    other_nan = holes.copy()
    other_nan.view(np.uint32)[0, 0] ^= 1
    assert compare(with_holes, changed("param:w", other_nan)).equal, "a not-a-number equals any other"
    for pair in ((BASE, with_holes), (with_holes, BASE)):
        (difference,) = compare(*pair, atol=1e9).values
        assert difference.changed == 2
        assert difference.max_abs == np.inf


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "complex64", "int64", "uint8"])
def test_distances_are_those_of_the_whole_tensor_however_it_is_gone_through(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_compare, "_CHUNK_ELEMENTS", 7)
    a = (RNG.normal(size=(13, 11)) * 40).astype(np.dtype(getattr(ml_dtypes, kind, kind)))
    b = a.copy()
    b[3:5, 2:9] = b[3:5, 2:9] * a.dtype.type(2)
    found = compare({"param:w": a}, {"param:w": b}).values[0]
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    gap = np.abs(a.astype(wide) - b.astype(wide))
    assert found.changed == np.count_nonzero(gap)
    assert found.max_abs == gap.max()
    assert found.rel_l2 == pytest.approx(np.linalg.norm(gap) / np.linalg.norm(a.astype(wide)), rel=1e-12)


def test_integers_that_no_float_tells_apart_are_not_equal() -> None:
    large = np.array([2**53, -(2**63), 5], np.int64)
    found = compare({"buffer:n": large}, {"buffer:n": large + np.array([1, 0, 0])}).values
    assert [(item.changed, item.max_abs) for item in found] == [(1, 1.0)]
    ends = compare({"buffer:n": np.array([-(2**63)])}, {"buffer:n": np.array([2**63 - 1])}).values
    assert ends[0].max_abs == 2.0**64


def test_an_infinity_on_one_side_makes_both_distances_infinite() -> None:
    mixed = np.array([1.0, np.inf, np.nan, 2.0], np.float32)
    found = compare({"param:w": mixed}, {"param:w": np.array([1.0, 3.0, np.nan, 2.0], np.float32)}).values[0]
    assert (found.changed, found.max_abs, found.rel_l2) == (1, np.inf, np.inf)
    found = compare({"param:w": mixed}, {"param:w": np.array([1.0, np.inf, np.nan, 2.5], np.float32)}).values[0]
    assert (found.changed, found.max_abs) == (1, 0.5)


def test_counters_are_compared_by_value() -> None:
    assert compare(BASE, changed("optim.step:w", np.array([4], np.int64))).equal
    assert not compare(BASE, changed("optim.step:w", np.array(5.0, np.float32))).equal
    assert compare(BASE, changed("optim.step:w", None)).only_in_a == ("optim.step:w",)
    assert compare(changed("optim.step:w", None), BASE).only_in_b == ("optim.step:w",)


def test_complex_and_bool() -> None:
    a = {"buffer:c": np.array([1 + 2j, 3], np.complex64), "buffer:m": np.array([True, False])}
    b = {"buffer:c": np.array([1 + 2j, 3 + 1j], np.complex64), "buffer:m": np.array([True, True])}
    result = compare(a, b)
    assert [(item.key, item.max_abs, item.changed) for item in result.values] == [
        ("buffer:c", 1.0, 1),
        ("buffer:m", 1.0, 1),
    ]


def test_ties_roles_and_renames() -> None:
    a = MemoryCheckpoint({"param:head": BASE["param:w"]}, aliases={"param:head": ("tok",)})
    b = MemoryCheckpoint({"param:tok": BASE["param:w"], "param:head": BASE["param:w"]})
    assert compare_checkpoints(a, b).equal, "saved once with an alias, and saved twice"
    assert compare({"param:n": BASE["buffer:n"]}, {"buffer:n": BASE["buffer:n"]}).equal
    renamed = {key.replace(":w", ":layer.w"): array for key, array in BASE.items()}
    assert not compare(BASE, renamed).equal
    mapped = MappedCheckpoint(MemoryCheckpoint(BASE), NameMap.of({"w": "layer.w"}))
    assert compare_checkpoints(mapped, MemoryCheckpoint(renamed)).equal


def test_settings_decide_and_objects_inform() -> None:
    def with_settings(**rest: Any) -> MemoryCheckpoint:
        parts: dict[str, Any] = {
            "groups": [ParamGroup(("w",), {"lr": 0.1, "betas": (0.9, 0.99)})],
            "progress": RecordedProgress(update=4),
            "scheduler": {"last_epoch": 4},
            "rng": {"rng.0": np.arange(4)},
        }
        return MemoryCheckpoint(BASE, **(parts | rest))

    assert compare_checkpoints(with_settings(), with_settings()).equal
    assert compare_checkpoints(with_settings(), MemoryCheckpoint(BASE)).equal, "what one side does not record"
    for name, value, key in (
        ("groups", [ParamGroup(("w",), {"lr": 0.2, "betas": [0.9, 0.99]})], "param:w lr"),
        ("progress", RecordedProgress(update=5), "progress.update"),
        ("scheduler", {"last_epoch": 5}, "scheduler.last_epoch"),
    ):
        result = compare_checkpoints(with_settings(), with_settings(**{name: value}))
        assert [item.key for item in result.settings] == [key]
        assert not result.equal
    result = compare_checkpoints(with_settings(), with_settings(rng={"rng.0": np.arange(4) + 1}))
    assert result.equal
    assert len(result.objects) == 1


def test_every_tensor_that_cannot_be_read_is_listed() -> None:
    class Holed(MemoryCheckpoint):
        def read_piece(self, key: str, piece: int) -> np.ndarray:
            if not key.endswith(":w"):
                return super().read_piece(key, piece)
            raise CorruptCheckpoint(Problem("SR-FILE-TRUNCATED", "cut off", where={"tensor": key}))

    with pytest.raises(CorruptCheckpoint) as raised:
        compare_checkpoints(Holed(BASE), MemoryCheckpoint(BASE))
    with pytest.raises(CorruptCheckpoint) as digested:
        verify_digest.digest_checkpoint(Holed(BASE))
    for error in (raised, digested):
        assert len(error.value.problems) == 3


def test_memory_stays_at_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_digest, "_BLOCK_BYTES", 256)
    sizes: list[int] = []

    class Watching(MemoryCheckpoint):
        def read(self, key: str, offsets: Any = None, sizes_: Any = None) -> np.ndarray:
            array = super().read(key, offsets, sizes_)
            sizes.append(array.nbytes)
            return array

    big = {"param:w": np.zeros((1000, 8), np.float32)}
    assert compare_checkpoints(MemoryCheckpoint(big), Watching(big)).equal
    assert max(sizes) <= 256


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    top = tmp_path_factory.mktemp("checkpoints")
    job = toy.build(Layout())
    toy.train(job, 2)
    toy.save(job, top / "a")
    with torch.no_grad():
        dict(job.model.named_parameters())["router"][1, 1] += 1
    toy.save(job, top / "b")
    return top / "a", top / "b"


def test_the_verbs_on_real_checkpoints(folders: tuple[Path, Path]) -> None:
    a, b = map(str, folders)
    same = CliRunner().invoke(diff, [a, a])
    assert same.exit_code == 0
    assert "equal" in same.stdout
    different = CliRunner().invoke(diff, [a, b, "--json"])
    body = json.loads(different.stdout)
    assert different.exit_code == 1
    assert body["schema"] == "samerun/diff/1"
    assert body["equal"] is False
    assert [(row["key"], row["changed"]) for row in body["values"]] == [("param:router", 1)]
    assert {"only_in_a", "only_in_b", "shape", "dtype"} <= body.keys()
    assert CliRunner().invoke(diff, [a, b, "--atol", "1.1"]).exit_code == 0
    assert "param:router" in CliRunner().invoke(diff, [a, b]).stdout

    listed = json.loads(CliRunner().invoke(digest, [a, "--json", "--include", "param:*"]).stdout)
    assert listed["schema"] == "samerun/digest/1"
    assert listed["state"] == state_digest(listed["tensors"])
    job = toy.build(Layout(), seed=3)
    toy.load(job, folders[0])
    assert listed["tensors"]["param:router"] == digest_array("param:router", toy.full_state(job)["param:router"])
    text = CliRunner().invoke(digest, [a]).stdout
    assert listed["tensors"]["param:router"] + "  param:router" in text


def test_a_name_map_that_does_not_fit(folders: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = map(str, folders)
    good, unused, broken = tmp_path / "good.yaml", tmp_path / "unused.yaml", tmp_path / "broken.yaml"
    good.write_text("router: gate\n")
    unused.write_text("ruter: gate\n")
    broken.write_text("- a\n")
    result = CliRunner().invoke(diff, [a, b, "--map", str(good), "--json"])
    assert "param:gate" in json.loads(result.stdout)["only_in_a"]
    with pytest.raises(UsageError, match="ruter"):
        CliRunner().invoke(diff, [a, b, "--map", str(unused)], catch_exceptions=False)
    with pytest.raises(UsageError, match="mapping"):
        read_name_map(str(broken), MemoryCheckpoint(BASE).state)
