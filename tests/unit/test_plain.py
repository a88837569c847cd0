"""Objects as plain data, and name maps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from samerun.core.plain import MISSING, differing_paths, is_opaque, plain, same_plain
from samerun.train.objects import object_state


class Colour(Enum):
    RED = "red"


@dataclass
class Settings:
    heads: int
    names: tuple[str, ...]


class Stateful:
    def state_dict(self) -> dict[str, object]:
        return {"scale": 2.0, "tracker": np.int64(3)}


def test_equal_things_are_equal_whatever_holds_them() -> None:
    assert plain((1, 2.5, None, True)) == [1, 2.5, None, True]
    assert plain({1: np.float32(0.5), "x": Colour.RED}) == {"1": 0.5, "x": "red"}
    assert plain(Settings(4, ("a", "b"))) == {"heads": 4, "names": ["a", "b"]}
    assert plain({"b", "a"}) == ["a", "b"]
    assert plain(math.nan) == "nan"
    assert plain(b"ab") == plain(bytearray(b"ab")) != plain(b"ac")
    assert object_state(Stateful(), "scaler") == {"scale": 2.0, "tracker": 3}
    assert object_state([Stateful()], "s") == [{"scale": 2.0, "tracker": 3}]


def test_arrays_are_their_digest_and_one_number_is_itself() -> None:
    import torch

    array = np.arange(5.0)
    assert plain(array, "a") == plain(array.copy(), "a")
    assert plain(array, "a") != plain(array + 1, "a")
    assert object_state({"x": torch.arange(5.0, dtype=torch.float64)}, "o")["x"] == plain(array, "o.x")
    assert object_state(torch.ones(2, dtype=torch.bfloat16), "o")["dtype"] == "bfloat16"
    assert same_plain(plain(np.array([7])), 7)
    assert not same_plain(plain(np.array([7])), 8)


def test_functions_and_foreign_objects_are_opaque() -> None:
    assert is_opaque(plain(len))
    assert is_opaque(plain(lambda: 0))
    assert is_opaque(plain(object()))
    assert not is_opaque(plain({"opaque": 1, "more": 2}))
    assert plain(float) == {"opaque": "builtins.float"}


def test_differences_are_leaves() -> None:
    a = {"x": {"y": 1, "z": [1, 2]}, "only": 1, "arr": plain(np.arange(3), "arr")}
    b = {"x": {"y": 1.0, "z": [1, 3]}, "more": 2, "arr": plain(np.arange(3) + 1, "arr")}
    paths = {path: (x, y) for path, x, y in differing_paths(a, b)}
    assert set(paths) == {"x.z.1", "only", "more", "arr"}
    assert paths["only"] == (1, MISSING)
    assert paths["x.z.1"] == (2, 3)
    assert differing_paths(True, 1) == [("", True, 1)]
    assert differing_paths([1], [1, 2]) == [("", [1], [1, 2])]
    assert differing_paths(a, a) == []


def test_keys_that_are_alike_as_text_are_told_apart() -> None:
    assert plain({1: "a", "1": "b"}) == {"1": "a", "'1'": "b"}
    assert plain({1: "a", "1": "b"}) != plain({1: "c", "1": "b"})
    assert plain({1: "a"}) == plain({"1": "a"}) == {"1": "a"}
